use std::fmt::Display;

use lrmoe_plan::Stash;

use crate::config::{Device, Dtype};
use crate::policy::UnknownForward;

const GIB: f64 = (1u64 << 30) as f64;

/// What makes a benchmark impossible.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A number out of its range.
    #[error("{name} {value} is out of range, must be {least} to {most}")]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// The smallest it can be.
        least: String,
        /// The largest.
        most: String,
    },
    /// The same retention twice.
    #[error("retention {0} is given twice")]
    Repeated(f64),
    /// No stash mode.
    #[error("there is no stash mode to time")]
    NoStash,
    /// The same stash mode twice.
    #[error("stash mode {0} is given twice")]
    RepeatedStash(Stash),
    /// A score that a stash mode cannot wait for.
    #[error(transparent)]
    Stash(#[from] UnknownForward),
    /// More memory than the machine has left.
    #[error(
        "the layer needs about {:.1} GiB ({:.1} for weights, gradients and the optimizer's copy, {:.1} for rows and tokens) and {:.1} GiB are available: \
         lower --experts, --width or --hidden for the former, --tokens for the latter, or take a smaller --preset",
        (*weights as f64 + *rows as f64) / GIB, *weights as f64 / GIB, *rows as f64 / GIB, *available as f64 / GIB
    )]
    Memory {
        /// Bytes of weights, gradients and master weights.
        weights: u64,
        /// Bytes of everything that grows with rows.
        rows: u64,
        /// Bytes that the machine can give.
        available: u64,
    },
    /// Several cards for the one rank.
    #[error("the layer of a benchmark is on one card, not on {0}")]
    Cards(Device),
    /// Threads that the system does not give.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// How many.
        threads: usize,
        /// Why.
        source: rayon::ThreadPoolBuildError,
    },
    /// A type that the device cannot compute with.
    #[error(
        "the layer does not run in {dtype} on {device}, only on cpu and cuda: change --dtype or --device"
    )]
    Dtype {
        /// The type.
        dtype: Dtype,
        /// The device.
        device: Device,
    },
}

/// The value, if it lies in the range; NaN lies in none.
pub(super) fn within<T: PartialOrd + Display>(
    name: &'static str,
    value: T,
    least: T,
    most: T,
) -> Result<(), BenchError> {
    if least <= value && value <= most {
        return Ok(());
    }
    Err(BenchError::OutOfRange {
        name,
        value: value.to_string(),
        least: least.to_string(),
        most: most.to_string(),
    })
}
