//! What to expect of a model at several budgets.

use std::error::Error;
use std::path::Path;

use pinscope::map::ExpertMap;
use pinscope::memory::{format_bytes, Memory};
use pinscope::plan::Plan;
use pinscope::profile::{Coverage, Profile, ProfiledModel};
use pinscope_host::ContextOptions;
use serde::Serialize;

use super::advice::Case;
use super::estimate::{assumed_hit_rate, speed, Demand, Rates, Speed};
use crate::engine::Prepared;
use crate::threads::default_threads;

/// Budgets, as shares of the model's files.
const SHARES: [u64; 4] = [25, 40, 57, 100];

/// A model's demands and what comes of them.
#[derive(Debug, Clone, Serialize)]
pub struct Outlook {
    pub model: String,
    pub demand: Demand,
    /// Where hit rates come from, for people.
    pub hit_rates: String,
    /// At several shares of the file's size, and at the budget asked for.
    pub budgets: Vec<Budget>,
    #[serde(skip)]
    pub case: Case,
}

/// One budget.
#[derive(Debug, Clone, Serialize)]
pub struct Budget {
    pub label: String,
    pub ram_bytes: u64,
    /// Share of experts that fit, 0 to 1.
    pub resident: f64,
    pub hit_rate: f64,
    /// `null` if nothing runs in so little.
    pub speed: Option<Speed>,
    #[serde(skip)]
    works: bool,
}

impl Outlook {
    /// Plans for the model at `path`, whose map is `map`, with `ram` bytes,
    /// called `label`, and with shares of its size. Speeds come later, with
    /// [`with_speeds`](Self::with_speeds).
    ///
    /// # Errors
    /// A model that llama.cpp does not know, a profile that cannot be read or
    /// is of another model.
    pub fn new(
        path: &Path,
        map: &ExpertMap,
        profile: Option<&Path>,
        ram: u64,
        label: &str,
    ) -> Result<Outlook, Box<dyn Error>> {
        let coverage = profile.map(|profile| coverage(profile, map)).transpose()?;
        let hit_rate = |plan: &Plan| match &coverage {
            _ if plan.fits_all => 1.0,
            None => assumed_hit_rate(resident(plan)),
            Some(c) => c.held_out(resident(plan)).unwrap_or_else(|| c.own(resident(plan))),
        };
        let plan = |ram: u64| Ok::<_, Box<dyn Error>>(Prepared::new(path, ram, &context())?.plan);
        let budget = |label: String, plan: &Plan| Budget {
            label,
            ram_bytes: plan.ram_bytes,
            resident: resident(plan),
            hit_rate: hit_rate(plan),
            speed: None,
            works: plan.check().is_ok(),
        };

        let size: u64 = map.files().iter().map(|f| f.len).sum();
        let mut budgets = Vec::new();
        for share in SHARES {
            budgets.push(budget(format!("{share} % of the file"), &plan(size / 100 * share)?));
        }
        let asked = plan(ram)?;
        budgets.push(budget(label.to_owned(), &asked));
        let free = plan(Memory::now()?.default_ram().max(ram))?;
        let case = Case {
            demand: demand(map),
            ram,
            full_ram: asked.full_ram_bytes,
            smallest_ram: asked.smallest_ram_bytes,
            free_ram: free.ram_bytes,
            hit_rate: hit_rate(&asked),
            free_hit_rate: hit_rate(&free),
            locks: asked.dense_bytes + asked.arena_bytes,
        };
        Ok(Outlook {
            model: path.display().to_string(),
            demand: case.demand,
            hit_rates: match (&coverage, profile) {
                (Some(_), Some(path)) => format!("from the profile {}", path.display()),
                _ => "assumed, as published models route; a --profile knows better".into(),
            },
            budgets,
            case,
        })
    }

    /// With the speeds that follow from what was measured.
    pub fn with_speeds(mut self, rates: Rates) -> Outlook {
        for budget in self.budgets.iter_mut().filter(|b| b.works) {
            budget.speed = Some(speed(self.demand, rates, budget.hit_rate));
        }
        self
    }

    /// What a token needs, for people.
    pub fn needs(&self) -> String {
        format!(
            "A token reads {} of dense weights and {} of experts.",
            format_bytes(self.demand.dense),
            format_bytes(self.demand.experts)
        )
    }
}

/// Share of the experts that fit.
fn resident(plan: &Plan) -> f64 {
    plan.experts_resident as f64 / plan.experts_total.max(1) as f64
}

/// As `pinscope run` has it by default.
fn context() -> ContextOptions {
    let threads = default_threads();
    ContextOptions {
        n_ctx: 0,
        n_batch: 512,
        n_ubatch: 512,
        max_outputs: 1,
        threads,
        threads_batch: threads,
        ..ContextOptions::default()
    }
}

fn coverage(profile: &Path, map: &ExpertMap) -> Result<Coverage, Box<dyn Error>> {
    let profile = Profile::load_for(profile, &ProfiledModel::of(map)?)?;
    Ok(profile.coverage(0..map.layers().len()))
}

/// What a token reads: all dense weights, except the rows of other tokens in a
/// table of embeddings that is not used as the output layer as well.
fn demand(map: &ExpertMap) -> Demand {
    let table = map.tensor("token_embd.weight").filter(|_| map.tensor("output.weight").is_some());
    let top_k = u64::from(map.top_k());
    Demand {
        dense: map.dense_bytes() - table.map_or(0, |t| t.size),
        experts: map.layers().iter().map(|l| top_k * l.expert_bytes()).sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinscope::map::{ModelFile, TensorInfo};

    fn map(tensors: &[(&str, u64, u64)]) -> ExpertMap {
        let info = |&(name, size, n): &(&str, u64, u64)| TensorInfo {
            name: name.into(),
            file: 0,
            offset: 0,
            size,
            ne: [1, 1, n, 1],
        };
        let files = vec![ModelFile { path: "m".into(), len: 10_000, header_len: 0 }];
        ExpertMap::new(files, tensors.iter().map(info).collect(), 2).unwrap()
    }

    #[test]
    fn a_token_reads_its_experts_and_the_embeddings_only_where_they_are_the_output() {
        // Experts of 100 / 4 and 40 / 4 bytes, two of them for a token.
        let mut tensors = vec![
            ("blk.0.ffn_up_exps.weight", 100, 4),
            ("blk.1.ffn_up_exps.weight", 40, 4),
            ("token_embd.weight", 500, 1),
            ("blk.0.attn_q.weight", 30, 1),
        ];
        assert_eq!(demand(&map(&tensors)), Demand { dense: 530, experts: 70 });
        tensors.push(("output.weight", 600, 1));
        assert_eq!(demand(&map(&tensors)), Demand { dense: 630, experts: 70 });
    }
}
