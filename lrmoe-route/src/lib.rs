//! Capacity-aware routing of (token, expert) pairs to the instances of their experts.
//!
//! An expert may have instances (replicas) on several ranks. [`route`] decides how many pairs each source rank
//! sends to each instance, exactly to this goal:
//!
//! 1. the smallest possible largest rank load. Without capacities it is the largest of ceil(pairs of S / ranks
//!    that host an expert of S) over all sets S of experts;
//! 2. the fewest pairs that cross nodes, then the fewest that cross ranks;
//! 3. a fixed order: the same inputs give the same table on every rank.
//!
//! | value | shape |
//! |---|---|
//! | counts to route: pairs by source rank and expert | `[source ranks, experts]`, u32 |
//! | capacities: rows that each rank can hold | `[ranks]`, u64 |
//! | [`RoutingTable::counts`] | `[source ranks, instances]`, u32 |
//! | [`RoutingTable::deal`]: local pair ids in sending order | by (destination rank, instance, pair id) |
//! | [`RoutingTable::chunk`]: what a rank receives in one round | `[source ranks, local instances]` |
//!
//! Instances are numbered by (rank, expert), as in [`Placement`]. The pairs of all ranks together must fit in
//! u32. Of the pairs that a source has for an expert, in ascending order, the lowest instance it sends to gets
//! the first.
//!
//! Pairs that have to stay where they were routed, because that is where their rows are, keep a table of their own: [`RoutingTable::kept`].
//!
//! Nothing is dropped silently: where capacities are too small, [`route`] names the experts and the shortfall,
//! and [`shrink`] is the explicit alternative, which says what left.
//!
//! # Method
//!
//! The smallest largest load is found by maximum flows and minimum cuts. For the crossings, how the pairs of an
//! expert are divided among its instances is all that matters: given that, as many pairs as possible stay on
//! their rank and on their node at once. So the fewest crossings are a minimum-cost flow from experts to ranks
//! with convex costs, whose size is the number of instances and not that of ranks times experts. It starts from
//! the cheapest division without bounds and moves what exceeds a bound along cheapest paths. The cost is exact
//! for both crossings: nodes weigh 2^32 times ranks, in integers.
//!
//! Medians of `cargo bench -p lrmoe-route` on one core of a busy two-core machine: a table takes 3 to 20 µs for
//! 8 ranks and 128 experts with 16 to 32 instances on a rank, and 60 to 330 µs for 64 ranks and 256 experts
//! with 5 to 16; about 2 ms if each of 64 ranks hosts all 256 experts.
//!
//! # Example
//!
//! ```
//! use lrmoe_route::{Placement, Topology, route};
//! use ndarray::array;
//!
//! // Expert 0 lives on both ranks, expert 1 on rank 1.
//! let placement = Placement::new(2, vec![vec![0], vec![0, 1]])?;
//! let counts = array![[3, 2], [1, 0]];
//! let table = route(counts.view(), &placement, &Topology::single_node(2)?, None)?;
//!
//! // Instances: expert 0 on rank 0, expert 0 on rank 1, expert 1 on rank 1.
//! assert_eq!(table.counts(), array![[3, 0, 2], [0, 1, 0]]);
//! assert_eq!(table.rank_loads(), [3, 3]);
//! assert_eq!(table.crossings(&Topology::single_node(2)?).ranks, 2);
//!
//! // Rank 0 has five pairs; first those for rank 0, then those for rank 1.
//! let expert_ids = [0, 1, 1, 0, 0];
//! assert_eq!(table.deal(0, &expert_ids, &[0, 1, 2, 3, 4])?, [0, 3, 4, 1, 2]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod balance;
mod crossings;
mod error;
mod kept;
mod network;
mod nodes;
mod pour;
mod request;
mod route;
mod shrink;
mod table;

pub use error::Error;
pub use kept::KeptPlaces;
pub use lrmoe_plan::{Placement, Topology};
pub use ndarray::{Array2, ArrayView2};
pub use route::route;
pub use shrink::{Shrunk, shrink};
pub use table::{Crossings, RoutingTable};
