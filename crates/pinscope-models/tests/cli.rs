//! The program from outside.

use std::path::Path;
use std::process::{Command, Output};

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_pinscope-models"))
}

fn files(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

fn fails_with(output: &Output, text: &str) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(error.contains(text), "{error}");
    assert!(!error.contains("panicked"), "{error}");
}

#[test]
fn a_file_size_limit_gives_an_error_and_no_file() {
    let dir = tempfile::tempdir().unwrap();
    // 1000 blocks are less than the model. The signal is ignored so that the write fails.
    let script = "trap '' XFSZ; ulimit -f 1000; exec \"$0\" synth --shape tiny-olmoe \"$1\"";
    let output = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_pinscope-models")])
        .arg(dir.path().join("m.gguf"))
        .output()
        .unwrap();
    fails_with(&output, "no room for");
    assert_eq!(files(dir.path()), 0);
}

#[test]
fn a_full_disk_gives_an_error_and_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(dir.path())
        .output();
    if !mount.is_ok_and(|m| m.status.success()) {
        eprintln!("skipped: this test needs to mount a small tmpfs");
        return;
    }
    let output = program()
        .args(["synth", "--shape", "tiny-olmoe"])
        .arg(dir.path().join("m.gguf"))
        .output()
        .unwrap();
    let left = files(dir.path());
    assert!(Command::new("umount").arg(dir.path()).status().unwrap().success());
    fails_with(&output, "Free some space");
    assert_eq!(left, 0);
}

#[test]
fn unknown_shapes_and_types_are_refused_with_the_known_ones() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m.gguf");
    let output = program().args(["synth", "--shape", "gpt-5"]).arg(&out).output().unwrap();
    fails_with(&output, "qwen3-30b-a3b");
    let output = program()
        .args(["synth", "--shape", "tiny-olmoe", "--type", "Q9"])
        .arg(&out)
        .output()
        .unwrap();
    fails_with(&output, "iq4_xs");
    assert_eq!(files(dir.path()), 0);
}

#[test]
fn routing_prints_json_that_names_every_figure() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m.gguf");
    let made = program().args(["synth", "--shape", "tiny-mixtral"]).arg(&out).output().unwrap();
    assert!(made.status.success());
    assert_eq!(String::from_utf8_lossy(&made.stdout).trim(), out.to_str().unwrap());
    let measured =
        program().args(["routing", "--json", "--tokens", "150", "-m"]).arg(&out).output().unwrap();
    assert!(measured.status.success(), "{}", String::from_utf8_lossy(&measured.stderr));
    let report: serde_json::Value = serde_json::from_slice(&measured.stdout).unwrap();
    assert_eq!(report["tokens"], 150);
    for figure in ["previous_token_overlap", "top_k_share", "active_in_128_tokens"] {
        assert!(report["overall"][figure].is_f64(), "{figure} in {report}");
    }
}

#[test]
fn upcycling_a_mixture_of_experts_or_no_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("m.gguf");
    let made = program().args(["synth", "--shape", "tiny-mixtral"]).arg(&base).output().unwrap();
    assert!(made.status.success());
    let upcycle = |base: &Path| {
        let out = dir.path().join("out.gguf");
        program().arg("upcycle").arg("--base").arg(base).arg(out).output().unwrap()
    };
    fails_with(&upcycle(&base), "already");
    fails_with(&upcycle(&dir.path().join("none.gguf")), "none.gguf");
    let text = dir.path().join("text.gguf");
    std::fs::write(&text, "no model").unwrap();
    fails_with(&upcycle(&text), "not a GGUF file");
}
