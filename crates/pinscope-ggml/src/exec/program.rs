//! Finds the expert part of a layer in the nodes that ggml hands over.
//!
//! A [`Program`] is a run of nodes that treat each *column* on its own: a
//! column is what one expert does for one token, `ids` says which expert that
//! is. Such nodes may be computed in any grouping of columns without changing
//! a bit, which is what lets experts that are in RAM go first. For the usual
//! layer the program is `up, gate, activation, down, weighted`; with LoRA, an
//! evaluation callback or an unknown operation in between it is shorter, down
//! to a single matrix product, and there are several of them.

use pinscope::map::ExpertMap;

use crate::ffi::{Numbers, Tensor};

/// Where a step takes an operand from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// No operand.
    None,
    /// The weights of the column's expert.
    Expert,
    /// The expert of each column.
    Ids,
    /// One row for each expert (a bias), used as it is.
    Table,
    /// The same for all columns, used as it is.
    Same,
    /// A row for each token, shared by the experts of the token.
    Token,
    /// A row for each column.
    Column,
    /// `ne0` values of each column of an earlier step, from byte `offset` on.
    Step { index: usize, offset: usize },
}

/// One node of a program.
#[derive(Debug, Clone)]
pub struct Step {
    /// The node.
    pub node: *mut Tensor,
    /// For a product with expert weights: position of the part in its layer.
    pub part: Option<usize>,
    /// The node's operands.
    pub sources: [Source; 3],
    /// Whether anything but later steps may read the result.
    pub output: bool,
}

/// A run of column-wise nodes.
#[derive(Debug, Clone)]
pub struct Program {
    /// Position of the layer in [`ExpertMap::layers`].
    pub layer: usize,
    /// Experts of each column: I32 `[k, tokens]`.
    pub ids: *mut Tensor,
    /// Experts that serve a token.
    pub k: usize,
    /// Tokens of the batch.
    pub tokens: usize,
    /// The nodes in order; views between them are left out.
    pub steps: Vec<Step>,
    /// The first step that needs the part that is read last, if others come
    /// before it: steps up to here can be computed while that part is read.
    pub cut: Option<usize>,
}

impl Program {
    /// Whether an expert may be computed before its last part has come. For
    /// prompts there are enough other experts to compute.
    pub fn in_stages(&self) -> bool {
        self.tokens == 1 && self.cut.is_some()
    }

    /// Weight of a column, `token * k + choice`, in its token's result; 0 where
    /// the model applies weights outside of the program.
    pub fn weight(&self, numbers: &Numbers, column: u32) -> f32 {
        let weighted = |s: &&Step| {
            // SAFETY: nodes and operands are alive while the graph is computed.
            let one = unsafe { (*s.node).src[1].as_ref() }.is_some_and(|w| w.ne[0] == 1);
            // SAFETY: as above.
            unsafe { (*s.node).op == numbers.mul && one && s.sources[1] == Source::Column }
        };
        let Some(step) = self.steps.iter().find(weighted) else { return 0.0 };
        let (token, choice) = (column as usize / self.k, column as usize % self.k);
        // SAFETY: as above; the operand is F32 `[1, k, tokens]` in host memory,
        // computed before this graph.
        unsafe {
            let w = &*(*step.node).src[1];
            w.data
                .cast::<u8>()
                .add(token * w.nb[2] + choice * w.nb[1])
                .cast::<f32>()
                .read_unaligned()
        }
    }
}

/// What is known of a node's operand without looking at the program.
fn through_views(numbers: &Numbers, mut t: *mut Tensor) -> *mut Tensor {
    // SAFETY: ggml's graph is alive, and a view has its source in `src[0]`.
    unsafe {
        while !t.is_null() && ((*t).op == numbers.view || (*t).op == numbers.reshape) {
            t = (*t).src[0];
        }
    }
    t
}

/// Looks for a program that begins at `nodes[0]`; says how many nodes it takes.
/// `steps` is memory for its steps.
///
/// # Errors
/// Gives the memory back when the node is not a product with file-backed
/// expert weights.
pub fn find(
    numbers: &Numbers,
    map: &ExpertMap,
    is_ours: &dyn Fn(&Tensor) -> bool,
    nodes: &[*mut Tensor],
    mut steps: Vec<Step>,
) -> Result<(Program, usize), Vec<Step>> {
    steps.clear();
    let finder = Finder { numbers, map, is_ours };
    let Some(mut program) = nodes.first().and_then(|&node| finder.begin(node)) else {
        return Err(steps);
    };
    program.steps = steps;
    let mut taken = 0;
    for &node in nodes {
        // SAFETY: as above.
        let op = unsafe { (*node).op };
        if op != numbers.view && op != numbers.reshape {
            let Some(step) = finder.step(&program, node) else { break };
            program.steps.push(step);
        }
        taken += 1;
    }
    // A batch none of whose tokens produce output leaves nothing for the last
    // layer: as plain nodes, which ggml skips when they are empty.
    if program.steps.is_empty() || program.tokens == 0 {
        return Err(program.steps);
    }
    finder.mark_outputs(&mut program, &nodes[taken..]);
    let last = map.layers()[program.layer].parts.len() - 1;
    program.cut = program.steps.iter().position(|s| s.part == Some(last)).filter(|&at| at > 0);
    Ok((program, taken))
}

struct Finder<'a> {
    numbers: &'a Numbers,
    map: &'a ExpertMap,
    is_ours: &'a dyn Fn(&Tensor) -> bool,
}

impl Finder<'_> {
    /// A program without steps, if `node` is where one begins.
    fn begin(&self, node: *mut Tensor) -> Option<Program> {
        let (layer, _) = self.product(node)?;
        // SAFETY: nodes of ggml's graph and their operands are alive while it
        // is computed.
        let (ids, shape) = unsafe { ((*node).src[2], (*node).src[2].as_ref()?.ne) };
        Some(Program {
            layer,
            ids,
            k: usize::try_from(shape[0]).ok()?,
            tokens: usize::try_from(shape[1]).ok()?,
            steps: Vec::new(),
            cut: None,
        })
    }

    /// Layer and part of a product with file-backed expert weights.
    fn product(&self, node: *mut Tensor) -> Option<(usize, usize)> {
        // SAFETY: nodes and operands are alive while the graph is computed.
        let (node, weights) = unsafe { (node.as_ref()?, (*node).src[0].as_ref()) };
        let weights = weights.filter(|_| node.op == self.numbers.mul_mat_id)?;
        let part = self.map.expert_tensor(weights.name()).filter(|_| (self.is_ours)(weights))?;
        Some((part.layer, part.part))
    }

    /// The node as a step of `program`, if it is column-wise.
    fn step(&self, program: &Program, node: *mut Tensor) -> Option<Step> {
        // SAFETY: as above.
        let t = unsafe { &*node };
        let n = self.numbers;
        let shape = [program.k as i64, program.tokens as i64, 1];
        if t.type_ != n.f32 || t.ne[1..] != shape || t.nb[0] != 4 {
            return None;
        }
        let mut sources = [Source::None; 3];
        let mut part = None;
        if t.op == n.mul_mat_id {
            let (layer, p) = self.product(node)?;
            if layer != program.layer || t.src[2] != program.ids {
                return None;
            }
            part = Some(p);
            sources = [Source::Expert, self.operand(program, t.src[1])?, Source::Ids];
        } else if t.op == n.add_id {
            if t.src[2] != program.ids {
                return None;
            }
            sources = [self.operand(program, t.src[0])?, Source::Table, Source::Ids];
        } else if [n.glu, n.unary, n.mul, n.add, n.clamp, n.scale, n.sqr].contains(&t.op) {
            for (source, &operand) in sources.iter_mut().zip(&t.src) {
                if !operand.is_null() {
                    *source = self.operand(program, operand)?;
                }
            }
            if t.src[3..].iter().any(|s| !s.is_null()) {
                return None;
            }
        } else {
            return None;
        }
        Some(Step { node, part, sources, output: false })
    }

    fn operand(&self, program: &Program, t: *mut Tensor) -> Option<Source> {
        let base = through_views(self.numbers, t);
        // SAFETY: as above.
        let (t, base_ref) = unsafe { (t.as_ref()?, base.as_ref()?) };
        let (k, tokens) = (program.k as i64, program.tokens as i64);
        if t.type_ != self.numbers.f32 || t.nb[0] != 4 || t.ne[3] != 1 || t.data.is_null() {
            return None;
        }
        if let Some(index) = program.steps.iter().position(|s| s.node == base) {
            // A view must keep the columns apart: only the first dimension may
            // be cut, as llama.cpp does for fused gate and up.
            let offset = (t.data as usize).checked_sub(base_ref.data as usize)?;
            let row = offset + t.ne[0] as usize * 4;
            let same = t.ne[1..3] == [k, tokens] && t.nb[1..3] == base_ref.nb[1..3];
            return (same && row <= base_ref.ne[0] as usize * 4)
                .then_some(Source::Step { index, offset });
        }
        match [t.ne[1], t.ne[2]] {
            [1, 1] => Some(Source::Same),
            [1, n] if n == tokens => Some(Source::Token),
            [m, n] if m == k && n == tokens => Some(Source::Column),
            _ => None,
        }
    }

    /// A result that no later step reads, or that a node after the program
    /// reads, has to reach ggml's own tensor.
    fn mark_outputs(&self, program: &mut Program, after: &[*mut Tensor]) {
        for at in 0..program.steps.len() {
            let reads = |s: &Source| matches!(s, Source::Step { index, .. } if *index == at);
            let later = &program.steps[at + 1..];
            let used = later.iter().any(|step| step.sources.iter().any(reads));
            program.steps[at].output = !used;
        }
        for &node in after {
            // SAFETY: as above.
            for &operand in unsafe { &(*node).src } {
                let base = through_views(self.numbers, operand);
                for step in program.steps.iter_mut().filter(|s| s.node == base) {
                    step.output = true;
                }
            }
        }
    }
}
