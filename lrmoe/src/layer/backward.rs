//! Backward pass: score, select, and the retained pairs through their experts.

use lrmoe_comm::Collective;
use lrmoe_compact::gather;
use lrmoe_kernels::{BackwardRows, Cpu, ExpertFfn};
use lrmoe_metric::{Draw, Pairs, Selection, SquaredNorm, score, select, squared_norms};
use lrmoe_route::{RoutingTable, route};
use ndarray::{Array2, ArrayView2};

use super::dispatch::{Dispatch, rows_between_ranks, rows_leaving};
use super::stats::{Clock, Stage};
use super::{MoeLayer, Stash};
use crate::error::Error;
use crate::exchange::Over;
use crate::policy::{Policy, Selecting};

impl MoeLayer {
    /// `(dx [tokens, width], dgate_weights [tokens, top_k])` of the last training forward pass, from dL/dy; leaves the instances'
    /// weight gradients for `reduce_gradients`. Pairs that are not retained contribute nothing; a retained pair's weight multiplies its
    /// terms in the weight gradients and in dgate_weights, not in dx.
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
            stash.h_norms.as_deref(),
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
        clock.lap(&mut self.stats.seconds, Stage::Select);
        Ok(selection)
    }

    /// Routing table of the retained pairs of all ranks.
    fn route_retained<C: Collective>(
        &self,
        comm: &mut C,
        pairs: &Pairs<'_>,
        retained: &[u32],
    ) -> Result<RoutingTable, Error> {
        let mut mine = vec![0; self.config.experts];
        for pair in retained {
            mine[pairs.expert_ids()[*pair as usize] as usize] += 1;
        }
        let mut all = vec![0; mine.len() * comm.ranks()];
        comm.all_gather(&mine, &mut all)?;
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
        let table = self.route_retained(comm, pairs, &selection.pairs)?;
        let chunk =
            Dispatch::single_chunk(&table, self.rank, pairs.expert_ids(), &selection.pairs)?;
        clock.lap(&mut self.stats.seconds, Stage::Route);

        let (width, rows, top_k) = (
            self.config.shape.width,
            chunk.received_rows(),
            pairs.top_k(),
        );
        let weights = per_pair(selection, pairs.len());
        let (buffers, seconds) = (&mut self.buffers, &mut self.stats.seconds);
        let tokens: Vec<u32> = chunk.pairs.iter().map(|pair| pair / top_k as u32).collect();
        for (source, grouped) in [(stash.x.view(), &mut buffers.x), (dy, &mut buffers.dy)] {
            gather(source, &tokens, buffers.send.rows(tokens.len(), width))?;
            clock.lap(seconds, Stage::Compact);
            chunk.dispatch(comm, buffers.send.filled(), width, &mut buffers.receive)?;
            clock.lap(seconds, Stage::Exchange);
            chunk.grouping.group(
                buffers.receive.filled_rows(width),
                grouped.rows(rows, width),
            )?;
            clock.lap(seconds, Stage::Compact);
        }
        for (scalars, pair) in buffers
            .scalars
            .take(2 * tokens.len())
            .chunks_exact_mut(2)
            .zip(&chunk.pairs)
        {
            scalars.copy_from_slice(&[
                pairs.gate_weights()[*pair as usize],
                weights[*pair as usize],
            ]);
        }
        chunk.dispatch(
            comm,
            buffers.scalars.filled(),
            2,
            &mut buffers.received_scalars,
        )?;
        clock.lap(seconds, Stage::Exchange);
        chunk.grouping.group(
            buffers.received_scalars.filled_rows(2),
            buffers.scalars.rows(rows, 2),
        )?;
        let column = |i| buffers.scalars.filled_rows(2).column(i).to_vec();
        let (gate_weights, row_weights) = (column(0), column(1));
        clock.lap(seconds, Stage::Compact);

        let (expert_weights, mut gradients) = self.experts.weights_and_gradients();
        let backward_rows = BackwardRows {
            x: buffers.x.filled_rows(width),
            dy: buffers.dy.filled_rows(width),
            gate_weights: &gate_weights,
            weights: &row_weights,
        };
        Cpu.backward(
            &self.config.shape,
            &expert_weights,
            chunk.grouping.offsets(),
            &backward_rows,
            &mut self.workspace,
            buffers.out.rows(rows, width),
            buffers.scalars.take(rows),
            &mut gradients,
        )?;
        clock.lap(seconds, Stage::Backward);

        chunk.grouping.ungroup(
            buffers.out.filled_rows(width),
            buffers.receive.rows(rows, width),
        )?;
        chunk.grouping.ungroup(
            buffers.scalars.filled_rows(1),
            buffers.received_scalars.rows(rows, 1),
        )?;
        clock.lap(seconds, Stage::Compact);
        chunk.give_back(comm, buffers.receive.filled(), width, &mut buffers.send)?;
        chunk.give_back(
            comm,
            buffers.received_scalars.filled(),
            1,
            &mut buffers.scalars,
        )?;
        clock.lap(seconds, Stage::Exchange);
        let (mut dx, mut dp) = (
            Array2::zeros(stash.x.dim()),
            Array2::zeros(stash.gate_weights.dim()),
        );
        self.scatter.add(
            buffers.send.filled_rows(width),
            &chunk.pairs,
            None,
            top_k,
            dx.view_mut(),
        )?;
        let flat_dp = dp.as_slice_mut().expect("an owned array is contiguous");
        for (pair, value) in chunk.pairs.iter().zip(buffers.scalars.filled()) {
            flat_dp[*pair as usize] = weights[*pair as usize] * value;
        }
        clock.lap(seconds, Stage::Compact);
        self.record_backward(&table);
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

/// Every pair that is not masked, at weight 1.
fn everything(pairs: &Pairs<'_>) -> Selection {
    let kept: Vec<u32> = (0..pairs.len() as u32)
        .filter(|pair| pairs.expert_ids()[*pair as usize] >= 0)
        .collect();
    Selection {
        weights: vec![1.0; kept.len()],
        pairs: kept,
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
