//! Forward pass: loads, quotas, and every pair through its expert, chunk by chunk.

use lrmoe_comm::Collective;
use lrmoe_compact::gather;
use lrmoe_kernels::{Cpu, ExpertFfn};
use lrmoe_metric::{Pairs, SquaredNorm};
use lrmoe_plan::{Loads, QuotaRequest, Quotas, quotas};
use lrmoe_route::{RoutingTable, route};
use ndarray::{Array2, ArrayView2};

use super::dispatch::{Chunk, Dispatch, rows_between_ranks, rows_leaving};
use super::stats::{Clock, LayerStats, Stage};
use super::{Buffers, MoeLayer, PairStash, Stash, unmasked};
use crate::error::Error;
use crate::policy::{Policy, mask_beyond};

impl MoeLayer {
    /// y_t = sum over slots of p times the expert's output, for the tokens of this rank.
    ///
    /// `x`: `[tokens, width]`; `expert_ids`, `gate_weights`: `[tokens, top_k]`, id -1 = masked. `step`: `Some` number of the training step, which
    /// keeps what `backward` needs and lets the policy drop pairs; `None` to evaluate, where nothing is dropped or kept.
    ///
    /// # Errors
    /// Wrong shapes, expert ids out of range, a failed exchange; a plan that memory does not allow.
    pub fn forward<C: Collective>(
        &mut self,
        comm: &mut C,
        x: ArrayView2<'_, f32>,
        expert_ids: ArrayView2<'_, i32>,
        gate_weights: ArrayView2<'_, f32>,
        step: Option<u32>,
    ) -> Result<Array2<f32>, Error> {
        let mut clock = Clock::start();
        self.check_forward(x, expert_ids, gate_weights)?;
        let training = step.is_some();
        if training {
            self.stats = LayerStats::default();
        }
        comm.barrier()?;
        clock.lap(&mut self.stats.seconds, Stage::Wait);
        let given = Pairs::new(expert_ids, gate_weights, self.config.experts, 0)?;
        let (routed, first_pair) = self.gather_loads(comm, &given)?;
        clock.lap(&mut self.stats.seconds, Stage::Exchange);
        let (loads, expert_ids) = self.drop_pairs(&routed, expert_ids, training)?;
        let quotas = self.quotas(&loads)?;
        clock.lap(&mut self.stats.seconds, Stage::Plan);

        let table = route(
            loads.counts(),
            self.experts.placement(),
            &self.config.topology,
            None,
        )?;
        let pairs = Pairs::new(
            expert_ids.view(),
            gate_weights,
            self.config.experts,
            first_pair,
        )?;
        let mut dispatch = Dispatch::new(
            &table,
            self.rank,
            pairs.expert_ids(),
            &unmasked(&pairs),
            self.config.chunk_rows,
        )?;
        clock.lap(&mut self.stats.seconds, Stage::Route);

        let mut y = Array2::zeros(x.dim());
        let mut kept = self.pair_stash(training, pairs.len());
        while let Some(chunk) = dispatch.next_chunk()? {
            clock.lap(&mut self.stats.seconds, Stage::Route);
            self.forward_chunk(comm, &mut clock, &chunk, x, &pairs, &mut kept, &mut y)?;
        }
        if let Some(step) = step {
            self.stats.loads = routed.per_expert().to_vec();
            self.stats.dropped = routed.total() - loads.total();
            self.stats.quotas = quotas.as_slice().to_vec();
            self.record_forward(&table, kept.h_norms.is_some());
            let (x, gate_weights) = (x.to_owned(), gate_weights.to_owned());
            self.stash = Some(Stash {
                step,
                x,
                expert_ids,
                gate_weights,
                kept,
                first_pair,
                quotas,
            });
            self.stats.buffer_bytes = self.buffer_bytes();
        }
        self.loads = Some(routed);
        Ok(y)
    }

    fn check_forward(
        &self,
        x: ArrayView2<'_, f32>,
        expert_ids: ArrayView2<'_, i32>,
        gate_weights: ArrayView2<'_, f32>,
    ) -> Result<(), Error> {
        let (width, top_k) = (self.config.shape.width, self.config.top_k);
        let pairs = (x.nrows(), top_k);
        if x.ncols() == width && expert_ids.dim() == pairs && gate_weights.dim() == pairs {
            return Ok(());
        }
        Err(Error::ForwardShapes {
            x: x.dim(),
            expert_ids: expert_ids.dim(),
            gate_weights: gate_weights.dim(),
            width,
            top_k,
        })
    }

    /// What is left of the loads and of this rank's pairs, dropped ones masked, once the policy has had its say; in training alone.
    fn drop_pairs(
        &self,
        routed: &Loads,
        expert_ids: ArrayView2<'_, i32>,
        training: bool,
    ) -> Result<(Loads, Array2<i32>), Error> {
        let mut expert_ids = expert_ids.to_owned();
        let Some(symi) = self.symi.as_ref().filter(|_| training) else {
            return Ok((routed.clone(), expert_ids));
        };
        let loads = symi.kept(routed)?;
        let ids = expert_ids
            .as_slice_mut()
            .expect("checked for standard layout, so the copy has it too");
        mask_beyond(loads.counts().row(self.rank), ids);
        Ok((loads, expert_ids))
    }

    /// Room for what the backward pass will want of each pair.
    fn pair_stash(&self, training: bool, pairs: usize) -> PairStash {
        let policy = &self.config.policy;
        let keeps = |what: bool| training && what;
        PairStash {
            h_norms: keeps(policy.needs_h()).then(|| vec![SquaredNorm::default(); pairs]),
            outputs: keeps(policy.needs_outputs())
                .then(|| Array2::zeros((pairs, self.config.shape.width))),
        }
    }

    /// One chunk: rows to their instances, through the experts, and back into `y`, weighted; what is kept per pair beside it.
    #[expect(
        clippy::too_many_arguments,
        reason = "one stage of a loop body, its state spread over three owners"
    )]
    fn forward_chunk<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        chunk: &Chunk,
        x: ArrayView2<'_, f32>,
        pairs: &Pairs<'_>,
        kept: &mut PairStash,
        y: &mut Array2<f32>,
    ) -> Result<(), Error> {
        let (width, rows) = (self.config.shape.width, chunk.received_rows());
        let (buffers, seconds) = (&mut self.buffers, &mut self.stats.seconds);
        let tokens: Vec<u32> = chunk
            .pairs
            .iter()
            .map(|pair| pair / pairs.top_k() as u32)
            .collect();
        gather(x, &tokens, buffers.send.rows(tokens.len(), width))?;
        clock.lap(seconds, Stage::Compact);
        chunk.dispatch(comm, buffers.send.filled(), width, &mut buffers.receive)?;
        clock.lap(seconds, Stage::Exchange);
        chunk.grouping.group(
            buffers.receive.filled_rows(width),
            buffers.x.rows(rows, width),
        )?;
        clock.lap(seconds, Stage::Compact);
        Cpu.forward(
            &self.config.shape,
            &self.experts.weights(),
            chunk.grouping.offsets(),
            buffers.x.filled_rows(width),
            &mut self.workspace,
            buffers.out.rows(rows, width),
            kept.h_norms.as_ref().map(|_| buffers.norms.take(rows)),
        )?;
        clock.lap(seconds, Stage::Forward);
        chunk.grouping.ungroup(
            buffers.out.filled_rows(width),
            buffers.receive.rows(rows, width),
        )?;
        clock.lap(seconds, Stage::Compact);
        chunk.give_back(comm, buffers.receive.filled(), width, &mut buffers.send)?;
        clock.lap(seconds, Stage::Exchange);
        let p: Vec<f32> = chunk
            .pairs
            .iter()
            .map(|pair| pairs.gate_weights()[*pair as usize])
            .collect();
        self.scatter.add(
            buffers.send.filled_rows(width),
            &chunk.pairs,
            Some(&p),
            pairs.top_k(),
            y.view_mut(),
        )?;
        if let Some(outputs) = &mut kept.outputs {
            for (pair, out) in chunk
                .pairs
                .iter()
                .zip(buffers.send.filled_rows(width).rows())
            {
                outputs.row_mut(*pair as usize).assign(&out);
            }
        }
        clock.lap(seconds, Stage::Compact);
        if let Some(h_norms) = &mut kept.h_norms {
            return_norms(comm, chunk, buffers, h_norms)?;
            clock.lap(seconds, Stage::Exchange);
        }
        Ok(())
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
            Loads::new(all.slice(ndarray::s![.., ..experts]).to_owned())?,
            first_pair,
        ))
    }

    /// Bytes of rows that leave the rank: x out and y back, with |h|^2 beside each row that comes back.
    fn record_forward(&mut self, table: &RoutingTable, norms: bool) {
        let rows = rows_between_ranks(table);
        let (out, back) = rows_leaving(&rows, self.rank);
        let row = (self.config.shape.width * size_of::<f32>()) as u64;
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

/// Brings |h|^2 of a chunk's rows back to the ranks the pairs came from.
fn return_norms<C: Collective>(
    comm: &mut C,
    chunk: &Chunk,
    buffers: &mut Buffers,
    h_norms: &mut [SquaredNorm],
) -> Result<(), Error> {
    let rows = chunk.received_rows();
    let mut ungrouped = buffers.ungrouped_norms.rows(rows, 1);
    chunk
        .grouping
        .ungroup(buffers.norms.filled_rows(1), ungrouped.view_mut())?;
    for (words, norm) in buffers
        .words
        .take(2 * rows)
        .chunks_exact_mut(2)
        .zip(&ungrouped)
    {
        words.copy_from_slice(&[norm.significand.to_bits(), norm.scale]);
    }
    chunk.give_back(comm, buffers.words.filled(), 2, &mut buffers.received_words)?;
    for (pair, words) in chunk
        .pairs
        .iter()
        .zip(buffers.received_words.filled().chunks_exact(2))
    {
        h_norms[*pair as usize] = SquaredNorm {
            significand: f32::from_bits(words[0]),
            scale: words[1],
        };
    }
    Ok(())
}
