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
//! | budgets: bytes that a rank may use | `[ranks]` |
//! | slots: instances that a rank holds memory for | `[ranks]` |
//! | capacities: retained rows that a rank can hold and finish in time | `[ranks]` |
//!
//! - [`plan`](plan()) does all of it for one layer: slots, placement, capacities, quotas, rows, memory and time within a
//!   budget. The [`Plan`] prints itself with what binds each rank.
//! - [`quotas`] divides the retained pairs among the experts so that they fit into the capacities and retain
//!   the most value: the greedy for polymatroids (Edmonds 1970; Federgruen and Groenevelt 1986), computed by
//!   decomposition with maximum flows (Groenevelt 1991).
//! - [`PlacementPolicy`] is implemented by [`Fixed`], [`FixedReplicas`], [`Symi`] and [`FlexMoe`] (re-derived from the
//!   papers of those names) and [`Lrmoe`], which places by maximum flow and the alias method.
//! - [`MemoryModel`] gives each term of a rank's memory in bytes, and the capacities within a budget.
//! - [`modelled_seconds`] gives the time of a step on a [`ClusterSpec`]. It is a model, never a measurement.
//! - [`ModelSpec`] and [`ClusterSpec`] have presets.
//!
//! Ties go to the lower expert id and the lower rank. Memory is in bytes, time in seconds.
//!
//! ```
//! use lrmoe_plan::{
//!     ClusterSpec, Constraint, Fixed, Loads, Lrmoe, MemoryModel, ModelSpec, PlanRequest, QuotaPolicy, Stash,
//!     Topology, plan,
//! };
//! use ndarray::array;
//!
//! // One layer on two ranks, three experts; expert 0 is hot.
//! let model = ModelSpec { experts: 3, ..ModelSpec::preset("tiny")? };
//! let memory = MemoryModel {
//!     shape: model.expert(4),
//!     top_k: model.top_k,
//!     tokens: 40,
//!     chunk_rows: 64,
//!     overlap: false,
//!     stash: Stash::Recompute,
//!     keeps_outputs: false,
//!     fixed: 0,
//! };
//! let plan = plan(&PlanRequest {
//!     loads: &Loads::new(array![[60, 10, 10], [50, 20, 10]])?,
//!     previous: &Fixed::placement(3, 2)?,
//!     topology: &Topology::single_node(2)?,
//!     memory: &memory,
//!     cluster: &ClusterSpec::preset("8xA100")?,
//!     budget: &[2 << 20; 2],
//!     slots: Some(&[2, 2]),
//!     placement: &Lrmoe::default(),
//!     retention: 0.5,
//!     quota_policy: QuotaPolicy::Proportional,
//!     profile: None,
//!     floor: 4,
//!     seconds: None,
//! })?;
//! assert_eq!(plan.placement.instances_of(0).len(), 2);
//! assert_eq!(plan.quotas.as_slice(), [55, 15, 10]);
//! assert!(plan.ranks.iter().all(|rank| rank.memory.total() <= rank.budget));
//! assert_eq!(plan.ranks[0].binds, Constraint::Retention);
//! println!("{plan}");
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
