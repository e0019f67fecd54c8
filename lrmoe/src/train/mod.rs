//! Training of a byte-level language model whose MoE layers are LRMoE's, every rank a thread of this process, or a
//! process of its own.

mod attached;
mod checkpoint;
mod compare;
mod log;
mod modelled;
mod oracle;
mod process;
mod rank;
mod record;
mod retention;
mod run;
mod setup;
mod threads;
mod trace;
mod traffic;

pub use checkpoint::{Checkpoint, CheckpointError};
pub(crate) use checkpoint::{folder_of, temporary_beside, write_atomically};
pub use compare::{Comparison, Outcome, compare};
pub use modelled::MODELLED_AT;
pub use oracle::{Agreement, LayerSummary, OracleRecord, OracleSummary};
pub use process::{settle, train_rank};
pub use record::{LayerRecord, StepRecord};
pub use run::Observer;
pub(crate) use run::{checkpoint_path, lock};
pub use threads::{train, train_on};
pub use traffic::{LinkRecord, SentRecord};
