use crate::Activation;

/// What the crate refuses.
#[derive(Debug, thiserror::Error)]
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
    /// Sums of hidden values, wanted of a backend that does not have them.
    #[error(
        "sums of hidden values, which compensation by moments needs, are computed by the cpu backend alone"
    )]
    NoHiddenSums,
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
    /// Places of rows that do not ascend.
    #[error("place {place} of row {position} is not above {before}, that of the row before it")]
    PlaceOrder {
        /// The row.
        position: usize,
        /// Its place.
        place: u32,
        /// The place before.
        before: u32,
    },
    /// Numbers of chosen rows that do not ascend.
    #[error("chosen row {position} is row {row}, which is not above {before}, the one before it")]
    RowOrder {
        /// Where it stands.
        position: usize,
        /// Its number.
        row: u32,
        /// The number before.
        before: u32,
    },
    /// Scores or selections that [`lrmoe_metric`] refuses.
    #[error(transparent)]
    Metric(#[from] lrmoe_metric::Error),
    /// Rows or pairs that [`lrmoe_compact`] refuses.
    #[error(transparent)]
    Compact(#[from] lrmoe_compact::Error),
    /// Norms of gradients, asked of a backend that has none.
    #[error(
        "norms of gradients, by which score full-grad judges, are computed by the cpu backend alone"
    )]
    NoGradientNorms,
    /// No device that the backend can use.
    #[error("no device for {backend}: {reason}")]
    NoDevice {
        /// The backend.
        backend: &'static str,
        /// What its driver says.
        reason: String,
    },
    /// The device is gone: unplugged, reset by its driver, or destroyed. Nothing that was in its memory can be had back.
    #[error("the device was lost while {operation}: {reason}")]
    DeviceLost {
        /// What was being done when it was noticed.
        operation: &'static str,
        /// What its driver says.
        reason: String,
    },
    /// The device's memory is full.
    #[error(
        "the device is out of memory while {operation}, for which it was asked for {bytes} bytes"
    )]
    OutOfMemory {
        /// What was being done.
        operation: &'static str,
        /// Bytes asked for.
        bytes: u64,
    },
    /// More than the device can hold in one piece.
    #[error("{what} of {bytes} bytes is past the device's limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its bytes.
        bytes: u64,
        /// Bytes that the device allows.
        limit: u64,
    },
    /// A buffer in the memory of another device.
    #[error("a buffer is in the memory of another device")]
    OtherDevice,
    /// The device's driver refuses a shader of this crate.
    #[error("the driver refuses shader {shader}: {reason}")]
    Shader {
        /// The shader.
        shader: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// The device's driver refuses a command of this crate.
    #[error("the driver refuses {operation}: {reason}")]
    Refused {
        /// What was being done.
        operation: &'static str,
        /// What the driver says.
        reason: String,
    },
}

/// Checks that `what`, a list, has `expected` entries.
pub(crate) fn check_length(what: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    if got != expected {
        return Err(Error::Shape {
            what,
            got: vec![got],
            expected: vec![expected],
        });
    }
    Ok(())
}
