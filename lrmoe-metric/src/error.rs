use crate::exchange::ExchangeError;

/// What this crate refuses, with the values that were wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An array is not contiguous in row-major order.
    #[error("{what} are not in standard (row-major) layout")]
    Layout {
        /// The array.
        what: &'static str,
    },
    /// Expert ids and gate weights differ in shape.
    #[error(
        "gate weights have shape [{weight_tokens}, {weight_slots}], expert ids [{tokens}, {top_k}]"
    )]
    Shape {
        /// Rows of the expert ids.
        tokens: usize,
        /// Columns of the expert ids.
        top_k: usize,
        /// Rows of the gate weights.
        weight_tokens: usize,
        /// Columns of the gate weights.
        weight_slots: usize,
    },
    /// A slice has the wrong length.
    #[error("{found} {what}, expected {expected}")]
    Length {
        /// What the slice holds.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length it must have.
        expected: usize,
    },
    /// Tokens have no slots.
    #[error("expert ids have 0 slots per token, expected at least 1")]
    NoSlots,
    /// One rank has more pairs than local ids.
    #[error("{tokens} tokens of {top_k} slots are more than {} pairs", u32::MAX)]
    TooManyPairs {
        /// Tokens of the rank.
        tokens: usize,
        /// Slots per token.
        top_k: usize,
    },
    /// More experts than ids.
    #[error("{experts} experts are more than the {} ids", 1_u32 << 31)]
    TooManyExperts {
        /// Number of experts.
        experts: usize,
    },
    /// Global pair ids would pass 64 bits.
    #[error("{pairs} pairs from global id {first_pair} on pass 64 bits")]
    PairIds {
        /// Global id of the rank's first pair.
        first_pair: u64,
        /// Pairs of the rank.
        pairs: usize,
    },
    /// The pairs of all ranks together pass 32 bits.
    #[error("{pairs} pairs over all ranks are more than {}", u32::MAX)]
    TooManyPairsOverall {
        /// Unmasked pairs over all ranks.
        pairs: u64,
    },
    /// A rank that does not exist.
    #[error("rank {rank} is out of range: there are {ranks} ranks")]
    Rank {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// An expert id is out of range.
    #[error("expert id {id} in slot {slot} of token {token} is neither -1 nor in 0..{experts}")]
    ExpertId {
        /// Token of the rank.
        token: usize,
        /// Slot of the token.
        slot: usize,
        /// The id found.
        id: i32,
        /// Number of experts.
        experts: usize,
    },
    /// A token names one expert in two slots.
    #[error("token {token} names expert {expert} more than once")]
    RepeatedExpert {
        /// Token of the rank.
        token: usize,
        /// The expert.
        expert: usize,
    },
    /// A score needs norms that were not given.
    #[error("score {score} needs the squared norms of {what}")]
    MissingNorms {
        /// The score.
        score: crate::Score,
        /// `dy`, or the symbol of the score's [`Row`](crate::Row).
        what: &'static str,
    },
    /// A score is not a number.
    #[error("the score of pair {pair} with expert {expert} is not a number")]
    NanScore {
        /// Global pair id.
        pair: u64,
        /// Expert of the pair.
        expert: usize,
    },
    /// A norm is none that [`SquaredNorm::of`](crate::SquaredNorm::of) gives.
    #[error(
        "the squared norm of {what} of pair {pair} has significand {significand} with scale {scale}, which is no norm of a row"
    )]
    Norm {
        /// `dy`, or the symbol of the score's [`Row`](crate::Row).
        what: &'static str,
        /// Global pair id.
        pair: u64,
        /// Its significand.
        significand: f32,
        /// Its scale.
        scale: u32,
    },
    /// A squared score of another backend is negative or not a number.
    #[error("squared score {squared} of local pair {pair} is negative or not a number")]
    SquaredScore {
        /// Local pair id.
        pair: usize,
        /// The squared score.
        squared: f32,
    },
    /// Scores of another backend with a scale that no norms have.
    #[error("exponent {exponent} of squared scores is outside -254 to 254")]
    ScoreExponent {
        /// The exponent.
        exponent: i32,
    },
    /// A caller's score is negative.
    #[error("the score {score} of pair {pair} with expert {expert} is negative")]
    NegativeScore {
        /// Global pair id.
        pair: u64,
        /// Expert of the pair.
        expert: usize,
        /// The score.
        score: f32,
    },
    /// Another rank met an error in the same call; it says there what was wrong.
    #[error("another rank met an error in the same call")]
    Elsewhere,
    /// A collective failed.
    #[error("an exchange between the ranks failed")]
    Exchange(#[source] ExchangeError),
    /// A name is not that of a score.
    #[error("`{name}` is no score; scores are {}", crate::Score::names())]
    UnknownScore {
        /// The name.
        name: String,
    },
    /// A name is not that of a selection method.
    #[error("`{name}` is no selection method; methods are priority, top")]
    UnknownMethod {
        /// The name.
        name: String,
    },
    /// A name is not that of a rescaling.
    #[error("`{name}` is no rescaling; they are none, count, mass")]
    UnknownRescale {
        /// The name.
        name: String,
    },
    /// A power of the experts' sums of scores outside its range.
    #[error("recalibration {alpha} is outside [0, 1]")]
    Recalibration {
        /// The power.
        alpha: f64,
    },
    /// A moving average cannot have this decay.
    #[error("decay {decay} is outside [0, 1)")]
    Decay {
        /// The decay.
        decay: f32,
    },
    /// The profile is for another number of experts.
    #[error("profile of {profile} experts met pairs of {pairs} experts")]
    ProfileExperts {
        /// Experts of the profile.
        profile: usize,
        /// Experts of the pairs.
        pairs: usize,
    },
    /// A stored profile holds an impossible count.
    #[error("count {count} in bucket {bucket} of expert {expert} is negative or not finite")]
    ProfileCount {
        /// Expert of the count.
        expert: usize,
        /// Bucket of the count.
        bucket: usize,
        /// The count.
        count: f32,
    },
}

/// Checks that `found` things named `what` are `expected`.
pub(crate) fn check_length(what: &'static str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected {
        Ok(())
    } else {
        Err(Error::Length {
            what,
            found,
            expected,
        })
    }
}
