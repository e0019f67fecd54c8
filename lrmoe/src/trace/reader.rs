//! Reading, step by step.

use std::fs::File;
use std::path::{Path, PathBuf};

use ndarray::Array3;
use safetensors::tensor::Dtype;

use super::check::{self, Located};
use super::error::{Fault, Place, TraceError};
use super::header::{PairRecord, TraceHeader};
use super::layout::{Tensor, Tensors};
use super::pairs::{PairTensors, read, shaped};
use super::sizes::{sizes, with_recorded};

/// An open trace. Holds one step at a time.
#[derive(Debug)]
pub struct TraceReader {
    path: PathBuf,
    file: File,
    header: TraceHeader,
    counts: Option<Tensor>,
    pairs: Option<PairTensors>,
}

impl TraceReader {
    /// Opens a trace and checks its header; the steps are checked when they are read.
    ///
    /// # Errors
    /// `TraceError`: no such file, or one that is not a native trace.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let mut file = File::open(path).map_err(TraceError::io(path))?;
        let invalid = |fault| TraceError::invalid(path, Place::default(), fault);
        let tensors = Tensors::read(&mut file).map_err(TraceError::io(path))?;
        let tensors = tensors.map_err(invalid)?;
        let counts = tensors
            .find("counts", &[Dtype::U32], "U32")
            .map_err(invalid)?;
        let pairs = PairTensors::find(&tensors).map_err(invalid)?;
        let mut header =
            sizes(tensors.metadata(), counts.as_ref(), pairs.as_ref()).map_err(invalid)?;
        if let Some(pairs) = &pairs {
            let recorded = pairs.axes[0];
            let numbers = match tensors
                .find("steps", &[Dtype::I32], "I32")
                .map_err(invalid)?
            {
                None => None,
                Some(steps) => {
                    steps.require(&[recorded]).map_err(invalid)?;
                    let numbers = read(&mut file, &steps, 0, recorded, i32::from_le_bytes);
                    Some(numbers.map_err(TraceError::io(path))?)
                }
            };
            header = with_recorded(header, counts.is_some(), recorded, numbers).map_err(invalid)?;
        }
        Ok(Self {
            path: path.into(),
            file,
            header,
            counts,
            pairs,
        })
    }

    /// Sizes and facts.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Pairs of one step, `[layers, ranks, experts]`. `step` is an index into `0..header().steps`.
    ///
    /// # Errors
    /// `TraceError`: a step beyond the trace, a layer with more than `u32::MAX` pairs; what `pairs` finds, where the counts come from there.
    pub fn step(&mut self, step: usize) -> Result<Array3<u32>, TraceError> {
        let TraceHeader {
            steps,
            layers,
            ranks,
            experts,
            ..
        } = self.header;
        self.within(step, steps)?;
        let Some(counts) = &self.counts else {
            let pairs = self.read_pairs(step)?;
            return Ok(check::count(pairs.expert.view(), ranks, experts));
        };
        let len = layers * ranks * experts;
        let words = read(&mut self.file, counts, step * len, len, u32::from_le_bytes);
        let words = words.map_err(TraceError::io(&self.path))?;
        let words = shaped((layers, ranks, experts), words);
        self.located(step, check::counts(words.view()))?;
        Ok(words)
    }

    /// Every pair of one step. `index` is an index into `header().recorded`.
    ///
    /// # Errors
    /// `TraceError`: an index beyond those recorded, an expert that does not exist or appears twice in a token, a weight, norm or score that is
    /// NaN, infinite or negative, pairs that contradict the counts.
    pub fn pairs(&mut self, index: usize) -> Result<PairRecord, TraceError> {
        let pairs = self.read_pairs(index)?;
        if self.counts.is_some() {
            let step = self.header.recorded[index] as usize;
            let counts = self.step(step)?;
            self.located(step, check::agree(pairs.expert.view(), counts.view()))?;
        }
        Ok(pairs)
    }

    fn read_pairs(&mut self, index: usize) -> Result<PairRecord, TraceError> {
        self.within(index, self.header.recorded.len())?;
        let step = self.header.recorded[index] as usize;
        let tensors = self.pairs.as_ref().expect("something is recorded");
        let at = TraceError::io(&self.path);
        let record = tensors.read(&mut self.file, index).map_err(at)?;
        let mut record = self.located(step, record)?;
        self.located(step, check::pairs(&mut record, self.header.experts))?;
        Ok(record)
    }

    /// Layer `layer` exists.
    pub(super) fn has_layer(&self, layer: usize) -> Result<(), TraceError> {
        let layers = self.header.layers;
        if layer < layers {
            return Ok(());
        }
        let fault = Fault::NoSuchLayer { layer, layers };
        Err(TraceError::invalid(&self.path, Place::default(), fault))
    }

    fn within(&self, index: usize, steps: usize) -> Result<(), TraceError> {
        if index < steps {
            return Ok(());
        }
        let fault = Fault::NoSuchStep { index, steps };
        Err(TraceError::invalid(&self.path, Place::default(), fault))
    }

    fn located<T>(&self, step: usize, result: Located<T>) -> Result<T, TraceError> {
        result.map_err(|located| {
            let (place, fault) = *located;
            let step = Some(u64::from(self.header.number(step)));
            TraceError::invalid(&self.path, Place { step, ..place }, fault)
        })
    }
}
