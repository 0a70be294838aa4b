//! Plots: curves as SVG files, and one curve in the terminal.

use std::path::Path;

use plotters::prelude::*;

/// A curve and its name in the legend.
pub struct Curve<'a> {
    pub name: &'a str,
    pub points: &'a [(f64, f64)],
}

/// What stands beside the axes.
pub struct Labels<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
}

const SIZE: (u32, u32) = (800, 480);
/// Told apart by people who see fewer colours, too (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(120, 120, 120),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// Whether plots can be written to a file of that name.
pub fn check_name(path: &str) -> Result<std::path::PathBuf, String> {
    match Path::new(path).extension().is_some_and(|e| e.eq_ignore_ascii_case("svg")) {
        true => Ok(path.into()),
        false => Err("plots are written as SVG: give a name that ends in .svg".into()),
    }
}

/// Writes curves of shares (0 to 1) as an SVG file.
///
/// # Errors
/// One sentence for the user: the file cannot be written.
pub fn svg(path: &Path, labels: &Labels, curves: &[Curve]) -> Result<(), String> {
    write(path, labels, curves, Scale::Shares)
}

/// The same for amounts from 0 up, each measured one marked.
///
/// # Errors
/// As [`svg`].
pub fn amounts(path: &Path, labels: &Labels, curves: &[Curve]) -> Result<(), String> {
    let ys = curves.iter().flat_map(|c| c.points.iter().map(|p| p.1));
    let most = ys.fold(0.0, f64::max);
    write(path, labels, curves, Scale::UpTo(if most > 0.0 { most * LEGEND } else { 1.0 }))
}

/// Room above the curves for the legend.
const LEGEND: f64 = 1.35;

/// What the upright axis shows.
#[derive(Clone, Copy)]
enum Scale {
    Shares,
    UpTo(f64),
}

fn write(path: &Path, labels: &Labels, curves: &[Curve], scale: Scale) -> Result<(), String> {
    let mut text = String::new();
    draw(&mut text, labels, curves, scale).map_err(|e| format!("cannot draw the plot: {e}"))?;
    std::fs::write(path, text).map_err(|e| format!("cannot write the plot {}: {e}", path.display()))
}

fn draw(
    text: &mut String,
    labels: &Labels,
    curves: &[Curve],
    scale: Scale,
) -> Result<(), Box<dyn std::error::Error>> {
    let (top, legend) = match scale {
        Scale::Shares => (1.0, SeriesLabelPosition::LowerRight),
        Scale::UpTo(top) => (top, SeriesLabelPosition::UpperRight),
    };
    let xs = || curves.iter().flat_map(|c| c.points.iter().map(|p| p.0));
    let from = xs().reduce(f64::min).unwrap_or(0.0);
    let to = xs().reduce(f64::max).filter(|&to| to > from).unwrap_or(from + 1.0);
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(labels.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(from..to, 0.0..top)?;
    chart
        .configure_mesh()
        .x_desc(labels.x)
        .y_desc(labels.y)
        .x_label_formatter(&|x| format!("{:.*}", if to - from < 10.0 { 1 } else { 0 }, x))
        .y_label_formatter(&|y| match scale {
            Scale::Shares => format!("{:.0} %", y * 100.0),
            Scale::UpTo(top) => format!("{:.*}", if top < 10.0 { 1 } else { 0 }, y),
        })
        .light_line_style(WHITE.mix(0.0))
        .draw()?;
    for (curve, colour) in curves.iter().zip(COLOURS.into_iter().cycle()) {
        let line = LineSeries::new(curve.points.iter().copied(), colour.stroke_width(2));
        chart
            .draw_series(line)?
            .label(curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        if matches!(scale, Scale::UpTo(_)) {
            let dot = |&at: &(f64, f64)| Circle::new(at, 3, colour.filled());
            chart.draw_series(curve.points.iter().map(dot))?;
        }
    }
    chart
        .configure_series_labels()
        .position(legend)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    Ok(())
}

/// Rows and columns of a plot in the terminal.
const ROWS: usize = 10;
pub const COLUMNS: usize = 50;

/// A curve of [`COLUMNS`]` + 1` shares, as text.
pub fn terminal(curve: &[(f64, f64)], x_label: &str) -> String {
    let mut lines = String::new();
    for row in (0..ROWS).rev() {
        let label = format!("{:>4} %", (row + 1) * 100 / ROWS);
        let cell = |&(_, y): &(f64, f64)| {
            // Eighths of a cell that the column fills.
            let eighths = ((y * ROWS as f64 - row as f64) * 8.0).round().clamp(0.0, 8.0);
            [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][eighths as usize]
        };
        let bars: String = curve.iter().map(cell).collect();
        lines += &format!("{label} │{}\n", bars.trim_end());
    }
    lines += &format!("       └{}\n", "─".repeat(curve.len()));
    lines + &format!("        0 %{x_label:^width$}100 %", width = curve.len().saturating_sub(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_as_high_as_its_share() {
        let text = terminal(&[(0.0, 0.0), (0.5, 0.55), (1.0, 1.0)], "");
        let rows: Vec<Vec<char>> =
            text.lines().map(|l| l.chars().skip(8).collect()).take(ROWS).collect();
        let height = |column: usize| {
            rows.iter().filter(|r| r.get(column).is_some_and(|c| *c == '█')).count()
        };
        assert_eq!((height(0), height(1), height(2)), (0, 5, 10));
        assert_eq!(rows[ROWS - 6][1], '▄', "half a row on top of five:\n{text}");
    }

    #[test]
    fn a_plot_is_an_svg_with_its_words() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.svg");
        let labels = Labels { title: "Hits", x: "token", y: "share" };
        let points = [(0.0, 0.1), (10.0, 0.9)];
        svg(&path, &labels, &[Curve { name: "pinned", points: &points }]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for word in ["<svg", "Hits", "token", "share", "pinned", "polyline"] {
            assert!(text.contains(word), "{word} is missing");
        }
        let points = [(0.5, 120.0), (1.5, 40.0)];
        amounts(&path, &labels, &[Curve { name: "pinscope", points: &points }]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.matches("<circle").count(), 2);
        assert!(text.contains("\n120\n") && !text.contains(" %"), "{text}");
        let error = svg(Path::new("/nowhere/p.svg"), &labels, &[]).unwrap_err();
        assert!(error.contains("/nowhere/p.svg"), "{error}");
        assert!(check_name("p.png").is_err() && check_name("p.SVG").is_ok());
    }
}
