//! The products of a group: our own kernels' where their bits are ggml's,
//! ggml's nodes otherwise.

use std::ffi::c_void;

use super::{blank, Group, Workspace, ALIGN, MAX_PRODUCTS};
use crate::exec::kernels::Kernels;
use crate::exec::program::{Program, Source, Step};
use crate::exec::rows::{self, Expert, Inputs, Lists, Products, Work};
use crate::ffi::{Numbers, Tensor};

/// The quantised inputs of a group's columns, kept for later steps.
pub(super) struct Quantised {
    /// The operand that they were made of.
    of: *mut Tensor,
    /// ggml's type.
    type_: u32,
    /// Of each column.
    pub rows: Vec<*const u8>,
    /// The latest products with experts that take them.
    products: Option<usize>,
}

/// Lists of graphs that are computed, for the next ones.
#[derive(Default)]
pub(super) struct Spare {
    lists: Vec<Lists>,
    rows: Vec<Vec<(*const f32, *mut u8)>>,
    places: Vec<Vec<*const u8>>,
}

/// Places that a new list has: more than a token needs. A list that grew only
/// when its turn came for a larger group would allocate long after the start.
const ROOM: usize = 64;

impl Spare {
    pub fn lists(&mut self) -> Lists {
        self.lists.pop().unwrap_or_else(|| Lists {
            experts: Vec::with_capacity(ROOM),
            inputs: Vec::with_capacity(ROOM),
            out: Vec::with_capacity(ROOM),
        })
    }

    pub fn rows(&mut self) -> Vec<(*const f32, *mut u8)> {
        self.rows.pop().unwrap_or_else(|| Vec::with_capacity(ROOM))
    }

    pub fn places(&mut self) -> Vec<*const u8> {
        self.places.pop().unwrap_or_else(|| Vec::with_capacity(ROOM))
    }

    pub fn take_back(
        &mut self,
        products: &mut Vec<Products>,
        inputs: &mut Vec<Inputs>,
        quantised: &mut Vec<Quantised>,
    ) {
        self.lists.extend(products.drain(..).map(Products::into_lists));
        self.rows.extend(inputs.drain(..).map(|i| cleared(i.rows)));
        self.places.extend(quantised.drain(..).map(|q| cleared(q.rows)));
    }
}

fn cleared<T>(mut list: Vec<T>) -> Vec<T> {
    list.clear();
    list
}

/// The kernels for all of a step's products with `group`; `None` where ggml's
/// nodes have to compute some, and then all of them.
pub(super) fn kernels(numbers: &Numbers, step: &Step, group: Group) -> Option<Kernels> {
    step.part?;
    // SAFETY: the program's node and its weights are alive.
    let type_ = unsafe { (*(*step.node).src[0]).type_ };
    Kernels::of_experts(numbers, type_).filter(|k| group.iter().all(|g| k.serve(g.columns.len())))
}

impl Workspace {
    /// Appends the products of `step` with `kernels` as one node, and if need
    /// be one that quantises their inputs. `input` is an earlier step's result
    /// where the step takes one. A `late` step may not be computed earlier than
    /// its place; others join an earlier node with the same inputs, as up joins
    /// gate: one meeting of the threads less, and one end of work at which
    /// they wait for each other.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn own_products(
        &mut self,
        program: &Program,
        step: &Step,
        group: Group,
        kernels: Kernels,
        (result, input): (*mut Tensor, *mut Tensor),
        late: bool,
        inputs: &dyn Fn(*mut Tensor) -> *mut c_void,
        expert_data: &dyn Fn(u32) -> *mut c_void,
    ) {
        // SAFETY: the program's node, its operands, and tensors of this
        // workspace are alive.
        let (weights, operand, out) =
            unsafe { (*(*step.node).src[0], (*step.node).src[1], *result) };
        let n = group.iter().map(|g| g.columns.len()).sum();
        let at = self.quantised(operand, kernels, n).unwrap_or_else(|| {
            let rows = self.quantise(program, step, group, kernels, input, inputs);
            self.keep_quantised(operand, kernels, rows)
        });
        let known = self.quantised[at].products.filter(|_| !late);
        let joined = known.filter(|&p| self.products[p].take_also(&weights));
        let place = joined.unwrap_or(self.products.len());
        if joined.is_none() {
            let lists = self.spare.lists();
            let products = self.add_products(Products::new(&weights, kernels, lists));
            self.quantised[at].products = Some(place);
            // SAFETY: `result` is a tensor of this workspace.
            unsafe {
                (*result).op = self.numbers.custom;
                (*result).op_params = rows::params(Work::Multiply(products));
            }
            self.add(result);
        }
        let columns = &self.quantised[at].rows;
        let lists = self.products[place].lists();
        let mut first = lists.inputs.len();
        lists.inputs.extend_from_slice(columns);
        lists.experts.extend(group.iter().map(|g| {
            let columns = first..first + g.columns.len();
            first = columns.end;
            Expert { weights: expert_data(g.expert).cast(), columns }
        }));
        lists.out.extend(
            (0..columns.len())
                .map(|i| out.data.cast::<u8>().wrapping_add(i * out.nb[1]).cast::<f32>()),
        );
    }

    /// Where the quantised columns of `operand` are among those of this graph.
    pub(super) fn quantised(
        &self,
        operand: *mut Tensor,
        kernels: Kernels,
        columns: usize,
    ) -> Option<usize> {
        let key = (operand, kernels.input_type(), columns);
        self.quantised.iter().position(|q| (q.of, q.type_, q.rows.len()) == key)
    }

    /// Remembers them for later products.
    pub(super) fn keep_quantised(
        &mut self,
        of: *mut Tensor,
        kernels: Kernels,
        rows: Vec<*const u8>,
    ) -> usize {
        let type_ = kernels.input_type();
        self.quantised.push(Quantised { of, type_, rows, products: None });
        self.quantised.len() - 1
    }

    /// Keeps `products` until the graph was computed; gives their address.
    pub(super) fn add_products(&mut self, products: Products) -> *mut Products {
        // Nodes hold the addresses: the vector must not move.
        assert!(self.products.len() < MAX_PRODUCTS, "too many products for one graph");
        self.products.push(products);
        self.products.last_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut)
    }

    /// Appends a node that quantises `inputs` into memory from `rooms` on.
    pub(super) fn add_quantise(&mut self, inputs: Inputs, rooms: *mut u8) {
        assert!(self.inputs.len() < MAX_PRODUCTS, "too many products for one graph");
        self.inputs.push(inputs);
        let inputs = self.inputs.last_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
        let mut node = blank(self.numbers.f32, [1, 1], [4, 4], rooms.cast());
        node.op = self.numbers.custom;
        node.op_params = rows::params(Work::Quantise(inputs));
        let node = self.tensor(node);
        self.add(node);
    }

    /// Has the inputs of a group's columns quantised, each once; gives the
    /// place of each column's.
    fn quantise(
        &mut self,
        program: &Program,
        step: &Step,
        group: Group,
        kernels: Kernels,
        input: *mut Tensor,
        inputs: &dyn Fn(*mut Tensor) -> *mut c_void,
    ) -> Vec<*const u8> {
        // SAFETY: as above.
        let (n, operand) = unsafe { ((*(*step.node).src[0]).ne[0] as usize, *(*step.node).src[1]) };
        let source = step.sources[1];
        let base = match source {
            // SAFETY: as above.
            Source::Step { .. } => unsafe { (*input).data },
            // SAFETY: as above.
            _ => inputs(unsafe { (*step.node).src[1] }),
        };
        // SAFETY: as above.
        let step_bytes = if input.is_null() { 0 } else { unsafe { (*input).nb[1] } };
        let columns = group.iter().flat_map(|g| g.columns.iter().map(|&c| c as usize));
        // Where each column's values are: as they are, that is for F32 weights
        // what is asked for.
        let mut quantised = self.spare.places();
        quantised.extend(columns.enumerate().map(|(i, column)| {
            let (token, choice) = (column / program.k, column % program.k);
            let offset = match source {
                Source::Token => token * operand.nb[2],
                Source::Column => token * operand.nb[2] + choice * operand.nb[1],
                Source::Step { .. } => i * step_bytes,
                _ => 0,
            };
            base.cast::<u8>().wrapping_add(offset).cast_const()
        }));
        if kernels.takes_floats() {
            return quantised;
        }
        let room = kernels.input_bytes(n).next_multiple_of(ALIGN);
        let mut distinct = self.spare.places();
        distinct.extend_from_slice(&quantised);
        distinct.sort_unstable();
        distinct.dedup();
        let rooms = self.allot(room * distinct.len());
        let place = |i: usize| rooms.wrapping_add(i * room);
        for values in &mut quantised {
            *values = place(distinct.partition_point(|d| *d < *values)).cast_const();
        }
        let mut rows = self.spare.rows();
        rows.extend(distinct.iter().enumerate().map(|(i, &v)| (v.cast::<f32>(), place(i))));
        distinct.clear();
        self.spare.places.push(distinct);
        let work = Inputs { kernels, n, rows };
        if program.tokens == 1 && !matches!(source, Source::Step { .. }) {
            // SAFETY: the input is there, and the rooms are new.
            unsafe { work.quantise(0, 1) };
            self.spare.rows.push(cleared(work.rows));
        } else {
            self.add_quantise(work, rooms);
        }
        quantised
    }
}
