//! `pinscope run` and `pinscope plan` from outside.

mod common;

use std::io::{Read, Write};
use std::process::{Output, Stdio};

use common::{json, pinscope, program, stderr, tiny};

/// Options that make an answer short, and the same each time.
const SHORT: [&str; 8] = ["--temp", "0", "-c", "512", "--ram", "1G", "-n", "4"];

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The number before `what` in the summary lines, one for each answer.
fn counts(output: &Output, before: &str) -> Vec<usize> {
    let after = |line: &str| line.split_once(before)?.1.split(' ').next()?.parse().ok();
    stderr(output).lines().filter_map(after).collect()
}

/// Runs a chat that is fed these lines.
fn chat(lines: &str, arguments: &[&str]) -> Output {
    let mut child = program(&[&["run", "-m", tiny().to_str().unwrap()], arguments].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn one_answer_is_all_that_standard_output_has() {
    let output = pinscope("run", tiny(), &[&SHORT[..], &["-p", "The sea", "--raw"]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).ends_with('\n') && !stdout(&output).contains("tok/s"));
    assert_eq!(counts(&output, "answer "), [4]);
    assert!(stderr(&output).contains("peak memory"), "{}", stderr(&output));
}

#[test]
fn the_prompt_is_put_into_the_chat_template_unless_raw() {
    let tokens = |raw: &[&str]| {
        let output = pinscope("run", tiny(), &[&SHORT[..], &["-p", "sea"], raw].concat());
        counts(&output, "[prompt ")[0]
    };
    assert!(tokens(&[]) > tokens(&["--raw"]));
}

#[test]
fn a_chat_computes_only_what_is_new_in_the_second_turn() {
    let output = chat("The sea\n\nThe sea\n/clear\nThe sea\n/exit\nnot read\n", &SHORT);
    assert!(output.status.success(), "{}", stderr(&output));
    let prompts = counts(&output, "[prompt ");
    assert_eq!(prompts.len(), 3, "{}", stderr(&output));
    // The second turn is the first prompt, the answer and as much again. What
    // is computed: the new turn, and the answer if it reads back as other tokens.
    assert!(prompts[1] <= prompts[0] + 16, "{prompts:?}");
    // After /clear all but the common beginning is new, and the answer is the first again.
    let text = stdout(&output);
    let answers: Vec<_> = text.lines().collect();
    assert_eq!(answers.first(), answers.last());
    assert!(prompts[2] <= prompts[0]);
}

#[test]
fn a_turn_that_does_not_fit_is_refused_and_the_chat_goes_on() {
    let long = "sea ".repeat(600);
    let output = chat(&format!("{long}\nThe sea\n"), &SHORT);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("-c"), "{}", stderr(&output));
    assert_eq!(counts(&output, "answer "), [4]);
}

#[test]
fn an_answer_ends_with_a_reason_when_the_context_is_full() {
    let arguments = ["--temp", "0", "-c", "256", "--ram", "1G", "--ignore-eos", "--raw"];
    let prompt = "sea ".repeat(60);
    let output = pinscope("run", tiny(), &[&arguments[..], &["-p", &prompt]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("context is full"), "{}", stderr(&output));
    let (prompt, answer) = (counts(&output, "[prompt ")[0], counts(&output, "answer ")[0]);
    // The last token needs no place any more.
    assert_eq!(prompt + answer, 257);
}

#[test]
fn a_prompt_that_does_not_fit_is_an_error() {
    let prompt = "sea ".repeat(600);
    let output = pinscope("run", tiny(), &[&SHORT[..], &["--raw", "-p", &prompt]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("larger context (-c)"), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
}

/// A run that answers until somebody stops it.
fn endless_answer() -> std::process::Child {
    let model = tiny().to_str().unwrap();
    let endless = ["-p", "sea", "--raw", "--ignore-eos", "--temp", "0", "-c", "32768"];
    program(&[&["run", "-m", model, "--ram", "4G"], &endless[..]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn ctrl_c_stops_the_answer_and_the_summary_still_comes() {
    let mut child = endless_answer();
    // Once it answers.
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    // SAFETY: a signal to a child that was not waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("tok/s"), "{}", stderr(&output));
}

#[test]
fn an_output_that_nobody_reads_ends_the_program_quietly() {
    let mut child = endless_answer();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
    assert!(!stderr(&output).contains("pipe"), "{}", stderr(&output));
}

#[test]
fn the_plan_adds_up_and_its_smallest_amount_runs() {
    let plan = |ram: &str| {
        let output = pinscope("plan", tiny(), &["--json", "-c", "512", "--ram", ram]);
        (output.status.code(), json(&output))
    };
    let (code, full) = plan("1G");
    assert_eq!((code, full["works"].as_bool()), (Some(0), Some(true)));
    assert_eq!(full["fits_all"], true);
    assert_eq!(full["experts_resident"], full["experts_total"]);

    let smallest = full["smallest_ram_bytes"].as_u64().unwrap().div_ceil(1 << 20);
    let (code, tight) = plan(&format!("{smallest}M"));
    assert_eq!((code, tight["fits_all"].as_bool()), (Some(0), Some(false)));
    let sum: u64 = ["dense", "kv", "compute", "output", "overhead", "arena"]
        .map(|part| tight[format!("{part}_bytes")].as_u64().unwrap())
        .iter()
        .sum();
    assert!(sum <= smallest << 20, "{tight}");

    let (code, less) = plan(&format!("{}M", smallest - 2));
    assert_eq!((code, less["works"].as_bool()), (Some(1), Some(false)));

    // What is measured differs by some pages between processes.
    let arguments = ["-c", "512", "-n", "4", "--temp", "0", "-p", "The sea", "--raw"];
    let ram = format!("{}M", smallest + 1);
    let small = pinscope("run", tiny(), &[&arguments[..], &["--ram", &ram]].concat());
    let large = pinscope("run", tiny(), &[&arguments[..], &["--ram", "1G"]].concat());
    assert!(small.status.success(), "{}", stderr(&small));
    assert!(stderr(&small).contains("read a token"), "{}", stderr(&small));
    assert_eq!(small.stdout, large.stdout);
}

#[test]
fn the_plan_is_a_table_for_people() {
    let output = pinscope("plan", tiny(), &["--ram", "1G"]);
    let text = stdout(&output);
    for word in ["Dense weights", "KV cache", "Experts", "Smallest RAM that works"] {
        assert!(text.contains(word), "{text}");
    }
    let output = pinscope("plan", tiny(), &["--ram", "20M"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("too little is left"));
}

#[test]
fn wrong_usage_has_its_own_exit_code() {
    for arguments in [&["run"][..], &["run", "-m", "x", "--ram", "10"], &["walk"]] {
        assert_eq!(program(arguments).output().unwrap().status.code(), Some(2));
    }
}
