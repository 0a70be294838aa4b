//! Results of experts whose first stage is computed and whose last part is
//! still being read.

use super::{Group, Workspace};
use crate::exec::program::{Program, Source};
use crate::ffi::Tensor;

/// Rows that later steps need, expert by expert.
#[derive(Default)]
pub(super) struct Halves {
    experts: Vec<u32>,
    /// For each expert the row of each step that [`is_needed`], in order.
    values: Vec<f32>,
}

/// Whether a step after `cut` uses the result of `step` before it.
fn is_needed(program: &Program, step: usize, cut: usize) -> bool {
    let uses = |s: &Source| matches!(s, Source::Step { index, .. } if *index == step);
    program.steps[cut..].iter().any(|s| s.sources.iter().any(uses))
}

impl Workspace {
    /// Forgets what earlier programs left.
    pub fn clear_halves(&mut self) {
        self.halves.experts.clear();
        self.halves.values.clear();
    }

    /// Keeps what the second stage of `group` needs of the graph that was just
    /// computed, the first stage of a batch of one token.
    pub fn keep_halves(&mut self, program: &Program, group: Group) {
        let cut = program.cut.unwrap_or(0);
        if self.halves.experts.is_empty() {
            // All of a token's experts may come in halves, one day.
            let needed = (0..cut).filter(|&s| is_needed(program, s, cut));
            // SAFETY: the program's nodes are alive.
            let row: usize =
                needed.map(|s| unsafe { (*program.steps[s].node).ne[0] } as usize).sum();
            self.halves.experts.reserve(program.k);
            self.halves.values.reserve(program.k * row);
        }
        for (i, g) in group.iter().enumerate() {
            self.halves.experts.push(g.expert);
            for step in (0..cut).filter(|&s| is_needed(program, s, cut)) {
                // SAFETY: the result has a row of `ne[0]` values for each
                // expert of the group, in scratch.
                let row = unsafe {
                    let t = &*self.results[step];
                    let at = t.data.cast::<u8>().wrapping_add(i * t.nb[1]).cast::<f32>();
                    std::slice::from_raw_parts(at, t.ne[0] as usize)
                };
                self.halves.values.extend_from_slice(row);
            }
        }
    }

    /// Puts what was kept of `group` into scratch, as the `results` of the
    /// steps before `cut`; null where no later step needs one.
    pub(super) fn take_halves(
        &mut self,
        program: &Program,
        cut: usize,
        group: Group,
        results: &mut Vec<*mut Tensor>,
    ) {
        let halves = std::mem::take(&mut self.halves);
        let row_of_all = halves.values.len() / halves.experts.len().max(1);
        let mut from = 0;
        for step in 0..cut {
            if !is_needed(program, step, cut) {
                results.push(std::ptr::null_mut());
                continue;
            }
            // SAFETY: the program's nodes are alive.
            let ne0 = unsafe { (*program.steps[step].node).ne[0] };
            let result = self.rows(ne0, group.len());
            for (i, g) in group.iter().enumerate() {
                let Some(kept) = halves.experts.iter().position(|&e| e == g.expert) else {
                    continue;
                };
                let row = &halves.values[kept * row_of_all + from..][..ne0 as usize];
                // SAFETY: `result` has a row for each expert of the group.
                unsafe {
                    let to = (*result).data.cast::<u8>().wrapping_add(i * (*result).nb[1]);
                    std::ptr::copy_nonoverlapping(row.as_ptr(), to.cast(), row.len());
                }
            }
            from += ne0 as usize;
            results.push(result);
        }
        self.halves = halves;
    }
}
