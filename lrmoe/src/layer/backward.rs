//! Backward pass: the retained pairs through their experts, chunk by chunk.
//!
//! Weight gradients go on from chunk to chunk in row order, so that they do not depend on the size of the chunks. A token's rows of dx are to be
//! added in slot order, but chunks come in the order of the experts: the rows are kept, once, until all of them are there.

mod chunk;

use lrmoe_comm::Collective;
use lrmoe_kernels::Memory;
use lrmoe_metric::{Pairs, Selection};
use lrmoe_plan::Stash as StashMode;
use lrmoe_route::{RoutingTable, route};
use ndarray::{Array2, ArrayViewMut2};

use super::dispatch::{Dispatch, rows_between_ranks, rows_leaving};
use super::element::LayerElement;
use super::instances::{InstanceRows, Keeping};
use super::line::{Line, Step};
use super::pass::Pass;
use super::stats::{Clock, Stage};
use super::{Backend, MoeLayer, unmasked};
use crate::error::Error;
pub(super) use chunk::Inputs;

/// x and dy, `[tokens, width]`, and the pairs of the tokens. x is not looked at where rows stay at their instances.
type Rows<'a, B, T> = (
    &'a <B as Memory>::Buffer<T>,
    &'a <B as Memory>::Buffer<T>,
    &'a Pairs<'a>,
);

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// [`backward`](Self::backward) in the backend's memory: `x` is that of the forward pass, and is not looked at where
    /// rows stay at their instances, unless the policy needs it; `dy` and `dx` are `[tokens, width]`, `dp`
    /// `[tokens, top_k]` is on the host.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_rows<C: Collective>(
        &mut self,
        comm: &mut C,
        x: &B::Buffer<T>,
        dy: &B::Buffer<T>,
        dx: &mut B::Buffer<T>,
        dp: ArrayViewMut2<'_, f32>,
    ) -> Result<(), Error> {
        let step = self.stash.step.ok_or(Error::NoForward)?;
        let tokens = self.stash.expert_ids.nrows();
        let (keeping, needs_x) = (self.stash.instances.keeping(), self.needs_x());
        let given = [("x", x), ("dy", dy)];
        self.check_backward(if needs_x { &given } else { &given[1..] }, tokens)?;
        if dp.dim() != self.stash.gate_weights.dim() {
            return Err(Error::RouterGradientShape {
                dp: dp.dim(),
                expected: self.stash.gate_weights.dim(),
            });
        }
        let mut stash = std::mem::take(&mut self.stash);
        stash.step = None;
        let mut clock = Clock::start();
        comm.barrier()?;
        clock.lap(&mut self.stats.seconds, Stage::Wait);
        let pairs = Pairs::new(
            stash.expert_ids.view(),
            stash.gate_weights.view(),
            self.config.experts,
            stash.first_pair,
        )?;
        self.has_selection = false;
        if self.config.policy.needs_full_gradients() {
            self.gradient_norms(comm, &pairs, [x, dy], &mut stash.pairs)?;
            clock = Clock::start();
        }
        let instances = &mut stash.instances;
        let is_chosen = instances.retained().is_some();
        if !is_chosen {
            let (known, norms) = ((stash.quotas.as_ref(), step), stash.pairs.norms());
            let rows = [needs_x.then_some(x), Some(dy)];
            self.choose(comm, &mut clock, known, &pairs, rows, norms)?;
        }
        let selection = std::mem::take(&mut self.selector.selection);
        match self.config.policy.runs_all_backward() {
            true => unmasked(&pairs, &mut self.lists.chosen),
            false => self.lists.chosen.clone_from(&selection.pairs),
        }
        if keeping != Keeping::Nothing && !is_chosen {
            self.locate(comm, &mut clock, &pairs, instances)?;
        }
        let table = match instances.retained() {
            Some(table) => table.clone(),
            None => self.route_chosen(comm, &mut clock, &pairs, true)?,
        };
        let source = (keeping != Keeping::Nothing).then(|| instances.rewound());
        let rows = (x, dy, &pairs);
        self.backward_retained(comm, clock, (&table, &selection), (rows, source), dx)?;
        let mut clock = Clock::start();
        self.compensate(comm, &mut clock, stash.quotas.as_ref(), (x, dy, &pairs))?;
        self.router_gradient(&stash, dy, dp)?;
        clock.lap(&mut self.stats.seconds, Stage::Compact);
        self.record_backward(&table, (keeping, is_chosen));
        self.stats.selection = checksum(&selection.pairs, stash.first_pair);
        self.selector.selection = selection;
        self.has_selection = true;
        self.stash = stash;
        self.record_buffers();
        Ok(())
    }

    fn check_backward(
        &self,
        rows: &[(&'static str, &B::Buffer<T>)],
        tokens: usize,
    ) -> Result<(), Error> {
        let width = self.config.shape.width;
        for &(what, rows) in rows {
            let len = B::len(rows);
            if len != tokens * width {
                return Err(Error::BackwardRows {
                    what,
                    len,
                    tokens,
                    width,
                });
            }
        }
        Ok(())
    }

    /// Routing table of the pairs of all ranks that `lists` has as chosen, within the ranks' memory for the backward pass if it is `bounded`.
    pub(super) fn route_chosen<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        pairs: &Pairs<'_>,
        bounded: bool,
    ) -> Result<RoutingTable, Error> {
        let mut mine = vec![0; self.config.experts];
        for pair in &self.lists.chosen {
            mine[pairs.expert_ids()[*pair as usize] as usize] += 1;
        }
        let mut all = vec![0; mine.len() * comm.ranks()];
        clock.lap(&mut self.stats.seconds, Stage::Route);
        comm.all_gather(&mine, &mut all)?;
        clock.lap(&mut self.stats.seconds, Stage::Exchange);
        let counts =
            Array2::from_shape_vec((comm.ranks(), mine.len()), all).expect("ranks times experts");
        Ok(route(
            counts.view(),
            self.experts.placement(),
            &self.config.topology,
            self.config.capacities.as_deref().filter(|_| bounded),
        )?)
    }

    /// Whether the backward pass looks at x of the tokens.
    pub(super) fn needs_x(&self) -> bool {
        self.config.stash == StashMode::Recompute || self.config.policy.needs_x()
    }

    /// Finds the rows of the pairs that `lists` has as chosen at the instances.
    fn locate<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        pairs: &Pairs<'_>,
        instances: &mut InstanceRows<B, T>,
    ) -> Result<(), Error> {
        let capacities = self.config.capacities.as_deref();
        if self.config.policy.retains_all() {
            instances.locate_all(self.rank, capacities)?;
        } else {
            let chosen = (pairs.expert_ids(), &*self.lists.chosen);
            instances.locate(comm, self.rank, chosen, capacities)?;
        }
        instances.settle();
        clock.lap(&mut self.stats.seconds, Stage::Route);
        Ok(())
    }

    /// The chosen pairs through their experts, with the weights of the selection: writes dx and the weight gradients, leaves dp of the rows in `buffers.all_dp`.
    fn backward_retained<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: Clock,
        (table, selection): (&RoutingTable, &Selection),
        ((x, dy, pairs), mut source): (Rows<'_, B, T>, Option<&mut InstanceRows<B, T>>),
        dx: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let width = self.config.shape.width;
        let mut dispatch = Dispatch::new(
            table,
            self.rank,
            (pairs.expert_ids(), pairs.top_k()),
            &mut self.lists,
            self.config.chunk_rows,
            1,
        )?;
        let inputs = Inputs {
            x,
            dy,
            pairs,
            width,
            dx_weight: self.config.policy.dx_weight(),
            at_once: dispatch.rounds() == 1,
        };
        let (backend, buffers, rows) = (&self.backend, &mut self.buffers, dispatch.rows());
        per_pair(selection, pairs.len(), &mut buffers.host.weights);
        let mut pass = Pass::new(backend, comm, clock, &mut self.stats.seconds);
        pass.lap(Stage::Route);
        backend.resize(&mut buffers.all_dp, rows)?;
        backend.resize(
            &mut buffers.all_dx,
            if inputs.at_once { 0 } else { rows * width },
        )?;
        pass.lap(Stage::Compact);
        let scratch = &mut buffers.scratch;
        let sums = self
            .moments
            .start_backward::<B, T>(scratch, &self.config.policy)?;
        let mut written = Written::new(table, self.rank);
        let mut line = Line::new(self.config.overlap && !pass.is_alone());
        while let Some(step) = line.advance(&mut dispatch)? {
            pass.lap(Stage::Route);
            let computes = matches!(step, Step::Compute { .. });
            let experts = (&mut self.experts, &mut written);
            let step = (&dispatch, step, source.as_deref_mut());
            buffers.backward_step(&mut pass, step, experts, &inputs, dx)?;
            if computes {
                sums.take(B::hidden_sums(&buffers.scratch));
            }
            self.stats.buffer_bytes = self.stats.buffer_bytes.max(buffers.bytes() as u64);
        }
        if !inputs.at_once {
            let rows = std::mem::take(&mut buffers.all_dx);
            buffers.combine_dx(backend, (&rows, width), &self.lists.gone, &inputs, dx)?;
            buffers.all_dx = rows;
            pass.lap(Stage::Compact);
        }
        Ok(())
    }

    /// Bytes of rows that leave the rank: x, dy, p and the weight out, dx and dp back.
    fn record_backward(&mut self, table: &RoutingTable, (keeping, is_chosen): (Keeping, bool)) {
        let rows = rows_between_ranks(table);
        let (out, back) = rows_leaving(&rows, self.rank);
        let (row, scalar) = (
            (self.config.shape.width * size_of::<T>()) as u64,
            size_of::<f32>() as u64,
        );
        let is_located = !is_chosen && !self.config.policy.retains_all();
        let of_row = match keeping {
            Keeping::Nothing => 2 * row + 2 * scalar,
            Keeping::All if is_located => row + 3 * scalar,
            _ => row + 2 * scalar,
        };
        self.stats.backward_bytes = out * of_row + back * (row + scalar);
        self.stats.backward_rows = rows;
    }
}

/// Which instances of a rank have gradients of this pass already.
struct Written {
    /// Rows of each instance in all chunks.
    rows: Vec<u64>,
    seen: Vec<bool>,
    is_first: bool,
}

impl Written {
    fn new(table: &RoutingTable, rank: usize) -> Self {
        let counts = table.counts();
        let instances = table.placement().on_rank(rank);
        let rows = instances.map(|i| counts.column(i).iter().map(|n| u64::from(*n)).sum());
        let rows: Vec<u64> = rows.collect();
        Self {
            seen: vec![false; rows.len()],
            rows,
            is_first: true,
        }
    }

    /// Whether the next chunk, whose groups have these offsets, adds to an instance's gradients. They are written with the first rows of an instance;
    /// zeros with the first chunk, if it has none; and left alone where there is nothing to add.
    fn next(&mut self, offsets: &[usize]) -> Vec<bool> {
        let is_first = std::mem::replace(&mut self.is_first, false);
        let instances = offsets.windows(2).enumerate();
        let adds = instances.map(|(i, group)| match group[1] - group[0] {
            0 => !(is_first && self.rows[i] == 0),
            _ => std::mem::replace(&mut self.seen[i], true),
        });
        adds.collect()
    }
}

/// Sum of the hashes of global pair ids, modulo 2^64.
fn checksum(pairs: &[u32], first_pair: u64) -> u64 {
    let hash = |pair: &u32| {
        // The finalizer of splitmix64: every bit of the id changes about half of those of the hash.
        let id = (first_pair + u64::from(*pair)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let id = (id ^ (id >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let id = (id ^ (id >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        id ^ (id >> 31)
    };
    pairs.iter().map(hash).fold(0, u64::wrapping_add)
}

/// Weights by local pair id, 0 where a pair is not selected.
pub(super) fn per_pair(selection: &Selection, pairs: usize, weights: &mut Vec<f32>) {
    weights.clear();
    weights.resize(pairs, 0.0);
    for (pair, weight) in selection.pairs.iter().zip(&selection.weights) {
        weights[*pair as usize] = *weight;
    }
}
