use thiserror::Error;

/// What can be wrong with a routing request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Two inputs do not belong together.
    #[error("{what}: expected {expected}, got {got}")]
    Mismatch {
        /// What was counted.
        what: &'static str,
        /// The count that the placement implies.
        expected: usize,
        /// The count found.
        got: usize,
    },
    /// Counts that are not in standard layout.
    #[error("counts are not in standard (row-major, contiguous) layout")]
    Layout,
    /// The pairs of a layer over all ranks do not fit in u32.
    #[error("{pairs} pairs in one layer exceed the limit of {}", u32::MAX)]
    TooManyPairs {
        /// Pairs over all ranks.
        pairs: u64,
    },
    /// The ranks that host some experts have less room than these experts have pairs.
    #[error(
        "{pairs} pairs of experts {experts:?} exceed the {room} rows of the ranks {ranks:?} that host them by {shortfall}"
    )]
    NoRoom {
        /// Experts that live on no other ranks, ascending.
        experts: Vec<u32>,
        /// The ranks that host them, ascending.
        ranks: Vec<u32>,
        /// Pairs of these experts.
        pairs: u64,
        /// Rows that these ranks can hold together.
        room: u64,
        /// Pairs that have to go: the fewest of the whole layer.
        shortfall: u64,
    },
    /// More pairs that are kept at an instance than were routed to it.
    #[error(
        "rank {source_rank} keeps {kept} pairs at instance {instance}, but {routed} were routed there"
    )]
    TooManyKept {
        /// The source rank.
        source_rank: usize,
        /// The instance.
        instance: usize,
        /// Pairs kept.
        kept: u32,
        /// Pairs routed.
        routed: u32,
    },
    /// Pairs that have to stay where they were routed, and do not fit there.
    #[error("{rows} pairs stay on rank {rank}, where they were routed, but it can hold {capacity}")]
    RankFull {
        /// The rank.
        rank: usize,
        /// Pairs kept there.
        rows: u64,
        /// Rows that it can hold.
        capacity: u64,
    },
    /// A rank that does not exist.
    #[error("rank {rank} is out of range: there are {ranks} ranks")]
    RankOutOfRange {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// A pair id past the end of the pairs.
    #[error("pair {pair} is out of range: there are {pairs} pairs")]
    PairOutOfRange {
        /// The local pair id.
        pair: u32,
        /// Number of pairs.
        pairs: usize,
    },
    /// Pair ids that do not ascend.
    #[error("pair {pair} follows pair {before}, but pair ids must ascend")]
    PairOrder {
        /// The local pair id.
        pair: u32,
        /// The id before it.
        before: u32,
    },
    /// A masked pair, or an expert that does not exist.
    #[error("pair {pair} goes to expert {expert}, but experts are 0..{experts}")]
    ExpertOutOfRange {
        /// The local pair id.
        pair: u32,
        /// Its expert id.
        expert: i32,
        /// Number of experts.
        experts: usize,
    },
    /// Pairs that are not those whose counts were routed.
    #[error("rank {source_rank} deals {got} pairs of expert {expert}, but {expected} were routed")]
    PairCount {
        /// The source rank.
        source_rank: usize,
        /// The expert.
        expert: usize,
        /// Pairs in the counts.
        expected: u64,
        /// Pairs given.
        got: u64,
    },
}

/// Checks that a count agrees with the placement.
pub(crate) fn expect(what: &'static str, expected: usize, got: usize) -> Result<(), Error> {
    if expected == got {
        Ok(())
    } else {
        Err(Error::Mismatch {
            what,
            expected,
            got,
        })
    }
}

/// Checks that as many pairs of an expert are given as were counted.
pub(crate) fn expect_pairs(
    source_rank: usize,
    expert: usize,
    expected: u64,
    got: u64,
) -> Result<(), Error> {
    if expected == got {
        Ok(())
    } else {
        Err(Error::PairCount {
            source_rank,
            expert,
            expected,
            got,
        })
    }
}
