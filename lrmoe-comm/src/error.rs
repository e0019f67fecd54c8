use std::fmt;
use std::time::Duration;

use crate::Call;

/// Which buffer of a collective an [`Error`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// What the rank gives.
    Send,
    /// What the rank gets.
    Receive,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Receive => "receive",
        })
    }
}

/// Why a world could not be made or a collective failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A world needs at least one rank.
    #[error("a world of 0 ranks was asked for")]
    NoRanks,
    /// More ranks than a process has threads.
    #[error("a world of {ranks} ranks was asked for, the most is {most}")]
    TooManyRanks {
        /// Ranks asked for.
        ranks: usize,
        /// The limit.
        most: usize,
    },
    /// A node needs at least one rank.
    #[error("nodes of 0 ranks were asked for")]
    NoRanksPerNode,
    /// MPI was initialised for fewer threads than its ranks need.
    #[error(
        "MPI was not initialised for MPI_THREAD_MULTIPLE, which a rank that may change its thread needs"
    )]
    ThreadSupport,
    /// The MPI library failed to send to a rank or to receive from it.
    #[error("MPI failed with code {code} between this rank and rank {rank} in {collective}")]
    Mpi {
        /// The other rank.
        rank: usize,
        /// The collective.
        collective: Call,
        /// The library's code of the error.
        code: i32,
    },
    /// A rank was dropped, because its thread or process finished, returned an error or panicked; or its process has died.
    #[error("rank {rank} left the world before or during {collective}, noticed after {:.3} s", .waited.as_secs_f64())]
    PeerLost {
        /// The rank that left.
        rank: usize,
        /// The first collective that missed it.
        collective: Call,
        /// How long the rank that noticed it first had been in that collective.
        waited: Duration,
    },
    /// A rank did not come to a collective in time.
    #[error("rank {rank} did not come to {collective} within {:.3} s", .waited.as_secs_f64())]
    Deadline {
        /// The lowest rank that is missing.
        rank: usize,
        /// The collective that missed it.
        collective: Call,
        /// How long the rank that gave up first had waited.
        waited: Duration,
    },
    /// Two ranks met in different collectives, or with different types or lengths.
    #[error("rank {rank} called {found} where rank 0 called {expected}")]
    Mismatch {
        /// The lowest rank that differs from rank 0.
        rank: usize,
        /// What that rank called.
        found: Call,
        /// What rank 0 called.
        expected: Call,
    },
    /// The two ends of an all-to-all message disagree about its length.
    #[error("rank {from} sends {sent} elements to rank {to}, which expects {expected}")]
    CountMismatch {
        /// The sending rank.
        from: usize,
        /// The receiving rank.
        to: usize,
        /// The sender's count.
        sent: usize,
        /// The receiver's count.
        expected: usize,
    },
    /// An integer sum is too large for its type.
    #[error("the sum of element {index} over all ranks is past the largest value in {collective}")]
    Overflow {
        /// The lowest such element, counted in the array that is reduced.
        index: usize,
        /// The collective.
        collective: Call,
    },
    /// The counts of an all-to-all do not name every peer once.
    #[error("rank {rank} gave {found} {side} counts to {collective} in a world of {ranks} ranks")]
    PeerCounts {
        /// The rank that called.
        rank: usize,
        /// The collective.
        collective: Call,
        /// Which counts.
        side: Side,
        /// Counts given.
        found: usize,
        /// Ranks in the world.
        ranks: usize,
    },
    /// A buffer does not have the length that the other arguments ask for.
    #[error(
        "rank {rank} gave a {side} buffer of {found} elements to {collective}, expected {expected}"
    )]
    BufferLength {
        /// The rank that called.
        rank: usize,
        /// The collective.
        collective: Call,
        /// Which buffer.
        side: Side,
        /// Its length.
        found: usize,
        /// The length it must have.
        expected: usize,
    },
    /// The root of a broadcast is not a rank.
    #[error("rank {rank} named root {root} in a world of {ranks} ranks")]
    Root {
        /// The rank that called.
        rank: usize,
        /// The root it named.
        root: usize,
        /// Ranks in the world.
        ranks: usize,
    },
    /// A rank that is none of the world's.
    #[error("rank {rank} was given in a world of {ranks} ranks")]
    NoSuchRank {
        /// The rank given.
        rank: usize,
        /// Ranks in the world.
        ranks: usize,
    },
    /// A rendezvous has no such address, or its port is in use.
    #[error("the rendezvous at {address} cannot be had: {reason}")]
    Address {
        /// Host and port.
        address: String,
        /// What the system says.
        reason: std::io::ErrorKind,
    },
    /// A rank did not come to a rendezvous in time.
    #[error("rank {rank} did not come to the rendezvous at {address} within {:.3} s", .waited.as_secs_f64())]
    Absent {
        /// The lowest rank that is missing.
        rank: usize,
        /// Host and port.
        address: String,
        /// How long the others waited.
        waited: Duration,
    },
    /// A rank came to the rendezvous of a world of another size.
    #[error("rank {rank} expects {found} ranks, rank 0 expects {expected}")]
    WorldSize {
        /// The rank that came.
        rank: usize,
        /// What it expects.
        found: usize,
        /// What rank 0 expects.
        expected: usize,
    },
    /// A rank came to a rendezvous to which another had come with its number.
    #[error("another rank has come to the rendezvous as rank {rank}")]
    RankTaken {
        /// The number.
        rank: usize,
    },
    /// Something that is no rank answers where the rendezvous should be.
    #[error("something else answers at {address}")]
    Stranger {
        /// Host and port.
        address: String,
    },
    /// More bytes than a rendezvous takes.
    #[error("{len} bytes were given to a rendezvous, which takes {most} at most")]
    TooLong {
        /// Bytes given.
        len: usize,
        /// The limit.
        most: usize,
    },
    /// A library that a world needs is not installed.
    #[error("no {library} library was found")]
    NoLibrary {
        /// What is missing.
        library: &'static str,
    },
    /// The CUDA driver reports an error.
    #[error("the CUDA driver reports error {code}")]
    Cuda {
        /// Its `CUresult`.
        code: u32,
    },
    /// NCCL reports an error.
    #[error("NCCL reports error {code}")]
    Nccl {
        /// Its `ncclResult_t`.
        code: u32,
    },
    /// Not all ranks came to a collective of NCCL in time, or their calls differ.
    #[error("{collective} was not done within {:.3} s; NCCL does not say which rank is late", .waited.as_secs_f64())]
    Stalled {
        /// The collective; a barrier at the start of a world.
        collective: Call,
        /// How long this rank waited.
        waited: Duration,
    },
}
