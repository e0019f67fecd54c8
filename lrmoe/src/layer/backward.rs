//! Backward pass: score, select, and the retained pairs through their experts.

use lrmoe_comm::Collective;
use lrmoe_compact::gather;
use lrmoe_kernels::{BackwardRows, Cpu, ExpertFfn};
use lrmoe_metric::{Draw, Pairs, Selection, SquaredNorm, score, select, squared_norms};
use lrmoe_route::{RoutingTable, route};
use ndarray::{Array2, ArrayView2};

use super::dispatch::{Chunk, Dispatch, rows_between_ranks, rows_leaving};
use super::stats::{Clock, Stage};
use super::{MoeLayer, Stash, unmasked};
use crate::error::Error;
use crate::exchange::Over;
use crate::policy::{DxWeight, Policy, Selecting};

impl MoeLayer {
    /// `(dx [tokens, width], dgate_weights [tokens, top_k])` of the last training forward pass, from dL/dy; leaves the instances'
    /// weight gradients for `reduce_gradients`. A pair that is not retained adds nothing to them, a retained one adds its term times its
    /// selection weight; `Selecting::dx_weight` and `Selecting::router_gradient` make exceptions for dx and dgate_weights.
    ///
    /// # Errors
    /// `Error::NoForward` without a training forward pass before it, a wrong shape, a NaN score, more rows than memory allows, a failed exchange.
    pub fn backward<C: Collective>(
        &mut self,
        comm: &mut C,
        dy: ArrayView2<'_, f32>,
    ) -> Result<(Array2<f32>, Array2<f32>), Error> {
        let stash = self.stash.take().ok_or(Error::NoForward)?;
        if dy.dim() != stash.x.dim() {
            return Err(Error::BackwardShape {
                dy: dy.dim(),
                expected: stash.x.dim(),
            });
        }
        let mut clock = Clock::start();
        comm.barrier()?;
        clock.lap(&mut self.stats.seconds, Stage::Wait);
        let pairs = Pairs::new(
            stash.expert_ids.view(),
            stash.gate_weights.view(),
            self.config.experts,
            stash.first_pair,
        )?;
        let selection = match self.config.policy {
            Policy::Lrmoe(selecting) => self.select(comm, &stash, &pairs, dy, selecting)?,
            _ => everything(&pairs),
        };
        let gradients = self.backward_retained(comm, &stash, &pairs, dy, &selection)?;
        self.selection = Some(selection);
        Ok(gradients)
    }

    fn select<C: Collective>(
        &mut self,
        comm: &mut C,
        stash: &Stash,
        pairs: &Pairs<'_>,
        dy: ArrayView2<'_, f32>,
        selecting: Selecting,
    ) -> Result<Selection, Error> {
        let mut clock = Clock::start();
        let mut dy_norms = vec![
            SquaredNorm::default();
            if selecting.score.needs_dy() {
                pairs.tokens()
            } else {
                0
            }
        ];
        if selecting.score.needs_dy() {
            squared_norms(dy, &mut dy_norms)?;
        }
        let dy_norms = selecting.score.needs_dy().then_some(dy_norms.as_slice());
        let draw = Draw {
            seed: self.config.seed,
            step: stash.step,
            layer: self.config.layer,
        };
        let scores = score(
            selecting.score,
            pairs,
            dy_norms,
            stash.kept.h_norms.as_deref(),
            &mut Over(comm),
        )?;
        self.profile
            .observe(pairs, &scores, self.config.profile_decay, &mut Over(comm))?;
        clock.lap(&mut self.stats.seconds, Stage::Score);
        let selection = select(
            selecting.method,
            pairs,
            &scores,
            stash.quotas.as_slice(),
            draw,
            &mut Over(comm),
        )?;
        self.scores = self.keeps_scores.then_some(scores);
        clock.lap(&mut self.stats.seconds, Stage::Select);
        Ok(selection)
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

    fn backward_retained<C: Collective>(
        &mut self,
        comm: &mut C,
        stash: &Stash,
        pairs: &Pairs<'_>,
        dy: ArrayView2<'_, f32>,
        selection: &Selection,
    ) -> Result<(Array2<f32>, Array2<f32>), Error> {
        let mut clock = Clock::start();
        let table = self.route_retained(comm, &mut clock, pairs, &selection.pairs)?;
        let chunk =
            Dispatch::single_chunk(&table, self.rank, pairs.expert_ids(), &selection.pairs)?;
        clock.lap(&mut self.stats.seconds, Stage::Route);
        let weights = per_pair(selection, pairs.len());
        let scalars = self.send_out(comm, &mut clock, &chunk, stash, pairs, dy, &weights)?;
        self.run_experts(&chunk, &scalars)?;
        clock.lap(&mut self.stats.seconds, Stage::Backward);
        let gradients = self.bring_back(comm, &mut clock, &chunk, stash, dy, &weights)?;
        self.record_backward(&table);
        Ok(gradients)
    }

    /// Rows of x and dy to their instances, grouped in `buffers.x` and `buffers.dy`; returns gate weights and selection weights of the rows.
    #[expect(
        clippy::too_many_arguments,
        reason = "one stage of the pass, its inputs spread over their owners"
    )]
    fn send_out<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        chunk: &Chunk,
        stash: &Stash,
        pairs: &Pairs<'_>,
        dy: ArrayView2<'_, f32>,
        weights: &[f32],
    ) -> Result<[Vec<f32>; 2], Error> {
        let (width, rows) = (self.config.shape.width, chunk.received_rows());
        let (buffers, seconds) = (&mut self.buffers, &mut self.stats.seconds);
        let token = |pair: &u32| pair / pairs.top_k() as u32;
        let tokens: Vec<u32> = chunk.pairs.iter().map(token).collect();
        for (source, grouped) in [(stash.x.view(), &mut buffers.x), (dy, &mut buffers.dy)] {
            gather(source, &tokens, buffers.send.rows(tokens.len(), width))?;
            clock.lap(seconds, Stage::Compact);
            chunk.dispatch(comm, buffers.send.filled(), width, &mut buffers.receive)?;
            clock.lap(seconds, Stage::Exchange);
            let received = buffers.receive.filled_rows(width);
            chunk.grouping.group(received, grouped.rows(rows, width))?;
            clock.lap(seconds, Stage::Compact);
        }
        let scalars = buffers.scalars.take(2 * tokens.len());
        for (scalars, pair) in scalars.chunks_exact_mut(2).zip(&chunk.pairs) {
            let pair = *pair as usize;
            scalars.copy_from_slice(&[pairs.gate_weights()[pair], weights[pair]]);
        }
        let received = &mut buffers.received_scalars;
        chunk.dispatch(comm, buffers.scalars.filled(), 2, received)?;
        clock.lap(seconds, Stage::Exchange);
        let received = buffers.received_scalars.filled_rows(2);
        chunk
            .grouping
            .group(received, buffers.scalars.rows(rows, 2))?;
        let column = |i| buffers.scalars.filled_rows(2).column(i).to_vec();
        clock.lap(seconds, Stage::Compact);
        Ok([column(0), column(1)])
    }

    /// The experts' backward pass over the grouped rows: dx in `buffers.out`, dp in `buffers.scalars`.
    fn run_experts(
        &mut self,
        chunk: &Chunk,
        [gate_weights, weights]: &[Vec<f32>; 2],
    ) -> Result<(), Error> {
        let (width, rows) = (self.config.shape.width, chunk.received_rows());
        let (expert_weights, mut gradients) = self.experts.weights_and_gradients();
        let buffers = &mut self.buffers;
        let backward_rows = BackwardRows {
            x: buffers.x.filled_rows(width),
            dy: buffers.dy.filled_rows(width),
            gate_weights,
            weights,
        };
        Ok(Cpu.backward(
            &self.config.shape,
            &expert_weights,
            chunk.grouping.offsets(),
            &backward_rows,
            &mut self.workspace,
            buffers.out.rows(rows, width),
            buffers.scalars.take(rows),
            &mut gradients,
            &vec![false; chunk.grouping.offsets().len() - 1],
        )?)
    }

    /// dx and dp back to the ranks that the pairs came from, added up per token.
    fn bring_back<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        chunk: &Chunk,
        stash: &Stash,
        dy: ArrayView2<'_, f32>,
        weights: &[f32],
    ) -> Result<(Array2<f32>, Array2<f32>), Error> {
        let (width, rows) = (self.config.shape.width, chunk.received_rows());
        let (buffers, seconds) = (&mut self.buffers, &mut self.stats.seconds);
        let (out, back) = (
            buffers.out.filled_rows(width),
            buffers.receive.rows(rows, width),
        );
        chunk.grouping.ungroup(out, back)?;
        let back = buffers.received_scalars.rows(rows, 1);
        chunk
            .grouping
            .ungroup(buffers.scalars.filled_rows(1), back)?;
        clock.lap(seconds, Stage::Compact);
        chunk.give_back(comm, buffers.receive.filled(), width, &mut buffers.send)?;
        let scalars = buffers.received_scalars.filled();
        chunk.give_back(comm, scalars, 1, &mut buffers.scalars)?;
        clock.lap(seconds, Stage::Exchange);

        let top_k = stash.gate_weights.ncols();
        let row_weight = |pair: &u32| weights[*pair as usize];
        let dx_weights: Option<Vec<f32>> = (self.config.policy.dx_weight() == DxWeight::Selection)
            .then(|| chunk.pairs.iter().map(row_weight).collect());
        let mut dx = Array2::zeros(stash.x.dim());
        let back = buffers.send.filled_rows(width);
        self.scatter.add(
            back,
            &chunk.pairs,
            dx_weights.as_deref(),
            top_k,
            dx.view_mut(),
        )?;
        let mut dp = Array2::zeros(stash.gate_weights.dim());
        match &stash.kept.outputs {
            Some(outputs) => all_dots(dy, outputs, &stash.expert_ids, &mut dp),
            None => {
                for (pair, value) in chunk.pairs.iter().zip(buffers.scalars.filled()) {
                    let pair = *pair as usize;
                    dp[[pair / top_k, pair % top_k]] = weights[pair] * value;
                }
            }
        }
        clock.lap(seconds, Stage::Compact);
        Ok((dx, dp))
    }

    /// Bytes of rows that leave the rank: x, dy, p and the weight out, dx and dp back.
    fn record_backward(&mut self, table: &RoutingTable) {
        let rows = rows_between_ranks(table);
        let (out, back) = rows_leaving(&rows, self.rank);
        let (row, scalar) = (
            (self.config.shape.width * size_of::<f32>()) as u64,
            size_of::<f32>() as u64,
        );
        self.stats.backward_bytes = out * (2 * row + 2 * scalar) + back * (row + scalar);
        self.stats.backward_rows = rows;
        self.stats.buffer_bytes = self.stats.buffer_bytes.max(self.buffer_bytes());
    }
}

/// dp = <dy, expert output> of every pair that is not masked.
fn all_dots(
    dy: ArrayView2<'_, f32>,
    outputs: &Array2<f32>,
    expert_ids: &Array2<i32>,
    dp: &mut Array2<f32>,
) {
    let top_k = expert_ids.ncols();
    for ((token, slot), dp) in dp.indexed_iter_mut() {
        if expert_ids[[token, slot]] >= 0 {
            *dp = dy.row(token).dot(&outputs.row(token * top_k + slot));
        }
    }
}

/// Every pair that is not masked, at weight 1.
fn everything(pairs: &Pairs<'_>) -> Selection {
    let pairs = unmasked(pairs);
    Selection {
        weights: vec![1.0; pairs.len()],
        pairs,
    }
}

/// Weights by local pair id, 0 where a pair is not retained.
fn per_pair(selection: &Selection, pairs: usize) -> Vec<f32> {
    let mut weights = vec![0.0; pairs];
    for (pair, weight) in selection.pairs.iter().zip(&selection.weights) {
        weights[*pair as usize] = *weight;
    }
    weights
}
