//! Counts as text: `step,layer,rank,expert,count`, one line for each count that is not 0.
//!
//! The first line names the columns, in any order; `step`, `layer` and `rank` may be absent and are 0 then, further columns are left alone. Every
//! file is in order of its steps, which are numbered on from the first without gaps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use csv::StringRecord;
use indicatif::{ProgressBar, ProgressBarIter};
use ndarray::Array3;

use super::merge::{Keyed, Merged, Records, Taken};
use super::{ConvertOptions, Source, Step, announce, check_sizes, counted, first_step};
use crate::trace::error::{Fault, Place, TraceError};
use crate::trace::header::TraceSettings;

const COLUMNS: [&str; 5] = ["step", "layer", "rank", "expert", "count"];
/// Columns that there must be.
const NEEDED: [&str; 2] = ["expert", "count"];

/// One line: layer, rank, expert, count.
#[derive(Clone, Copy)]
struct Record {
    layer: usize,
    rank: usize,
    expert: usize,
    count: u32,
}

impl Record {
    fn place(&self, step: u64) -> Place {
        Place {
            step: Some(step),
            layer: Some(self.layer),
            rank: Some(self.rank),
            ..Place::default()
        }
    }
}

struct File {
    path: PathBuf,
    file: csv::Reader<ProgressBarIter<std::fs::File>>,
    /// Index of each of `COLUMNS`.
    columns: [Option<usize>; 5],
    record: StringRecord,
}

impl File {
    fn open(path: &Path, progress: &ProgressBar) -> Result<Self, TraceError> {
        let whole = |fault| TraceError::invalid(path, Place::default(), fault);
        let mut builder = csv::ReaderBuilder::new();
        let mut file = builder
            .trim(csv::Trim::All)
            .from_reader(counted(path, progress)?);
        let names = file.headers().map_err(|error| whole(error.into()))?;
        let columns = COLUMNS.map(|column| names.iter().position(|name| name == column));
        for (name, column) in COLUMNS.into_iter().zip(columns) {
            if column.is_none() && NEEDED.contains(&name) {
                return Err(whole(Fault::NoColumn(name)));
            }
        }
        Ok(Self {
            path: path.into(),
            file,
            columns,
            record: StringRecord::new(),
        })
    }

    /// A column's number, 0 where there is no such column.
    fn number(&self, column: usize, limit: u64) -> Result<u64, Fault> {
        let Some(index) = self.columns[column] else {
            return Ok(0);
        };
        let text = self.record.get(index).unwrap_or_default();
        let number = text.parse().ok().filter(|number| *number <= limit);
        number.ok_or_else(|| Fault::Field {
            name: COLUMNS[column],
            value: text.into(),
            expected: format!("a whole number from 0 to {limit}"),
        })
    }

    fn parse(&self) -> Result<(u64, Record), Fault> {
        let id = super::MOST as u64 - 1;
        let record = Record {
            layer: self.number(1, id)? as usize,
            rank: self.number(2, id)? as usize,
            expert: self.number(3, id)? as usize,
            count: self.number(4, u32::MAX.into())? as u32,
        };
        Ok((self.number(0, i32::MAX as u64)?, record))
    }
}

impl Records for File {
    type Record = Record;

    fn path(&self) -> &Path {
        &self.path
    }

    fn next(&mut self) -> Result<Option<Keyed<Record>>, TraceError> {
        let read = self.file.read_record(&mut self.record);
        let line = self.record.position().map(csv::Position::line);
        let fault = |fault| {
            TraceError::invalid(
                &self.path,
                Place {
                    line,
                    ..Place::default()
                },
                fault,
            )
        };
        if !read.map_err(|error| TraceError::invalid(&self.path, Place::default(), error.into()))? {
            return Ok(None);
        }
        let (key, record) = self.parse().map_err(fault)?;
        let line = line.unwrap_or(0);
        Ok(Some(Keyed { key, line, record }))
    }
}

fn merged(inputs: &[PathBuf], progress: &ProgressBar) -> Result<Merged<File>, TraceError> {
    Merged::new(inputs.iter().map(|path| File::open(path, progress)))
}

pub(super) struct Csv {
    records: Merged<File>,
    settings: TraceSettings,
}

impl Csv {
    pub(super) fn open(
        inputs: &[PathBuf],
        options: &ConvertOptions,
        progress: &ProgressBar,
    ) -> Result<Self, TraceError> {
        announce(inputs, 2, progress)?;
        let mut records = merged(inputs, progress)?;
        let first = first_step(&inputs[0], records.peek())?;
        let mut sizes = [0; 3];
        while let Some(step) = records.peek() {
            while let Some(Taken {
                keyed: Keyed { record, .. },
                ..
            }) = records.of_step(step)?
            {
                for (size, index) in
                    sizes
                        .iter_mut()
                        .zip([record.layer, record.rank, record.expert])
                {
                    *size = (*size).max(index + 1);
                }
            }
        }
        let settings = TraceSettings {
            layers: sizes[0],
            ranks: sizes[1],
            experts: options.experts.unwrap_or(sizes[2]),
            first_step: first,
            metadata: BTreeMap::new(),
            ..TraceSettings::default()
        };
        check_sizes(&inputs[0], &settings)?;
        Ok(Self {
            records: merged(inputs, progress)?,
            settings,
        })
    }
}

impl Source for Csv {
    fn settings(&self) -> TraceSettings {
        self.settings.clone()
    }

    fn next(&mut self) -> Result<Option<Step>, TraceError> {
        let Some(step) = self.records.peek() else {
            return Ok(None);
        };
        let TraceSettings {
            layers,
            ranks,
            experts,
            ..
        } = self.settings;
        let mut counts = Array3::zeros((layers, ranks, experts));
        let mut seen = Array3::from_elem(counts.dim(), false);
        while let Some(taken) = self.records.of_step(step)? {
            let record = taken.keyed.record;
            let at = [record.layer, record.rank, record.expert];
            let fault = |fault| taken.fault(record.place(step), fault);
            let Some(seen) = seen.get_mut(at) else {
                let expert = record.expert as i64;
                return Err(fault(Fault::NoSuchExpert { expert, experts }));
            };
            if std::mem::replace(seen, true) {
                return Err(fault(Fault::Twice));
            }
            counts[at] = record.count;
        }
        Ok(Some(Step {
            counts,
            pairs: None,
        }))
    }
}
