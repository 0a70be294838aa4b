//! What `pinscope doctor` prints.

use std::io::{self, Write};

use serde::Serialize;

use super::advice::Advice;
use super::checks::{checks, Check, Verdict};
use super::disk::Reading;
use super::estimate::{Bound, EFFICIENCY};
use super::outlook::Outlook;
use super::process::Process;
use super::Findings;
use crate::style;

/// The JSON of `--json`; rates in bytes a second.
#[derive(Serialize)]
struct Report<'a> {
    disk: &'a [Reading],
    reader: &'a str,
    memory_one_thread: f64,
    memory_all_threads: f64,
    /// Share of the memory bandwidth that arithmetic is assumed to reach.
    efficiency: f64,
    checks: &'a [Check],
    process: Option<&'a Process>,
    outlook: Option<&'a Outlook>,
    advice: &'a Advice,
}

/// Prints to standard output.
///
/// # Errors
/// Nobody reads it.
pub fn print(json: bool, findings: &Findings, advice: &Advice) -> io::Result<()> {
    let checks = checks(findings);
    let mut out = io::stdout().lock();
    if json {
        let report = Report {
            disk: &findings.disk.readings,
            reader: findings.disk.reader,
            memory_one_thread: findings.bandwidth.0,
            memory_all_threads: findings.bandwidth.1,
            efficiency: EFFICIENCY,
            checks: &checks,
            process: findings.process.as_ref(),
            outlook: findings.outlook.as_ref(),
            advice,
        };
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
        return out.flush();
    }
    writeln!(out, "{}", check_lines(&checks))?;
    if let Some(outlook) = &findings.outlook {
        writeln!(out, "{}", speeds(outlook))?;
        writeln!(
            out,
            "{} Estimates, not measurements: arithmetic at {:.0} % of the memory bandwidth; \
             hit rates {}.\n",
            outlook.needs(),
            100.0 * EFFICIENCY,
            outlook.hit_rates
        )?;
    }
    let gain = advice.gain.map_or(String::new(), |gain| format!(" (about {gain:.1} times faster)"));
    writeln!(out, "What would help most: {}{gain}.\nWhy: {}.", advice.change, advice.why)?;
    out.flush()
}

/// One line each: name, verdict, figures.
fn check_lines(checks: &[Check]) -> String {
    let width = checks.iter().map(|c| c.what.len()).max().unwrap_or(0);
    let line = |c: &Check| {
        let verdict = match c.verdict {
            Verdict::Good => "good",
            Verdict::Fair => "fair",
            Verdict::Poor => "POOR",
            Verdict::Unknown => "-",
        };
        format!("{:width$}  {verdict:4}  {}\n", c.what, c.found)
    };
    checks.iter().map(line).collect()
}

fn speeds(outlook: &Outlook) -> String {
    let mut table = style::table();
    table.set_header(["--ram", "", "experts in RAM", "hits", "disk ms", "tok/s", "limited by"]);
    for budget in &outlook.budgets {
        let ram = format!("{}M", budget.ram_bytes >> 20);
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        let row = match &budget.speed {
            None => [
                ram,
                budget.label.clone(),
                "too little".into(),
                "".into(),
                "".into(),
                "".into(),
                "".into(),
            ],
            Some(speed) => [
                ram,
                budget.label.clone(),
                percent(budget.resident),
                percent(budget.hit_rate),
                format!("{:.1}", speed.disk_ms),
                format!("{:.2}", speed.tokens_per_second),
                match speed.bound {
                    Bound::Arithmetic => "arithmetic".into(),
                    Bound::Disk => "disk".into(),
                },
            ],
        };
        table.add_row(row);
    }
    style::numbers_right(&mut table);
    table.to_string()
}
