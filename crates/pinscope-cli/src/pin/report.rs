//! What `pinscope pin` prints when everything is locked.

use std::io::{self, Write};

use pinscope::map::ExpertMap;
use pinscope::memory::format_bytes;
use pinscope::pin::FileRanges;
use pinscope::policy::ExpertId;
use pinscope::profile::{Profile, ProfiledModel};
use serde::Serialize;

use super::{size, Args, Outcome};
use crate::style;

/// The JSON of `--json`.
#[derive(Serialize)]
struct Report {
    model: String,
    /// As in profiles.
    model_id: String,
    pid: u32,
    /// What may be locked; `null`: no limit.
    lockable_bytes: Option<u64>,
    locked_bytes: u64,
    dense: Row,
    /// False: `ram` or the limit is less than the dense tensors need.
    dense_complete: bool,
    experts: Row,
    experts_locked: usize,
    experts_total: u64,
    /// Read ahead, not locked.
    warm: Row,
    warm_experts: usize,
    files: Vec<File>,
    notes: Vec<String>,
}

/// One kind of pages.
#[derive(Serialize)]
struct Row {
    ranges: usize,
    bytes: u64,
    /// Of the profiled choices of experts, 0 to 1; `null` without a profile.
    traffic: Option<f64>,
}

#[derive(Serialize)]
struct File {
    path: String,
    /// First byte and the one behind the last.
    locked: Vec<(u64, u64)>,
}

/// Prints to standard output.
///
/// # Errors
/// Nobody reads it.
pub fn print(
    args: &Args,
    map: &ExpertMap,
    model: &ProfiledModel,
    profile: Option<&Profile>,
    outcome: &Outcome,
) -> io::Result<()> {
    let report = report(args, map, model, profile, outcome);
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        writeln!(out, "{}", table(&report))?;
        for note in &report.notes {
            writeln!(out, "{note}")?;
        }
        writeln!(out, "Process {} keeps this until Ctrl-C.", report.pid)?;
    }
    out.flush()
}

fn report(
    args: &Args,
    map: &ExpertMap,
    model: &ProfiledModel,
    profile: Option<&Profile>,
    outcome: &Outcome,
) -> Report {
    let row = |ranges: &FileRanges, experts: Option<&[ExpertId]>| Row {
        ranges: ranges.iter().map(Vec::len).sum(),
        bytes: size(ranges),
        traffic: profile.zip(experts).map(|(profile, experts)| share(profile, experts)),
    };
    let locked = &outcome.locked;
    let dense = locked.dense_ranges();
    let file = |(file, ranges): (&pinscope::map::ModelFile, Vec<std::ops::Range<u64>>)| File {
        path: file.path.display().to_string(),
        locked: ranges.into_iter().map(|r| (r.start, r.end)).collect(),
    };
    Report {
        model: args.model.display().to_string(),
        model_id: model.id.to_string(),
        pid: std::process::id(),
        lockable_bytes: outcome.lockable,
        locked_bytes: locked.bytes(),
        dense_complete: locked.dense_complete(),
        experts: row(&locked.beyond(&dense), Some(locked.experts())),
        dense: row(&dense, None),
        experts_locked: locked.experts().len(),
        experts_total: map.expert_count(),
        warm: row(&outcome.warm, Some(&outcome.warm_experts)),
        warm_experts: outcome.warm_experts.len(),
        files: map.files().iter().zip(locked.ranges()).map(file).collect(),
        notes: outcome.notes.clone(),
    }
}

/// Share of the profile's choices that these experts serve.
fn share(profile: &Profile, experts: &[ExpertId]) -> f64 {
    let rate = profile.rate();
    let all: f64 = rate.iter().sum();
    let some: f64 = experts.iter().filter_map(|e| rate.get(e.0 as usize)).sum();
    if all > 0.0 {
        some / all
    } else {
        0.0
    }
}

fn table(report: &Report) -> String {
    let mut table = style::table();
    table.set_header(["Kept in the page cache", "ranges", "bytes", "of expert traffic"]);
    let dense = match report.dense_complete {
        true => "Dense tensors, locked",
        false => "Dense tensors in part, locked",
    };
    let experts = format!("{} of {} experts, locked", report.experts_locked, report.experts_total);
    let rest = if report.dense_complete { "" } else { "The other dense tensors, " };
    let warm = format!("{rest}{} experts, read ahead only", report.warm_experts);
    for (what, row) in [(dense, &report.dense), (&experts, &report.experts), (&warm, &report.warm)]
    {
        if row.bytes > 0 {
            let traffic = row.traffic.map_or("".into(), |share| format!("{:.1} %", 100.0 * share));
            table.add_row([what, &row.ranges.to_string(), &format_bytes(row.bytes), &traffic]);
        }
    }
    style::numbers_right(&mut table);
    table.to_string()
}
