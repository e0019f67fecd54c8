//! `--oracle-every`: how near the gradients of a step are to those of all pairs. The run itself is not changed by it.

mod record;
mod summary;
mod sums;

use std::time::Instant;

use lrmoe_comm::Collective;
use lrmoe_metric::{Scores, Selection};
use ndarray::{Array2, ArrayView2};

use crate::config::TrainConfig;
use crate::error::Error;
use crate::layer::{Backend, LayerGradients, MoeLayer};

pub(super) use record::gather;
pub use record::{Agreement, OracleRecord};
pub use summary::{LayerSummary, OracleSummary};
use sums::{Spread, Sums};

/// Draws that the oracle looks at in a step, counted from 1; 0 if it is not asked.
pub(super) fn draws(config: &TrainConfig, step: u32) -> u32 {
    let every = config.oracle_every;
    if every > 0 && step.is_multiple_of(every) {
        config.oracle_draws
    } else {
        0
    }
}

/// The gradients of one layer's step as one rank has them: the full ones, and how those of the step compare.
#[derive(Debug)]
pub(super) struct Oracle {
    full: LayerGradients,
    /// Of dx, dp and the shard over draws, where they are repeated.
    spread: [Spread; 3],
    repeats: bool,
    dx: Sums,
    dp: Sums,
    /// Sums of the scores of an expert's pairs, all and retained.
    scores: Option<Vec<[f64; 2]>>,
    /// What it took.
    pub(super) seconds: f64,
}

impl Oracle {
    /// Between a layer's forward and backward pass: the full gradients, and those of `draws` draws but the step's own.
    pub(super) fn ahead<B: Backend, C: Collective>(
        layer: &mut MoeLayer<B>,
        comm: &mut C,
        dy: ArrayView2<'_, f32>,
        draws: u32,
    ) -> Result<Self, Error> {
        let started = Instant::now();
        let full = layer.full_gradient(comm, dy)?;
        let mut oracle = Self {
            full,
            spread: Default::default(),
            repeats: draws > 1,
            dx: Sums::default(),
            dp: Sums::default(),
            scores: None,
            seconds: 0.0,
        };
        for draw in 1..draws {
            let LayerGradients { dx, dp, shard } = layer.redrawn_gradient(comm, dy, draw)?;
            let [of_dx, of_dp, of_shard] = &mut oracle.spread;
            of_dx.take(dx.iter());
            of_dp.take(dp.iter());
            of_shard.take(shard.iter());
        }
        oracle.seconds = started.elapsed().as_secs_f64();
        Ok(oracle)
    }

    /// Takes in the step's own gradients of the layer's inputs, and which pairs it retained by their scores.
    pub(super) fn take_backward(
        &mut self,
        [dx, dp]: [&Array2<f32>; 2],
        expert_ids: &Array2<i32>,
        experts: usize,
        judged: Option<(&Scores, &Selection)>,
    ) {
        let started = Instant::now();
        let [of_dx, of_dp, _] = &mut self.spread;
        if self.repeats {
            of_dx.take(dx.iter());
            of_dp.take(dp.iter());
        }
        self.dx = Sums::of(dx, &self.full.dx, of_dx.part(0..dx.len()));
        self.dp = Sums::of(dp, &self.full.dp, of_dp.part(0..dp.len()));
        self.scores = judged.map(|(scores, retained)| {
            let of_pair = scores.squared().iter().map(|squared| f64::from(*squared));
            let of_pair: Vec<f64> = of_pair.map(f64::sqrt).collect();
            let mut sums = vec![[0.0; 2]; experts];
            let ids: Vec<i32> = expert_ids.iter().copied().collect();
            for (id, score) in ids.iter().zip(&of_pair).filter(|(id, _)| **id >= 0) {
                sums[*id as usize][0] += score;
            }
            for pair in &retained.pairs {
                sums[ids[*pair as usize] as usize][1] += of_pair[*pair as usize];
            }
            sums
        });
        self.seconds += started.elapsed().as_secs_f64();
    }

    /// This rank's figures once the step's gradients have come to their owners.
    fn figures<B: Backend>(mut self, layer: &MoeLayer<B>) -> Figures {
        let shard = layer.shard_gradient();
        let [.., spread] = &mut self.spread;
        if self.repeats {
            spread.take(shard.iter());
        }
        let mut experts = vec![Sums::default(); layer.config().experts];
        let mut start = 0;
        for (expert, length) in layer.shard_experts() {
            let part = start..start + length;
            experts[expert] += Sums::of(
                &shard[part.clone()],
                &self.full.shard[part.clone()],
                spread.part(part),
            );
            start += length;
        }
        Figures {
            dx: self.dx,
            dp: self.dp,
            experts,
            scores: self.scores,
        }
    }
}

/// Sums of one layer, on one rank or over all.
#[derive(Debug)]
struct Figures {
    dx: Sums,
    dp: Sums,
    /// Of the weight gradients of each expert.
    experts: Vec<Sums>,
    /// Of the scores of each expert's pairs, all and retained.
    scores: Option<Vec<[f64; 2]>>,
}
