//! `pinscope plot`: what several `pinscope bench --json` showed, against what
//! differed between them.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;

use crate::plot::{self, Curve, Labels};

/// Options of `pinscope plot`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Results of `pinscope bench --json`, each behind its place on the axis
    #[arg(value_name = "NUMBER=FILE", required = true)]
    points: Vec<Point>,
    /// What the numbers are
    #[arg(short, long, value_name = "TEXT")]
    x: String,
    /// What stands above the plot
    #[arg(long, value_name = "TEXT", default_value = "")]
    title: String,
    /// What PinScope's budgets are, the smallest one first, with commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "pinscope")]
    budgets: Vec<String>,
    /// The plot
    #[arg(short, long, value_name = "FILE.svg", value_parser = plot::check_name)]
    output: PathBuf,
}

/// A file of results and where it stands.
#[derive(Debug, Clone)]
struct Point {
    x: f64,
    file: PathBuf,
}

impl FromStr for Point {
    type Err = String;

    fn from_str(text: &str) -> Result<Point, String> {
        let parsed = text.split_once('=').and_then(|(x, file)| Some((x.parse().ok()?, file)));
        match parsed {
            Some((x, file)) if f64::is_finite(x) => Ok(Point { x, file: file.into() }),
            _ => Err("expected a number, =, and a file, such as 128=results.json".into()),
        }
    }
}

/// What is read of the results.
#[derive(Deserialize)]
struct Results {
    medians: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    contender: String,
    ram: Option<u64>,
    ms_per_token: f64,
}

/// Draws milliseconds a token.
///
/// # Errors
/// Files that are no results, or a plot that cannot be written.
pub fn main(args: &Args) -> Result<(), Box<dyn Error>> {
    let mut curves = Vec::<(String, Vec<(f64, f64)>)>::new();
    for point in &args.points {
        for (name, ms) in named(read(&point.file)?, &args.budgets) {
            match curves.iter_mut().find(|(known, _)| *known == name) {
                Some((_, points)) => points.push((point.x, ms)),
                None => curves.push((name, vec![(point.x, ms)])),
            }
        }
    }
    let mut drawn = Vec::new();
    for (name, points) in &mut curves {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        drawn.push(Curve { name, points });
    }
    let labels = Labels { title: &args.title, x: &args.x, y: "ms a token" };
    Ok(plot::amounts(&args.output, &labels, &drawn)?)
}

fn read(file: &Path) -> Result<Results, String> {
    let name = file.display();
    let text = std::fs::read_to_string(file).map_err(|e| format!("cannot read {name}: {e}"))?;
    serde_json::from_str(&text).map_err(|e| {
        format!("{name} has no results ({e}); make it with `pinscope bench --json > {name}`")
    })
}

/// The rows with their names in the legend.
fn named(mut results: Results, budgets: &[String]) -> Vec<(String, f64)> {
    results.medians.sort_by_key(|row| (row.ram.is_none(), row.ram));
    let mut budgets = budgets.iter();
    let name = |row: Row| {
        let budget = (row.contender == "pinscope").then(|| budgets.next().cloned()).flatten();
        (budget.unwrap_or(row.contender), row.ms_per_token)
    };
    results.medians.into_iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_named_from_the_smallest_and_others_by_themselves() {
        let row = |contender: &str, ram, ms_per_token| Row {
            contender: contender.into(),
            ram,
            ms_per_token,
        };
        let medians = vec![
            row("pinscope", Some(9), 3.0),
            row("resident", None, 2.0),
            row("pinscope", Some(5), 7.0),
        ];
        let names = ["half".to_owned(), "all".to_owned()];
        let want =
            [("half".to_owned(), 7.0), ("all".to_owned(), 3.0), ("resident".to_owned(), 2.0)];
        assert_eq!(named(Results { medians }, &names), want);
    }

    #[test]
    fn a_point_is_a_number_and_a_file() {
        let point: Point = "12.5=a=b.json".parse().unwrap();
        assert_eq!((point.x, point.file), (12.5, "a=b.json".into()));
        for bad in ["a.json", "x=a.json", "nan=a.json"] {
            assert!(bad.parse::<Point>().is_err(), "{bad}");
        }
    }
}
