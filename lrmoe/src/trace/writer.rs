//! Writing, step by step.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ndarray::{Array3, ArrayView3};
use safetensors::tensor::{Dtype, TensorInfo};
use serde_json::Value;
use tempfile::NamedTempFile;

use super::check::{self, Located};
use super::error::{Fault, Place, TraceError};
use super::header::{PairRecord, TraceSettings};
use super::layout::LENGTH_BYTES;
use super::limits::MOST_STEPS;
use crate::files::{folder_of, persist, temporary_beside};

/// More bytes than the header can gain until the end: the four per-pair tensors and the digits of what is not known before, each below 200.
const GROWTH: usize = 1024;

/// A trace that is being written. Steps go to temporary files in the folder of the trace; `finish` puts them together under its name. Dropped
/// before that, it leaves nothing behind.
#[derive(Debug)]
pub struct TraceWriter {
    path: PathBuf,
    settings: TraceSettings,
    /// Room for the header, then the counts.
    counts: BufWriter<NamedTempFile>,
    /// Bytes of that room.
    room: usize,
    steps: usize,
    /// Counts of the last step, for its pairs to be checked against.
    last: Array3<u32>,
    pairs: Option<PairFiles>,
}

/// Per-pair tensors, each a file of its own until the end.
#[derive(Debug)]
struct PairFiles {
    numbers: Vec<i32>,
    expert: BufWriter<File>,
    gate_weight: BufWriter<File>,
    score: Option<BufWriter<File>>,
}

impl TraceWriter {
    /// Starts a trace that will be at `path`, in place of what is there.
    ///
    /// # Errors
    /// `TraceError`: sizes of 0 or beyond the limits, a folder that cannot be written to.
    pub fn create(path: impl AsRef<Path>, settings: TraceSettings) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let checked = settings.check();
        checked.map_err(|fault| TraceError::invalid(path, Place::default(), fault))?;
        let counts = temporary_beside(path).map_err(TraceError::io(folder_of(path)))?;
        let mut writer = Self {
            path: path.into(),
            counts: BufWriter::new(counts),
            room: 0,
            steps: 0,
            last: Array3::zeros((0, 0, 0)),
            pairs: None,
            settings,
        };
        writer.room = (writer.header().len() + GROWTH).next_multiple_of(8);
        let blank = vec![b' '; LENGTH_BYTES as usize + writer.room];
        writer
            .counts
            .write_all(&blank)
            .map_err(TraceError::io(path))?;
        Ok(writer)
    }

    /// Steps pushed so far.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Adds a step. `counts`: `[layers, ranks, experts]`.
    ///
    /// # Errors
    /// `TraceError`: another shape, a layer with more than `u32::MAX` pairs, a step number beyond `i32::MAX`, a failed write.
    pub fn push(&mut self, counts: ArrayView3<'_, u32>) -> Result<(), TraceError> {
        let TraceSettings {
            layers,
            ranks,
            experts,
            first_step,
            ..
        } = self.settings;
        let limit = MOST_STEPS - u64::from(first_step).min(MOST_STEPS);
        let checked = if counts.dim() != (layers, ranks, experts) {
            whole(shape("counts", counts.shape(), [layers, ranks, experts]))
        } else if self.steps as u64 >= limit {
            let (what, value) = ("steps", self.steps as u64 + 1);
            whole(Fault::TooMany { what, value, limit })
        } else {
            check::counts(counts)
        };
        self.located(self.steps, checked)?;
        for count in counts {
            self.counts
                .write_all(&count.to_le_bytes())
                .map_err(TraceError::io(&self.path))?;
        }
        self.last = counts.to_owned();
        self.steps += 1;
        Ok(())
    }

    /// Adds every pair of the step pushed last. Either all such steps have scores, or none has.
    ///
    /// # Errors
    /// `TraceError`: another shape, settings without `top_k` or `tokens_per_rank`, what a reader would refuse, a failed write.
    pub fn push_pairs(&mut self, mut pairs: PairRecord) -> Result<(), TraceError> {
        let checked = self.check_pairs(&mut pairs);
        self.located(self.steps.saturating_sub(1), checked)?;
        let number = self.number();
        self.write_pairs(number, &pairs)
            .map_err(TraceError::io(&self.path))
    }

    fn check_pairs(&self, pairs: &mut PairRecord) -> Located<()> {
        let Some(top_k) = self.settings.top_k else {
            return whole(Fault::NoMetadata("top_k"));
        };
        let Some(tokens) = self.settings.tokens_per_rank else {
            return whole(Fault::NoMetadata("tokens_per_rank"));
        };
        let dim = [self.settings.layers, self.settings.ranks * tokens, top_k];
        let score = pairs.score.as_ref().map(|score| ("score", score.shape()));
        let shapes = [
            ("expert", pairs.expert.shape()),
            ("gate_weight", pairs.gate_weight.shape()),
        ];
        for (tensor, found) in shapes.into_iter().chain(score) {
            if found != dim {
                return whole(shape(tensor, found, dim));
            }
        }
        let scored = pairs.score.is_some();
        let before = self.pairs.as_ref();
        let repeated = before.is_some_and(|before| {
            before.numbers.last() == Some(&self.number()) || before.score.is_some() != scored
        });
        if self.steps == 0 || repeated {
            return whole(Fault::PairOrder);
        }
        check::pairs(pairs, self.settings.experts)?;
        check::agree(pairs.expert.view(), self.last.view())
    }

    fn write_pairs(&mut self, number: i32, pairs: &PairRecord) -> std::io::Result<()> {
        let folder = folder_of(&self.path);
        let create = || tempfile::tempfile_in(folder).map(BufWriter::new);
        if self.pairs.is_none() {
            self.pairs = Some(PairFiles {
                numbers: Vec::new(),
                expert: create()?,
                gate_weight: create()?,
                score: pairs.score.as_ref().map(|_| create()).transpose()?,
            });
        }
        let files = self.pairs.as_mut().expect("just made");
        files.numbers.push(number);
        for id in &pairs.expert {
            files.expert.write_all(&id.to_le_bytes())?;
        }
        for weight in &pairs.gate_weight {
            files.gate_weight.write_all(&weight.to_le_bytes())?;
        }
        for (file, scores) in files.score.iter_mut().zip(&pairs.score) {
            for score in scores {
                file.write_all(&score.to_le_bytes())?;
            }
        }
        Ok(())
    }

    /// Puts the trace together and gives it its name.
    ///
    /// # Errors
    /// `TraceError`: no steps, a failed write. Nothing is left behind then.
    pub fn finish(self) -> Result<(), TraceError> {
        if self.steps == 0 {
            return Err(TraceError::invalid(
                &self.path,
                Place::default(),
                Fault::NoSteps,
            ));
        }
        let header = self.header();
        let path = self.path.clone();
        self.assemble(&header).map_err(TraceError::io(&path))
    }

    fn assemble(mut self, header: &str) -> std::io::Result<()> {
        let out = &mut self.counts;
        if let Some(pairs) = self.pairs {
            for number in &pairs.numbers {
                out.write_all(&number.to_le_bytes())?;
            }
            for file in [Some(pairs.expert), Some(pairs.gate_weight), pairs.score]
                .into_iter()
                .flatten()
            {
                let mut file = file.into_inner()?;
                file.seek(SeekFrom::Start(0))?;
                out.flush()?;
                std::io::copy(&mut file, out.get_mut().as_file_mut())?;
            }
        }
        let mut file = self.counts.into_inner()?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&(self.room as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        persist(file, &self.path)
    }

    /// The header for what has been written, in the order in which `assemble` puts it together; keys sorted, so that equal traces are equal
    /// files.
    fn header(&self) -> String {
        let TraceSettings {
            layers,
            ranks,
            experts,
            top_k,
            tokens_per_rank,
            ..
        } = self.settings;
        let mut metadata: BTreeMap<&str, String> = self
            .settings
            .metadata
            .iter()
            .map(|(key, value)| (key.as_str(), value.clone()))
            .collect();
        let sizes = [
            ("experts", Some(experts)),
            ("ranks", Some(ranks)),
            ("top_k", top_k),
            ("tokens_per_rank", tokens_per_rank),
            ("first_step", Some(self.settings.first_step as usize)),
        ];
        for (key, value) in sizes {
            metadata.remove(key);
            metadata.extend(value.map(|value| (key, value.to_string())));
        }
        let mut header = BTreeMap::from([("__metadata__", json(&metadata))]);
        let mut end = 0;
        let mut add = |name, dtype, shape: &[usize]| {
            let start = end;
            end += 4 * shape.iter().product::<usize>();
            let info = TensorInfo {
                dtype,
                shape: shape.to_vec(),
                data_offsets: (start, end),
            };
            header.insert(name, json(&info));
        };
        add("counts", Dtype::U32, &[self.steps, layers, ranks, experts]);
        if let Some(pairs) = &self.pairs {
            let recorded = pairs.numbers.len();
            let tokens = ranks * tokens_per_rank.expect("checked with the pairs");
            let shape = [
                recorded,
                layers,
                tokens,
                top_k.expect("checked with the pairs"),
            ];
            add("steps", Dtype::I32, &[recorded]);
            add("expert", Dtype::I32, &shape);
            add("gate_weight", Dtype::F32, &shape);
            if pairs.score.is_some() {
                add("score", Dtype::F32, &shape);
            }
        }
        serde_json::to_string(&header).expect("strings and numbers")
    }

    /// Number in the run of the step pushed last.
    fn number(&self) -> i32 {
        (self.settings.first_step as usize + self.steps).saturating_sub(1) as i32
    }

    fn located(&self, step: usize, checked: Located<()>) -> Result<(), TraceError> {
        checked.map_err(|located| {
            let (place, fault) = *located;
            let step = Some(u64::from(self.settings.first_step) + step as u64);
            TraceError::invalid(&self.path, Place { step, ..place }, fault)
        })
    }
}

/// A fault of a step as a whole.
fn whole<T>(fault: Fault) -> Located<T> {
    Err(Box::new((Place::default(), fault)))
}

fn shape(tensor: &'static str, found: &[usize], expected: [usize; 3]) -> Fault {
    Fault::Shape {
        tensor,
        found: found.to_vec(),
        expected: format!("{expected:?}"),
    }
}

fn json(value: &impl serde::Serialize) -> Value {
    serde_json::to_value(value).expect("strings and numbers")
}

/// Checks before long work that a file can be written afterwards.
///
/// # Errors
/// `TraceError::Exists` for a file that would be replaced, but for `overwrite`; `TraceError::NotAFile` for what is no regular file;
/// `TraceError::Io` if there is no folder for it.
pub fn check_output(path: &Path, overwrite: bool) -> Result<(), TraceError> {
    let folder = folder_of(path);
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => Err(TraceError::NotAFile(path.into())),
        Ok(_) if !overwrite => Err(TraceError::Exists(path.into())),
        Ok(_) => Ok(()),
        Err(_) => match std::fs::metadata(folder) {
            Ok(found) if !found.is_dir() => Err(TraceError::NotAFile(path.into())),
            Ok(_) => Ok(()),
            Err(source) => Err(TraceError::Io {
                path: folder.into(),
                source,
            }),
        },
    }
}
