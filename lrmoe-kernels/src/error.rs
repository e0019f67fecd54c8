use crate::Activation;

/// What the crate refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A name that is not one of [`Activation::ALL`].
    #[error("unknown activation '{name}', expected one of {}", Activation::names())]
    UnknownActivation {
        /// The name given.
        name: String,
    },
    /// An expert without inputs or without hidden units.
    #[error("an expert needs width and hidden above 0, got width {width} and hidden {hidden}")]
    EmptyExpert {
        /// Model width D.
        width: usize,
        /// Hidden width F.
        hidden: usize,
    },
    /// A gated activation without gate weights (or their gradients).
    #[error("{activation} is gated, but there are no {what}")]
    MissingGate {
        /// The activation.
        activation: Activation,
        /// Which argument.
        what: &'static str,
    },
    /// Gate weights (or their gradients) that the activation does not use.
    #[error("{activation} is not gated, but there are {what}")]
    UnusedGate {
        /// The activation.
        activation: Activation,
        /// Which argument.
        what: &'static str,
    },
    /// An array of another shape than the others imply.
    #[error("shape of {what} is {got:?}, expected {expected:?}")]
    Shape {
        /// Which argument.
        what: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// The shape it must have.
        expected: Vec<usize>,
    },
    /// An array that is not contiguous in row-major order.
    #[error("{what} of shape {shape:?} is not in standard layout, its strides are {strides:?}")]
    Layout {
        /// Which argument.
        what: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides in elements.
        strides: Vec<isize>,
    },
    /// Row offsets that do not begin at 0.
    #[error("row offsets begin at {first}, not 0")]
    OffsetStart {
        /// The first offset.
        first: usize,
    },
    /// Row offsets that fall.
    #[error("row offset {offset} of instance {instance} is below its start {start}")]
    OffsetOrder {
        /// The instance whose rows end before they begin.
        instance: usize,
        /// Where its rows begin.
        start: usize,
        /// Where they end.
        offset: usize,
    },
    /// Row offsets that do not end at the number of rows.
    #[error("row offsets end at {last}, but there are {rows} rows")]
    OffsetEnd {
        /// The last offset.
        last: usize,
        /// Rows of x.
        rows: usize,
    },
}
