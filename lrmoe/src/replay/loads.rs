//! One load matrix from a file, for a single plan.

use std::io::Read;
use std::path::Path;

use indicatif::ProgressBar;
use lrmoe_plan::Loads;
use ndarray::{Array2, Axis};

use super::ReplayError;
use crate::trace::{ConvertOptions, Format, TraceError, TraceReader, convert};

/// Reads pairs by source rank and expert, `[ranks, experts]`: a `.npy` or `.npz` array, else CSV without a header, one rank a line; CSV from
/// standard input where the path is `-`.
///
/// # Errors
///
/// A file that cannot be read, or holds anything but a matrix of counts; the error says where.
pub fn read_loads(path: &Path) -> Result<Loads, ReplayError> {
    let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
    let numpy = ending.is_some_and(|ending| ending == "npy" || ending == "npz");
    let counts = if numpy {
        read_numpy(path)?
    } else if path.as_os_str() == "-" {
        read_csv(path, std::io::stdin().lock())?
    } else {
        read_csv(
            path,
            std::fs::File::open(path).map_err(TraceError::io(path))?,
        )?
    };
    Loads::new(counts).map_err(|source| ReplayError::Loads {
        path: path.into(),
        source,
    })
}

/// By way of a trace of one step and layer.
fn read_numpy(path: &Path) -> Result<Array2<u32>, ReplayError> {
    let folder = tempfile::tempdir().map_err(TraceError::io(path))?;
    let trace = folder.path().join("loads.safetensors");
    let options = ConvertOptions {
        from: Some(Format::Numpy),
        axes: Some("ranks,experts".parse().expect("two axes")),
        ..ConvertOptions::default()
    };
    convert(&[path.into()], &trace, &options, &ProgressBar::hidden())?;
    Ok(TraceReader::open(&trace)?.step(0)?.remove_axis(Axis(0)))
}

fn read_csv(path: &Path, file: impl Read) -> Result<Array2<u32>, ReplayError> {
    let mut builder = csv::ReaderBuilder::new();
    builder
        .has_headers(false)
        .trim(csv::Trim::All)
        .comment(Some(b'#'));
    let mut reader = builder.from_reader(file);
    let (mut counts, mut ranks) = (Vec::new(), 0);
    for record in reader.records() {
        let record = record.map_err(|source| ReplayError::Csv {
            path: path.into(),
            source,
        })?;
        for (column, value) in record.iter().enumerate() {
            counts.push(value.parse().map_err(|_| ReplayError::Count {
                path: path.into(),
                line: record.position().map_or(0, csv::Position::line),
                column: column + 1,
                value: value.into(),
            })?);
        }
        ranks += 1;
    }
    let experts = counts.len() / ranks.max(1);
    Ok(Array2::from_shape_vec((ranks, experts), counts).expect("lines of equal length"))
}
