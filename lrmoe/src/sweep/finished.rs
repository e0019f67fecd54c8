//! `OUT/finished.jsonl`: what the report needs of every finished run, so that a sweep can be kept, passed on and gone on with elsewhere without the
//! logs of its runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use toml::Table;

use super::SweepError;
use super::curve::Curve;
use crate::error::Error;
use crate::files;

/// What a run was started with, in `run.toml` too.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Started {
    /// Length and checksum of the text.
    pub(super) text: String,
    /// Without the path of the text.
    pub(super) options: Table,
}

/// A line of the file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct FinishedRun {
    run: String,
    #[serde(flatten)]
    pub(super) started: Started,
    pub(super) curve: Curve,
}

/// The file, by the names of its runs. Runs that the grid has no more stay in it.
#[derive(Debug)]
pub(super) struct FinishedRuns {
    path: PathBuf,
    runs: BTreeMap<String, FinishedRun>,
}

impl FinishedRuns {
    /// Reads the file of a sweep's folder, which need not be there.
    ///
    /// # Errors
    /// A line that is no finished run.
    pub(super) fn read(out: &Path) -> Result<Self, Error> {
        let path = out.join("finished.jsonl");
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.map_err(Error::io(&path))?,
        };
        let mut runs = BTreeMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let run: FinishedRun =
                serde_json::from_str(line).map_err(|source| SweepError::FinishedLine {
                    path: path.clone(),
                    line: number,
                    source,
                })?;
            runs.insert(run.run.clone(), run);
        }
        Ok(Self { path, runs })
    }

    pub(super) fn get(&self, run: &str) -> Option<&FinishedRun> {
        self.runs.get(run)
    }

    /// Adds a run, in place of an older one of its name.
    pub(super) fn insert(&mut self, run: &str, started: Started, curve: &Curve) {
        let finished = FinishedRun {
            run: run.to_owned(),
            started,
            curve: curve.clone(),
        };
        self.runs.insert(run.to_owned(), finished);
    }

    /// Writes the file, one run a line, in the order of their names; none without runs.
    pub(super) fn write(&self) -> Result<(), Error> {
        if self.runs.is_empty() {
            return Ok(());
        }
        let line =
            |run| serde_json::to_string(run).expect("a run has only string keys and numbers");
        let lines: String = self.runs.values().map(|run| line(run) + "\n").collect();
        files::write(&self.path, lines.as_bytes())
    }
}
