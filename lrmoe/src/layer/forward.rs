//! Forward pass: loads, quotas, and every pair through its expert, chunk by chunk.

mod chunk;

use lrmoe_comm::Collective;
use lrmoe_metric::{EarlyKey, Pairs, Row, SquaredNorm};
use lrmoe_plan::{Loads, QuotaRequest, Quotas, Stash as StashMode, quotas};
use lrmoe_route::{RoutingTable, route};
use ndarray::{Array2, ArrayView2, Axis, s};

use super::dispatch::{Dispatch, rows_between_ranks, rows_leaving};
use super::early::{Given, Left};
use super::element::LayerElement;
use super::instances::Keeping;
use super::line::{Line, Step};
use super::pass::Pass;
use super::stash::{Stash, keep};
use super::stats::{Clock, LayerStats, Stage};
use super::{Backend, MoeLayer, unmasked};
use crate::error::Error;
use crate::policy::{Policy, mask_beyond};
use chunk::Inputs;

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
        }
        let loads = loads.as_ref().unwrap_or(&routed);
        clock.lap(&mut self.stats.seconds, Stage::Plan);

        let table = route(
            loads.counts(),
            self.experts.placement(),
            &self.config.topology,
            None,
        )?;
        clock.lap(&mut self.stats.seconds, Stage::Route);
        if step.is_some() {
            let quotas = self.quotas(loads, &table)?;
            self.stats.quotas = quotas.as_slice().to_vec();
            stash.quotas = Some(quotas);
        }
        clock.lap(&mut self.stats.seconds, Stage::Plan);
        let Stash {
            expert_ids: kept_ids,
            quotas,
            pairs: kept,
            instances,
            ..
        } = &mut stash;
        let expert_ids = step.map_or(expert_ids, |_| kept_ids.view());
        let pairs = Pairs::new(expert_ids, gate_weights, self.config.experts, first_pair)?;
        let (inputs, known) = ((x, &pairs), (step, quotas.as_ref()));
        let left = (kept, instances);
        let passes = self.forward_all(comm, clock, known, (&table, inputs), left, y)?;
        if step.is_some() {
            self.stats.loads = routed.per_expert().to_vec();
            self.stats.dropped = routed.total() - loads.total();
            self.record_forward(&table, &stash, passes);
            stash.step = step;
            stash.first_pair = first_pair;
            self.stash = stash;
            self.record_buffers();
        }
        self.loads = Some(routed);
        Ok(())
    }

    /// Every pair through its expert into `y`, chunk by chunk.
    pub(super) fn forward_chunks<C: Collective>(
        &mut self,
        comm: &mut C,
        mut clock: Clock,
        (step, quotas): (Option<u32>, Option<&Quotas>),
        (table, (x, pairs)): (&RoutingTable, Given<'_, B, T>),
        (kept, instances): Left<'_, B, T>,
        y: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let shape = self.config.shape;
        unmasked(pairs, &mut self.lists.chosen);
        let mut lists = std::mem::take(&mut self.lists);
        let mut dispatch = Dispatch::new(
            table,
            self.rank,
            (pairs.expert_ids(), pairs.top_k()),
            &mut lists,
            self.config.chunk_rows,
            0,
        )?;
        clock.lap(&mut self.stats.seconds, Stage::Route);
        if let (Keeping::Largest, Some(step), Policy::Lrmoe(selecting)) =
            (instances.keeping(), step, &self.config.policy)
        {
            let (order, draw) = ((pairs, dispatch.order()), self.draw(step));
            instances.bring_keys(comm, self.rank, order, (selecting.method, draw))?;
            clock.lap(&mut self.stats.seconds, Stage::Exchange);
        }
        let mut pass = Pass::new(&self.backend, comm, clock, &mut self.stats.seconds);
        let inputs = Inputs {
            x,
            pairs,
            experts: &self.experts,
            at_once: dispatch.rounds() == 1,
        };
        if !inputs.at_once {
            let sums = T::sums::<B>(y, &mut self.buffers.sums);
            self.backend.zero(sums, B::len(x))?;
        }
        let policy = step.map(|_| &self.config.policy);
        let sizes = (pairs.len(), dispatch.rows(), shape.width);
        let buffers = &mut self.buffers;
        kept.start(&self.backend, buffers, policy, sizes)?;
        let quotas = quotas.map_or(&[][..], Quotas::as_slice);
        instances.make_room(&self.backend, &shape, (self.rank, quotas))?;
        instances.lend(inputs.at_once, &mut buffers.x, &mut buffers.pre_activations);
        let sums = self
            .moments
            .start_forward::<B, T>(&mut buffers.scratch, policy)?;
        pass.lap(Stage::Compact);
        let mut line = Line::new(self.config.overlap && !pass.is_alone());
        while let Some(step) = line.advance(&mut dispatch)? {
            pass.lap(Stage::Route);
            let computes = matches!(step, Step::Compute { .. });
            let left = (&mut *kept, &mut *instances);
            buffers.forward_step(&mut pass, (&dispatch, step), &inputs, left, y)?;
            if computes {
                sums.take(B::hidden_sums(&buffers.scratch));
            }
            self.stats.buffer_bytes = self.stats.buffer_bytes.max(buffers.bytes() as u64);
        }
        instances.lend(inputs.at_once, &mut buffers.x, &mut buffers.pre_activations);
        if !inputs.at_once {
            T::round(&self.backend, &buffers.sums, y)?;
        }
        kept.finish(&self.backend, buffers, &lists.gone, pairs)?;
        pass.lap(Stage::Compact);
        self.lists = lists;
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

    /// Bytes of rows that leave the rank: x out, with what is known of its key, and y back, with |h|^2; and the numbers of the rows that were chosen.
    fn record_forward(&mut self, table: &RoutingTable, stash: &Stash<B, T>, passes: u64) {
        let rows = rows_between_ranks(table);
        let (out, back) = rows_leaving(&rows, self.rank);
        let row = (self.config.shape.width * size_of::<T>()) as u64;
        let if_so = |so: bool, bytes: usize| if so { bytes as u64 } else { 0 };
        let with_norms = stash.pairs.norms_of() == Some(Row::Hidden);
        let norm = if_so(with_norms, size_of::<SquaredNorm>());
        let by_key = stash.instances.keeping() == Keeping::Largest || passes > 1;
        let keys = out * if_so(by_key, size_of::<EarlyKey>());
        self.stats.forward_bytes = keys + passes * (out * row + back * (row + norm));
        if let Some(retained) = stash.instances.retained() {
            let (chosen, _) = rows_leaving(&rows_between_ranks(retained), self.rank);
            self.stats.forward_bytes += chosen * size_of::<u32>() as u64;
        }
        self.stats.forward_rows = rows;
        let placement = self.experts.placement();
        self.stats.instances = (0..placement.ranks())
            .map(|rank| placement.local_experts(rank).len() as u32)
            .collect();
    }

    /// How many pairs of each expert run backward; where they do so at the instances of `table`, no more than fit there.
    fn quotas(&self, loads: &Loads, table: &RoutingTable) -> Result<Quotas, Error> {
        let Policy::Lrmoe(selecting) = &self.config.policy else {
            return Ok(Quotas::all(loads));
        };
        let unbounded = vec![u64::MAX; self.config.topology.ranks()];
        // Where all pairs run backward, it does not matter to memory which of them are selected.
        let bounded = !self.config.policy.runs_all_backward();
        let capacities = self.config.capacities.as_deref().filter(|_| bounded);
        let mut profile = (!self.profile.is_empty()).then_some(&self.profile);
        let recalibrated;
        if let (Some(seen), true) = (profile, selecting.recalibration > 0.0) {
            recalibrated = seen.recalibrated(loads.per_expert(), selecting.recalibration)?;
            profile = Some(&recalibrated);
        }
        let quotas = quotas(&QuotaRequest {
            loads,
            placement: self.experts.placement(),
            capacities: capacities.unwrap_or(&unbounded),
            retention: selecting.retention,
            policy: selecting.quotas,
            profile,
            floor: selecting.floor,
        })?;
        match capacities {
            Some(capacities) if self.config.stash != StashMode::Recompute => {
                let rows = table
                    .counts()
                    .map(|&rows| u64::from(rows))
                    .sum_axis(Axis(0));
                Ok(quotas.held(self.experts.placement(), &rows.to_vec(), capacities)?)
            }
            _ => Ok(quotas),
        }
    }
}
