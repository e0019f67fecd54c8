//! Forward pass: loads, quotas, and every pair through its expert, chunk by chunk.

use lrmoe_comm::Collective;
use lrmoe_metric::{Pairs, SquaredNorm};
use lrmoe_plan::{Loads, QuotaRequest, Quotas, quotas};
use lrmoe_route::{RoutingTable, route};
use ndarray::{Array2, ArrayView2, s};

use super::buffers::{Buffers, ungroup};
use super::dispatch::{Chunk, Dispatch, rows_between_ranks, rows_leaving};
use super::element::LayerElement;
use super::experts::Experts;
use super::pass::{Pass, on_host};
use super::stash::{PairStash, Stash, keep};
use super::stats::{Clock, LayerStats, Stage};
use super::{Backend, MoeLayer, unmasked};
use crate::error::Error;
use crate::policy::{Policy, mask_beyond};

/// The rows and pairs of a pass.
struct Inputs<'a, B: Backend<T>, T: LayerElement> {
    /// `[tokens, width]`
    x: &'a B::Buffer<T>,
    pairs: &'a Pairs<'a>,
    /// Whether all rows go in one chunk.
    at_once: bool,
}

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// [`forward`](Self::forward) in the backend's memory: `x` and `y` are `[tokens, width]`. The caller keeps `x` for
    /// [`backward_rows`](Self::backward_rows), so that the layer need not.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_rows<C: Collective>(
        &mut self,
        comm: &mut C,
        x: &B::Buffer<T>,
        expert_ids: ArrayView2<'_, i32>,
        gate_weights: ArrayView2<'_, f32>,
        step: Option<u32>,
        y: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let mut clock = Clock::start();
        self.check_forward(B::len(x), expert_ids, gate_weights)?;
        let mut stash = Stash::default();
        if step.is_some() {
            self.stats = LayerStats::default();
            stash = std::mem::take(&mut self.stash);
            stash.step = None;
            self.rows.has_x = false;
        }
        comm.barrier()?;
        clock.lap(&mut self.stats.seconds, Stage::Wait);
        let given = Pairs::new(expert_ids, gate_weights, self.config.experts, 0)?;
        let (routed, first_pair) = self.gather_loads(comm, &given)?;
        clock.lap(&mut self.stats.seconds, Stage::Exchange);

        let mut loads = None;
        if step.is_some() {
            keep(expert_ids, &mut stash.expert_ids);
            keep(gate_weights, &mut stash.gate_weights);
            loads = self.drop_pairs(&routed, &mut stash.expert_ids)?;
            let quotas = self.quotas(loads.as_ref().unwrap_or(&routed))?;
            self.stats.quotas = quotas.as_slice().to_vec();
            stash.quotas = Some(quotas);
        }
        let loads = loads.as_ref().unwrap_or(&routed);
        clock.lap(&mut self.stats.seconds, Stage::Plan);

        let table = route(
            loads.counts(),
            self.experts.placement(),
            &self.config.topology,
            None,
        )?;
        let Stash {
            expert_ids: kept_ids,
            pairs: kept,
            ..
        } = &mut stash;
        let expert_ids = step.map_or(expert_ids, |_| kept_ids.view());
        let pairs = Pairs::new(expert_ids, gate_weights, self.config.experts, first_pair)?;
        unmasked(&pairs, &mut self.lists.chosen);
        let mut dispatch = Dispatch::new(
            &table,
            self.rank,
            (pairs.expert_ids(), pairs.top_k()),
            &mut self.lists,
            self.config.chunk_rows,
            0,
        )?;
        clock.lap(&mut self.stats.seconds, Stage::Route);

        let mut pass = Pass::new(&self.backend, comm, clock, &mut self.stats.seconds);
        let inputs = Inputs {
            x,
            pairs: &pairs,
            at_once: dispatch.rounds() == 1,
        };
        if !inputs.at_once {
            let sums = T::sums::<B>(y, &mut self.buffers.sums);
            self.backend.zero(sums, B::len(x))?;
        }
        let policy = step.map(|_| &self.config.policy);
        let sizes = (pairs.len(), dispatch.rows(), self.config.shape.width);
        kept.start(&self.backend, &mut self.buffers, policy, sizes)?;
        let scratch = &mut self.buffers.scratch;
        let sums = self.moments.start_forward::<B, T>(scratch, policy)?;
        pass.lap(Stage::Compact);
        while let Some(chunk) = dispatch.next_chunk()? {
            pass.lap(Stage::Route);
            let (buffers, experts) = (&mut self.buffers, &self.experts);
            buffers.forward_chunk(&mut pass, &chunk, experts, &inputs, kept, y)?;
            sums.take(B::hidden_sums(&buffers.scratch));
            self.stats.buffer_bytes = self.stats.buffer_bytes.max(buffers.bytes() as u64);
        }
        if !inputs.at_once {
            T::round(&self.backend, &self.buffers.sums, y)?;
        }
        kept.finish(&self.backend, &mut self.buffers, &self.lists.gone, &pairs)?;
        pass.lap(Stage::Compact);
        if step.is_some() {
            self.stats.loads = routed.per_expert().to_vec();
            self.stats.dropped = routed.total() - loads.total();
            self.record_forward(&table, stash.pairs.keeps_norms());
            stash.step = step;
            stash.first_pair = first_pair;
            self.stash = stash;
            self.record_buffers();
        }
        self.loads = Some(routed);
        Ok(())
    }

    fn check_forward(
        &self,
        len: usize,
        expert_ids: ArrayView2<'_, i32>,
        gate_weights: ArrayView2<'_, f32>,
    ) -> Result<(), Error> {
        let (width, top_k) = (self.config.shape.width, self.config.top_k);
        let pairs = (len / width, top_k);
        if len.is_multiple_of(width) && expert_ids.dim() == pairs && gate_weights.dim() == pairs {
            return Ok(());
        }
        Err(Error::ForwardShapes {
            x: (len / width, width),
            expert_ids: expert_ids.dim(),
            gate_weights: gate_weights.dim(),
            width,
            top_k,
        })
    }

    /// Masks the pairs of this rank that the policy drops. Returns the loads that are left, if any were.
    fn drop_pairs(
        &self,
        routed: &Loads,
        expert_ids: &mut Array2<i32>,
    ) -> Result<Option<Loads>, Error> {
        let Some(symi) = &self.symi else {
            return Ok(None);
        };
        let loads = symi.kept(routed)?;
        let ids = expert_ids
            .as_slice_mut()
            .expect("kept ids are in standard layout");
        mask_beyond(loads.counts().row(self.rank), ids);
        Ok(Some(loads))
    }

    /// Loads of all ranks, and the global id of this rank's first pair.
    fn gather_loads<C: Collective>(
        &self,
        comm: &mut C,
        pairs: &Pairs<'_>,
    ) -> Result<(Loads, u64), Error> {
        let mut mine = pairs.loads();
        mine.push(pairs.len() as u32);
        let mut all = vec![0; mine.len() * comm.ranks()];
        comm.all_gather(&mine, &mut all)?;
        let all = Array2::from_shape_vec((comm.ranks(), mine.len()), all)
            .expect("ranks times the length of one");
        let experts = self.config.experts;
        let first_pair = all
            .column(experts)
            .iter()
            .take(self.rank)
            .map(|pairs| u64::from(*pairs))
            .sum();
        Ok((
            Loads::new(all.slice(s![.., ..experts]).to_owned())?,
            first_pair,
        ))
    }

    /// Bytes of rows that leave the rank: x out and y back, with |h|^2 beside each row that comes back.
    fn record_forward(&mut self, table: &RoutingTable, norms: bool) {
        let rows = rows_between_ranks(table);
        let (out, back) = rows_leaving(&rows, self.rank);
        let row = (self.config.shape.width * size_of::<T>()) as u64;
        let norm = if norms {
            size_of::<SquaredNorm>() as u64
        } else {
            0
        };
        self.stats.forward_bytes = out * row + back * (row + norm);
        self.stats.forward_rows = rows;
        let placement = self.experts.placement();
        self.stats.instances = (0..placement.ranks())
            .map(|rank| placement.local_experts(rank).len() as u32)
            .collect();
    }

    fn quotas(&self, loads: &Loads) -> Result<Quotas, Error> {
        let Policy::Lrmoe(selecting) = &self.config.policy else {
            return Ok(Quotas::all(loads));
        };
        let unbounded = vec![u64::MAX; self.config.topology.ranks()];
        Ok(quotas(&QuotaRequest {
            loads,
            placement: self.experts.placement(),
            capacities: self.config.capacities.as_deref().unwrap_or(&unbounded),
            retention: selecting.retention,
            policy: selecting.quotas,
            profile: (!self.profile.is_empty()).then_some(&self.profile),
            floor: selecting.floor,
        })?)
    }
}

impl<B: Backend<T>, T: LayerElement> Buffers<B, T> {
    /// One chunk: rows to their instances, through the experts, and back into `y`, weighted; what is kept per pair beside it.
    fn forward_chunk<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk<'_>,
        experts: &Experts<B, T>,
        inputs: &Inputs<'_, B, T>,
        kept: &mut PairStash<B, T>,
        y: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let (backend, width, pairs) = (pass.backend, experts.shape().width, inputs.pairs);
        backend.row_index_into(chunk.tokens, pairs.tokens(), &mut self.index)?;
        let x = (inputs.x, width);
        self.traffic
            .dispatch(pass, chunk, x, &self.index, &mut self.x)?;
        backend.forward(
            experts.shape(),
            experts.weights(),
            chunk.grouping.offsets(),
            &self.x,
            &mut self.scratch,
            &mut self.out,
            kept.keeps_norms().then_some(&mut self.norms),
        )?;
        pass.lap(Stage::Forward);
        let back = self.traffic.give_back(pass, chunk, (&self.out, width))?;
        let [gate_weights, ..] = &mut self.host.scalars;
        gate_weights.clear();
        let of_pair = |pair: &u32| pairs.gate_weights()[*pair as usize];
        gate_weights.extend(chunk.pairs.iter().map(of_pair));
        backend.write(gate_weights, &mut self.gate_weights)?;
        let slots = [pairs.tokens(), pairs.top_k()];
        backend.pair_rows_into(chunk.pairs, slots, &mut self.pairs)?;
        let weights = Some(&self.gate_weights);
        if inputs.at_once {
            backend.combine(back, width, &self.pairs, weights, y)?;
        } else {
            let sums = T::sums::<B>(y, &mut self.sums);
            backend.scatter_add(back, width, &self.pairs, weights, sums)?;
        }
        if kept.keeps_outputs() {
            kept.take_outputs(chunk.pairs, on_host(backend, back, &mut self.host.rows)?);
        }
        pass.lap(Stage::Compact);
        if kept.keeps_norms() {
            self.return_norms(pass, chunk)?;
            backend.copy(&self.norms, &mut self.all_norms, chunk.first)?;
            pass.lap(Stage::Exchange);
        }
        Ok(())
    }

    /// Brings |h|^2 of grouped rows back to the ranks the pairs came from.
    fn return_norms<C: Collective>(
        &mut self,
        pass: &mut Pass<'_, B, C>,
        chunk: &Chunk<'_>,
    ) -> Result<(), Error> {
        if pass.is_alone() {
            return Ok(());
        }
        let [outgoing, incoming] = &mut self.host.words;
        let [copy, norms] = &mut self.host.norms;
        ungroup(pass.backend, chunk, &self.norms, [copy, norms])?;
        outgoing.clear();
        outgoing.extend(
            norms
                .iter()
                .flat_map(|norm| [norm.significand.to_bits(), norm.scale]),
        );
        chunk.give_back(pass.comm, outgoing, 2, incoming)?;
        norms.clear();
        norms.extend(incoming.chunks_exact(2).map(|words| SquaredNorm {
            significand: f32::from_bits(words[0]),
            scale: words[1],
        }));
        Ok(pass.backend.write(norms, &mut self.norms)?)
    }
}
