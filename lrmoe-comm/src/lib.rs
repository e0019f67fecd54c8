//! Collectives between the ranks of a training job, over buffers that the caller owns.
//!
//! Every rank of a world calls the same [`Collective`] methods in the same order; a rank with
//! nothing to send takes part all the same. Worlds: [`Solo`] (one rank), [`Threads`] (the ranks are
//! threads of one process), with feature `mpi` `Mpi` (the ranks are processes of an MPI job), all with
//! the same results to the bit; and with feature `nccl` `Nccl` (one rank for each NVIDIA GPU), whose
//! docs say where it promises less. Code written over `C: Collective` runs on any. Ranks that are
//! processes of their own find each other by [`rendezvous`].
//!
//! | method | rank r gives | rank r gets |
//! |---|---|---|
//! | [`all_to_all`](Collective::all_to_all) | `send_counts[p]` elements for each peer p | `recv_counts[p]` elements from each peer p |
//! | [`all_reduce`](Collective::all_reduce) | `[n]` | `[n]`, reduced over the ranks |
//! | [`all_gather`](Collective::all_gather) | `[n]` | `[ranks * n]`, in rank order |
//! | [`reduce_scatter`](Collective::reduce_scatter) | `[ranks * n]` | `[n]`: its part of the reduction |
//! | [`broadcast`](Collective::broadcast) | `[n]` on the root | the root's `[n]` |
//! | [`barrier`](Collective::barrier) | | |
//!
//! Any of them can go on while the rank computes: [`overlap`](Collective::overlap).
//!
//! All counts and lengths are in elements ([`Element`]: `u32`, `f32`, [`bf16`]). Buffers are slices, so
//! data that are not contiguous cannot be given: gather them first.
//!
//! **Sums repeat to the bit.** A floating-point sum is taken in ascending rank order, whatever the
//! timing; `bf16` is summed in `f32` and rounded once. A `u32` sum past `u32::MAX` is an error, not
//! a wrapped number. The largest of several equal values (`-0.0` and `0.0`) is that of the lowest
//! rank, and a NaN is larger than everything.
//!
//! **Nothing hangs.** Every wait has a deadline. A rank that leaves (also by a panic) ends in
//! [`Error::PeerLost`] and a late one in [`Error::Deadline`], on every other rank; ranks that call
//! different collectives, or with lengths that do not fit, all get [`Error::Mismatch`] or
//! [`Error::CountMismatch`]. A world in which a collective has failed stays failed: later calls
//! return an error at once. After an error the contents of output buffers are unspecified.
//!
//! **Nodes.** [`Hierarchical`] wraps a world whose ranks live on several nodes and joins the
//! messages of an all-to-all that cross between two of them; [`Counted`] counts bytes and messages
//! by class of link: own memory, within the node, across nodes. Both are worlds themselves:
//! `Hierarchical<Counted<Threads>>` counts what its hops send.
//!
//! ```
//! use lrmoe_comm::{Collective, Error, Reduction, Threads};
//! use std::time::Duration;
//!
//! fn step(comm: &mut impl Collective) -> Result<(), Error> {
//!     let mut values = [comm.rank() as u32, 10];
//!     comm.all_reduce(&mut values, Reduction::Sum)?;
//!     assert_eq!(values, [0 + 1 + 2, 30]);
//!
//!     // Rank r sends r copies of its number to rank 0, and nothing to the others.
//!     let send = vec![comm.rank() as f32; comm.rank()];
//!     let send_counts = [send.len(), 0, 0];
//!     let recv_counts = if comm.rank() == 0 { [0, 1, 2] } else { [0, 0, 0] };
//!     let mut received = vec![0.0; recv_counts.iter().sum()];
//!     comm.all_to_all(&send, &send_counts, &mut received, &recv_counts)?;
//!     if comm.rank() == 0 {
//!         assert_eq!(received, [1.0, 2.0, 2.0]);
//!     }
//!     Ok(())
//! }
//!
//! let world = Threads::world(3, Duration::from_secs(5))?;
//! std::thread::scope(|scope| {
//!     for mut comm in world {
//!         scope.spawn(move || step(&mut comm).unwrap());
//!     }
//! });
//! # Ok::<_, Error>(())
//! ```

mod call;
mod check;
mod collective;
mod element;
mod error;
mod hierarchical;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(any(test, feature = "nccl"))]
mod nccl;
mod nodes;
pub mod rendezvous;
mod solo;
mod threads;
mod traffic;
mod transport;

#[cfg(feature = "mpi")]
pub use ::mpi as rsmpi;
pub use bytemuck::Pod;
pub use call::{Call, Reduction};
pub use collective::Collective;
#[cfg(feature = "nccl")]
pub use cudarc;
pub use element::Element;
pub use error::{Error, Side};
pub use half::bf16;
pub use hierarchical::{Algorithm, Hierarchical};
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
pub use solo::Solo;
pub use threads::Threads;
pub use traffic::{Counted, LinkTraffic, Sent, Traffic};
