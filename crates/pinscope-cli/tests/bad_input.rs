//! What is wrong with a model or a budget is said in one paragraph.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{assert_refused, folder, make, pinscope, smallest_ram, stderr, tiny, SHORT};

/// Every command that takes a model, with what it needs besides.
const COMMANDS: [(&str, &[&str]); 6] = [
    ("run", &["--ram", "1G", "-p", "x", "-n", "1", "--raw"]),
    ("plan", &["--ram", "1G"]),
    ("pin", &["--ram", "1G"]),
    ("doctor", &[]),
    ("verify", &["--ram", "1G", "--tokens", "1"]),
    ("bench", &["--ram", "1G", "--tokens", "1"]),
];

fn assert_all_refuse(model: &Path, words: &[&str]) {
    for (command, arguments) in COMMANDS {
        assert_refused(&pinscope(command, model, arguments), words);
    }
}

fn file(name: &str, content: &[u8]) -> PathBuf {
    let path = folder().join(name);
    fs::write(&path, content).unwrap();
    path
}

/// A file cut to a share of its length.
fn cut(path: &Path, numerator: u64, denominator: u64) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() * numerator / denominator).unwrap();
}

#[test]
fn a_file_that_is_not_there_is_named() {
    assert_all_refuse(&folder().join("nowhere.gguf"), &["nowhere.gguf", "No such file"]);
}

#[test]
fn a_folder_is_not_a_model() {
    assert_all_refuse(folder(), &[folder().to_str().unwrap()]);
}

#[test]
fn a_file_of_another_kind_is_not_a_gguf() {
    assert_all_refuse(&file("note.txt", b"Dear diary,"), &["note.txt", "GGUF"]);
    assert_all_refuse(&file("empty.gguf", b""), &["empty.gguf", "GGUF"]);
}

#[test]
fn a_damaged_header_is_refused() {
    let mut bytes = fs::read(tiny()).unwrap();
    bytes.truncate(64 << 10);
    // The number of tensors (bytes 8 to 15), then a wild string length.
    let mut many = bytes.clone();
    many[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_all_refuse(&file("many.gguf", &many), &["many.gguf"]);
    let mut long = bytes;
    long[24..32].copy_from_slice(&(1u64 << 60).to_le_bytes());
    assert_all_refuse(&file("long.gguf", &long), &["long.gguf"]);
}

#[test]
fn a_file_that_ends_early_is_truncated() {
    let path = folder().join("half.gguf");
    fs::copy(tiny(), &path).unwrap();
    cut(&path, 1, 2);
    assert_all_refuse(&path, &["half.gguf", "truncated"]);
}

#[test]
fn a_part_that_is_missing_truncated_or_given_instead_of_the_first_is_named() {
    let dir = folder().join("parts");
    fs::create_dir(&dir).unwrap();
    let first = make("tiny-qwen3moe", 3, &dir.join("m.gguf"));
    let second = dir.join("m-00002-of-00003.gguf");
    let third = dir.join("m-00003-of-00003.gguf");

    assert_all_refuse(&second, &["part 2 of", "m-00001-of-00003.gguf"]);
    cut(&second, 2, 3);
    assert_all_refuse(&first, &["m-00002-of-00003.gguf", "truncated"]);
    fs::remove_file(&third).unwrap();
    assert_all_refuse(&first, &["m-00003-of-00003.gguf", "missing"]);
}

#[test]
fn a_dense_model_is_told_that_there_is_nothing_to_do() {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(1u64.to_le_bytes()); // tensors
    bytes.extend(1u64.to_le_bytes()); // values
    bytes.extend([string("general.architecture"), 8u32.to_le_bytes().to_vec()].concat());
    bytes.extend(string("llama"));
    bytes.extend(string("blk.0.ffn_up.weight"));
    bytes.extend(1u32.to_le_bytes()); // dimensions
    bytes.extend(32u64.to_le_bytes());
    bytes.extend([0u8; 4 + 8]); // F32, at the start of the data
    bytes.resize(bytes.len().next_multiple_of(32) + 32 * 4, 0);
    assert_all_refuse(&file("dense.gguf", &bytes), &["dense.gguf", "dense model"]);
}

#[test]
fn a_budget_that_is_too_small_is_refused_with_the_smallest_that_works() {
    for (command, arguments) in
        [("run", &["--ram", "20M", "-p", "x", "--raw"][..]), ("verify", &["--ram", "20M"])]
    {
        assert_refused(&pinscope(command, tiny(), arguments), &["too few", "--ram that works is"]);
    }
    let smallest = smallest_ram(tiny(), &SHORT);
    let with = |mib: u64| {
        pinscope("verify", tiny(), &[&SHORT[..], &["--ram", &format!("{mib}M")]].concat())
    };
    assert!(with(smallest).status.success(), "{}", stderr(&with(smallest)));
    assert_refused(&with(smallest - 1), &["--ram that works is"]);
}

#[test]
fn a_text_that_is_not_there_is_named() {
    for command in ["verify", "bench"] {
        let output = pinscope(command, tiny(), &["--ram", "1G", "--text", "/no/such/text"]);
        assert_refused(&output, &["/no/such/text"]);
    }
}

#[test]
fn a_worker_started_by_hand_explains_itself() {
    let output = common::program(&["worker"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("not by hand"));
}
