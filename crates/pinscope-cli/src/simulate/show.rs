//! Replays as tables, JSON and a plot.

use std::io::{self, Write};
use std::path::Path;

use pinscope::memory::format_bytes;
use pinscope::simulate::{Counts, Outcome};
use serde::Serialize;

use super::{Row, Table};
use crate::plot::{self, Curve, Labels};
use crate::style;

impl Table {
    /// Share of the way from the textbook's LRU to the best that `outcome`
    /// goes at a budget, in what generated tokens find; `None` without a way
    /// to go.
    fn gap_closed(&self, budget: usize, outcome: &Outcome) -> Option<f64> {
        let (first, last) = (self.rows.first()?, self.rows.last()?);
        let rate = |row: &Row| row.outcomes[budget].decode.hit_rate();
        let gap = rate(last) - rate(first);
        (gap > 1e-6).then(|| (outcome.decode.hit_rate() - rate(first)) / gap)
    }

    fn title(&self) -> String {
        let (prompt, decode) = self.trace.tokens();
        format!(
            "{} ({}): {prompt} prompt tokens, {decode} generated",
            self.path.display(),
            self.trace.model.name
        )
    }
}

pub fn print(table: &Table) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", table.title())?;
    let mut shown = style::table();
    let mut header = vec!["Hit rate of generated tokens".to_owned()];
    for (text, bytes) in &table.budgets {
        header.push(match text.ends_with('%') {
            true => format!("{text} ({})", format_bytes(*bytes)),
            false => text.clone(),
        });
        header.push("gap closed".into());
        header.push("MB a token".into());
        header.push("prompt".into());
    }
    shown.set_header(header);
    for row in &table.rows {
        let mut cells = vec![row.policy.to_owned()];
        for (i, outcome) in row.outcomes.iter().enumerate() {
            let closed = table.gap_closed(i, outcome);
            cells.push(format!("{:.1} %", 100.0 * outcome.decode.hit_rate()));
            cells.push(closed.map_or("-".into(), |c| format!("{:.0} %", 100.0 * c)));
            cells.push(format!("{:.1}", outcome.decode.bytes_a_token() / 1e6));
            cells.push(format!("{:.1} %", 100.0 * outcome.prompt.hit_rate()));
        }
        shown.add_row(cells);
    }
    style::numbers_right(&mut shown);
    writeln!(out, "{shown}")?;
    if table.trace.cut {
        writeln!(out, "The recording ended within a pass, which is left out.")?;
    }
    if let Some(caveat) = table.trace.caveat {
        writeln!(out, "Note: {caveat}.")?;
    }
    writeln!(out)
}

#[derive(Serialize)]
struct Report {
    trace: String,
    model: String,
    prompt_tokens: u64,
    generated_tokens: u64,
    cut: bool,
    caveat: Option<&'static str>,
    replays: Vec<Replay>,
}

#[derive(Serialize)]
struct Replay {
    policy: &'static str,
    /// For experts, bytes.
    budget_bytes: u64,
    /// Of generated tokens, 0 to 1.
    hit_rate: f64,
    prompt_hit_rate: f64,
    bytes_read_per_token: f64,
    /// From the textbook's LRU (0) to Belady (1).
    gap_closed: Option<f64>,
    hits: u64,
    misses: u64,
}

pub fn print_json(tables: &[Table]) -> io::Result<()> {
    let replays = |table: &Table, row: &Row| -> Vec<Replay> {
        let replay = |(i, outcome): (usize, &Outcome)| {
            let decode: &Counts = &outcome.decode;
            Replay {
                policy: row.policy,
                budget_bytes: table.budgets[i].1,
                hit_rate: decode.hit_rate(),
                prompt_hit_rate: outcome.prompt.hit_rate(),
                bytes_read_per_token: decode.bytes_a_token(),
                gap_closed: table.gap_closed(i, outcome),
                hits: decode.hits,
                misses: decode.misses,
            }
        };
        row.outcomes.iter().enumerate().map(replay).collect()
    };
    let report = |table: &Table| {
        let (prompt_tokens, generated_tokens) = table.trace.tokens();
        Report {
            trace: table.path.display().to_string(),
            model: table.trace.model.name.clone(),
            prompt_tokens,
            generated_tokens,
            cut: table.trace.cut,
            caveat: table.trace.caveat,
            replays: table.rows.iter().flat_map(|row| replays(table, row)).collect(),
        }
    };
    let reports: Vec<Report> = tables.iter().map(report).collect();
    writeln!(io::stdout(), "{}", serde_json::to_string_pretty(&reports)?)
}

/// Draws hit rates over budgets as SVG.
pub fn draw(table: &Table, path: &Path) -> Result<(), String> {
    let points = |row: &Row| -> Vec<(f64, f64)> {
        let rates = row.outcomes.iter().map(|o| o.decode.hit_rate());
        let gib = table.budgets.iter().map(|b| b.1 as f64 / (1u64 << 30) as f64);
        let mut points: Vec<_> = gib.zip(rates).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let all: Vec<_> = table.rows.iter().map(|row| (row.policy, points(row))).collect();
    let curves: Vec<_> = all.iter().map(|(name, points)| Curve { name, points }).collect();
    let title = format!("{}: experts found in RAM", table.trace.model.name);
    let labels = Labels { title: &title, x: "memory for experts, GiB", y: "hit rate" };
    plot::svg(path, &labels, &curves)
}
