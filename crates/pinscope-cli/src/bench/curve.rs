//! Hit rates as decoding goes on, as a plot.

use std::path::Path;

use pinscope::memory::format_bytes;

use super::Results;
use crate::launch::{Window, WINDOW};
use crate::plot::{self, Curve, Labels};

/// Draws a curve for each of our rows, of its first run, and one for the part
/// that pins served where there were any.
///
/// # Errors
/// One sentence for the user: the file cannot be written.
pub fn draw(results: &Results, path: &Path) -> Result<(), String> {
    let mut curves = Vec::new();
    for row in results.medians.iter().filter(|f| !f.windows.is_empty()) {
        let ram = row.ram.map_or(String::new(), |ram| format!(" {}", format_bytes(ram)));
        let name = format!("{}{ram}", row.contender);
        curves.push((name.clone(), rate(&row.windows, |w| w.hits)));
        if row.pinned_hit_rate.is_some() {
            curves.push((format!("{name}, pinned"), rate(&row.windows, |w| w.pinned_hits)));
        }
    }
    let curves: Vec<_> = curves.iter().map(|(name, points)| Curve { name, points }).collect();
    let labels = Labels {
        title: "Needed experts that were in RAM",
        x: "decoded tokens",
        y: "share of needed experts",
    };
    plot::svg(path, &labels, &curves)
}

fn rate(windows: &[Window], of: impl Fn(&Window) -> u64) -> Vec<(f64, f64)> {
    let share = |w: &Window| of(w) as f64 / (w.hits + w.misses).max(1) as f64;
    windows.iter().enumerate().map(|(i, w)| (((i + 1) * WINDOW) as f64, share(w))).collect()
}
