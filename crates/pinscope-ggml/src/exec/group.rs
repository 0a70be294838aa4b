//! Computes a program for some of its experts.
//!
//! The columns of the chosen experts are put side by side, expert by expert,
//! and the program's steps are rebuilt on them as a small ggml graph, which
//! ggml's CPU backend computes: one node for the products of a part where our
//! kernels give ggml's bits, otherwise ggml's own matrix product for each
//! expert and part, and one node for each other step. So every quantisation
//! and instruction set works and each column gets the bits that the whole
//! graph would have given it. All columns of an expert stay together: ggml
//! picks another kernel for eight rows and more, and splitting would change
//! the choice.

mod dense;
mod halves;
mod products;
mod scratch;

use std::ffi::c_void;

use pinscope::map::{ExpertMap, Role};
use pinscope::residency::Stage;

use crate::ffi::{self, Numbers, Tensor};

use super::program::{Program, Source, Step};
use super::rows::{Inputs, Products};
use halves::Halves;
use products::{Quantised, Spare};
pub(super) use scratch::blank;
use scratch::part_of_rows;

/// Experts in one graph at most; bounds the tensors that it takes.
pub const MAX_EXPERTS: usize = 256;
/// Columns in one graph, unless a single expert has more; bounds scratch.
pub const MAX_COLUMNS: usize = 512;
/// Nodes that a graph has room for: a product for each expert and part, the
/// other steps, and a tail.
pub const MAX_NODES: usize = MAX_EXPERTS * 4 + 64 + MAX_TAIL;
/// Nodes of ggml's own that may come after a group, less one.
pub const MAX_TAIL: usize = 64;
/// Products in one graph at most: of an expert's parts, which are three at
/// most, and with dense weights in a tail.
const MAX_PRODUCTS: usize = 8 + MAX_TAIL;
const ALIGN: usize = 64;

/// Memory that groups take at most besides the arena, for prompts in batches
/// of `n_ubatch` tokens, bytes: a row for each step of the usual program with
/// biases, its inputs, and a copy of the batch's input.
pub(super) fn scratch_bytes(map: &ExpertMap, n_ubatch: usize) -> u64 {
    let columns = MAX_COLUMNS.max(n_ubatch) as u64;
    let values = map.layers().iter().map(|layer| {
        let rows = layer.parts.iter().map(|p| {
            let wide = if p.role == Role::Down { 3 } else { 2 };
            p.ne[0] + p.ne[1] * wide
        });
        rows.sum::<u64>()
    });
    values.max().unwrap_or(0) * 4 * columns + dense::scratch_bytes(map, n_ubatch)
}

/// Columns of one expert, as positions `token * k + choice`.
#[derive(Debug, Clone)]
pub struct ExpertColumns {
    /// Expert of the layer.
    pub expert: u32,
    /// Its columns, ascending.
    pub columns: Vec<u32>,
}

/// Where the results of a one-token batch go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Scratch; [`Workspace::copy_out`] puts them in place.
    Scratch,
    /// ggml's own tensors: the group is all experts of the token, in the order
    /// of its choices.
    Ggml,
}

/// Some of the experts that a layer chose.
#[derive(Debug, Clone, Copy)]
pub struct Group<'a> {
    /// All that the layer chose.
    pub all: &'a [ExpertColumns],
    /// Positions in `all`.
    pub picked: &'a [usize],
}

impl<'a> Group<'a> {
    fn iter(&self) -> impl Iterator<Item = &'a ExpertColumns> + Clone {
        let all = self.all;
        self.picked.iter().map(move |&at| &all[at])
    }

    fn len(&self) -> usize {
        self.picked.len()
    }
}

/// Memory that is kept from graph to graph: a token allocates nothing.
pub struct Workspace {
    numbers: Numbers,
    graph: *mut ffi::Graph,
    context: *mut ffi::Context,
    tensors: Vec<Tensor>,
    scratch: Vec<u64>,
    used: usize,
    columns: Vec<u32>,
    /// Nodes hold their addresses: the vectors never grow.
    products: Vec<Products>,
    inputs: Vec<Inputs>,
    quantised: Vec<Quantised>,
    spare: Spare,
    /// External operands that are side by side, and where.
    gathered: Vec<(*mut Tensor, *mut Tensor)>,
    /// ggml's tensor and our result, for [`Workspace::copy_out`].
    outputs: Vec<(*mut Tensor, *mut Tensor)>,
    /// Result of each step of the graph that was built last.
    results: Vec<*mut Tensor>,
    halves: Halves,
}

// SAFETY: the graph and its context belong to this workspace alone.
unsafe impl Send for Workspace {}

impl Drop for Workspace {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once; the graph lives in the context.
        unsafe { ffi::ggml_free(self.context) }
    }
}

impl Workspace {
    /// Room for graphs of up to [`MAX_EXPERTS`] experts; `None` when memory
    /// is out.
    pub fn new(numbers: Numbers) -> Option<Self> {
        // SAFETY: plain allocation; the graph lives in the context.
        let (context, graph) = unsafe {
            let mem_size = ffi::ggml_graph_overhead_custom(MAX_NODES, false) + 4096;
            let params =
                ffi::InitParams { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true };
            let context = ffi::ggml_init(params);
            if context.is_null() {
                return None;
            }
            (context, ffi::ggml_new_graph_custom(context, MAX_NODES, false))
        };
        Some(Self {
            numbers,
            graph,
            context,
            tensors: Vec::with_capacity(MAX_NODES * 5),
            scratch: Vec::new(),
            used: 0,
            columns: Vec::new(),
            products: Vec::with_capacity(MAX_PRODUCTS),
            inputs: Vec::with_capacity(MAX_PRODUCTS),
            quantised: Vec::new(),
            spare: Spare::default(),
            gathered: Vec::new(),
            outputs: Vec::new(),
            results: Vec::new(),
            halves: Halves::default(),
        })
    }

    fn clear(&mut self) -> *mut ffi::Graph {
        // SAFETY: the graph is alive and nobody computes it now.
        unsafe { ffi::ggml_graph_clear(self.graph) };
        self.tensors.clear();
        self.used = 0;
        self.spare.take_back(&mut self.products, &mut self.inputs, &mut self.quantised);
        self.gathered.clear();
        self.outputs.clear();
        self.graph
    }

    /// Appends a node; nodes are computed in the order in which they come.
    fn add(&mut self, node: *mut Tensor) {
        // SAFETY: the caller's node outlives the graph's computation. Nodes
        // that ggml built have their COMPUTE flag, ours get it in `tensor`.
        unsafe { ffi::ggml_graph_add_node(self.graph, node) };
    }

    /// Builds the graph of a stage of `program` for `group`. `expert_data` gives the
    /// bytes of a part of an expert, `inputs` the data of external operands
    /// (copies, where results would overwrite the original). `tail` are nodes of
    /// ggml's that come after, and are computed in the same graph.
    ///
    /// Where the batch has one token, the results of [`Step::output`] go to
    /// `place`; otherwise the graph puts them in ggml's tensors.
    #[allow(clippy::too_many_arguments)]
    pub fn build(
        &mut self,
        program: &Program,
        place: Place,
        stage: Stage,
        group: Group,
        tail: &[*mut Tensor],
        inputs: &dyn Fn(*mut Tensor) -> *mut c_void,
        expert_data: &dyn Fn(usize, u32) -> *mut c_void,
    ) -> *mut ffi::Graph {
        self.clear();
        let mut columns = std::mem::take(&mut self.columns);
        columns.clear();
        columns.extend(group.iter().flat_map(|g| g.columns.iter().copied()));
        let p = columns.len();
        self.reserve(program, group, p, tail);

        let experts = group.iter().flat_map(|g| g.columns.iter().map(|_| g.expert as i32));
        let experts = self.i32s(experts);
        let zeros = self.i32s(std::iter::repeat_n(0, p));
        let positions = self.i32s(columns.iter().map(|&c| c as i32));
        let tokens = self.i32s(columns.iter().map(|&c| (c as usize / program.k) as i32));

        let mut results = std::mem::take(&mut self.results);
        results.clear();
        let cut = program.cut.unwrap_or(0);
        let steps = match stage {
            Stage::Whole => 0..program.steps.len(),
            Stage::First => 0..cut,
            Stage::Second => cut..program.steps.len(),
        };
        if stage == Stage::Second {
            self.take_halves(program, cut, group, &mut results);
        }
        for step in &program.steps[steps] {
            // SAFETY: the program's nodes and their operands are alive.
            let node = unsafe { &*step.node };
            let kernels = products::kernels(&self.numbers, step, group);
            let mut src = [std::ptr::null_mut(); 3];
            for (i, source) in step.sources.iter().enumerate() {
                if kernels.is_some() && !matches!(source, Source::Step { .. }) {
                    continue; // our kernels take operands as they lie
                }
                src[i] = match *source {
                    Source::None | Source::Expert => std::ptr::null_mut(),
                    Source::Ids => experts,
                    Source::Table | Source::Same => {
                        // SAFETY: as above.
                        let original = unsafe { *node.src[i] };
                        let data = inputs(node.src[i]);
                        self.tensor(Tensor { data, op: self.numbers.none, ..original })
                    }
                    Source::Step { index, offset } => {
                        // SAFETY: results are tensors of this workspace.
                        let (of, ne0) = unsafe { (*results[index], (*node.src[i]).ne[0]) };
                        let data = of.data.cast::<u8>().wrapping_add(offset).cast();
                        self.tensor(Tensor {
                            ne: [ne0, p as i64, 1, 1],
                            data,
                            op: self.numbers.none,
                            ..of
                        })
                    }
                    Source::Token | Source::Column => {
                        let original = node.src[i];
                        match self.gathered.iter().find(|(o, _)| *o == original) {
                            Some(&(_, t)) => t,
                            None => {
                                let rows = (tokens, &columns[..]);
                                let t = self.gather(program, original, *source, inputs, rows);
                                self.gathered.push((original, t));
                                t
                            }
                        }
                    }
                };
            }
            let in_place = step.output && place == Place::Ggml;
            let result = match in_place {
                true => {
                    let (shape, strides) = ([node.ne[0], p as i64], [node.nb[0], node.nb[1]]);
                    self.tensor(blank(self.numbers.f32, shape, strides, node.data))
                }
                false => self.rows(node.ne[0], p),
            };
            match step.part {
                Some(part) => {
                    let of_part = |expert| expert_data(part, expert);
                    let io = (result, src[1]);
                    match kernels {
                        Some(k) => {
                            // ggml's memory may be another node's operand until then.
                            let late = in_place;
                            self.own_products(program, step, group, k, io, late, inputs, &of_part);
                        }
                        None => self.products(step, group, io, zeros, &of_part),
                    }
                }
                None => {
                    // SAFETY: `result` is a tensor of this workspace.
                    unsafe {
                        (*result).op = node.op;
                        (*result).op_params = node.op_params;
                        (&mut (*result).src)[..3].copy_from_slice(&src);
                    }
                    self.add(result);
                }
            }
            results.push(result);
            if step.output && program.tokens > 1 {
                self.scatter(program, node, result, positions);
            } else if step.output && !in_place {
                self.outputs.push((step.node, result));
            }
        }
        tail.iter().for_each(|&node| self.add_node(node));
        self.columns = columns;
        self.results = results;
        self.graph
    }

    /// Copies the outputs of a one-token batch from scratch into ggml's
    /// tensors, after the graph that [`Workspace::build`] made was computed.
    pub fn copy_out(&self) {
        for &(node, rows) in &self.outputs {
            // SAFETY: node and result are alive and of one row size.
            let (node, rows) = unsafe { (&*node, &*rows) };
            for (i, &column) in self.columns.iter().enumerate() {
                // SAFETY: row `i` of the result exists, as does column
                // `column` of the node; they do not overlap, since scratch is
                // ours.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        rows.data.cast::<u8>().wrapping_add(i * rows.nb[1]),
                        node.data.cast::<u8>().wrapping_add(column as usize * node.nb[1]),
                        rows.nb[1],
                    );
                }
            }
        }
    }

    /// One product for each expert of the group, each on its own columns.
    fn products(
        &mut self,
        step: &Step,
        group: Group,
        (result, input): (*mut Tensor, *mut Tensor),
        zeros: *mut Tensor,
        expert_data: &dyn Fn(u32) -> *mut c_void,
    ) {
        // SAFETY: the program's node, its weights, and tensors of this
        // workspace are alive.
        let (node, weights, out, x, ids) =
            unsafe { (*step.node, *(*step.node).src[0], *result, *input, *zeros) };
        let mut first = 0;
        for g in group.iter() {
            let n = g.columns.len();
            let src0 = self.tensor(Tensor {
                ne: [weights.ne[0], weights.ne[1], 1, 1],
                data: expert_data(g.expert),
                op: self.numbers.none,
                ..weights
            });
            let src1 = if step.sources[1] == Source::Same {
                input
            } else {
                self.tensor(part_of_rows(x, first, n))
            };
            let ids = self.tensor(Tensor { ne: [n as i64, 1, 1, 1], ..ids });
            let mut product = part_of_rows(out, first, n);
            product.op = node.op;
            product.op_params = node.op_params;
            product.src[..3].copy_from_slice(&[src0, src1, ids]);
            let product = self.tensor(product);
            self.add(product);
            first += n;
        }
    }

    /// Puts the rows that the columns need side by side.
    fn gather(
        &mut self,
        program: &Program,
        original: *mut Tensor,
        source: Source,
        inputs: &dyn Fn(*mut Tensor) -> *mut c_void,
        (tokens, columns): (*mut Tensor, &[u32]),
    ) -> *mut Tensor {
        // SAFETY: an operand of the program is alive.
        let t = unsafe { *original };
        let data = inputs(original);
        let out = self.rows(t.ne[0], columns.len());
        if source == Source::Token {
            let table = self.tensor(Tensor {
                ne: [t.ne[0], t.ne[2], 1, 1],
                nb: [t.nb[0], t.nb[2], t.nb[3], t.nb[3]],
                data,
                op: self.numbers.none,
                ..t
            });
            // SAFETY: `out` is a tensor of this workspace.
            unsafe {
                (*out).op = self.numbers.get_rows;
                (&mut (*out).src)[..2].copy_from_slice(&[table, tokens]);
            }
            self.add(out);
        } else {
            // Almost always the router's weights, one float a column.
            let bytes = t.ne[0] as usize * 4;
            for (i, &c) in columns.iter().enumerate() {
                let (token, choice) = (c as usize / program.k, c as usize % program.k);
                // SAFETY: the column exists in the operand, the row in `out`.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        data.cast::<u8>().wrapping_add(token * t.nb[2] + choice * t.nb[1]),
                        (*out).data.cast::<u8>().wrapping_add(i * bytes),
                        bytes,
                    );
                }
            }
        }
        out
    }

    /// Appends the copy of a result into ggml's own tensor.
    fn scatter(
        &mut self,
        program: &Program,
        node: &Tensor,
        result: *mut Tensor,
        positions: *mut Tensor,
    ) {
        debug_assert_eq!(node.nb[2], node.nb[1] * program.k);
        let columns = (program.k * program.tokens) as i64;
        let target = Tensor {
            ne: [node.ne[0], columns, 1, 1],
            nb: [4, node.nb[1], node.nb[1] * columns as usize, node.nb[1] * columns as usize],
            op: self.numbers.none,
            ..*node
        };
        let table = self.tensor(target);
        let mut copy = target;
        copy.op = self.numbers.set_rows;
        copy.op_params = [0; 16];
        copy.src = [std::ptr::null_mut(); ffi::MAX_SRC];
        copy.src[..3].copy_from_slice(&[result, positions, table]);
        let copy = self.tensor(copy);
        self.add(copy);
    }
}
