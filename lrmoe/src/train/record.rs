//! What a training step reports: one JSON line in `steps.jsonl`.

use std::collections::BTreeMap;

use lrmoe_comm::Collective;
use ndarray::Array2;
use serde::{Deserialize, Serialize};

use super::modelled::{MODELLED_AT, Modelling};
use super::oracle::OracleRecord;
use super::traffic::LinkRecord;
use crate::config::TrainConfig;
use crate::error::Error;
use crate::layer::{LayerStats, Seconds, Stage, imbalance};

/// One step over all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Steps done, counting this one.
    pub step: u32,
    /// Mean loss of the global batch, nats per byte.
    pub loss: f32,
    /// Mean loss on held-out text after this step, where it was measured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub held_out_loss: Option<f32>,
    /// Learning rate of the step.
    pub learning_rate: f32,
    /// Norm of the whole gradient before clipping.
    pub gradient_norm: f32,
    /// Wall time of the step, evaluation and oracle not included.
    pub seconds: f64,
    /// Tokens of the global batch per second.
    pub tokens_per_second: f64,
    /// Pairs that ran backward over routed pairs, all layers together.
    pub retention: f64,
    /// Measured wall time in the MoE layers on the slowest rank.
    pub moe_seconds: f64,
    /// The same work on the modelled cluster.
    pub modelled_moe_seconds: f64,
    /// Its loads on the modelled cluster with layers of the sizes of other models ([`MODELLED_AT`]), in bf16, and with 4,096 tokens on each rank.
    #[serde(default)]
    pub modelled_moe_seconds_at: BTreeMap<String, f64>,
    /// Measured seconds per stage, all layers, the slowest rank of each stage.
    pub stage_seconds: BTreeMap<String, f64>,
    /// Bytes sent from rank to rank forward, all layers and ranks.
    pub forward_bytes: u64,
    /// Bytes sent from rank to rank backward.
    pub backward_bytes: u64,
    /// Bytes sent from rank to rank for gradient reduction and weight delivery.
    pub update_bytes: u64,
    /// What all ranks sent in this step, counted where it was sent: by collective, then to itself, within nodes and between them.
    #[serde(default)]
    pub sent: BTreeMap<String, LinkRecord>,
    /// Token buffers of all layers on the rank that holds most: rows in exchange, workspaces, stash.
    pub buffer_bytes: u64,
    /// Layer by layer.
    pub layers: Vec<LayerRecord>,
}

/// One layer of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// Pairs per expert over all ranks.
    pub load: Vec<u32>,
    /// Pairs per expert that were to be selected for its weight gradients.
    pub quota: Vec<u32>,
    /// Pairs that ran backward: those selected, or with scope wgrad all.
    pub retained: u64,
    /// Checksum of the selected pairs in hexadecimal digits: the same for the same pairs, on any number of ranks and on any device.
    #[serde(default)]
    pub selection: String,
    /// Share of its pairs that was to run backward, of a policy that selects them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub retention: Option<f64>,
    /// Variance that the selection adds to its weight gradient over that of the minibatch, in a step where an adaptive retention measured it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub selection_variance: Option<f64>,
    /// Pairs dropped in forward and backward.
    pub dropped: u32,
    /// Largest over mean rank load of the routed pairs.
    pub imbalance_before: f64,
    /// Largest over mean rank load of the retained pairs.
    pub imbalance_after: f64,
    /// Bytes sent from rank to rank forward.
    pub forward_bytes: u64,
    /// Bytes sent from rank to rank backward.
    pub backward_bytes: u64,
    /// How near its gradients are to those of all pairs, where the oracle was asked.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub oracle: Option<OracleRecord>,
}

/// Puts the layers' figures of all ranks together; every rank gets the same record.
pub(super) fn gather_record<C: Collective>(
    comm: &mut C,
    config: &TrainConfig,
    layers: &[LayerStats],
) -> Result<StepRecord, Error> {
    let ranks = comm.ranks();
    let mine: Vec<u32> = layers
        .iter()
        .flat_map(|stats| RankStats::of(stats, ranks).to_words())
        .collect();
    let mut all = vec![0; mine.len() * ranks];
    comm.all_gather(&mine, &mut all)?;
    let per_layer = mine.len() / layers.len().max(1);
    let of_rank = |words: &[u32]| {
        words
            .chunks(per_layer)
            .map(|words| RankStats::from_words(words, ranks))
            .collect()
    };
    let per_rank: Vec<Vec<RankStats>> = if mine.is_empty() {
        Vec::new()
    } else {
        all.chunks(mine.len()).map(of_rank).collect()
    };

    let mut record = StepRecord::default();
    let own = Modelling::of_run(config);
    let others = MODELLED_AT.map(|name| Modelling::at_sizes_of(name, config));
    let others = others.into_iter().collect::<Result<Vec<_>, _>>()?;
    for (index, stats) in layers.iter().enumerate() {
        let of_layer: Vec<&RankStats> = per_rank.iter().map(|rank| &rank[index]).collect();
        let sum = |what: fn(&RankStats) -> u64| of_layer.iter().map(|rank| what(rank)).sum::<u64>();
        record.update_bytes += sum(|rank| rank.reduction.iter().chain(&rank.delivery).sum());
        let between = |of: fn(&RankStats) -> &Vec<u64>| {
            Array2::from_shape_fn((ranks, ranks), |(from, to)| of(of_layer[from])[to])
        };
        let weights = [
            between(|rank| &rank.reduction),
            between(|rank| &rank.delivery),
        ];
        record.modelled_moe_seconds += own.seconds(config, stats, &weights)?;
        for (name, modelling) in MODELLED_AT.iter().zip(&others) {
            let sum = record.modelled_moe_seconds_at.entry((*name).to_owned());
            *sum.or_default() += modelling.seconds(config, stats, &weights)?;
        }
        record.layers.push(LayerRecord {
            load: stats.loads.clone(),
            quota: stats.quotas.clone(),
            retained: stats.backward_rows.sum(),
            selection: {
                let parts = of_layer.iter().map(|rank| rank.selection);
                format!("{:016x}", parts.fold(0, u64::wrapping_add))
            },
            retention: None,
            selection_variance: None,
            dropped: stats.dropped,
            imbalance_before: imbalance(&stats.forward_rows),
            imbalance_after: imbalance(&stats.backward_rows),
            forward_bytes: sum(|rank| rank.forward),
            backward_bytes: sum(|rank| rank.backward),
            oracle: None,
        });
    }
    let slowest = |of: &dyn Fn(&RankStats) -> f64| {
        per_rank
            .iter()
            .map(|rank| rank.iter().map(of).sum())
            .fold(0.0, f64::max)
    };
    for stage in Stage::ALL {
        record.stage_seconds.insert(
            stage.name().to_owned(),
            slowest(&|rank| rank.seconds.0[stage as usize]),
        );
    }
    record.moe_seconds = slowest(&|rank| rank.seconds.total());
    record.buffer_bytes = per_rank
        .iter()
        .map(|rank| rank.iter().map(|layer| layer.buffers).sum())
        .max()
        .unwrap_or(0);
    record.forward_bytes = record.layers.iter().map(|layer| layer.forward_bytes).sum();
    record.backward_bytes = record.layers.iter().map(|layer| layer.backward_bytes).sum();
    let routed: u64 = record
        .layers
        .iter()
        .flat_map(|layer| &layer.load)
        .map(|load| u64::from(*load))
        .sum();
    let retained: u64 = record.layers.iter().map(|layer| layer.retained).sum();
    record.retention = if routed == 0 {
        0.0
    } else {
        retained as f64 / routed as f64
    };
    Ok(record)
}

/// What one rank alone knows of a layer's step, as it travels.
struct RankStats {
    forward: u64,
    backward: u64,
    buffers: u64,
    selection: u64,
    reduction: Vec<u64>,
    delivery: Vec<u64>,
    seconds: Seconds,
}

impl RankStats {
    fn of(stats: &LayerStats, ranks: usize) -> Self {
        // Frozen experts are neither reduced nor delivered.
        let per_peer = |bytes: &[u64]| {
            if bytes.is_empty() {
                vec![0; ranks]
            } else {
                bytes.to_vec()
            }
        };
        Self {
            forward: stats.forward_bytes,
            backward: stats.backward_bytes,
            buffers: stats.buffer_bytes,
            selection: stats.selection,
            reduction: per_peer(&stats.reduction_bytes),
            delivery: per_peer(&stats.delivery_bytes),
            seconds: stats.seconds,
        }
    }

    fn to_words(&self) -> Vec<u32> {
        let bytes = [self.forward, self.backward, self.buffers, self.selection]
            .into_iter()
            .chain(self.reduction.iter().copied())
            .chain(self.delivery.iter().copied());
        let halves = |bits: u64| [bits as u32, (bits >> 32) as u32];
        bytes
            .chain(self.seconds.0.map(f64::to_bits))
            .flat_map(halves)
            .collect()
    }

    fn from_words(words: &[u32], ranks: usize) -> Self {
        let mut bits = words
            .as_chunks::<2>()
            .0
            .iter()
            .map(|half| u64::from(half[0]) | u64::from(half[1]) << 32);
        let mut next = || bits.next().expect("as many words as `to_words` wrote");
        let [forward, backward, buffers, selection] = std::array::from_fn(|_| next());
        let reduction = (0..ranks).map(|_| next()).collect();
        let delivery = (0..ranks).map(|_| next()).collect();
        Self {
            forward,
            backward,
            buffers,
            selection,
            reduction,
            delivery,
            seconds: Seconds(std::array::from_fn(|_| f64::from_bits(next()))),
        }
    }
}
