//! Which experts a model's traffic uses: counting, keeping, ranking.
//!
//! The idea is HotPin's (LozzKappa, 2026): run representative text, count the
//! router's choices, keep the experts that are chosen most. A [`Profile`] holds
//! its counts in two halves of the traffic, piece by piece in turn: pins that
//! one half suggests are judged by the other, so that it shows when a profile
//! has only learnt its own text.

mod counts;
mod coverage;
mod file;
mod model_id;
mod pins;

pub use counts::{PhaseCounts, RoutingCounts};
pub use coverage::Coverage;
pub use file::ProfileError;
pub use model_id::ModelId;
pub(crate) use pins::choose_pins;
pub use pins::PinPlan;

use crate::map::ExpertMap;
use crate::policy::ExpertId;

/// The model that a profile is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfiledModel {
    /// Its identity.
    pub id: ModelId,
    /// Name of its (first) file, for people.
    pub name: String,
    /// Numbers of the layers with experts (`blk.N`).
    pub layers: Vec<usize>,
    /// Experts of a layer.
    pub experts_per_layer: u32,
    /// Experts that serve a token.
    pub top_k: u32,
}

impl ProfiledModel {
    /// The model of `map`, whose headers are read.
    ///
    /// # Errors
    /// Those of [`ModelId::of`].
    pub fn of(map: &ExpertMap) -> std::io::Result<Self> {
        let file = map.files().first().and_then(|f| f.path.file_name());
        Ok(Self {
            id: ModelId::of(map)?,
            name: file.unwrap_or_default().to_string_lossy().into_owned(),
            layers: map.layers().iter().map(|l| l.index).collect(),
            experts_per_layer: map.experts_per_layer(),
            top_k: map.top_k(),
        })
    }

    /// Experts of all layers.
    pub fn experts(&self) -> usize {
        self.layers.len() * self.experts_per_layer as usize
    }
}

/// Counts of a model's routing, in two halves of the same traffic.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    model: ProfiledModel,
    halves: [RoutingCounts; 2],
}

impl Profile {
    /// An empty profile.
    pub fn new(model: ProfiledModel) -> Self {
        let counts = RoutingCounts::new(model.experts());
        Self { model, halves: [counts.clone(), counts] }
    }

    /// Whose profile it is.
    pub fn model(&self) -> &ProfiledModel {
        &self.model
    }

    /// The two halves of the traffic.
    pub fn halves(&self) -> &[RoutingCounts; 2] {
        &self.halves
    }

    /// Adds a piece of traffic, such as one conversation, to the half that has
    /// seen less so far.
    pub fn record(&mut self, piece: &RoutingCounts) {
        let tokens = |c: &RoutingCounts| c.prefill.tokens + c.decode.tokens;
        let [a, b] = &mut self.halves;
        let half = if tokens(b) < tokens(a) { b } else { a };
        half.add(piece, 1.0);
    }

    /// Adds `factor` times what `other` has counted.
    ///
    /// # Errors
    /// [`ProfileError::OtherModel`] if it is of another model.
    pub fn merge(&mut self, other: &Profile, factor: f64) -> Result<(), ProfileError> {
        other.check(&self.model)?;
        for (to, from) in self.halves.iter_mut().zip(&other.halves) {
            to.add(from, factor);
        }
        Ok(())
    }

    /// Whether the profile is of `model`.
    ///
    /// # Errors
    /// [`ProfileError::OtherModel`].
    pub fn check(&self, model: &ProfiledModel) -> Result<(), ProfileError> {
        if self.model.id == model.id {
            return Ok(());
        }
        Err(ProfileError::OtherModel { of: self.model.name.clone(), wanted: model.name.clone() })
    }

    /// Both halves together.
    pub fn total(&self) -> RoutingCounts {
        let mut total = self.halves[0].clone();
        total.add(&self.halves[1], 1.0);
        total
    }

    /// Choices a token to be expected of each expert, 0 to 1; see
    /// [`RoutingCounts::rate`].
    pub fn rate(&self) -> Vec<f64> {
        self.total().rate()
    }

    /// All experts that were ever chosen, the hottest first.
    pub fn hottest(&self) -> Vec<ExpertId> {
        hottest(&self.rate())
    }
}

/// Experts with a rate above 0, the largest first; equal ones as in the file.
pub(crate) fn hottest(rate: &[f64]) -> Vec<ExpertId> {
    let mut ids: Vec<usize> = (0..rate.len()).filter(|&i| rate[i] > 0.0).collect();
    ids.sort_by(|&a, &b| rate[b].total_cmp(&rate[a]));
    ids.into_iter().map(|i| ExpertId(i as u32)).collect()
}

#[cfg(test)]
mod tests;
