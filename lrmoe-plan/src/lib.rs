//! Plans of selective Mixture-of-Experts backward passes: which share of each expert's pairs runs backward, where
//! experts live, and what that costs in memory and time.
//!
//! Host-only integers: no backend, no communication. Same inputs give the same plan on every rank, so every
//! rank plans for itself.
//!
//! | input | shape |
//! |---|---|
//! | [`Loads`]: routed pairs by source rank and expert | `[ranks, experts]` |
//! | [`Placement`]: experts of each rank, at most one instance of an expert on a rank | |
//! | capacities: retained rows that a rank can hold | `[ranks]` |
//! | slots: instances that a rank can hold | `[ranks]` |
//!
//! - [`quotas`] divides the retained pairs among the experts so that they fit into the capacities and retain
//!   the most value. Its source is the greedy for polymatroids (Edmonds 1970; Federgruen and Groenevelt 1986)
//!   with augmenting flows.
//! - [`PlacementPolicy`] is implemented by [`Fixed`], [`FixedReplicas`], [`Symi`] and [`FlexMoe`] (re-derived from the
//!   papers of those names) and [`Lrmoe`], which places by maximum flow and the alias method.
//! - [`MemoryModel`] gives each term of a rank's memory in bytes, and the capacities within a budget.
//! - [`modelled_seconds`] gives the time of a step on a [`ClusterSpec`]. It is a model, never a measurement.
//!
//! Ties go to the lower expert id and the lower rank. Memory is in bytes, time in seconds.
//!
//! ```
//! use lrmoe_plan::{
//!     ExpertShape, Fixed, Loads, Lrmoe, MemoryModel, PlacementPolicy, PlacementRequest, QuotaPolicy,
//!     QuotaRequest, Stash, Topology, quotas,
//! };
//! use ndarray::array;
//!
//! // Two ranks, three experts; expert 0 is hot.
//! let loads = Loads::new(array![[60, 10, 10], [50, 20, 10]])?;
//! let slots = [2, 2];
//! let placement = Lrmoe::default().place(&PlacementRequest {
//!     loads: &loads,
//!     previous: &Fixed::placement(3, 2)?,
//!     slots: &slots,
//!     topology: &Topology::single_node(2)?,
//! })?;
//! assert_eq!(placement.instances_of(0).len(), 2);
//! assert_eq!(placement.largest_load(loads.per_expert())?, 80);
//!
//! let memory = MemoryModel {
//!     shape: ExpertShape { width: 16, hidden: 32, gated: true, bytes: 4 },
//!     top_k: 2,
//!     tokens: 40,
//!     chunk_rows: 64,
//!     stash: Stash::Recompute,
//!     keeps_outputs: false,
//!     fixed: 0,
//! };
//! let capacities = memory.capacities(&slots, 3, &[160_000, 160_000])?;
//! let quotas = quotas(&QuotaRequest {
//!     loads: &loads,
//!     placement: &placement,
//!     capacities: &capacities,
//!     retention: 0.5,
//!     policy: QuotaPolicy::Proportional,
//!     profile: None,
//!     floor: 4,
//! })?;
//! assert_eq!(quotas.as_slice(), [55, 15, 10]);
//! # Ok::<(), lrmoe_plan::Error>(())
//! ```

#![forbid(unsafe_code)]

mod arithmetic;
mod cluster;
mod cost;
mod error;
mod flow;
mod loads;
mod memory;
mod model;
mod placement;
mod plan;
mod policy;
mod quota;
mod topology;

pub use cluster::{ClusterSpec, Link};
pub use cost::{ModelledSeconds, StepWork, modelled_seconds};
pub use error::Error;
pub use loads::Loads;
pub use memory::{Memory, MemoryModel, Stash};
pub use model::{ExpertShape, ModelSpec};
pub use placement::Placement;
pub use plan::{Constraint, Plan, PlanRequest, RankPlan, plan};
pub use policy::{
    Fixed, FixedReplicas, FlexMoe, Lrmoe, PlacementPolicy, PlacementRequest, Symi, symi_capacity,
    symi_replicas,
};
pub use quota::{QuotaPolicy, QuotaRequest, Quotas, quotas};
pub use topology::Topology;

pub use lrmoe_metric::Profile;
pub use ndarray;
pub use toml;
