//! The retention of the layers, step by step.

use crate::config::{RetentionSchedule, TrainConfig};
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

    /// Takes in what was measured of each layer in a step, at the retention it had. Half of an estimate is what was known before.
    pub(super) fn observe(&mut self, retention: &[f64], measured: &[Noise]) {
        for ((state, &retention), noise) in self.noise.iter_mut().zip(retention).zip(measured) {
            let at_half = f64::from(noise.selection) * retention / (1.0 - retention);
            let found = (at_half / f64::from(noise.batch)) as f32;
            // A layer without gradient says nothing.
            if found.is_finite() && found > 0.0 {
                *state = if *state > 0.0 {
                    0.5 * (*state + found)
                } else {
                    found
                };
            }
        }
    }

    /// What a resumed run needs; empty where there is nothing.
    pub(super) fn state(&self) -> &[f32] {
        match self.schedule {
            RetentionSchedule::Adaptive { .. } => &self.noise,
            _ => &[],
        }
    }
}
