//! Traces of every format against second readers of it.

mod csv;
mod jsonl;
mod megatron;
mod native;
mod numpy;

use indicatif::ProgressBar;
use lrmoe::trace::{
    ConvertOptions, Format, PairRecord, TraceError, TraceHeader, TraceReader, convert,
};
use ndarray::Array3;

use crate::files;

pub use csv::trace_csv;
pub use jsonl::trace_jsonl;
pub use megatron::trace_megatron;
pub use native::trace_native;
pub use numpy::trace_numpy;

/// Most counts of a step with which a target goes on: a trace is dense, and a few bytes of text can ask for a GiB of zeros.
const MOST_COUNTS: usize = 1 << 16;
/// Most experts, ranks and layers of a trace.
const MOST: usize = 1 << 16;
/// Most steps of a run.
const MOST_STEPS: u64 = i32::MAX as u64;

/// What a second reader makes of an input.
enum Expected {
    /// Something that it does not tell.
    Unknown,
    /// No trace.
    Refused,
    Steps(Steps),
}

/// All steps of a trace, `[layers, ranks, experts]` each, and their pairs where there are any.
#[derive(Debug, Default, PartialEq)]
struct Steps {
    first: u64,
    counts: Vec<Array3<u32>>,
    pairs: Vec<PairRecord>,
}

impl Steps {
    /// Sizes and sums are within the limits.
    fn checked(self) -> Expected {
        let sum = |counts: &Array3<u32>| {
            let layers = counts.outer_iter();
            let pairs = layers.map(|layer| layer.iter().map(|&n| u64::from(n)).sum::<u64>());
            pairs.max().unwrap_or(0)
        };
        let fits = self.first < MOST_STEPS
            && self.first + self.counts.len() as u64 <= MOST_STEPS
            && self
                .counts
                .iter()
                .all(|counts| sum(counts) <= u32::MAX.into());
        if fits {
            Expected::Steps(self)
        } else {
            Expected::Refused
        }
    }
}

/// A trace read whole.
#[derive(Debug)]
struct Contents {
    header: TraceHeader,
    steps: Steps,
}

fn read_all(reader: &mut TraceReader) -> Result<Contents, TraceError> {
    let header = reader.header().clone();
    let mut steps = Steps {
        first: header.first_step.into(),
        ..Steps::default()
    };
    for step in 0..header.steps {
        steps.counts.push(reader.step(step)?);
    }
    for index in 0..header.recorded.len() {
        steps.pairs.push(reader.pairs(index)?);
    }
    Ok(Contents { header, steps })
}

/// Converts the bytes as a file of that name; what comes of it, or of its refusal, must be as expected.
fn check_converted(
    name: &str,
    bytes: &[u8],
    format: Format,
    options: &ConvertOptions,
    expected: &Expected,
) {
    let (input, out) = (files::write(name, bytes), files::path("out.safetensors"));
    let options = ConvertOptions {
        from: Some(format),
        ..options.clone()
    };
    let _ = std::fs::remove_file(&out);
    let converted = convert(&[input], &out, &options, &ProgressBar::hidden());
    match converted {
        Ok(header) => {
            let mut reader = TraceReader::open(&out).expect("what has just been written");
            let found = read_all(&mut reader).expect("what has just been written");
            assert_eq!(found.header, header);
            match expected {
                Expected::Unknown => {}
                Expected::Refused => panic!("not refused: {found:?}"),
                Expected::Steps(steps) => assert_eq!(found.steps, *steps),
            }
        }
        Err(error) => {
            check_error(&error, name);
            assert!(!out.exists(), "a trace is left behind after {error}");
            assert!(!matches!(expected, Expected::Steps(_)), "{error}");
        }
    }
}

/// The error is about the file and says more than its name.
fn check_error(error: &TraceError, name: &str) {
    let message = error.to_string();
    let about = match error {
        TraceError::Invalid(invalid) => &invalid.path,
        TraceError::Io { path, .. } => path,
        _ => panic!("{message}"),
    };
    let named = about.file_name().is_some_and(|file| file == name);
    // The limits of sizes are the writer's.
    assert!(named || about.ends_with("out.safetensors"), "{message}");
    let (_, said) = message
        .split_once(": ")
        .expect("the file, then what is wrong");
    assert!(!said.trim().is_empty(), "{message}");
}

/// The rest of the bytes, and a number from the first of them, which chooses options.
fn choice(data: &[u8]) -> Option<(u8, &[u8])> {
    let (first, rest) = data.split_first()?;
    Some((first.wrapping_sub(b'0'), rest))
}
