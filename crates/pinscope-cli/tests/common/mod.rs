//! What the tests of the program share: tiny models, made once, and the program.
#![allow(dead_code)] // each test file uses its own part

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use pinscope_models::synth::{self, Options, Shape};
use tempfile::TempDir;

/// A folder that lives as long as the tests do.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir().unwrap()).path()
}

/// Writes a tiny model of that shape; the first file of as many parts.
pub fn make(shape: &str, parts: u32, out: &Path) -> PathBuf {
    let shape = Shape::named(shape).unwrap();
    let options = Options { parts, ..Options::default() };
    synth::write(&shape, &options, out, &mut |_, _| {}).unwrap().remove(0)
}

/// The tiny Qwen3 MoE that most tests use: 4 layers of 32 experts.
pub fn tiny() -> &'static Path {
    static MODEL: OnceLock<PathBuf> = OnceLock::new();
    MODEL.get_or_init(|| make("tiny-qwen3moe", 1, &folder().join("tiny.gguf")))
}

/// The program with these arguments, not started yet.
pub fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinscope"));
    command.args(arguments).stdin(std::process::Stdio::null());
    // Tests run side by side: threads that wait must not spin.
    command.env("OMP_WAIT_POLICY", "passive");
    command
}

/// `pinscope COMMAND -m MODEL ARGUMENTS`, run to the end.
pub fn pinscope(command: &str, model: &Path, arguments: &[&str]) -> Output {
    let model = model.to_str().unwrap();
    program(&[&[command, "-m", model], arguments].concat()).output().unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What the program printed as JSON.
pub fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("no JSON ({e}); standard error says: {}", stderr(output)))
}

/// The program refused, in one paragraph, with all of `words`, and without a
/// panic, a killed process or half an answer.
pub fn assert_refused(output: &Output, words: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    assert_eq!(text.trim_end().lines().count(), 1, "not one paragraph: {text}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    for word in words {
        assert!(text.contains(word), "\"{word}\" is missing in: {text}");
    }
}

/// Short runs of `verify`, as JSON.
pub const SHORT: [&str; 5] = ["--json", "--prompt-tokens", "48", "--tokens", "8"];

/// The smallest `--ram` that `verify` works with, MiB, from its own refusal.
pub fn smallest_ram(model: &Path, arguments: &[&str]) -> u64 {
    let output = pinscope("verify", model, &[arguments, &["--ram", "1M"]].concat());
    let text = stderr(&output);
    text.split_once("--ram that works is ")
        .and_then(|(_, rest)| rest.split_once('M')?.0.parse().ok())
        .unwrap_or_else(|| panic!("no smallest --ram in: {text}"))
}
