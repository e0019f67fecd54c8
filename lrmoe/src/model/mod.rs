//! The dense part of a byte-level MoE transformer language model, in candle.
//!
//! Per layer: `x += attention(norm(x))`, then `x += moe(norm(x))`. Norms are RMS norms with a scale,
//! attention is causal with a rotary position encoding, the router is a softmax over experts whose
//! top-k probabilities are renormalised to gate weights. Before the output head there is one more norm.
//!
//! The MoE layer itself is foreign to candle: [`SparseLayer`] is all the model asks of it, and a
//! custom op carries its forward and backward into candle's graph. What the layer reports as an
//! error arrives as [`ModelError::Layer`], whether it happened in forward or in backward.
//!
//! Norm, attention, softmax and cross entropy have forward and backward written here: candle-nn's fused
//! versions have no backward, and composed ones spend most of their time on temporary tensors.
//!
//! With contexts of at least 65 bytes, the logits of a sequence do not depend, to the bit, on how
//! many other sequences are in the batch.

mod attention;
mod config;
mod error;
mod language;
mod ops;
mod parameters;
mod router;
mod sparse;

pub use config::ModelConfig;
pub use error::ModelError;
pub use language::{LanguageModel, Losses};
pub use parameters::{DenseParameters, ExpertWeights, expert_init};
pub use sparse::{LayerError, SharedLayer, SparseLayer};

/// Values a token can take: the model reads and writes bytes.
pub const VOCABULARY: usize = 256;
