//! The retention of the layers, step by step.

use std::time::Instant;

use lrmoe_comm::{Collective, Reduction};
use ndarray::{ArrayView2, s};

use super::record::StepRecord;
use crate::config::{RetentionSchedule, TrainConfig};
use crate::error::Error;
use crate::layer::{Backend, MoeLayer};
use crate::policy::Policy;

/// Bounds of an adaptive retention: nothing can be learned of the variance where nothing or all is selected.
const ADAPTIVE: (f64, f64) = (0.02, 0.95);

/// Sets the retention of each layer before each step.
#[derive(Debug)]
pub(super) struct RetentionControl {
    schedule: RetentionSchedule,
    steps: u32,
    /// Of the options, `[layers]`; `None` for a policy without one.
    given: Option<Vec<f64>>,
    /// Adaptive: estimate of (variance of the selection at half retention) / (variance of the minibatch), `[layers]`; 0 before the first.
    noise: Vec<f32>,
}

/// Squared errors of the weight gradient of a layer in one step, summed over its components.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Noise {
    /// Of the selection.
    pub(super) selection: f32,
    /// Of the minibatch.
    pub(super) batch: f32,
}

impl Noise {
    /// Of the layer whose backward pass is to come, with dL/dy `[tokens, width]`, over this rank's share of the parameters; and the seconds it took. The
    /// error of the selection is that of another draw against the gradient of all pairs; that of the minibatch is the distance between the gradients of
    /// its halves, on every rank the first and the second half of its tokens: as far from each other as batches are from their mean.
    pub(super) fn measure<B: Backend, C: Collective>(
        layer: &mut MoeLayer<B>,
        comm: &mut C,
        dy: ArrayView2<'_, f32>,
    ) -> Result<(Self, f64), Error> {
        let started = Instant::now();
        let all = layer.full_gradient(comm, dy)?.shard;
        let drawn = layer.redrawn_gradient(comm, dy, 1)?.shard;
        let mut first = dy.to_owned();
        first.slice_mut(s![dy.nrows() / 2.., ..]).fill(0.0);
        let first = layer.full_gradient(comm, first.view())?.shard;
        let square = |x: f32| f64::from(x) * f64::from(x);
        let selection = drawn
            .iter()
            .zip(&all)
            .map(|(drawn, all)| square(drawn - all));
        let batch = first
            .iter()
            .zip(&all)
            .map(|(first, all)| square(2.0 * first - all));
        let noise = Self {
            selection: selection.sum::<f64>() as f32,
            batch: batch.sum::<f64>() as f32,
        };
        Ok((noise, started.elapsed().as_secs_f64()))
    }
}

impl RetentionControl {
    /// `noise`: state of the run that is gone on with, empty for a new one.
    pub(super) fn new(config: &TrainConfig, noise: &[f32]) -> Self {
        let layers = config.model.layers;
        let given = match &config.policy {
            Policy::Lrmoe(selecting) => Some(match &config.layer_retention {
                Some(layers) => layers.clone(),
                None => vec![selecting.retention; layers],
            }),
            _ => None,
        };
        let mut state = noise.to_vec();
        state.resize(layers, 0.0);
        Self {
            schedule: config.retention_schedule,
            steps: config.steps,
            given,
            noise: state,
        }
    }

    /// Retention of each layer in a step, counted from 0.
    pub(super) fn of_step(&self, step: u32) -> Option<Vec<f64>> {
        let given = self.given.as_ref()?;
        Some(match self.schedule {
            RetentionSchedule::Constant => given.clone(),
            RetentionSchedule::Linear { from, to } => {
                let last = self.steps.saturating_sub(1).max(1);
                let part = f64::from(step.min(last)) / f64::from(last);
                vec![from + part * (to - from); given.len()]
            }
            RetentionSchedule::Warmup { steps } if step < steps => vec![1.0; given.len()],
            RetentionSchedule::Warmup { .. } => given.clone(),
            RetentionSchedule::Adaptive { share, .. } => {
                let of_layer = |(&given, &noise): (&f64, &f32)| match noise {
                    // The variance of a selection goes with 1 / retention - 1.
                    noise if noise > 0.0 => 1.0 / (1.0 + share / f64::from(noise)),
                    _ => given,
                };
                let layers = given.iter().zip(&self.noise).map(of_layer);
                layers.map(|r| r.clamp(ADAPTIVE.0, ADAPTIVE.1)).collect()
            }
        })
    }

    /// Whether the noise of a step is to be measured.
    pub(super) fn measures(&self, step: u32) -> bool {
        match self.schedule {
            RetentionSchedule::Adaptive { every, .. } => {
                self.given.is_some() && step.is_multiple_of(every)
            }
            _ => false,
        }
    }

    /// Records the retention of a step, and takes in what its layers have measured, if it does; `measured`: of this rank, with the seconds it took,
    /// which count as time in the layers. Its traffic counts in `sent` alone.
    pub(super) fn settle<C: Collective>(
        &mut self,
        comm: &mut C,
        step: u32,
        measured: &[(Noise, f64)],
        record: &mut StepRecord,
    ) -> Result<(), Error> {
        let Some(retention) = self.of_step(step) else {
            return Ok(());
        };
        for (layer, &retention) in record.layers.iter_mut().zip(&retention) {
            layer.retention = Some(retention);
        }
        if !self.measures(step) {
            return Ok(());
        }
        let numbers = measured.iter().flat_map(|(n, _)| [n.selection, n.batch]);
        let mut sums: Vec<f32> = numbers.collect();
        let mut slowest = [measured.iter().map(|(_, seconds)| seconds).sum::<f64>() as f32];
        comm.all_reduce(&mut sums, Reduction::Sum)?;
        comm.all_reduce(&mut slowest, Reduction::Max)?;
        record.moe_seconds += f64::from(slowest[0]);
        for ((layer, sums), (state, retention)) in (record.layers.iter_mut())
            .zip(sums.as_chunks::<2>().0)
            .zip(self.noise.iter_mut().zip(retention))
        {
            let variance = f64::from(sums[0]) / f64::from(sums[1]);
            layer.selection_variance = variance.is_finite().then_some(variance);
            // A layer without gradient says nothing. Half of an estimate is what was known before.
            let found = (variance * retention / (1.0 - retention)) as f32;
            if found.is_finite() && found > 0.0 {
                *state = match *state {
                    known if known > 0.0 => 0.5 * (known + found),
                    _ => found,
                };
            }
        }
        Ok(())
    }

    /// What a resumed run needs; empty where there is nothing.
    pub(super) fn state(&self) -> &[f32] {
        match self.schedule {
            RetentionSchedule::Adaptive { .. } => &self.noise,
            _ => &[],
        }
    }
}
