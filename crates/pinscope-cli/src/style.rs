//! What the terminal shows besides the answer; all of it on standard error.

use std::io::Write;
use std::time::Duration;

use comfy_table::{presets, CellAlignment, Table};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar up to `total` that shows on a terminal only, and only if it takes a
/// moment.
pub fn bar(what: &'static str, total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10))
        .with_message(what);
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {percent:>3} %  {eta}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// A line for the user. Nobody listening is no reason to stop.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A table of names and amounts.
pub fn table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table
}

/// Right-aligns every column but the first.
pub fn numbers_right(table: &mut Table) {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}
