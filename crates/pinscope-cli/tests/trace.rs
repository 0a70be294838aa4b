//! Traces and their replay, from outside.

mod common;

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;

use common::{assert_refused, folder, json, pinscope, program, stderr, tiny};

const TEXT: &str = "The sea was calm that night, and the boats lay still in the harbour. ";

fn text() -> &'static Path {
    static TEXT_FILE: OnceLock<PathBuf> = OnceLock::new();
    TEXT_FILE.get_or_init(|| {
        let path = folder().join("text.txt");
        std::fs::write(&path, TEXT.repeat(8)).unwrap();
        path
    })
}

fn record(name: &str, arguments: &[&str]) -> (Output, PathBuf) {
    let path = folder().join(name);
    let fixed = ["-o", path.to_str().unwrap(), "-c", "256", "--ram", "1G", "--json"];
    (pinscope("trace", tiny(), &[&fixed, arguments].concat()), path)
}

/// A trace of the tiny model, made once.
fn made() -> &'static str {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let make = || {
        let text = text().to_str().unwrap();
        let (output, path) = record("made.trace", &["--text", text, "--prompt-tokens", "20"]);
        assert!(output.status.success(), "{}", stderr(&output));
        path
    };
    MADE.get_or_init(make).to_str().unwrap()
}

fn simulate(arguments: &[&str]) -> Output {
    program(&[&["simulate"], arguments].concat()).output().unwrap()
}

#[test]
fn a_text_is_recorded_as_a_prompt_and_single_tokens_and_can_be_shown() {
    let shown = json(&program(&["trace", "show", made(), "--json"]).output().unwrap());
    assert_eq!((&shown["prompts"], &shown["prompt_tokens"]), (&1.into(), &20.into()));
    let generated = shown["generated_tokens"].as_u64().unwrap();
    assert!(generated > 50, "{shown}");
    assert_eq!(shown["passes"].as_u64(), Some(4 * (generated + 1)), "4 layers");
    // All tokens ask for as many experts, of one size in each layer.
    let all = shown["expert_bytes"].as_f64().unwrap();
    let share = shown["top_k"].as_f64().unwrap() / shown["experts_per_layer"].as_f64().unwrap();
    let a_token = shown["bytes_a_token"].as_f64().unwrap();
    assert!((a_token / (all * share) - 1.0).abs() < 1e-9, "{shown}");
    let people = program(&["trace", "show", made()]).output().unwrap();
    assert!(String::from_utf8_lossy(&people.stdout).contains("1 prompts of 20 tokens"));
}

#[test]
fn an_answer_is_recorded_token_by_token() {
    let (output, _) = record("answer.trace", &["-p", "The sea", "-n", "7"]);
    assert_eq!(json(&output)["generated_tokens"], 7, "{}", stderr(&output));
}

#[test]
fn a_recording_that_was_cut_is_replayed_up_to_there() {
    let whole = std::fs::read(made()).unwrap();
    let cut = folder().join("cut.trace");
    std::fs::write(&cut, &whole[..whole.len() - 3]).unwrap();
    let shown = program(&["trace", "show", cut.to_str().unwrap()]).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("ended within a pass"));
    let report = json(&simulate(&[cut.to_str().unwrap(), "--ram", "50%", "--json"]));
    assert_eq!(report[0]["cut"], true);
}

#[test]
fn all_policies_are_replayed_at_all_budgets_and_belady_is_best() {
    let plot = folder().join("hits.svg");
    let report = json(&simulate(&[
        made(),
        "--ram",
        "20%,50%,2G",
        "--json",
        "--plot",
        plot.to_str().unwrap(),
    ]));
    let replays = report[0]["replays"].as_array().unwrap();
    let rates = |policy: &str| -> Vec<f64> {
        let of = replays.iter().filter(|r| r["policy"] == policy);
        of.map(|r| r["hit_rate"].as_f64().unwrap()).collect()
    };
    let best = rates("belady");
    for policy in ["lru (textbook)", "adaptive", "lru", "lfu", "s3fifo", "random"] {
        let rates = rates(policy);
        assert!(rates.len() == 3 && rates[0] < rates[2], "{policy}: {rates:?}");
        assert!(rates.iter().zip(&best).all(|(r, best)| r <= best), "{policy}: {rates:?} {best:?}");
        assert_eq!(rates[2], best[2], "with room for all, nothing is read twice");
    }
    assert!(std::fs::read_to_string(plot).unwrap().starts_with("<svg"));
    let table = simulate(&[made(), "--ram", "20%", "--policy", "lfu,adaptive"]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    for word in ["lfu", "adaptive", "belady", "gap closed", "100 %"] {
        assert!(table.contains(word), "{word} is missing:\n{table}");
    }
    assert!(!table.contains("s3fifo"));
}

#[test]
fn a_caveat_stands_beside_figures_of_other_peoples_traces() {
    let csv = folder().join("t.csv");
    let rows =
        "# route_trace v1\n# model=a n_expert=4 n_expert_used=1\n# layer=0 expert_bytes=9000\n\
        turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n\
        0,0,0,0,0,1,1.0,0,0\n0,1,0,0,0,1,1.0,0,0\n";
    std::fs::write(&csv, rows).unwrap();
    let shown = simulate(&[csv.to_str().unwrap(), "--ram", "1M"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("BigMoeOnEdge") && shown.contains("100.0 %"), "{shown}");
}

#[test]
fn what_cannot_be_recorded_or_replayed_is_refused() {
    let (output, _) = record("x.trace", &["--text", "/no/such.txt"]);
    assert_refused(&output, &["/no/such.txt"]);
    let (output, _) = record("no/such/folder/x.trace", &["-p", "x", "-n", "1"]);
    assert_refused(&output, &["cannot write the trace", "no/such/folder"]);
    assert_refused(&simulate(&["/no/such.trace", "--ram", "1G"]), &["/no/such.trace"]);
    assert_refused(&simulate(&[tiny().to_str().unwrap(), "--ram", "1G"]), &["not a trace"]);
    assert_refused(&simulate(&[made(), "--ram", "1%"]), &["too few", "needs at least"]);
    assert_refused(&simulate(&[made(), "--ram", "1G", "--skip", "99999"]), &["--skip"]);
    let two = simulate(&[made(), made(), "--ram", "1G", "--plot", "x.svg"]);
    assert_refused(&two, &["one trace"]);
}
