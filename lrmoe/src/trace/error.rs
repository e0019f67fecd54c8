//! What is wrong with a trace: the file, the place in it, and the value found there.

use std::fmt;
use std::path::{Path, PathBuf};

/// Why a trace cannot be read, written or converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A file could not be read or written.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file that exists already and was not to be replaced.
    #[error("{} already exists; replace it with --overwrite or choose another name", .0.display())]
    Exists(PathBuf),
    /// An output that is an input or another output too.
    #[error("{} is read or written here already; choose another name", .0.display())]
    Taken(PathBuf),
    /// Something that is no regular file where one is to be written.
    #[error("{} cannot be written: it is not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// A file whose contents are not what a trace holds.
    #[error(transparent)]
    Invalid(Box<Invalid>),
}

/// A fault of a file, and where it is.
#[derive(Debug, thiserror::Error)]
#[error("{}: {place}{fault}", .path.display())]
pub struct Invalid {
    /// The file.
    pub path: PathBuf,
    /// Where in it.
    pub place: Place,
    /// What is wrong there.
    pub fault: Fault,
}

/// A place in a trace, as exact as the fault allows; what is `None` does not matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Line of a text file, from 1.
    pub line: Option<u64>,
    /// Number of the step in the run.
    pub step: Option<u64>,
    /// MoE layer, from 0.
    pub layer: Option<usize>,
    /// Source rank.
    pub rank: Option<usize>,
    /// Expert.
    pub expert: Option<usize>,
    /// Token of all ranks, in the step.
    pub token: Option<usize>,
    /// Slot of the token, from 0 to k - 1.
    pub slot: Option<usize>,
}

impl fmt::Display for Place {
    /// `step 3, layer 1, token 17: `, nothing for the whole file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let usize = |n: Option<usize>| n.map(|n| n as u64);
        let parts = [
            ("line", self.line),
            ("step", self.step),
            ("layer", usize(self.layer)),
            ("rank", usize(self.rank)),
            ("expert", usize(self.expert)),
            ("token", usize(self.token)),
            ("slot", usize(self.slot)),
        ];
        let mut separator = "";
        for (name, number) in parts {
            if let Some(number) = number {
                write!(f, "{separator}{name} {number}")?;
                separator = ", ";
            }
        }
        if separator.is_empty() {
            Ok(())
        } else {
            f.write_str(": ")
        }
    }
}

/// What is wrong at a place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// A file too short for a header, or shorter than its header.
    #[error("not a safetensors file: a header of {header} bytes in a file of {found}")]
    HeaderLength {
        /// Bytes of the header by the file's first eight.
        header: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// A header that is not JSON, or describes tensors that do not fit together.
    #[error("not a safetensors file: {0}")]
    Header(serde_json::Error),
    /// Fewer or more bytes than the header says.
    #[error("its header describes {expected} bytes, the file has {found}")]
    Length {
        /// Bytes by the header, header included.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// A tensor that a trace needs.
    #[error("it has no tensor `{0}`")]
    NoTensor(&'static str),
    /// A tensor of another type.
    #[error("`{tensor}` is {found}, must be {expected}")]
    Dtype {
        /// The tensor.
        tensor: &'static str,
        /// Its type.
        found: String,
        /// The types it can have.
        expected: &'static str,
    },
    /// A tensor of another shape.
    #[error("`{tensor}` is {found:?}, must be {expected}")]
    Shape {
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// The shape it must have.
        expected: String,
    },
    /// An axis of length 0.
    #[error("`{tensor}` is {found:?}: it has no {axis}")]
    Empty {
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// The axis.
        axis: &'static str,
    },
    /// Nothing to make a trace of.
    #[error("it has no steps")]
    NoSteps,
    /// Metadata that a trace needs.
    #[error("its metadata has no `{0}`")]
    NoMetadata(&'static str),
    /// A value of the metadata that is no number in range, or contradicts a shape.
    #[error("metadata `{key}` is `{value}`, must be {expected}")]
    Metadata {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        expected: String,
    },
    /// A size of 0 or beyond the limit.
    #[error("{value} {what} must be at least 1 and at most {limit}")]
    Size {
        /// Which size.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The largest it can be.
        limit: u64,
    },
    /// More than fits, a sign of damage.
    #[error("{value} {what} are more than the limit, {limit}")]
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// How many.
        value: u64,
        /// The most there can be.
        limit: u64,
    },
    /// An expert that does not exist.
    #[error("expert {expert} does not exist among {experts}")]
    NoSuchExpert {
        /// The expert.
        expert: i64,
        /// Number of experts.
        experts: usize,
    },
    /// A token sent to one expert twice.
    #[error("expert {0} appears twice")]
    DuplicateExpert(u32),
    /// A weight, norm or score that is NaN, infinite or negative.
    #[error("{what} {value} must be finite and at least 0")]
    Number {
        /// What it is.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// Counts and per-pair ids that contradict each other.
    #[error("expert {expert} has {pairs} pairs by their ids, {count} by the counts")]
    Disagree {
        /// The expert.
        expert: usize,
        /// Pairs by their ids.
        pairs: u32,
        /// Pairs by the counts.
        count: u32,
    },
    /// Numbers of recorded steps that do not ascend within the trace.
    #[error("`steps` has {value} at index {index}, must ascend within {first} to {last}")]
    StepNumber {
        /// Index into `steps`.
        index: usize,
        /// The number there.
        value: i64,
        /// Smallest number that it can have.
        first: u32,
        /// Largest number that it can have.
        last: u32,
    },
    /// Per-pair data without a step they belong to, twice for one step, or with scores for some steps alone.
    #[error(
        "per-pair data must follow the counts of their step, once, with scores for every such step or for none"
    )]
    PairOrder,
    /// A line that is not JSON, or lacks a field.
    #[error("{source}, near `{near}`")]
    Json {
        /// What is wrong.
        source: serde_json::Error,
        /// The text there.
        near: String,
    },
    /// A record that is not CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// An npz archive that cannot be read.
    #[error(transparent)]
    Zip(#[from] zip::result::ZipError),
    /// An npy header that cannot be read.
    #[error(transparent)]
    Npy(#[from] ndarray_npy::npy::header::ReadHeaderError),
    /// An array whose elements are no numbers. Reading Python objects would run code from the file.
    #[error(
        "array `{name}` has elements of type {found}; export it with an integer type, such as array.astype(\"int64\")"
    )]
    ArrayType {
        /// The array.
        name: String,
        /// Its type, as numpy writes it.
        found: String,
    },
    /// An array of other dimensions.
    #[error("array `{name}` is {found:?}, which is not [{expected}]; see --axes")]
    ArrayShape {
        /// The array.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// Its axes.
        expected: String,
    },
    /// Several arrays to choose from, or none.
    #[error("choose one of its arrays with --array: {}", .0.join(", "))]
    Arrays(Vec<String>),
    /// A column that a CSV file needs.
    #[error("the first line has no column `{0}`")]
    NoColumn(&'static str),
    /// A value that is not what its field holds.
    #[error("{name} is `{value}`, must be {expected}")]
    Field {
        /// The field.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        expected: String,
    },
    /// A second record for the same place.
    #[error("there is a record of it before")]
    Twice,
    /// No record for a place.
    #[error("there is no record of it")]
    Missing,
    /// Steps out of order in a file that is read as a stream.
    #[error("step {step} comes after step {after}; sort the file by step")]
    Unsorted {
        /// The step.
        step: u64,
        /// The step before it.
        after: u64,
    },
    /// Traces that do not belong together.
    #[error("it has {found} {what}, {other} has {expected}")]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// Its value here.
        found: u64,
        /// The file it is compared with.
        other: String,
        /// Its value there.
        expected: u64,
    },
    /// Traces that do not follow one another.
    #[error(
        "its first step is {found}, must be from {first} to {next}, where the trace before it starts and ends"
    )]
    Gap {
        /// The first step.
        found: u32,
        /// First step of the trace before it.
        first: u32,
        /// The step after its last.
        next: u32,
    },
    /// A step with pairs that has no counts.
    #[error("it has pairs of this step, the counts are those of other steps")]
    NoCounts,
    /// Layers with tokens that others lack.
    #[error("{found} records for tokens 0 to {last}")]
    Tokens {
        /// Records.
        found: u64,
        /// The largest token number.
        last: u64,
    },
    /// A file that is another at the second pass.
    #[error("it changed while it was read")]
    Changed,
    /// Per-pair data that were asked for and are not there.
    #[error("it has no per-pair data")]
    NoPairs,
    /// A file of no known format.
    #[error("its format is unknown; name it with --from")]
    UnknownFormat,
    /// An option that says nothing about the format.
    #[error("--{option} does not apply to {format}")]
    Option {
        /// The option.
        option: &'static str,
        /// The format.
        format: super::Format,
    },
    /// A layer beyond the trace.
    #[error("layer {layer} is beyond the {layers} there are")]
    NoSuchLayer {
        /// The layer.
        layer: usize,
        /// Number of layers.
        layers: usize,
    },
    /// A step beyond the trace.
    #[error("step index {index} is beyond the {steps} there are")]
    NoSuchStep {
        /// The index.
        index: usize,
        /// Steps, or steps with per-pair data.
        steps: usize,
    },
}

impl TraceError {
    /// For `map_err` on file operations.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io {
            path: path.into(),
            source,
        }
    }

    /// A fault at a place of a file.
    pub(crate) fn invalid(path: &Path, place: Place, fault: Fault) -> Self {
        Self::Invalid(Box::new(Invalid {
            path: path.into(),
            place,
            fault,
        }))
    }
}
