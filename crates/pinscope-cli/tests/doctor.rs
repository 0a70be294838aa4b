//! `pinscope doctor` from outside.

mod common;

use common::{assert_refused, folder, json, pinscope, program, stderr, tiny};
use serde_json::Value;

#[test]
fn a_model_and_a_process_are_examined_and_one_change_is_advised() {
    let pid = std::process::id().to_string();
    let output = pinscope("doctor", tiny(), &["--ram", "76M", "--pid", &pid, "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report = json(&output);

    let readings = report["disk"].as_array().unwrap();
    let ways: Vec<_> = readings
        .iter()
        .map(|r| (r["chunk"].as_u64().unwrap(), r["depth"].as_u64().unwrap(), r["direct"] == true))
        .collect();
    let (large, small) = (1 << 20, 128 << 10);
    let direct = [(large, 16, true), (large, 1, true), (small, 16, true), (small, 1, true)];
    assert_eq!(ways, [&direct[..], &[(large, 16, false), (large, 1, false)]].concat());
    let positive = |v: &Value| v.as_f64().unwrap() > 0.0;
    assert!(readings.iter().all(|r| positive(&r["rate"])), "{readings:?}");
    assert!(positive(&report["memory_one_thread"]) && positive(&report["memory_all_threads"]));

    // Room for a part of the experts at 76 MiB; less than nothing at a quarter of the file.
    let budgets = report["outlook"]["budgets"].as_array().unwrap();
    assert_eq!(budgets.len(), 5);
    assert!(budgets[0]["speed"].is_null());
    let asked = &budgets[4];
    assert_eq!(asked["ram_bytes"], 76 << 20);
    let hits = asked["hit_rate"].as_f64().unwrap();
    assert!(hits > asked["resident"].as_f64().unwrap() && hits < 1.0, "{asked}");
    assert!(positive(&asked["speed"]["tokens_per_second"]));

    assert_eq!(report["process"]["pid"].to_string(), pid);
    assert!(positive(&report["process"]["resident_bytes"]));
    assert!(report["advice"]["change"].as_str().is_some_and(|text| !text.is_empty()));
    let what = |name: &str| {
        let checks = report["checks"].as_array().unwrap();
        checks.iter().any(|c| c["what"] == name && c["verdict"].is_string())
    };
    for name in ["Memory that may be locked", "Huge pages", "Reader", "Swap", "Memory pressure"] {
        assert!(what(name), "{name}");
    }
}

#[test]
fn without_a_model_a_file_is_read_and_nothing_is_left_of_it() {
    let here = folder().join("doctor");
    std::fs::create_dir(&here).unwrap();
    let output = program(&["doctor"]).current_dir(&here).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("Disk, as PinScope reads") && text.contains("What would help most: "));
    assert_eq!(std::fs::read_dir(&here).unwrap().count(), 0);
}

#[test]
fn a_process_that_is_not_there_is_named_before_anything_is_measured() {
    let output = program(&["doctor", "--pid", "4194305"]).output().unwrap();
    assert_refused(&output, &["4194305", "--pid"]);
}
