//! Files of one JSON object a line.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressBarIter};
use serde::de::DeserializeOwned;

use super::counted;
use crate::trace::error::{Fault, Place, TraceError};

/// Longest line: a Megatron record of a million tokens fits.
pub(super) const MOST_BYTES: u64 = 1 << 28;
/// Characters quoted from a line that is wrong.
const NEAR: usize = 24;

/// Lines of one file.
pub(super) struct Lines {
    pub(super) path: PathBuf,
    file: BufReader<ProgressBarIter<std::fs::File>>,
    text: Vec<u8>,
    /// Number of the line read last, from 1.
    pub(super) line: u64,
}

impl Lines {
    pub(super) fn open(path: &Path, progress: &ProgressBar) -> Result<Self, TraceError> {
        Ok(Self {
            path: path.into(),
            file: BufReader::with_capacity(1 << 16, counted(path, progress)?),
            text: Vec::new(),
            line: 0,
        })
    }

    /// The next record, empty lines left out.
    pub(super) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, TraceError> {
        loop {
            self.text.clear();
            self.line += 1;
            let mut file = self.file.by_ref().take(MOST_BYTES);
            let read = file
                .read_until(b'\n', &mut self.text)
                .map_err(TraceError::io(&self.path))?;
            if read as u64 == MOST_BYTES {
                let (what, limit) = ("bytes of a line", MOST_BYTES - 1);
                return Err(self.fault(Fault::TooMany {
                    what,
                    value: MOST_BYTES,
                    limit,
                }));
            }
            if read == 0 {
                return Ok(None);
            }
            if self.text.trim_ascii().is_empty() {
                continue;
            }
            return match serde_json::from_slice(&self.text) {
                Ok(record) => Ok(Some(record)),
                Err(source) => Err(self.fault(self.json(source))),
            };
        }
    }

    fn json(&self, source: serde_json::Error) -> Fault {
        let start = source.column().saturating_sub(1).min(self.text.len());
        let near = &self.text[start..self.text.len().min(start + NEAR)];
        let near = String::from_utf8_lossy(near).trim_end().to_owned();
        Fault::Json { source, near }
    }

    /// A fault in the line read last.
    pub(super) fn fault(&self, fault: Fault) -> TraceError {
        self.fault_at(Place::default(), fault)
    }

    /// A fault at a place that the line read last is about.
    pub(super) fn fault_at(&self, place: Place, fault: Fault) -> TraceError {
        let line = Some(self.line);
        TraceError::invalid(&self.path, Place { line, ..place }, fault)
    }
}
