//! Records of several files as one stream.

use std::path::{Path, PathBuf};

use crate::trace::error::{Fault, Place, TraceError};

/// A record with what it is ordered by.
pub(super) struct Keyed<R> {
    pub(super) key: u64,
    /// Line of the file, from 1.
    pub(super) line: u64,
    pub(super) record: R,
}

/// The records of a file.
pub(super) trait Records {
    type Record;

    fn path(&self) -> &Path;

    fn next(&mut self) -> Result<Option<Keyed<Self::Record>>, TraceError>;
}

/// A record and the file it comes from.
pub(super) struct Taken<R> {
    pub(super) path: PathBuf,
    pub(super) keyed: Keyed<R>,
}

impl<R> Taken<R> {
    /// A fault of the record, at the place that it is about.
    pub(super) fn fault(&self, place: Place, fault: Fault) -> TraceError {
        let line = Some(self.keyed.line);
        TraceError::invalid(&self.path, Place { line, ..place }, fault)
    }
}

/// Takes, of the next records of all files, the one with the lowest key; of equal ones that of the first file. Files in order of
/// their keys make a stream in order.
pub(super) struct Merged<F: Records> {
    files: Vec<(F, Option<Keyed<F::Record>>)>,
}

impl<F: Records> Merged<F> {
    pub(super) fn new(
        files: impl IntoIterator<Item = Result<F, TraceError>>,
    ) -> Result<Self, TraceError> {
        let with_head = |file: Result<F, TraceError>| {
            let mut file = file?;
            let head = file.next()?;
            Ok((file, head))
        };
        let files = files
            .into_iter()
            .map(with_head)
            .collect::<Result<_, TraceError>>()?;
        Ok(Self { files })
    }

    /// The lowest key.
    pub(super) fn peek(&self) -> Option<u64> {
        let heads = self.files.iter().filter_map(|(_, head)| head.as_ref());
        heads.map(|head| head.key).min()
    }

    pub(super) fn next(&mut self) -> Result<Option<Taken<F::Record>>, TraceError> {
        let key = |(_, head): &&mut (F, Option<Keyed<F::Record>>)| {
            head.as_ref().map_or(u64::MAX, |head| head.key)
        };
        let Some((file, head)) = self.files.iter_mut().min_by_key(key) else {
            return Ok(None);
        };
        let Some(keyed) = head.take() else {
            return Ok(None);
        };
        *head = file.next()?;
        let path = file.path().into();
        Ok(Some(Taken { path, keyed }))
    }

    /// The next record, if it belongs to step `step`. The files are in order of their steps.
    pub(super) fn of_step(&mut self, step: u64) -> Result<Option<Taken<F::Record>>, TraceError> {
        match self.peek() {
            Some(next) if next <= step => {}
            _ => return Ok(None),
        }
        let taken = self.next()?;
        match &taken {
            Some(taken) if taken.keyed.key < step => {
                let fault = Fault::Unsorted {
                    step: taken.keyed.key,
                    after: step,
                };
                Err(taken.fault(Place::default(), fault))
            }
            _ => Ok(taken),
        }
    }
}
