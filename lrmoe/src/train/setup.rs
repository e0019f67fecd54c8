//! From the options of a run to the settings of its layers.

use std::collections::BTreeMap;

use lrmoe_kernels::FfnShape;
use lrmoe_plan::{ExpertShape, MemoryModel, Topology};

use crate::config::TrainConfig;
use crate::error::Error;
use crate::layer::LayerConfig;
use crate::text::Corpus;

/// Decay per step of the profile of scores.
const PROFILE_DECAY: f32 = 0.9;

/// Refuses what would end in an aborted allocation in a process that has `here` of the ranks: every rank holds the dense parameters with
/// gradient and moments, twice the former; the ranks together hold the experts with theirs.
pub(super) fn enough_memory(config: &TrainConfig, here: usize) -> Result<(), Error> {
    let [width, layers, experts, ranks, here] = [
        config.model.width,
        config.model.layers,
        config.model.experts,
        config.ranks,
        here,
    ]
    .map(|n| n as u128);
    let dense = 4 * width * width * layers + 2 * 256 * width;
    let expert = u128::from(expert_shape(config).parameters());
    let shards = (3 * experts * here).div_ceil(ranks);
    let numbers =
        5 * here * dense + layers * (shards + 2 * here * u128::from(config.slots)) * expert;
    let bytes = numbers * size_of::<f32>() as u128;
    let got =
        usize::try_from(bytes).is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    if got {
        Ok(())
    } else {
        Err(Error::Memory { bytes })
    }
}

/// Settings of each MoE layer; checks the memory budget.
pub(super) fn layer_configs(config: &TrainConfig) -> Result<Vec<LayerConfig>, Error> {
    let model = &config.model;
    let shape = FfnShape {
        width: model.width,
        hidden: model.hidden,
        activation: config.activation,
    };
    let slots = vec![config.slots; config.ranks];
    let capacities = config
        .budget_bytes
        .map(|budget| capacities(config, budget, &slots));
    let template = LayerConfig {
        layer: 0,
        seed: config.seed,
        shape,
        experts: model.experts,
        top_k: model.top_k,
        topology: Topology::new(config.ranks, config.ranks_per_node)?,
        slots,
        chunk_rows: config.chunk_rows,
        overlap: config.overlap,
        capacities: capacities.transpose()?,
        policy: config.policy.clone(),
        stash: config.stash,
        profile_decay: PROFILE_DECAY,
    };
    Ok((0..model.layers)
        .map(|layer| LayerConfig {
            layer: layer as u32,
            ..template.clone()
        })
        .collect())
}

/// Retained rows that each rank can hold in each layer, the budget divided evenly among the layers.
fn capacities(config: &TrainConfig, budget: u64, slots: &[u32]) -> Result<Vec<u64>, Error> {
    let layers = config.model.layers as u64;
    let shares = vec![budget / layers; config.ranks];
    let found = memory_model(config).capacities(slots, config.model.experts, &shares);
    found.map_err(|error| match error {
        lrmoe_plan::Error::BudgetTooSmall { smallest, .. } => Error::Budget {
            mib: budget >> 20,
            smallest_mib: smallest.saturating_mul(layers).div_ceil(1 << 20),
        },
        other => other.into(),
    })
}

fn memory_model(config: &TrainConfig) -> MemoryModel {
    MemoryModel {
        shape: expert_shape(config),
        top_k: config.model.top_k,
        tokens: config.batch / config.ranks * config.model.context,
        chunk_rows: config.chunk_rows,
        overlap: config.overlap,
        stash: config.stash,
        keeps_outputs: config.policy.needs_outputs(),
        fixed: 0,
    }
}

/// One expert as memory and cost models see it.
pub(super) fn expert_shape(config: &TrainConfig) -> ExpertShape {
    ExpertShape {
        width: config.model.width,
        hidden: config.model.hidden,
        gated: config.activation.is_gated(),
        bytes: size_of::<f32>(),
    }
}

/// Options that a resumed run must share with the run it continues. Others (steps, learning rate, paths) may change.
pub(super) fn identity(config: &TrainConfig, corpus: &Corpus) -> BTreeMap<String, String> {
    let model = &config.model;
    let values = [
        ("width", model.width.to_string()),
        ("layers", model.layers.to_string()),
        ("heads", model.heads.to_string()),
        ("context", model.context.to_string()),
        ("experts", model.experts.to_string()),
        ("top-k", model.top_k.to_string()),
        ("hidden", model.hidden.to_string()),
        ("activation", config.activation.to_string()),
        ("policy", config.policy.name().to_owned()),
        ("ranks", config.ranks.to_string()),
        ("slots", config.slots.to_string()),
        ("batch", config.batch.to_string()),
        ("seed", config.seed.to_string()),
        (
            "text",
            format!("{} bytes {:08x}", corpus.len(), corpus.checksum()),
        ),
    ];
    values
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
}
