//! Profiles and pins from outside.

mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::OnceLock;

use common::{
    assert_refused, folder, json, make, pinscope, program, smallest_ram, stderr, tiny, SHORT,
};

const TEXT: &str = "The sea was calm that night, and the boats lay still in the harbour. \
    Nobody spoke of the storm. In the morning the nets were full, and the price of fish fell. ";

/// A folder with two texts and something that is none.
fn texts() -> &'static Path {
    static TEXTS: OnceLock<PathBuf> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let dir = folder().join("texts");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("a.txt"), TEXT.repeat(12)).unwrap();
        std::fs::write(dir.join("b.txt"), TEXT.replace('e', "o").repeat(12)).unwrap();
        std::fs::write(dir.join("picture.png"), [0xff, 0xfe, 0x00, 0x80]).unwrap();
        dir
    })
}

fn profile(name: &str, arguments: &[&str]) -> (Output, PathBuf) {
    let path = folder().join(name);
    let fixed = ["-o", path.to_str().unwrap(), "-c", "600", "--generate", "4", "--ram", "1G"];
    (pinscope("profile", tiny(), &[&fixed, arguments].concat()), path)
}

/// A profile of the tiny model, made once.
fn made() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let (output, path) = profile("made.json", &["--text", texts().to_str().unwrap()]);
        assert!(output.status.success(), "{}", stderr(&output));
        path
    })
}

#[test]
fn a_folder_is_profiled_and_the_coverage_of_both_halves_is_shown() {
    let plot = folder().join("coverage.svg");
    let (output, path) = profile(
        "shown.json",
        &["--text", texts().to_str().unwrap(), "--plot", plot.to_str().unwrap()],
    );
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", stderr(&output));
    for word in ["all layers", "25 % held out", "of all experts"] {
        assert!(shown.contains(word), "{word} is missing:\n{shown}");
    }
    assert!(std::fs::read_to_string(plot).unwrap().starts_with("<svg"));
    let profile: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!((&profile["format"], &profile["version"]), (&"pinscope-profile".into(), &1.into()));
    // Every token chooses top-k experts in every layer.
    let model = &profile["model"];
    let layers = model["layers"].as_array().unwrap().len() as f64;
    for half in profile["halves"].as_array().unwrap() {
        for phase in ["prefill", "decode"] {
            let rows = half[phase]["chosen"].as_array().unwrap();
            let sum: f64 =
                rows.iter().flat_map(|r| r.as_array().unwrap()).map(|n| n.as_f64().unwrap()).sum();
            let tokens = half[phase]["tokens"].as_f64().unwrap();
            // The last layer sees only the last token of a prompt.
            let all = tokens * model["top_k"].as_f64().unwrap();
            let expected = all * (layers - 1.0)..=all * layers;
            assert!(
                tokens > 0.0 && expected.contains(&sum),
                "{phase}: {tokens} {sum} {expected:?}"
            );
        }
    }
}

#[test]
fn conversations_are_profiled_and_a_bad_line_is_named() {
    let good = folder().join("good.jsonl");
    let line = r#"{"messages":[{"role":"user","content":"The sea?"},{"role":"assistant","content":"Yes."}]}"#;
    std::fs::write(&good, format!("{line}\n\n{line}\n")).unwrap();
    let (output, _) = profile("chat.json", &["--chat", good.to_str().unwrap(), "--json"]);
    assert_eq!(json(&output)["decode_tokens"], 2.0 * 4.0);
    let bad = folder().join("bad.jsonl");
    std::fs::write(&bad, format!("{line}\n{{\"message\": 1}}\n")).unwrap();
    let (output, _) = profile("bad.json", &["--chat", bad.to_str().unwrap()]);
    assert_refused(&output, &["bad.jsonl, line 2", "\"messages\""]);
}

#[test]
fn profiles_merge_with_weights() {
    let made = made().to_str().unwrap();
    let tokens = |merge: &[&str]| {
        let (output, _) = profile("merged.json", &[merge, &["--json"]].concat());
        json(&output)["prefill_tokens"].as_f64().unwrap()
    };
    let one = tokens(&["--merge", made]);
    assert_eq!(tokens(&["--merge", made, "--merge", &format!("{made}=0.5")]), 1.5 * one);
}

#[test]
fn profiles_that_do_not_fit_are_refused() {
    let other = make("tiny-mixtral", 1, &folder().join("other.gguf"));
    let made = made().to_str().unwrap();
    let run = |model: &Path, profile: &str| {
        pinscope("run", model, &["-p", "x", "-n", "1", "-c", "256", "--profile", profile])
    };
    assert_refused(&run(&other, made), &["tiny.gguf", "other.gguf", "pinscope profile"]);
    assert_refused(&run(tiny(), "/no/such.json"), &["/no/such.json", "pinscope profile"]);
    let broken = folder().join("broken.json");
    std::fs::write(&broken, "{").unwrap();
    assert_refused(&run(tiny(), broken.to_str().unwrap()), &["not a profile"]);
    let empty = folder().join("empty.txt");
    std::fs::write(&empty, "").unwrap();
    std::fs::create_dir_all(folder().join("none")).unwrap();
    let (output, _) = profile("x.json", &["--text", folder().join("none").to_str().unwrap()]);
    assert_refused(&output, &["no text"]);
}

#[test]
fn with_pins_of_any_share_the_bits_are_the_same_and_the_budget_is_kept() {
    let ram = smallest_ram(tiny(), &SHORT) + 3;
    for share in ["0", "0.5", "1"] {
        let ram = format!("{ram}M");
        let pins = ["--profile", made().to_str().unwrap(), "--pin-share", share, "--ram", &ram];
        let output = pinscope("verify", tiny(), &[&SHORT[..], &pins].concat());
        let verdict = json(&output);
        assert_eq!(verdict["identical"], true, "{}", stderr(&output));
        assert!(verdict["peak_bytes"].as_u64() <= verdict["limit_bytes"].as_u64(), "{verdict}");
    }
}

#[test]
fn answers_can_be_added_to_a_profile() {
    let path = folder().join("updated.json");
    let answer = || {
        let arguments = ["-p", "The sea", "-n", "5", "-c", "256", "--ram", "1G", "--temp", "0"];
        let update = ["--profile", path.to_str().unwrap(), "--update-profile"];
        let output = pinscope("run", tiny(), &[&arguments[..], &update].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        let profile: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let decode = |half: usize| profile["halves"][half]["decode"]["tokens"].as_f64().unwrap();
        (decode(0), decode(1))
    };
    assert_eq!(answer(), (5.0, 0.0));
    assert_eq!(answer(), (5.0, 5.0));
}

#[test]
fn a_plan_with_a_profile_says_what_pins_promise() {
    let plan = |ram: &str| {
        let pins = ["--profile", made().to_str().unwrap(), "--pin-share", "1"];
        let fixed = ["--json", "-c", "256", "--ram", ram];
        json(&pinscope("plan", tiny(), &[&fixed[..], &pins].concat()))
    };
    let smallest = plan("1M")["smallest_ram_bytes"].as_u64().unwrap();
    let plan = plan(&format!("{}M", (smallest >> 20) + 4));
    let promise = plan["pins"]["promise"].as_f64().unwrap();
    assert!(plan["pins"]["count"].as_u64() > Some(0) && promise > 0.0 && promise <= 1.0, "{plan}");
}

/// A running `pinscope pin` of the tiny model.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_run_uses_what_a_pin_daemon_keeps_instead_of_reading_it_again() {
    let runtime = folder().join("runtime");
    std::fs::create_dir_all(&runtime).unwrap();
    std::fs::set_permissions(&runtime, std::fs::Permissions::from_mode(0o700)).unwrap();
    let model = tiny().to_str().unwrap();
    let command = |arguments: &[&str]| {
        let mut command = program(arguments);
        command.env("XDG_RUNTIME_DIR", &runtime).stdout(Stdio::piped());
        command
    };
    // Without a profile all of a model that fits is kept.
    let pin = ["pin", "-m", model, "--ram", "1G", "--json"];
    let mut daemon = Daemon(command(&pin).spawn().unwrap());
    let mut ready = String::new();
    BufReader::new(daemon.0.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    assert!(ready.starts_with('{'), "{ready}");

    let ram = format!("{}M", smallest_ram(tiny(), &SHORT) + 3);
    let verify = [&["verify", "-m", model, "--ram", &ram][..], &SHORT].concat();
    let verdict = json(&command(&verify).output().unwrap());
    assert_eq!(verdict["identical"], true, "{verdict}");
    assert_eq!(
        (&verdict["hit_rate"], &verdict["bytes_read_per_token"]),
        (&1.0.into(), &0.0.into())
    );
    let by = format!("process {} (pinscope pin) keeps", daemon.0.id());
    assert!(verdict["notes"].to_string().contains(&by), "{verdict}");

    drop(daemon);
    let verdict = json(&command(&verify).output().unwrap());
    assert_eq!(verdict["identical"], true, "{verdict}");
    assert!(verdict["hit_rate"].as_f64() < Some(1.0), "{verdict}");
}
