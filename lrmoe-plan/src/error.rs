use thiserror::Error;

/// What can be wrong with a plan's inputs.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A world without ranks.
    #[error("there are no ranks")]
    NoRanks,
    /// A layer without experts.
    #[error("there are no experts")]
    NoExperts,
    /// More experts than ids.
    #[error("{experts} experts are more than the {} ids", 1_u64 << 32)]
    TooManyExperts {
        /// Number of experts.
        experts: usize,
    },
    /// A node that holds no ranks.
    #[error("a node holds 0 ranks")]
    NoRanksPerNode,
    /// The pairs of a layer over all ranks do not fit in u32.
    #[error("{pairs} pairs in one layer exceed the limit of {}", u32::MAX)]
    TooManyPairs {
        /// Pairs over all ranks.
        pairs: u64,
    },
    /// Two inputs do not belong together.
    #[error("{what}: expected {expected}, got {got}")]
    Mismatch {
        /// What was counted.
        what: &'static str,
        /// The count that the other inputs imply.
        expected: usize,
        /// The count found.
        got: usize,
    },
    /// An expert id that does not exist.
    #[error("expert {expert} on rank {rank} is out of range: there are {experts} experts")]
    ExpertOutOfRange {
        /// Rank it was placed on.
        rank: usize,
        /// The id.
        expert: u32,
        /// Number of experts.
        experts: usize,
    },
    /// An expert twice on one rank.
    #[error("expert {expert} is placed twice on rank {rank}")]
    DuplicateExpert {
        /// The rank.
        rank: usize,
        /// The expert.
        expert: u32,
    },
    /// An expert without an instance.
    #[error("expert {expert} has no instance")]
    MissingExpert {
        /// The expert.
        expert: usize,
    },
    /// Fewer slots than experts.
    #[error("{slots} slots cannot hold {experts} experts")]
    TooFewSlots {
        /// Slots over all ranks.
        slots: u64,
        /// Number of experts.
        experts: usize,
    },
    /// A rank with fewer slots than a policy needs there.
    #[error("rank {rank} has {slots} slots and needs {needed}")]
    RankSlots {
        /// The rank.
        rank: usize,
        /// Its slots.
        slots: u32,
        /// The slots needed.
        needed: usize,
    },
    /// A setting outside its range.
    #[error("{what} {value} is outside {range}")]
    OutOfRange {
        /// The setting.
        what: &'static str,
        /// Its value.
        value: f64,
        /// The values allowed.
        range: &'static str,
    },
    /// Memory that cannot hold every expert and the forward pass.
    #[error(
        "budget of {budget} bytes on rank {rank} is {missing} bytes short: the smallest that works on every rank is {smallest} bytes"
    )]
    BudgetTooSmall {
        /// The rank that lacks most.
        rank: usize,
        /// Its budget in bytes.
        budget: u64,
        /// Bytes that it lacks.
        missing: u64,
        /// The smallest budget in bytes that works if every rank has it.
        smallest: u64,
    },
    /// A name that stands for nothing.
    #[error("unknown {what} `{name}`, expected one of {expected}")]
    UnknownName {
        /// What was named.
        what: &'static str,
        /// The name given.
        name: String,
        /// The names known.
        expected: &'static str,
    },
    /// A cluster description that is not valid TOML or lacks fields.
    #[error("cluster description: {}", .0.message())]
    ClusterToml(#[from] toml::de::Error),
}

/// Checks that a count agrees with what the other inputs imply.
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
