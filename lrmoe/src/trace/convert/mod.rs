//! Traces of other programs, as native ones.
//!
//! Every format is a [`Source`] of steps: sizes first, then one step after the other, written as they come.

mod csv;
mod element;
mod jsonl;
mod lines;
mod megatron;
mod merge;
mod native;
mod numpy;

use std::fmt;
use std::fs::File;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use indicatif::ProgressBar;
use ndarray::{Array3, ArrayView3};

use super::check::{self, Located};
use super::error::{Fault, Place, TraceError};
use super::header::{PairRecord, TraceHeader, TraceSettings};
use super::limits::{MOST, MOST_STEPS};
use super::{TraceReader, TraceWriter};

/// Formats that can be converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// LRMoE's own; several files are joined.
    Native,
    /// One JSON object per token and layer, with `topk_ids` and `topk_weights`.
    Jsonl,
    /// One JSON object per step, rank and layer, with `top_indices`.
    Megatron,
    /// Counts in a `.npy` or `.npz` file.
    Numpy,
    /// `step,layer,rank,expert,count`.
    Csv,
}

const FORMATS: [(&str, Format); 5] = [
    ("native", Format::Native),
    ("jsonl", Format::Jsonl),
    ("megatron", Format::Megatron),
    ("numpy", Format::Numpy),
    ("csv", Format::Csv),
];

/// A format that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown format `{0}`, must be {names}", names = FORMATS.map(|(name, _)| name).join(", "))]
pub struct UnknownFormat(String);

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = FORMATS.iter().find(|(_, format)| format == self);
        f.pad(named.map_or("", |(name, _)| name))
    }
}

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        let named = FORMATS.iter().find(|(known, _)| *known == name);
        named
            .map(|(_, format)| *format)
            .ok_or_else(|| UnknownFormat(name.into()))
    }
}

/// What the input does not say. An option that says nothing about the format is refused.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConvertOptions {
    /// The format, where it is not to be told from the first input.
    pub from: Option<Format>,
    /// A native trace of the same run whose per-pair data are taken over.
    pub pairs: Option<PathBuf>,
    /// JSONL: ranks among which the tokens of a step are divided, in order; 1 by default.
    pub ranks: Option<usize>,
    /// JSONL: tokens of a step, over all ranks; all of them by default.
    pub tokens_per_step: Option<usize>,
    /// JSONL, Megatron, CSV: experts of a layer; the largest id + 1 by default, unless the input says it.
    pub experts: Option<usize>,
    /// Numpy: the array's axes; by default the last of `steps`, `layers`, `ranks`, `experts`, without `ranks` where there are fewer than four.
    pub axes: Option<Axes>,
    /// Numpy: which array of an npz file.
    pub array: Option<String>,
}

pub use element::{Axes, UnknownAxes};

/// One step of an input.
struct Step {
    counts: Array3<u32>,
    pairs: Option<PairRecord>,
}

/// A format's reader.
trait Source {
    /// Sizes, known before the first step.
    fn settings(&self) -> TraceSettings;
    /// The next step, unless the input has ended.
    fn next(&mut self) -> Result<Option<Step>, TraceError>;
}

/// Converts `inputs`, in order, into the native trace `out`. `progress` counts bytes read. Returns the sizes of `out`.
///
/// # Errors
/// `TraceError`: an input that is not what its format says, an option that does not apply, a failed read or write. `out` is then left as it was.
pub fn convert(
    inputs: &[PathBuf],
    out: &Path,
    options: &ConvertOptions,
    progress: &ProgressBar,
) -> Result<TraceHeader, TraceError> {
    let mut source = open(inputs, options, progress)?;
    let mut pairs = match &options.pairs {
        None => None,
        Some(path) => Some(Pairs::open(path, inputs, &source.settings())?),
    };
    let mut settings = source.settings();
    if let Some(pairs) = &pairs {
        settings.top_k = pairs.reader.header().top_k;
        settings.tokens_per_rank = pairs.reader.header().tokens_per_rank;
    }
    let mut number = settings.first_step;
    let mut writer = TraceWriter::create(out, settings)?;
    while let Some(step) = source.next()? {
        let counts = step.counts.view();
        // The writer checks too, but would lay it to the output.
        located(&inputs[0], number, check::counts(counts))?;
        writer.push(counts)?;
        let other = pairs.as_mut().map(|pairs| pairs.of_step(number, counts));
        if let Some(pairs) = other.transpose()?.flatten().or(step.pairs) {
            writer.push_pairs(pairs)?;
        }
        number += 1;
    }
    if let Some(pairs) = pairs {
        pairs.done()?;
    }
    writer.finish()?;
    Ok(TraceReader::open(out)?.header().clone())
}

fn open(
    inputs: &[PathBuf],
    options: &ConvertOptions,
    progress: &ProgressBar,
) -> Result<Box<dyn Source>, TraceError> {
    let Some(first) = inputs.first() else {
        return Err(TraceError::invalid(
            Path::new(""),
            Place::default(),
            Fault::NoSteps,
        ));
    };
    let format = match options.from {
        Some(format) => format,
        None => detect(first)?,
    };
    options.check(first, format)?;
    Ok(match format {
        Format::Native => Box::new(native::Native::open(inputs, progress)?),
        Format::Jsonl => Box::new(jsonl::Jsonl::open(inputs, options, progress)?),
        Format::Megatron => Box::new(megatron::Megatron::open(inputs, options, progress)?),
        Format::Numpy => Box::new(numpy::Numpy::open(inputs, options, progress)?),
        Format::Csv => Box::new(csv::Csv::open(inputs, options, progress)?),
    })
}

impl ConvertOptions {
    fn check(&self, path: &Path, format: Format) -> Result<(), TraceError> {
        let given = [
            ("ranks", self.ranks.is_some(), &[Format::Jsonl][..]),
            (
                "tokens-per-step",
                self.tokens_per_step.is_some(),
                &[Format::Jsonl],
            ),
            (
                "experts",
                self.experts.is_some(),
                &[Format::Jsonl, Format::Megatron, Format::Csv],
            ),
            ("axes", self.axes.is_some(), &[Format::Numpy]),
            ("array", self.array.is_some(), &[Format::Numpy]),
        ];
        match given
            .iter()
            .find(|(_, given, formats)| *given && !formats.contains(&format))
        {
            None => Ok(()),
            Some((option, ..)) => {
                let fault = Fault::Option { option, format };
                Err(TraceError::invalid(path, Place::default(), fault))
            }
        }
    }
}

/// By the name's ending; JSON by the fields of the first record.
fn detect(path: &Path) -> Result<Format, TraceError> {
    let ending = path
        .extension()
        .map(|ending| ending.to_string_lossy().to_lowercase());
    Ok(match ending.as_deref().unwrap_or_default() {
        "safetensors" => Format::Native,
        "npy" | "npz" => Format::Numpy,
        "csv" => Format::Csv,
        "jsonl" | "ndjson" | "json" => {
            let file = File::open(path).map_err(TraceError::io(path))?;
            let mut line = Vec::new();
            let mut file = std::io::BufReader::new(std::io::Read::take(file, lines::MOST_BYTES));
            file.read_until(b'\n', &mut line)
                .map_err(TraceError::io(path))?;
            let fields = serde_json::from_slice::<serde_json::Value>(&line).unwrap_or_default();
            if fields.get("top_indices").is_some() {
                Format::Megatron
            } else {
                Format::Jsonl
            }
        }
        _ => {
            return Err(TraceError::invalid(
                path,
                Place::default(),
                Fault::UnknownFormat,
            ));
        }
    })
}

/// Per-pair data of another trace of the same run.
struct Pairs {
    reader: TraceReader,
    next: usize,
}

impl Pairs {
    fn open(path: &Path, inputs: &[PathBuf], run: &TraceSettings) -> Result<Self, TraceError> {
        let reader = TraceReader::open(path)?;
        let header = reader.header();
        let invalid = |fault| TraceError::invalid(path, Place::default(), fault);
        if header.recorded.is_empty() {
            return Err(invalid(Fault::NoPairs));
        }
        for (what, found, expected) in [
            ("layers", header.layers, run.layers),
            ("ranks", header.ranks, run.ranks),
            ("experts", header.experts, run.experts),
        ] {
            if found != expected {
                let (found, expected) = (found as u64, expected as u64);
                let other = inputs[0].display().to_string();
                return Err(invalid(Fault::Mismatch {
                    what,
                    found,
                    other,
                    expected,
                }));
            }
        }
        Ok(Self { reader, next: 0 })
    }

    /// Number of the next step that has pairs.
    fn number(&self) -> Option<u32> {
        let header = self.reader.header();
        let step = header.recorded.get(self.next)?;
        Some(header.number(*step as usize))
    }

    fn of_step(
        &mut self,
        number: u32,
        counts: ArrayView3<'_, u32>,
    ) -> Result<Option<PairRecord>, TraceError> {
        if self.number() != Some(number) {
            return Ok(None);
        }
        self.next += 1;
        let pairs = self.reader.pairs(self.next - 1)?;
        let agree = check::agree(pairs.expert.view(), counts);
        located(self.reader.path(), number, agree)?;
        Ok(Some(pairs))
    }

    /// Every step found its counts.
    fn done(&self) -> Result<(), TraceError> {
        match self.number() {
            None => Ok(()),
            Some(step) => {
                let place = Place {
                    step: Some(step.into()),
                    ..Place::default()
                };
                Err(TraceError::invalid(
                    self.reader.path(),
                    place,
                    Fault::NoCounts,
                ))
            }
        }
    }
}

/// Lays a fault to a step of a file.
fn located(path: &Path, number: u32, checked: Located<()>) -> Result<(), TraceError> {
    checked.map_err(|located| {
        let (place, fault) = *located;
        let step = Some(u64::from(number));
        TraceError::invalid(path, Place { step, ..place }, fault)
    })
}

/// Number of the first step, which there must be.
fn first_step(path: &Path, step: Option<u64>) -> Result<u32, TraceError> {
    let whole = |fault| TraceError::invalid(path, Place::default(), fault);
    let value = step.ok_or_else(|| whole(Fault::NoSteps))?;
    let limit = MOST_STEPS;
    match u32::try_from(value) {
        Ok(step) if value <= limit => Ok(step),
        _ => Err(whole(Fault::TooMany {
            what: "steps before the first",
            value,
            limit,
        })),
    }
}

/// Sizes within the limits, so that memory for a step can be had.
fn check_sizes(path: &Path, settings: &TraceSettings) -> Result<(), TraceError> {
    let checked = settings.check();
    checked.map_err(|fault| TraceError::invalid(path, Place::default(), fault))
}

/// Reads a file and counts its bytes.
fn counted(
    path: &Path,
    progress: &ProgressBar,
) -> Result<indicatif::ProgressBarIter<File>, TraceError> {
    let file = File::open(path).map_err(TraceError::io(path))?;
    Ok(progress.wrap_read(file))
}

/// Adds the bytes of all inputs to the length of the bar, `times` over.
fn announce(inputs: &[PathBuf], times: u64, progress: &ProgressBar) -> Result<(), TraceError> {
    for path in inputs {
        let bytes = std::fs::metadata(path).map_err(TraceError::io(path))?.len();
        progress.inc_length(times * bytes);
    }
    Ok(())
}
