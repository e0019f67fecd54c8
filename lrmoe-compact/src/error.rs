use std::fmt;

/// Which argument an [`Error`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Argument {
    /// The rows that are read by [`gather`](crate::gather) or
    /// [`ScatterAdd::add`](crate::ScatterAdd::add).
    Rows,
    /// The output of [`gather`](crate::gather).
    Out,
    /// The rows as they came from the sources.
    Received,
    /// The rows ordered by instance.
    Grouped,
    /// What [`ScatterAdd::add`](crate::ScatterAdd::add) adds to.
    Into,
    /// The pair ids of [`ScatterAdd::add`](crate::ScatterAdd::add).
    Pairs,
    /// The weights of [`ScatterAdd::add`](crate::ScatterAdd::add).
    Weights,
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rows => "rows",
            Self::Out => "out",
            Self::Received => "received",
            Self::Grouped => "grouped",
            Self::Into => "into",
            Self::Pairs => "pairs",
            Self::Weights => "weights",
        })
    }
}

/// Why rows could not be moved. Nothing has been written then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An array is not row-major without gaps.
    #[error("{argument} is not in standard layout (row-major, no gaps)")]
    Layout {
        /// The array.
        argument: Argument,
    },
    /// An array does not have the shape that the other arguments ask for.
    #[error(
        "{argument} has shape [{}, {}], expected [{}, {}]",
        .found[0], .found[1], .expected[0], .expected[1]
    )]
    Shape {
        /// The array.
        argument: Argument,
        /// Its rows and width.
        found: [usize; 2],
        /// The rows and width it must have.
        expected: [usize; 2],
    },
    /// A list has not one entry for each row.
    #[error("{argument} has {found} entries for {rows} rows")]
    Length {
        /// The list.
        argument: Argument,
        /// Its length.
        found: usize,
        /// Rows.
        rows: usize,
    },
    /// An index names a row that does not exist.
    #[error("index {index} at position {position} is out of range for {rows} rows")]
    IndexOutOfRange {
        /// Position in the list of indices; the lowest such.
        position: usize,
        /// The index.
        index: u32,
        /// Rows to read from.
        rows: usize,
    },
    /// A pair id belongs to no token.
    #[error("pair {pair} of row {row} is out of range for {tokens} tokens of {top_k} slots")]
    PairOutOfRange {
        /// The row; the lowest such.
        row: usize,
        /// Its pair id.
        pair: u32,
        /// Tokens.
        tokens: usize,
        /// Slots of a token.
        top_k: usize,
    },
    /// Two rows have the same pair id.
    #[error("rows {first} and {second} are both of pair {pair}")]
    DuplicatePair {
        /// The pair id.
        pair: u32,
        /// The first row.
        first: usize,
        /// The second row.
        second: usize,
    },
    /// Pair ids are `u32`.
    #[error("{tokens} tokens of {top_k} slots are more than {} pairs", u32::MAX)]
    TooManyPairs {
        /// Tokens.
        tokens: usize,
        /// Slots of a token.
        top_k: usize,
    },
    /// Groups cannot be padded to a multiple of 0 rows.
    #[error("groups cannot be padded to a multiple of 0 rows")]
    ZeroMultiple,
    /// The padded groups have more rows than can be addressed.
    #[error(
        "groups padded to a multiple of {multiple} rows end past row {} at instance {instance}",
        usize::MAX
    )]
    TooManyRows {
        /// The first instance whose group does not fit.
        instance: usize,
        /// The multiple.
        multiple: usize,
    },
}
