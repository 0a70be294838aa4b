//! Milliseconds a token against the memory, as a plot.

use std::collections::BTreeMap;
use std::path::Path;

use super::Results;
use crate::plot::{self, Curve, Labels};

/// Draws a curve for each contender with a limit, and a level line for each
/// one without.
///
/// # Errors
/// One sentence for the user: the file cannot be written.
pub fn draw(results: &Results, path: &Path) -> Result<(), String> {
    let rows = results.medians.iter().map(|f| (f.contender, f.ram, f.ms_per_token));
    let curves = curves(rows);
    let curves: Vec<_> = curves.iter().map(|(name, points)| Curve { name, points }).collect();
    let title = format!(
        "One token of a model of {:.1} GB, by memory for the whole process",
        results.model_bytes as f64 / 1e9
    );
    plot::amounts(path, &Labels { title: &title, x: "RAM, GB", y: "ms a token" }, &curves)
}

/// Points (GB, milliseconds) by name, in the order of memory.
fn curves<'a>(
    rows: impl Iterator<Item = (&'a str, Option<u64>, f64)> + Clone,
) -> Vec<(&'a str, Vec<(f64, f64)>)> {
    let limited = || rows.clone().filter_map(|(name, ram, ms)| Some((name, ram? as f64 / 1e9, ms)));
    let mut curves = BTreeMap::<_, Vec<_>>::new();
    for (name, gb, ms) in limited() {
        curves.entry(name).or_default().push((gb, ms));
    }
    curves.values_mut().for_each(|points| points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    let ends = || limited().map(|(_, gb, _)| gb);
    let (from, to) = (ends().fold(f64::MAX, f64::min), ends().fold(0.0, f64::max));
    for (name, _, ms) in rows.clone().filter(|(_, ram, _)| ram.is_none()) {
        curves.insert(name, vec![(from, ms), (to, ms)]);
    }
    curves.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contenders_with_a_limit_are_curves_and_the_others_level_lines_beside_them() {
        let gb = 1_000_000_000;
        let rows = [
            ("pinscope", Some(3 * gb), 10.0),
            ("pinscope", Some(gb), 30.0),
            ("mmap", Some(gb), 90.0),
            ("resident", None, 9.0),
        ];
        let want = [
            ("mmap", vec![(1.0, 90.0)]),
            ("pinscope", vec![(1.0, 30.0), (3.0, 10.0)]),
            ("resident", vec![(1.0, 9.0), (3.0, 9.0)]),
        ];
        assert_eq!(curves(rows.into_iter()), want);
    }
}
