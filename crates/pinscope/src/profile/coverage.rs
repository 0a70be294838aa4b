//! How much of the traffic the hottest experts serve.

use std::ops::Range;

use super::{hottest, Profile};

/// Share of choices served by the hottest experts, for any number of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Coverage {
    /// Of the traffic that made them the hottest: share by number of experts,
    /// from 0 to all.
    own: Vec<f64>,
    /// Of the other half of the traffic; `None` as long as there is none.
    held_out: Option<Vec<f64>>,
}

impl Coverage {
    /// Share of the choices in `[0, 1]` that the hottest `part` (0 to 1) of
    /// experts serves, of the traffic that made them the hottest.
    pub fn own(&self, part: f64) -> f64 {
        at(&self.own, part)
    }

    /// The same of the half that was held out: what pins can promise.
    pub fn held_out(&self, part: f64) -> Option<f64> {
        self.held_out.as_deref().map(|curve| at(curve, part))
    }

    /// Both, as a curve of `steps + 1` points `(part, share)`.
    pub fn curve(&self, steps: usize) -> Vec<(f64, f64)> {
        let curve = self.held_out.as_deref().unwrap_or(&self.own);
        let part = |i| i as f64 / steps.max(1) as f64;
        (0..=steps).map(|i| (part(i), at(curve, part(i)))).collect()
    }
}

fn at(curve: &[f64], part: f64) -> f64 {
    let last = curve.len().saturating_sub(1);
    let i = (part.clamp(0.0, 1.0) * last as f64).round() as usize;
    curve.get(i).copied().unwrap_or(0.0)
}

impl Profile {
    /// Coverage within some layers, positions in [`ProfiledModel::layers`].
    ///
    /// Each half of the traffic chooses the hottest experts once and is judged
    /// by the other once; the figures are means of both.
    ///
    /// [`ProfiledModel::layers`]: super::ProfiledModel::layers
    pub fn coverage(&self, layers: Range<usize>) -> Coverage {
        let per_layer = self.model.experts_per_layer as usize;
        let experts = layers.start * per_layer..layers.end.min(self.model.layers.len()) * per_layer;
        let rates: Vec<Vec<f64>> = self
            .halves
            .iter()
            .filter(|h| !h.is_empty())
            .map(|h| h.rate()[experts.clone()].to_vec())
            .collect();
        let mean = |curves: Vec<Vec<f64>>| -> Vec<f64> {
            let n = curves.len() as f64;
            let point = |i: usize| curves.iter().map(|c| c[i]).sum::<f64>() / n;
            (0..=experts.len()).map(point).collect()
        };
        match &rates[..] {
            [] => Coverage { own: vec![0.0; experts.len() + 1], held_out: None },
            [one] => Coverage { own: served(one, one), held_out: None },
            [a, b, ..] => Coverage {
                own: mean(vec![served(a, a), served(b, b)]),
                held_out: Some(mean(vec![served(a, b), served(b, a)])),
            },
        }
    }
}

/// Share of `judge`'s choices that the 0, 1, 2, ... experts hottest by
/// `chooser` serve.
fn served(chooser: &[f64], judge: &[f64]) -> Vec<f64> {
    let all: f64 = judge.iter().sum();
    let mut order: Vec<usize> = hottest(chooser).iter().map(|id| id.0 as usize).collect();
    order.extend((0..chooser.len()).filter(|&i| chooser[i] <= 0.0));
    let mut sum = 0.0;
    let mut curve = vec![0.0];
    for i in order {
        sum += judge[i];
        curve.push(if all > 0.0 { sum / all } else { 0.0 });
    }
    curve
}
