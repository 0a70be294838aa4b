//! Computes the sub-graphs that ggml's scheduler hands to the device.
//!
//! The layer's program (see [`program`]) is computed in groups of experts:
//! those in RAM first, the others as they land. For prompts there is a shorter
//! way where every expert of the layer lies as it does in the file and ggml's
//! kernels are to be used: then ggml computes the nodes as they are, with the
//! weights' address put right.

pub mod group;
mod kernels;
pub(crate) mod predict;
mod probe;
pub mod program;
mod rows;
mod ways;

use pinscope::map::ExpertMap;
use pinscope::residency::{Demand, Residency, ResidencyError};
use pinscope::timeline::Activity;

use crate::ffi::{self, Numbers, Tensor};
use group::{ExpertColumns, Workspace};
use kernels::Kernels;
use predict::{Inputs, Predictor, Routers};
use program::{Program, Source, Step};
use ways::Done;

/// What a computation ended with, other than success.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExecError {
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    #[error("the router of layer {layer} chose expert {expert}, but the layer has {experts}. The model file is damaged")]
    NoSuchExpert { layer: usize, expert: i32, experts: u32 },
    /// ggml's own status, such as an abort that the user asked for.
    #[error("llama.cpp's CPU backend ended with status {0}")]
    Status(i32),
}

/// Memory that computing takes at most besides the arena, for prompts in
/// batches of `n_ubatch` tokens, bytes.
pub fn scratch_bytes(map: &ExpertMap, n_ubatch: usize) -> u64 {
    group::scratch_bytes(map, n_ubatch) + predict::bytes(map)
}

/// Computes for one backend (one llama.cpp context).
pub struct Executor {
    numbers: Numbers,
    cpu: *mut ffi::Backend,
    workspace: Workspace,
    nodes: Vec<*mut Tensor>,
    steps: Vec<Step>,
    columns: Vec<ExpertColumns>,
    // Memory that is kept from layer to layer: a token allocates nothing.
    spare: Vec<Vec<u32>>,
    place: Vec<u32>,
    demand: Vec<Demand>,
    ready: Vec<u32>,
    picked: Vec<usize>,
    predictor: Predictor,
    copies: Vec<(*mut Tensor, Vec<u8>)>,
    spare_copies: Vec<Vec<u8>>,
}

impl Executor {
    /// An executor that has ggml's `cpu` backend do the arithmetic; `None`
    /// when memory is out.
    pub fn new(numbers: Numbers, cpu: *mut ffi::Backend) -> Option<Self> {
        Some(Self {
            numbers,
            cpu,
            workspace: Workspace::new(numbers)?,
            nodes: Vec::new(),
            steps: Vec::new(),
            columns: Vec::new(),
            spare: Vec::new(),
            place: Vec::new(),
            demand: Vec::new(),
            ready: Vec::new(),
            picked: Vec::new(),
            predictor: Predictor::default(),
            copies: Vec::new(),
            spare_copies: Vec::new(),
        })
    }

    /// Computes `graph`, whose nodes this device claimed.
    ///
    /// # Errors
    /// A failed read, a router's choice that does not exist, or ggml's own
    /// failure. The residency has no open pass then.
    pub fn compute(
        &mut self,
        graph: *mut ffi::Graph,
        map: &ExpertMap,
        routers: &Routers,
        residency: &mut Residency,
        is_ours: &dyn Fn(&Tensor) -> bool,
    ) -> Result<(), ExecError> {
        residency.enter(Activity::Plan);
        let result = self.compute_nodes(graph, map, routers, residency, is_ours);
        if result.is_err() {
            residency.abort();
        }
        residency.enter(Activity::Rest);
        result
    }

    fn compute_nodes(
        &mut self,
        graph: *mut ffi::Graph,
        map: &ExpertMap,
        routers: &Routers,
        residency: &mut Residency,
        is_ours: &dyn Fn(&Tensor) -> bool,
    ) -> Result<(), ExecError> {
        let mut nodes = std::mem::take(&mut self.nodes);
        nodes.clear();
        // SAFETY: ggml's graph is alive while it is computed.
        unsafe {
            nodes.extend(
                (0..ffi::ggml_graph_n_nodes(graph)).map(|i| ffi::ggml_graph_node(graph, i)),
            );
        }
        let mut plain = 0;
        let mut at = 0;
        let mut result = Ok(());
        while at < nodes.len() && result.is_ok() {
            let steps = std::mem::take(&mut self.steps);
            match program::find(&self.numbers, map, is_ours, &nodes[at..], steps) {
                Ok((program, taken)) => {
                    at += taken;
                    // SAFETY: as above.
                    let product = |&n: &*mut Tensor| unsafe { (*n).op == self.numbers.mul_mat_id };
                    let last = !nodes[at..].iter().any(product);
                    let own = &nodes[at - taken..at];
                    let short = last && nodes.len() - at < group::MAX_TAIL;
                    let tail = if short { &nodes[at..] } else { &[] };
                    let computed = self
                        .nodes(&nodes[plain..at - taken], Activity::Rest, residency)
                        .and_then(|()| self.begin(&program, map, routers, residency))
                        .and_then(|()| self.program(&program, residency, own, tail));
                    match computed {
                        Ok(Done::Program) => {}
                        Ok(Done::Tail) => at += tail.len(),
                        Err(e) => result = Err(e),
                    }
                    plain = at;
                    self.steps = program.steps;
                }
                Err(steps) => {
                    self.steps = steps;
                    at += 1;
                }
            }
        }
        let result = result.and_then(|()| self.nodes(&nodes[plain..], Activity::Rest, residency));
        self.nodes = nodes;
        result
    }

    /// ggml's nodes as they stand, but for products that we compute.
    fn nodes(
        &mut self,
        mut nodes: &[*mut Tensor],
        what: Activity,
        residency: &mut Residency,
    ) -> Result<(), ExecError> {
        while !nodes.is_empty() {
            let (graph, n) = self.workspace.begin_nodes(nodes);
            let (now, later) = nodes.split_at(n);
            now.iter().for_each(|&node| self.workspace.add_node(node));
            self.run(graph, what, residency)?;
            nodes = later;
        }
        Ok(())
    }

    fn run(
        &self,
        graph: *mut ffi::Graph,
        what: Activity,
        residency: &mut Residency,
    ) -> Result<(), ExecError> {
        let before = residency.enter(what);
        // SAFETY: backend and graph are alive, and this thread owns both.
        let status = unsafe { ffi::ggml_backend_graph_compute(self.cpu, graph) };
        residency.enter(before);
        match status {
            ffi::STATUS_SUCCESS => Ok(()),
            status => Err(ExecError::Status(status)),
        }
    }

    /// Opens the pass: what is missing is asked for, and then what the next
    /// layer will probably miss.
    fn begin(
        &mut self,
        program: &Program,
        map: &ExpertMap,
        routers: &Routers,
        residency: &mut Residency,
    ) -> Result<(), ExecError> {
        self.note_columns(program, map)?;
        let numbers = &self.numbers;
        self.demand.clear();
        self.demand.extend(self.columns.iter().map(|c| Demand {
            expert: c.expert,
            tokens: c.columns.len() as u32,
            weight: c.columns.iter().map(|&c| program.weight(numbers, c)).sum(),
        }));
        residency.begin(program.layer, program.tokens, &self.demand)?;
        let next = program.layer + 1;
        let Some(layer) = map.layers().get(next) else { return Ok(()) };
        let shared = match program.steps[0].sources[1] {
            Source::Same => program.tokens == 1,
            Source::Token => true,
            _ => false,
        };
        if shared && residency.wants_prediction(next) {
            let before = residency.enter(Activity::Predict);
            // SAFETY: the first step is a product, whose input is alive and
            // was computed before this graph.
            let ranked = unsafe {
                let inputs = Inputs::of(&*(*program.steps[0].node).src[1]);
                self.predictor.rank(&self.numbers, routers, layer.index, program.k, &inputs)
            };
            residency.predict(next, ranked)?;
            residency.enter(before);
        }
        Ok(())
    }

    /// Computes an open pass. `nodes` are the program's, `tail` those after it
    /// if they are few and have no experts.
    fn program(
        &mut self,
        program: &Program,
        residency: &mut Residency,
        nodes: &[*mut Tensor],
        tail: &[*mut Tensor],
    ) -> Result<Done, ExecError> {
        let columns = std::mem::take(&mut self.columns);
        let mut ready = std::mem::take(&mut self.ready);
        let stage = residency.take_ready(program.in_stages(), &mut ready)?;
        let all = ready.len() == columns.len();
        let result = match program.tokens {
            1 if all && program.k == columns.len() => {
                self.at_once(program, residency, &columns, tail, &ready)
            }
            2.. if all
                && residency.is_mirrored(program.layer)
                && !Kernels::serve_all(&self.numbers, program) =>
            {
                self.in_place(program, residency, nodes, &ready)
            }
            _ => self.in_groups(program, residency, &columns, stage, &mut ready),
        };
        self.ready = ready;
        self.columns = columns;
        result
    }

    /// Who computes what, experts ascending: neighbours in the file are read
    /// one after the other.
    fn note_columns(&mut self, program: &Program, map: &ExpertMap) -> Result<(), ExecError> {
        let layer = &map.layers()[program.layer];
        self.place.clear();
        self.place.resize(layer.experts as usize, u32::MAX);
        self.spare.extend(self.columns.drain(..).map(|c| c.columns));
        for token in 0..program.tokens {
            for choice in 0..program.k {
                // SAFETY: `ids` is an I32 `[k, tokens]` in host memory; it may
                // be a strided view, so its strides are used.
                let expert = unsafe {
                    let ids = &*program.ids;
                    ids.data
                        .cast::<u8>()
                        .add(token * ids.nb[1] + choice * ids.nb[0])
                        .cast::<i32>()
                        .read_unaligned()
                };
                let place = usize::try_from(expert).ok().and_then(|e| self.place.get_mut(e));
                let Some(at) = place else {
                    let experts = layer.experts;
                    return Err(ExecError::NoSuchExpert { layer: layer.index, expert, experts });
                };
                if *at == u32::MAX {
                    *at = self.columns.len() as u32;
                    let mut columns = self.spare.pop().unwrap_or_default();
                    columns.clear();
                    self.columns.push(ExpertColumns { expert: expert as u32, columns });
                }
                self.columns[*at as usize].columns.push((token * program.k + choice) as u32);
            }
        }
        self.columns.sort_unstable_by_key(|r| r.expert);
        Ok(())
    }
}
