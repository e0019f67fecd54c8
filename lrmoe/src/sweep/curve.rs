//! What the report needs of one run.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::train::{LayerSummary, MODELLED_AT, OracleSummary, StepRecord};

/// Sizes at which time is modelled: the run's own, then those of [`MODELLED_AT`].
pub(super) const SIZES: usize = 1 + MODELLED_AT.len();

/// A run's figures up to one of its evaluations, sums over the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Passed {
    /// Steps done.
    pub(super) steps: f64,
    /// Held-out loss, nats per byte.
    pub(super) loss: f64,
    pub(super) moe_seconds: f64,
    /// On the modelled cluster, at the sizes of [`SIZES`].
    pub(super) modelled: [f64; SIZES],
    /// Between ranks backward.
    pub(super) backward_bytes: f64,
    /// Between ranks in all.
    pub(super) bytes: f64,
}

/// A finished run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Its evaluations in order; the last is that of its end.
    pub(super) passed: Vec<Passed>,
    /// Wall time of its steps.
    pub(super) seconds: f64,
    pub(super) peak_buffer_bytes: u64,
    /// Pairs that ran backward, over all pairs.
    pub(super) retention: f64,
    /// Pairs dropped in forward and backward, over all pairs.
    pub(super) dropped: f64,
    /// Gradients against those of all pairs, layer by layer; empty where the oracle was not asked.
    pub(super) quality: Vec<LayerSummary>,
}

impl Curve {
    pub(super) fn of(records: &[StepRecord]) -> Self {
        let mut curve = Self::default();
        let mut sum = Passed::default();
        let [mut routed, mut retained, mut dropped] = [0u64; 3];
        for record in records {
            sum.steps = f64::from(record.step);
            sum.moe_seconds += record.moe_seconds;
            let others = MODELLED_AT.iter();
            let others = others.map(|name| record.modelled_moe_seconds_at.get(*name));
            let modelled = [Some(&record.modelled_moe_seconds)]
                .into_iter()
                .chain(others);
            for (sum, seconds) in sum.modelled.iter_mut().zip(modelled) {
                *sum += seconds.copied().unwrap_or(f64::NAN);
            }
            sum.backward_bytes += record.backward_bytes as f64;
            let bytes = record.forward_bytes + record.backward_bytes + record.update_bytes;
            sum.bytes += bytes as f64;
            curve.seconds += record.seconds;
            curve.peak_buffer_bytes = curve.peak_buffer_bytes.max(record.buffer_bytes);
            for layer in &record.layers {
                routed += layer.load.iter().map(|load| u64::from(*load)).sum::<u64>();
                retained += layer.retained;
                dropped += u64::from(layer.dropped);
            }
            if let Some(loss) = record.held_out_loss {
                let loss = f64::from(loss);
                curve.passed.push(Passed { loss, ..sum });
            }
        }
        let share = |pairs: u64| pairs as f64 / routed.max(1) as f64;
        (curve.retention, curve.dropped) = (share(retained), share(dropped));
        let quality = OracleSummary::new(records).map(|summary| summary.layers);
        curve.quality = quality.unwrap_or_default();
        curve
    }

    /// The figures at the end of the run.
    pub(super) fn end(&self) -> Passed {
        self.passed.last().copied().unwrap_or_default()
    }

    /// The figures when the held-out loss first came down to `target`, between two evaluations in proportion; `None` if it never did.
    pub(super) fn reached(&self, target: f64) -> Option<Passed> {
        let index = self.passed.iter().position(|at| at.loss <= target)?;
        let after = self.passed[index];
        let Some(before) = index.checked_sub(1).map(|index| self.passed[index]) else {
            return Some(after);
        };
        let share = (before.loss - target) / (before.loss - after.loss);
        let between = |of: fn(&Passed) -> f64| of(&before) + share * (of(&after) - of(&before));
        Some(Passed {
            steps: between(|at| at.steps),
            loss: target,
            moe_seconds: between(|at| at.moe_seconds),
            modelled: std::array::from_fn(|size| {
                before.modelled[size] + share * (after.modelled[size] - before.modelled[size])
            }),
            backward_bytes: between(|at| at.backward_bytes),
            bytes: between(|at| at.bytes),
        })
    }
}

/// The records of the run in a folder, up to the first line that is none: that of a run which was killed, or goes on.
pub(super) fn read_records(folder: &Path) -> Result<Vec<StepRecord>, Error> {
    let path = folder.join("steps.jsonl");
    let text = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        read => read.map_err(Error::io(&path))?,
    };
    let records = text.lines().map(serde_json::from_str::<StepRecord>);
    let numbered = (1..).zip(records.map_while(Result::ok));
    Ok(numbered
        .take_while(|(step, record)| record.step == *step)
        .map(|(_, record)| record)
        .collect())
}
