//! What a profile shows: a table, a curve, JSON.

use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use pinscope::memory::format_bytes;
use pinscope::profile::{PinPlan, Profile};
use serde::Serialize;

use crate::plot::{self, Curve, Labels};
use crate::style;

/// Shares of experts in the table.
const PARTS: [f64; 3] = [0.10, 0.25, 0.50];
/// Groups of neighbouring layers.
const GROUPS: usize = 4;

/// A group of layers: their names, and their positions.
fn groups(profile: &Profile) -> Vec<(String, Range<usize>)> {
    let layers = &profile.model().layers;
    let n = layers.len();
    let mut groups = vec![("all layers".to_owned(), 0..n)];
    let part = |g: usize| g * n / GROUPS..(g + 1) * n / GROUPS;
    for range in (0..GROUPS).map(part).filter(|r| !r.is_empty()) {
        let name = match range.len() {
            1 => format!("layer {}", layers[range.start]),
            _ => format!("layers {} to {}", layers[range.start], layers[range.end - 1]),
        };
        groups.push((name, range));
    }
    groups
}

#[derive(Serialize)]
struct Report {
    profile: String,
    model_id: String,
    prefill_tokens: f64,
    decode_tokens: f64,
    coverage: Vec<Row>,
    pins: Option<Pins>,
}

#[derive(Serialize)]
struct Row {
    layers: String,
    /// Share of the experts.
    hottest: f64,
    /// Share of the traffic that they serve, of the half that made them hot.
    own: f64,
    /// The same of the other half.
    held_out: Option<f64>,
}

#[derive(Serialize)]
struct Pins {
    count: usize,
    /// Of the memory for experts, that pins may take.
    share: f64,
    /// Share of a generated token's choices that pins should serve.
    promise: f64,
    /// Pins will not help: experts are used about equally.
    flat: bool,
}

fn rows(profile: &Profile) -> Vec<Row> {
    let mut rows = Vec::new();
    for (layers, range) in groups(profile) {
        let coverage = profile.coverage(range);
        rows.extend(PARTS.map(|hottest| Row {
            layers: layers.clone(),
            hottest,
            own: coverage.own(hottest),
            held_out: coverage.held_out(hottest),
        }));
    }
    rows
}

pub fn print_json(profile: &Profile, path: &Path, pins: Option<&PinPlan>) -> io::Result<()> {
    let total = profile.total();
    let report = Report {
        profile: path.display().to_string(),
        model_id: profile.model().id.to_string(),
        prefill_tokens: total.prefill.tokens,
        decode_tokens: total.decode.tokens,
        coverage: rows(profile),
        pins: pins.map(|p| Pins {
            count: p.pins.len(),
            share: p.share,
            promise: p.promise,
            flat: p.flat,
        }),
    };
    writeln!(io::stdout(), "{}", serde_json::to_string_pretty(&report)?)
}

pub fn print(profile: &Profile, path: &Path, pins: Option<&PinPlan>, ram: u64) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let total = profile.total();
    writeln!(
        out,
        "Counted {:.0} prompt tokens and {:.0} generated ones.\n",
        total.prefill.tokens, total.decode.tokens
    )?;
    let mut table = style::table();
    let mut header = vec!["Served by the hottest".to_owned()];
    header.extend(PARTS.map(|p| format!("{:.0} %", p * 100.0)));
    header.extend(PARTS.map(|p| format!("{:.0} % held out", p * 100.0)));
    table.set_header(header);
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    for (layers, range) in groups(profile) {
        let coverage = profile.coverage(range);
        let mut row = vec![layers];
        row.extend(PARTS.map(|p| percent(coverage.own(p))));
        row.extend(PARTS.map(|p| coverage.held_out(p).map_or("-".into(), percent)));
        table.add_row(row);
    }
    style::numbers_right(&mut table);
    writeln!(out, "{table}\n")?;
    let all = profile.coverage(0..profile.model().layers.len());
    writeln!(out, "{}\n", plot::terminal(&all.curve(plot::COLUMNS), "of all experts"))?;
    if let Some(pins) = pins.filter(|p| !p.pins.is_empty() || p.flat) {
        let flat = if pins.flat { "; the router is flat, so pins will not help" } else { "" };
        writeln!(
            out,
            "With {} of RAM, {} experts would be pinned and should serve {:.0} % of what is \
             generated{flat}.",
            format_bytes(ram),
            pins.pins.len(),
            100.0 * pins.promise
        )?;
    }
    writeln!(out, "Profile: {}", path.display())
}

/// Draws the coverage of all layers as SVG.
pub fn draw(profile: &Profile, path: &Path) -> Result<(), String> {
    const STEPS: usize = 200;
    let coverage = profile.coverage(0..profile.model().layers.len());
    let own: Vec<_> = (0..=STEPS)
        .map(|i| i as f64 / STEPS as f64)
        .map(|part| (100.0 * part, coverage.own(part)))
        .collect();
    let held_out: Vec<_> = coverage.curve(STEPS).into_iter().map(|(x, y)| (100.0 * x, y)).collect();
    let title = format!("{}: traffic that the hottest experts serve", profile.model().name);
    let labels = Labels { title: &title, x: "hottest experts, % of all", y: "share of traffic" };
    let chance = [(0.0, 0.0), (100.0, 1.0)];
    let curves = [
        Curve { name: "held-out half", points: &held_out },
        Curve { name: "profiled half", points: &own },
        Curve { name: "chance", points: &chance },
    ];
    plot::svg(path, &labels, &curves)
}
