//! Synthetic traces: loads of one step from the workload, a seed and the step's number alone.

use std::fmt;
use std::str::FromStr;

use ndarray::Array3;

/// What the loads look like.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Workload {
    /// Every expert equally likely.
    Balanced,
}

/// Sizes of a synthetic trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SynthShape {
    /// MoE layers.
    pub layers: usize,
    /// Source ranks.
    pub ranks: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Tokens of each rank in a step.
    pub tokens_per_rank: usize,
}

/// A workload that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown workload `{0}`")]
pub struct UnknownWorkload(String);

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad("balanced")
    }
}

impl FromStr for Workload {
    type Err = UnknownWorkload;

    fn from_str(name: &str) -> Result<Self, UnknownWorkload> {
        match name {
            "balanced" => Ok(Self::Balanced),
            _ => Err(UnknownWorkload(name.into())),
        }
    }
}

/// Pairs of step `step`, `[layers, ranks, experts]`.
pub fn synth(_workload: Workload, _seed: u64, _step: u32, shape: &SynthShape) -> Array3<u32> {
    let pairs = (shape.tokens_per_rank * shape.top_k / shape.experts) as u32;
    Array3::from_elem((shape.layers, shape.ranks, shape.experts), pairs)
}
