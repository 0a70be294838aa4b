//! Products with dense weights, which come between ggml's own nodes.
//!
//! They touch as many bytes a token as the experts do, and ggml computes them
//! row by row and quantises their input anew for each: with the experts'
//! kernels, the rows of one matrix are asked for ahead, and what several
//! products share (queries, keys and values) is quantised once.

use pinscope::map::{ExpertMap, TensorInfo};

use super::{blank, Workspace, ALIGN, MAX_PRODUCTS};
use crate::exec::kernels::Kernels;
use crate::exec::rows::{self, Expert, Inputs, Products, Work};
use crate::ffi::{Graph, Numbers, Tensor};

/// Memory for quantised inputs of a layer's dense products, for batches of
/// `n_ubatch` tokens, bytes.
pub(super) fn scratch_bytes(map: &ExpertMap, n_ubatch: usize) -> u64 {
    let layer = |t: &TensorInfo| t.name.split('.').nth(1).and_then(|n| n.parse::<usize>().ok());
    let mut inputs = vec![0; 1 + map.dense_tensors().filter_map(layer).max().unwrap_or(0)];
    for t in map.dense_tensors().filter(|t| t.ne[1] > 1) {
        // A value takes a byte and a share of a scale, rooms are rounded up.
        inputs[layer(t).unwrap_or(0)] += t.ne[0] + t.ne[0] / 4 + ALIGN as u64;
    }
    inputs.into_iter().max().unwrap_or(0) * n_ubatch as u64
}

/// The kernels for `node` if it is a product of a matrix and columns that we
/// compute with ggml's bits.
fn kernels(numbers: &Numbers, node: &Tensor) -> Option<Kernels> {
    if node.op != numbers.mul_mat {
        return None;
    }
    // SAFETY: operands of a node that is computed are null or alive.
    let (weights, input) = unsafe { (node.src[0].as_ref()?, node.src[1].as_ref()?) };
    let flat = |t: &Tensor| t.ne[2..] == [1, 1];
    let columns = |t: &Tensor| flat(t) && t.type_ == numbers.f32 && t.nb[0] == 4;
    // The second parameter may ask for another algorithm.
    let usual = node.op_params[1] == 0 && flat(weights) && columns(node) && columns(input);
    let close = input.nb[1] == input.ne[0] as usize * 4;
    let n = usize::try_from(input.ne[1]).ok()?;
    (usual && close && n > 0)
        .then(|| Kernels::of_dense(numbers, weights.type_, n))
        .flatten()
        .filter(|k| !k.takes_floats())
}

/// Bytes of a quantised column of `input`.
fn room(kernels: Kernels, input: &Tensor) -> usize {
    kernels.input_bytes(input.ne[0] as usize).next_multiple_of(ALIGN)
}

impl Workspace {
    /// An empty graph for some of ggml's `nodes`, see [`Workspace::add_node`];
    /// says how many it has room for.
    pub fn begin_nodes(&mut self, nodes: &[*mut Tensor]) -> (*mut Graph, usize) {
        let graph = self.clear();
        let (mut n, mut products, mut bytes) = (0, 0, ALIGN);
        for &node in nodes.iter().take(super::MAX_NODES / 2) {
            if let Some(more) = self.bytes_of_dense(node) {
                if products == MAX_PRODUCTS {
                    break;
                }
                products += 1;
                bytes += more;
            }
            n += 1;
        }
        self.make_room(bytes);
        (graph, n)
    }

    /// Scratch that `node` needs if it is a product that we compute.
    pub(super) fn bytes_of_dense(&self, node: *mut Tensor) -> Option<usize> {
        // SAFETY: nodes and their operands are alive.
        let (node, input) = unsafe { (&*node, (*node).src[1].as_ref()) };
        let kernels = kernels(&self.numbers, node)?;
        input.map(|input| room(kernels, input) * input.ne[1] as usize)
    }

    /// Appends a node of ggml's: as it is, or as a product with our kernels.
    /// Scratch was reserved for it.
    pub fn add_node(&mut self, node: *mut Tensor) {
        // SAFETY: nodes and their operands are alive.
        let t = unsafe { &*node };
        match kernels(&self.numbers, t) {
            Some(kernels) => self.dense_product(t, kernels),
            None => self.add(node),
        }
    }

    fn dense_product(&mut self, node: &Tensor, kernels: Kernels) {
        let operand = node.src[1];
        // SAFETY: operands are alive.
        let (weights, input) = unsafe { (&*node.src[0], &*operand) };
        let n = input.ne[1] as usize;
        let at = self.quantised(operand, kernels, n).unwrap_or_else(|| {
            let rooms = self.allot(room(kernels, input) * n);
            let place = |i: usize| rooms.wrapping_add(i * room(kernels, input));
            let values = |i: usize| input.data.cast::<u8>().wrapping_add(i * input.nb[1]);
            let mut rows = self.spare.rows();
            rows.extend((0..n).map(|i| (values(i).cast::<f32>().cast_const(), place(i))));
            self.add_quantise(Inputs { kernels, n: input.ne[0] as usize, rows }, rooms);
            let mut places = self.spare.places();
            places.extend((0..n).map(|i| place(i).cast_const()));
            self.keep_quantised(operand, kernels, places)
        });
        let mut lists = self.spare.lists();
        lists.inputs.extend_from_slice(&self.quantised[at].rows);
        lists.experts.push(Expert { weights: weights.data.cast_const().cast(), columns: 0..n });
        let column = |i: usize| node.data.cast::<u8>().wrapping_add(i * node.nb[1]).cast::<f32>();
        lists.out.extend((0..n).map(column));
        let products = self.add_products(Products::new(weights, kernels, lists));
        // Later nodes know the result by the address of its values.
        let mut result =
            blank(self.numbers.f32, [node.ne[0], node.ne[1]], [4, node.nb[1]], node.data);
        result.op = self.numbers.custom;
        result.op_params = rows::params(Work::Multiply(products));
        let result = self.tensor(result);
        self.add(result);
    }
}
