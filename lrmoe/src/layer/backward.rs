//! Backward pass: the retained pairs through their experts, chunk by chunk.
//!
//! Weight gradients go on from chunk to chunk in row order, so that they do not depend on the size of the chunks. A token's rows of dx are to be
//! added in slot order, but chunks come in the order of the experts: the rows are kept, once, until all of them are there.

use lrmoe_comm::Collective;
use lrmoe_kernels::RowBuffers;
use lrmoe_metric::{Pairs, Selection};
use lrmoe_route::{RoutingTable, route};
use ndarray::{Array2, ArrayViewMut2};

use super::buffers::{Buffers, columns, columns_mut, ungroup};
use super::dispatch::{Chunk, Dispatch, rows_between_ranks, rows_leaving};
use super::element::LayerElement;
use super::experts::Experts;
use super::instances::{InstanceRows, Keeping};
use super::pass::Pass;
use super::stats::{Clock, Stage};
use super::{Backend, MoeLayer};
use crate::error::Error;
use crate::policy::{DxWeight, Policy};

/// Where the rows of x come from.
enum Source<'a, B: Backend<T>, T: LayerElement> {
    /// `[tokens, width]`
    Tokens(&'a B::Buffer<T>),
    Instances(&'a mut InstanceRows<B, T>),
}

/// What the backward pass goes by.
struct Inputs<'a, B: Backend<T>, T: LayerElement> {
    /// `[tokens, width]`
    dy: &'a B::Buffer<T>,
    pairs: &'a Pairs<'a>,
    dx_weight: DxWeight,
    /// Whether all rows go in one chunk.
    at_once: bool,
}

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// [`backward`](Self::backward) in the backend's memory: `x` is that of the forward pass, and is not looked at where rows stay at their
    /// instances; `dy` and `dx` are `[tokens, width]`, `dp`
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
        let keeping = self.stash.instances.keeping();
        let needs_x = keeping == Keeping::Nothing;
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
        let instances = &mut stash.instances;
        let is_chosen = instances.retained().is_some();
        if !is_chosen {
            let known = (Some(dy), stash.pairs.h_norms());
            self.choose(
                comm,
                &mut clock,
                (stash.quotas.as_ref(), step),
                &pairs,
                known,
            )?;
        }
        let selection = std::mem::take(&mut self.selector.selection);
        if !needs_x && !is_chosen {
            self.locate(comm, &mut clock, (&pairs, &selection.pairs), instances)?;
        }
        let table = match instances.retained() {
            Some(table) => table.clone(),
            None => self.route_retained(comm, &mut clock, &pairs, &selection.pairs)?,
        };
        let source = if needs_x {
            Source::Tokens(x)
        } else {
            instances.rewind();
            Source::Instances(instances)
        };
        self.backward_retained(comm, clock, (&table, &selection), (source, dy, &pairs), dx)?;
        let mut clock = Clock::start();
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

    /// Routing table of the retained pairs of all ranks.
    fn route_retained<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        pairs: &Pairs<'_>,
        retained: &[u32],
    ) -> Result<RoutingTable, Error> {
        let mut mine = vec![0; self.config.experts];
        for pair in retained {
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
            self.config.capacities.as_deref(),
        )?)
    }

    /// Finds the retained pairs' rows at the instances.
    fn locate<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        (pairs, retained): (&Pairs<'_>, &[u32]),
        instances: &mut InstanceRows<B, T>,
    ) -> Result<(), Error> {
        let capacities = self.config.capacities.as_deref();
        match self.config.policy {
            Policy::Lrmoe(_) => {
                instances.locate(comm, self.rank, (pairs.expert_ids(), retained), capacities)?
            }
            _ => instances.locate_all(self.rank, capacities)?,
        };
        instances.settle();
        clock.lap(&mut self.stats.seconds, Stage::Route);
        Ok(())
    }

    /// The retained pairs through their experts: writes dx and the weight gradients, leaves dp of the rows in `buffers.all_dp`.
    fn backward_retained<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: Clock,
        (table, selection): (&RoutingTable, &Selection),
        (mut source, dy, pairs): (Source<'_, B, T>, &B::Buffer<T>, &Pairs<'_>),
        dx: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let width = self.config.shape.width;
        self.lists.chosen.clear();
        self.lists.chosen.extend_from_slice(&selection.pairs);
        let mut dispatch = Dispatch::new(
            table,
            self.rank,
            (pairs.expert_ids(), pairs.top_k()),
            &mut self.lists,
            self.config.chunk_rows,
            1,
        )?;
        let inputs = Inputs {
            dy,
            pairs,
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
        let mut written = Written::new(table, self.rank);
        while let Some(chunk) = dispatch.next_chunk()? {
            pass.lap(Stage::Route);
            let accumulate = written.next(chunk.grouping.offsets());
            let experts = &mut self.experts;
            let rows = (&chunk, &mut source);
            buffers.backward_chunk(&mut pass, rows, experts, &inputs, &accumulate, dx)?;
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

    /// Bytes of rows that leave the rank: x, if rows do not stay at their instances, dy, p, the weight and the number of a row that was located
    /// in this pass out, dx and dp back.
    fn record_backward(&mut self, table: &RoutingTable, (keeping, is_chosen): (Keeping, bool)) {
        let rows = rows_between_ranks(table);
        let (out, back) = rows_leaving(&rows, self.rank);
        let (row, scalar) = (
            (self.config.shape.width * size_of::<T>()) as u64,
            size_of::<f32>() as u64,
        );
        let is_located = matches!(self.config.policy, Policy::Lrmoe(_)) && !is_chosen;
        let of_row = match keeping {
            Keeping::Nothing => 2 * row + 2 * scalar,
            Keeping::All if is_located => row + 3 * scalar,
            _ => row + 2 * scalar,
        };
        self.stats.backward_bytes = out * of_row + back * (row + scalar);
        self.stats.backward_rows = rows;
    }
}

impl<B: Backend<T>, T: LayerElement> Buffers<B, T> {
    /// One chunk: rows of x and dy to their instances, through the experts, and dx and dp back to where they came from.
    fn backward_chunk<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        (chunk, source): (&Chunk<'_>, &mut Source<'_, B, T>),
        experts: &mut Experts<B, T>,
        inputs: &Inputs<'_, B, T>,
        accumulate: &[bool],
        dx: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let (backend, shape) = (pass.backend, *experts.shape());
        let tokens = inputs.pairs.tokens();
        backend.row_index_into(chunk.tokens, tokens, &mut self.index)?;
        if let Source::Tokens(x) = source {
            let x = (&**x, shape.width);
            self.traffic
                .dispatch(pass, chunk, x, &self.index, &mut self.x)?;
        }
        let dy = (inputs.dy, shape.width);
        self.traffic
            .dispatch(pass, chunk, dy, &self.index, &mut self.dy)?;
        self.send_weights(pass, chunk, inputs.pairs)?;
        let (x, kept) = match source {
            Source::Tokens(_) => (&self.x, None),
            Source::Instances(instances) => {
                let room = (&mut self.x, &mut self.pre_activations);
                let rows = chunk.grouping.grouped_rows();
                let (x, kept) = instances.give(backend, &shape, rows, room)?;
                (x, Some(kept))
            }
        };
        pass.lap(Stage::Compact);
        let rows = RowBuffers {
            x,
            dy: &self.dy,
            gate_weights: &self.gate_weights,
            weights: &self.weights,
        };
        let (weights, gradients) = experts.weights_and_gradients();
        backend.backward(
            &shape,
            weights,
            chunk.grouping.offsets(),
            &rows,
            kept,
            &mut self.scratch,
            &mut self.out,
            &mut self.dp,
            gradients,
            accumulate,
        )?;
        pass.lap(Stage::Backward);
        self.return_dp(pass, chunk)?;
        backend.copy(&self.dp, &mut self.all_dp, chunk.first)?;
        let out = std::mem::take(&mut self.out);
        let mut traffic = std::mem::take(&mut self.traffic);
        let back = traffic.give_back(pass, chunk, (&out, shape.width))?;
        if inputs.at_once {
            self.combine_dx(backend, (back, shape.width), chunk.pairs, inputs, dx)?;
        } else {
            backend.copy(back, &mut self.all_dx, chunk.first * shape.width)?;
        }
        (self.out, self.traffic) = (out, traffic);
        pass.lap(Stage::Compact);
        Ok(())
    }

    /// Gate weights and selection weights of the chunk's rows to where the rows are.
    fn send_weights<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk<'_>,
        pairs: &Pairs<'_>,
    ) -> Result<(), Error> {
        let [p, w, outgoing, incoming] = &mut self.host.scalars;
        let of_pair = |pair: &u32| {
            let pair = *pair as usize;
            [pairs.gate_weights()[pair], self.host.weights[pair]]
        };
        outgoing.clear();
        outgoing.extend(chunk.pairs.iter().flat_map(of_pair));
        if !pass.is_alone() {
            chunk.dispatch(pass.comm, outgoing, 2, incoming)?;
            outgoing.resize(incoming.len(), 0.0);
            chunk
                .grouping
                .group(columns(incoming, 2), columns_mut(outgoing, 2))?;
            pass.lap(Stage::Exchange);
        }
        for (list, part) in [&mut *p, w].into_iter().zip(0..) {
            list.clear();
            list.extend(outgoing.iter().skip(part).step_by(2));
        }
        pass.backend.write(p, &mut self.gate_weights)?;
        pass.backend.write(w, &mut self.weights)?;
        pass.lap(Stage::Compact);
        Ok(())
    }

    /// Brings dp of grouped rows back to the ranks the pairs came from.
    fn return_dp<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk<'_>,
    ) -> Result<(), Error> {
        if pass.is_alone() {
            return Ok(());
        }
        let [copy, outgoing, incoming, _] = &mut self.host.scalars;
        ungroup(pass.backend, chunk, &self.dp, [copy, outgoing])?;
        chunk.give_back(pass.comm, outgoing, 1, incoming)?;
        pass.backend.write(incoming, &mut self.dp)?;
        pass.lap(Stage::Exchange);
        Ok(())
    }

    /// Writes the sums of each token's rows, in slot order, to dx.
    fn combine_dx(
        &mut self,
        backend: &B,
        (rows, width): (&B::Buffer<T>, usize),
        pairs: &[u32],
        inputs: &Inputs<'_, B, T>,
        dx: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let mut weights = None;
        if inputs.dx_weight == DxWeight::Selection {
            let ([list, ..], by_pair) = (&mut self.host.scalars, &self.host.weights);
            list.clear();
            list.extend(pairs.iter().map(|pair| by_pair[*pair as usize]));
            backend.write(list, &mut self.weights)?;
            weights = Some(&self.weights);
        }
        let slots = [inputs.pairs.tokens(), inputs.pairs.top_k()];
        backend.pair_rows_into(pairs, slots, &mut self.pairs)?;
        Ok(backend.combine(rows, width, &self.pairs, weights, dx)?)
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

/// Weights by local pair id, 0 where a pair is not retained.
fn per_pair(selection: &Selection, pairs: usize, weights: &mut Vec<f32>) {
    weights.clear();
    weights.resize(pairs, 0.0);
    for (pair, weight) in selection.pairs.iter().zip(&selection.weights) {
        weights[*pair as usize] = *weight;
    }
}
