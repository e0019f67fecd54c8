//! `steps.jsonl`: one line per step, and the records of a run in memory.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::checkpoint::write_atomically;
use super::record::StepRecord;
use crate::error::Error;

/// The open log of a run.
#[derive(Debug)]
pub(super) struct StepLog {
    path: PathBuf,
    file: File,
    records: Vec<StepRecord>,
}

impl StepLog {
    /// Opens `OUT/steps.jsonl`, keeping the records of the first `done` steps: what a killed run wrote after its last checkpoint is done again.
    /// An existing log is only touched if `replace`.
    pub(super) fn open(out: &Path, done: u32, replace: bool) -> Result<Self, Error> {
        let path = out.join("steps.jsonl");
        if path.exists() && !replace {
            return Err(Error::OutExists(out.into()));
        }
        std::fs::create_dir_all(out).map_err(Error::io(out))?;
        let records = if done > 0 {
            read(&path, done)?
        } else {
            Vec::new()
        };
        let lines: String = records.iter().map(line).collect();
        write_atomically(&path, lines.as_bytes())?;
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
        self.file
            .write_all(line(record).as_bytes())
            .map_err(Error::io(&self.path))?;
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

fn line(record: &StepRecord) -> String {
    let json = serde_json::to_string(record).expect("a record has only string keys");
    json + "\n"
}

/// Records of the first `done` steps. A last line that a kill cut short lies beyond the checkpoint and is passed over.
fn read(path: &Path, done: u32) -> Result<Vec<StepRecord>, Error> {
    let text = match std::fs::read_to_string(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        other => other.map_err(Error::io(path))?,
    };
    let records = text
        .lines()
        .map_while(|line| serde_json::from_str::<StepRecord>(line).ok());
    Ok(records.take_while(|record| record.step <= done).collect())
}
