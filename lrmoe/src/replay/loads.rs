//! One load matrix from a file, for a single plan.

use std::io::Read;
use std::path::Path;

use lrmoe_plan::Loads;
use ndarray::Array2;

use super::ReplayError;

/// Reads pairs by source rank and expert: CSV without a header, one rank a line; from standard input where the path is `-`.
///
/// # Errors
///
/// A file that cannot be read, or holds anything but counts, as many in each line; the error says where.
pub fn read_loads(path: &Path) -> Result<Loads, ReplayError> {
    let file: Box<dyn Read> = if path.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        Box::new(std::fs::File::open(path).map_err(crate::trace::TraceError::io(path))?)
    };
    let counts = read_csv(path, file)?;
    Loads::new(counts).map_err(|source| ReplayError::Loads {
        path: path.into(),
        source,
    })
}

fn read_csv(path: &Path, file: impl Read) -> Result<Array2<u32>, ReplayError> {
    let mut builder = csv::ReaderBuilder::new();
    builder.has_headers(false).trim(csv::Trim::All).comment(Some(b'#'));
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
