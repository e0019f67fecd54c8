//! Training of a byte-level language model whose MoE layers are LRMoE's, every rank a thread of this process.

mod checkpoint;
mod compare;
mod log;
mod rank;
mod record;
mod trace;
mod world;

pub use checkpoint::{Checkpoint, CheckpointError};
pub(crate) use checkpoint::{folder_of, temporary_beside};
pub use compare::{Comparison, Outcome, compare};
pub use record::{LayerRecord, StepRecord};
pub use world::{Observer, train, train_on};
