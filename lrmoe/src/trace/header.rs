//! What a trace says about itself, and one step's per-pair data.

use std::collections::BTreeMap;

use ndarray::Array3;

/// Sizes of a trace.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TraceHeader {
    /// Steps.
    pub steps: usize,
    /// MoE layers.
    pub layers: usize,
    /// Source ranks.
    pub ranks: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts per token, where known.
    pub top_k: Option<usize>,
    /// Number of the first step in its run, from 0.
    pub first_step: u32,
    /// Tokens of each rank in a step, where known and the same for all.
    pub tokens_per_rank: Option<usize>,
    /// Steps that have per-pair data, as indices into `0..steps`, ascending.
    pub recorded: Vec<u32>,
    /// Whether per-pair data have scores.
    pub scored: bool,
    /// Everything else that the file says: model, router, seed and the like.
    pub metadata: BTreeMap<String, String>,
    /// Numbers of the steps in their run where they do not follow one another.
    pub(super) numbers: Option<Vec<u32>>,
}

impl TraceHeader {
    /// Number of a step in its run: `first_step` plus the index, unless the trace holds selected steps alone.
    pub fn number(&self, step: usize) -> u32 {
        match &self.numbers {
            Some(numbers) => numbers[step],
            None => self.first_step + step as u32,
        }
    }
}

/// Every pair of one step. Tokens of all ranks, rank by rank: rank = token / tokens per rank.
#[derive(Clone, Debug, PartialEq)]
pub struct PairRecord {
    /// Expert of each pair, `[layers, tokens, k]`; -1 = masked.
    pub expert: Array3<i32>,
    /// Gate weight of each pair, same shape, finite and at least 0; 0 where masked.
    pub gate_weight: Array3<f32>,
    /// Score of each pair, same shape, finite and at least 0; 0 where masked.
    pub score: Option<Array3<f32>>,
}

/// What a trace to be written holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceSettings {
    /// MoE layers.
    pub layers: usize,
    /// Source ranks.
    pub ranks: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts per token; needed for per-pair data.
    pub top_k: Option<usize>,
    /// Tokens of each rank in a step, where the same for all; needed for per-pair data.
    pub tokens_per_rank: Option<usize>,
    /// Number of the first step in its run.
    pub first_step: u32,
    /// Facts about the run.
    pub metadata: BTreeMap<String, String>,
}
