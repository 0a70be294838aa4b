//! The same bits at every budget, seen from outside of the program.

mod common;

use std::fs;
use std::process::Stdio;

use common::{folder, json, make, pinscope, program, smallest_ram, stderr, tiny, SHORT};
use pinscope_ggml::read_map;

/// As much as the promise is about: 200 prompt tokens and 32 more.
const FULL: [&str; 5] = ["--json", "--prompt-tokens", "200", "--tokens", "32"];

/// Verifies a model with the smallest budget that works, with all in it, and with shares
/// of its experts between.
fn assert_exact_at_every_budget(model: &std::path::Path, arguments: &[&str]) {
    let smallest = smallest_ram(model, arguments);
    let experts = read_map(model).unwrap().expert_bytes_total().div_ceil(1 << 20);
    let mut hit_rates = Vec::new();
    // Room for rounding to whole pages, above "all of them".
    for ram in [smallest, smallest + experts / 4, smallest + experts / 2, smallest + experts + 4] {
        let output = pinscope(
            "verify",
            model,
            &[arguments, &["--ram", &format!("{ram}M"), "-t", "2"]].concat(),
        );
        let verdict = json(&output);
        assert_eq!(verdict["identical"], true, "at {ram}M: {verdict}");
        assert_eq!(verdict["sha256_reference"], verdict["sha256_budget"]);
        assert_eq!(output.status.code(), Some(0));
        let number = |key: &str| verdict[key].as_u64().unwrap();
        assert_eq!(number("limit_bytes"), ram << 20);
        assert!(number("peak_bytes") <= number("limit_bytes"), "at {ram}M: {verdict}");
        // Not because the kernel held it there.
        assert!(matches!(verdict["limit_hits"].as_u64(), None | Some(0)), "{verdict}");
        hit_rates.push(verdict["hit_rate"].as_f64().unwrap());
    }
    assert!(hit_rates[0] < 1.0, "the smallest budget had room for everything: {hit_rates:?}");
    assert_eq!(hit_rates[3], 1.0, "{hit_rates:?}");
}

#[test]
fn qwen3moe_is_exact_at_every_budget() {
    assert_exact_at_every_budget(tiny(), &FULL);
}

#[test]
fn a_model_in_parts_is_exact_at_every_budget() {
    let model = make("tiny-gpt-oss", 3, &folder().join("gpt-oss.gguf"));
    assert_exact_at_every_budget(&model, &SHORT);
}

/// The negative control: if this passes as identical, the tests above mean nothing.
#[test]
fn one_wrong_byte_in_one_expert_is_caught() {
    let altered = folder().join("altered.gguf");
    let mut bytes = fs::read(tiny()).unwrap();
    let map = read_map(tiny()).unwrap();
    let part = &map.layers()[0].parts[0];
    // The second byte of a block is the upper one of its scale: a loud change.
    let expert = 3;
    bytes[(part.offset + expert * part.bytes + 1) as usize] ^= 0x10;
    fs::write(&altered, bytes).unwrap();

    let reference = ["--reference", tiny().to_str().unwrap(), "--ram", "1G"];
    let output = pinscope("verify", &altered, &[&FULL[..], &reference].concat());
    let verdict = json(&output);
    assert_eq!(verdict["identical"], false, "{verdict}");
    assert_ne!(verdict["sha256_reference"], verdict["sha256_budget"]);
    assert!(verdict["first_difference"].is_u64(), "{verdict}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn an_answer_is_the_same_text_at_every_budget() {
    let smallest = format!("{}M", smallest_ram(tiny(), &SHORT) + 2);
    let answer = |ram: &str| {
        let arguments = ["-p", "The harbour", "--raw", "-n", "24", "--temp", "0", "--ram", ram];
        let context = ["-c", "128", "--ubatch", "64", "--ignore-eos"];
        let output = pinscope("run", tiny(), &[&arguments[..], &context].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(output.stdout.len() > 24, "{output:?}");
        output.stdout
    };
    assert_eq!(answer(&smallest), answer("1G"));
}

#[test]
fn bench_gives_every_contender_the_same_work_and_a_row() {
    let arguments = ["--ram", "1G", "--against", "mmap,resident", "--repeat", "2", "--hash"];
    let work = ["--tokens", "8", "--prompt", "40", "--no-step-aside", "--json"];
    let output = pinscope("bench", tiny(), &[&arguments[..], &work].concat());
    let results = json(&output);
    let runs = results["runs"].as_array().unwrap();
    let medians = results["medians"].as_array().unwrap();
    let name = |row: &serde_json::Value| row["contender"].as_str().unwrap().to_owned();
    let names: Vec<String> = medians.iter().map(name).collect();
    assert_eq!(names, ["pinscope", "mmap", "resident", "resident-repacked"]);
    assert_eq!(runs.len(), 8);
    // The second round goes backwards.
    assert_eq!(runs[3]["contender"], runs[4]["contender"]);
    for run in runs {
        assert_eq!(run["decoded_tokens"], 8);
        assert!(run["tokens_per_second"].as_f64().unwrap() > 0.0);
        assert!(run["peak_bytes"].as_u64().unwrap() > 1 << 20);
        if run["contender"] != "resident-repacked" {
            assert_eq!(run["sha256_logits"], runs[0]["sha256_logits"], "{run}");
        }
    }
}

#[test]
fn two_processes_on_one_model_keep_a_budget_each() {
    let ram = format!("{}M", smallest_ram(tiny(), &SHORT) + 3);
    let arguments = [&["verify", "-m", tiny().to_str().unwrap(), "--ram", &ram][..], &SHORT];
    let start = || {
        program(&arguments.concat()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for child in [start(), start()] {
        let verdict = json(&child.wait_with_output().unwrap());
        assert_eq!(verdict["identical"], true, "{verdict}");
        assert!(verdict["peak_bytes"].as_u64() <= verdict["limit_bytes"].as_u64(), "{verdict}");
    }
}
