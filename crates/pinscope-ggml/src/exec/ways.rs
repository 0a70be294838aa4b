//! The ways to compute a program: as ggml's nodes stand, all experts at once,
//! or group by group as they land.

use std::ffi::c_void;
use std::ops::Range;

use pinscope::residency::{Residency, Stage};
use pinscope::timeline::Activity;

use super::group::{self, ExpertColumns, Group, Place};
use super::program::{Program, Source};
use super::{ExecError, Executor};
use crate::ffi::Tensor;

/// What was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    /// The program.
    Program,
    /// The program and the nodes after it.
    Tail,
}

/// Where a part of a program's expert is.
fn data(program: &Program, residency: &Residency, part: usize, expert: u32) -> *mut c_void {
    residency.part_ptr(program.layer, part, expert).map_or(std::ptr::null_mut(), |p| p.cast())
}

impl Executor {
    /// Everything is in RAM and lies as in the file: only the address of the
    /// weights differs from what llama.cpp believes. `nodes` are the program's.
    pub(super) fn in_place(
        &mut self,
        program: &Program,
        residency: &mut Residency,
        nodes: &[*mut Tensor],
        ready: &[u32],
    ) -> Result<Done, ExecError> {
        let mut originals: Vec<(*mut Tensor, *mut c_void)> = Vec::new();
        for step in &program.steps {
            if let Some(part) = step.part {
                // SAFETY: the weights' tensor is alive, and nobody but this
                // thread looks at its address during the computation.
                unsafe {
                    let weights = (*step.node).src[0];
                    originals.push((weights, (*weights).data));
                    (*weights).data = residency.mirror_ptr(program.layer, part).cast();
                }
            }
        }
        let result = self.nodes(nodes, Activity::Experts, residency);
        for (weights, data) in originals {
            // SAFETY: as above.
            unsafe { (*weights).data = data };
        }
        result?;
        residency.finish(ready)?;
        Ok(Done::Program)
    }

    /// One token, all of whose experts are in RAM, in one graph with the `tail`
    /// that comes after them. Columns are in ggml's order, so that results
    /// need not be moved.
    pub(super) fn at_once(
        &mut self,
        program: &Program,
        residency: &mut Residency,
        columns: &[ExpertColumns],
        tail: &[*mut Tensor],
        ready: &[u32],
    ) -> Result<Done, ExecError> {
        let mut picked = std::mem::take(&mut self.picked);
        picked.clear();
        picked.extend(0..columns.len());
        picked.sort_unstable_by_key(|&i| columns[i].columns[0]);
        let group = Group { all: columns, picked: &picked };
        // SAFETY: an operand of the program is alive. Nodes are computed in
        // ggml's order, so nothing is overwritten too early.
        let inputs = |t: *mut Tensor| unsafe { (*t).data };
        let data = |part, expert| data(program, residency, part, expert);
        let (place, stage) = (Place::Ggml, Stage::Whole);
        let graph = self.workspace.build(program, place, stage, group, tail, &inputs, &data);
        self.picked = picked;
        self.run(graph, Activity::Experts, residency)?;
        residency.finish(ready)?;
        Ok(Done::Tail)
    }

    /// Experts in RAM first, the others as they land.
    pub(super) fn in_groups(
        &mut self,
        program: &Program,
        residency: &mut Residency,
        columns: &[ExpertColumns],
        mut stage: Stage,
        ready: &mut Vec<u32>,
    ) -> Result<Done, ExecError> {
        self.copy_endangered_inputs(program);
        self.workspace.clear_halves();
        while !ready.is_empty() {
            let mut rest = &ready[..];
            while !rest.is_empty() {
                let mut picked = std::mem::take(&mut self.picked);
                picked.clear();
                let mut count = 0;
                for &e in rest.iter().take(group::MAX_EXPERTS) {
                    let Ok(i) = columns.binary_search_by_key(&e, |c| c.expert) else { continue };
                    count += columns[i].columns.len();
                    if count > group::MAX_COLUMNS && !picked.is_empty() {
                        break;
                    }
                    picked.push(i);
                }
                let (now, later) = rest.split_at(picked.len());
                let group = Group { all: columns, picked: &picked };
                let copies = &self.copies;
                let inputs = |t: *mut Tensor| {
                    let copy = copies.iter().find(|(of, _)| *of == t);
                    // SAFETY: an operand of the program is alive.
                    copy.map_or_else(|| unsafe { (*t).data }, |(_, c)| c.as_ptr().cast_mut().cast())
                };
                let data = |part, expert| data(program, residency, part, expert);
                let place = Place::Scratch;
                let graph = self.workspace.build(program, place, stage, group, &[], &inputs, &data);
                self.run(graph, Activity::Experts, residency)?;
                self.workspace.copy_out();
                match stage {
                    Stage::First => self.workspace.keep_halves(program, group),
                    Stage::Whole | Stage::Second => residency.finish(now)?,
                }
                self.picked = picked;
                rest = later;
            }
            stage = residency.take_ready(program.in_stages(), ready)?;
        }
        Ok(Done::Program)
    }

    /// ggml reuses memory: the result of the last step may lie where an input
    /// of the first one is, which is fine node by node, but not group by
    /// group. Such inputs are copied.
    fn copy_endangered_inputs(&mut self, program: &Program) {
        // SAFETY: nodes and operands of the program are alive.
        let span = |t: *mut Tensor| unsafe {
            let start = (*t).data as usize;
            let last: usize = (0..4).map(|d| ((*t).ne[d] as usize - 1) * (*t).nb[d]).sum();
            start..start + last + 4
        };
        let written = |at: &Range<usize>| {
            program.steps.iter().filter(|s| s.output).any(|s| {
                let w = span(s.node);
                w.start < at.end && at.start < w.end
            })
        };
        self.spare_copies.extend(self.copies.drain(..).map(|(_, copy)| copy));
        for step in &program.steps {
            for (i, source) in step.sources.iter().enumerate() {
                if !matches!(source, Source::Same | Source::Token | Source::Column | Source::Table)
                {
                    continue;
                }
                // SAFETY: as above.
                let operand = unsafe { (*step.node).src[i] };
                let at = span(operand);
                if written(&at) && !self.copies.iter().any(|(of, _)| *of == operand) {
                    // SAFETY: the operand's bytes from first to last element.
                    let bytes = unsafe {
                        std::slice::from_raw_parts(at.start as *const u8, at.end - at.start)
                    };
                    let mut copy = self.spare_copies.pop().unwrap_or_default();
                    copy.clear();
                    copy.extend_from_slice(bytes);
                    self.copies.push((operand, copy));
                }
            }
        }
    }
}
