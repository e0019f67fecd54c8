//! `steps.jsonl`: one line per step, and the records of a run in memory.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::record::StepRecord;
use crate::error::Error;
use crate::files;

/// The open log of a run.
#[derive(Debug)]
pub(super) struct StepLog {
    path: PathBuf,
    file: File,
    records: Vec<StepRecord>,
}

impl StepLog {
    /// Opens `OUT/steps.jsonl`, keeping the records of the first `done` steps: what a killed run wrote after its last checkpoint is done again.
    /// An existing run is only touched if `replace`.
    pub(super) fn open(out: &Path, done: u32, replace: bool) -> Result<Self, Error> {
        let path = log_path(out);
        let compared = super::compare::compare_path(out).exists();
        if (path.exists() || compared) && !replace {
            return Err(Error::OutExists(out.into()));
        }
        std::fs::create_dir_all(out).map_err(Error::io(out))?;
        let records = if done > 0 {
            read(&path, done)?
        } else {
            Vec::new()
        };
        let lines: String = records.iter().map(line).collect();
        files::write(&path, lines.as_bytes())?;
        let file = OpenOptions::new()
            .append(true)
            .open(&path)
            .map_err(Error::io(&path))?;
        Ok(Self {
            path,
            file,
            records,
        })
    }

    pub(super) fn append(&mut self, record: &StepRecord) -> Result<(), Error> {
        let length = self.file.metadata().map_err(Error::io(&self.path))?.len();
        if let Err(error) = self.file.write_all(line(record).as_bytes()) {
            // No half line stays behind; the error that counts is the first.
            let _ = self.file.set_len(length);
            return Err(Error::io(&self.path)(error));
        }
        self.records.push(record.clone());
        Ok(())
    }

    pub(super) fn records(&self) -> &[StepRecord] {
        &self.records
    }

    pub(super) fn into_records(self) -> Vec<StepRecord> {
        self.records
    }
}

/// Where a run keeps its log.
pub(super) fn log_path(out: &Path) -> PathBuf {
    out.join("steps.jsonl")
}

fn line(record: &StepRecord) -> String {
    let json = serde_json::to_string(record).expect("a record has only string keys");
    json + "\n"
}

/// Records of the first `done` steps, one a line. What follows, perhaps cut short by a kill, is done again.
fn read(path: &Path, done: u32) -> Result<Vec<StepRecord>, Error> {
    let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
    let mut lines = text.lines();
    let record = |step: u32| {
        let record = lines
            .next()
            .and_then(|line| serde_json::from_str(line).ok());
        let record = record.filter(|record: &StepRecord| record.step == step);
        record.ok_or_else(|| Error::Log {
            path: path.into(),
            line: step as usize,
        })
    };
    (1..=done).map(record).collect()
}
