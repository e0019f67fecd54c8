//! Mixture-of-Experts training whose backward work is planned: the stages of the `lrmoe-*` crates composed into a layer, and a trainer.
//!
//! [`MoeLayer`](layer::MoeLayer) is one MoE layer on one rank, over any communicator and any backend of `lrmoe_kernels`. Its forward pass computes every routed pair
//! and plans how many pairs of each expert run backward; its backward pass scores the pairs, selects within the
//! quotas, routes what is retained over the replicas of the experts and runs only that.
//!
//! | call | in | out |
//! |---|---|---|
//! | `forward` | x `[tokens, width]`, expert ids and gate weights `[tokens, top_k]` | y `[tokens, width]` |
//! | `backward` | dL/dy `[tokens, width]` | dL/dx `[tokens, width]`, dL/dp `[tokens, top_k]` |
//! | `forward_rows`, `backward_rows` | the same in buffers of the backend, x twice | the same, into the caller's buffers |
//! | `reduce_gradients` | | sum of squares of this rank's shard |
//! | `update` | learning rate | the weights of the next placement |
//!
//! Every rank makes every call, with no tokens too. Selections are the same for any number of ranks and threads. x, y and their gradients are f32,
//! or bf16 (`MoeLayer<Cpu, bf16>`); expert ids are i32, gate weights and their gradients f32.
//!
//! The language model in [`model`] and the loop in [`train`] show how a trainer takes the layer up: the dense part is candle's, the layer is a
//! custom op. [`trace`] reads and writes routing traces, [`replay`] says what they would have cost under other placement policies.
//! [`bench`](mod@bench) times the layer.
//!
//! ```
//! use lrmoe::layer::{ExpertParameters, LayerConfig, MoeLayer};
//! use lrmoe::policy::{Policy, Selecting};
//! use lrmoe_comm::Solo;
//! use lrmoe_kernels::{Activation, FfnShape};
//! use lrmoe_plan::{Stash, Topology};
//! use ndarray::array;
//!
//! let config = LayerConfig {
//!     layer: 0,
//!     seed: 1,
//!     shape: FfnShape { width: 2, hidden: 3, activation: Activation::SwiGlu },
//!     experts: 2,
//!     top_k: 1,
//!     topology: Topology::new(1, 1)?,
//!     slots: vec![2],
//!     chunk_rows: 1024,
//!     overlap: false,
//!     capacities: None,
//!     policy: Policy::Lrmoe(Selecting { retention: 0.5, ..Selecting::default() }),
//!     stash: Stash::Recompute,
//!     profile_decay: 0.9,
//! };
//! let init = |_expert| ExpertParameters { gate: Some(vec![0.1; 6]), up: vec![0.2; 6], down: vec![0.3; 6] };
//! let mut layer = MoeLayer::new(config, 0, init)?;
//!
//! let x = array![[1.0, 2.0], [0.5, -1.0], [0.0, 3.0], [1.0, 1.0]];
//! let (expert_ids, gate_weights) = (array![[0], [1], [0], [1]], array![[0.5], [0.9], [0.7], [0.8]]);
//! let y = layer.forward(&mut Solo, x.view(), expert_ids.view(), gate_weights.view(), Some(0))?;
//! let (dx, _dp) = layer.backward(&mut Solo, y.view())?;
//! assert_eq!(dx.dim(), (4, 2));
//! // Two of the four pairs ran backward, one of each expert.
//! assert_eq!(layer.selection().map(|selection| selection.pairs.len()), Some(2));
//! # Ok::<_, lrmoe::error::Error>(())
//! ```

pub mod adamw;
mod backend;
pub mod bench;
pub mod calibrate;
pub mod config;
pub mod error;
pub mod exchange;
pub mod layer;
pub mod model;
mod page;
pub mod policy;
pub mod progress;
pub mod replay;
pub mod sweep;
pub mod text;
pub mod trace;
pub mod train;

/// The examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
