//! Reading, step by step.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use ndarray::Array3;
use safetensors::tensor::Dtype;

use super::check::{self, Located};
use super::error::{Fault, Place, TraceError};
use super::header::{PairRecord, TraceHeader};
use super::layout::{Tensor, Tensors, number, size};
use super::limits::{MOST, MOST_COUNTS, MOST_STEPS};

/// An open trace. Holds one step at a time.
#[derive(Debug)]
pub struct TraceReader {
    path: PathBuf,
    file: File,
    header: TraceHeader,
    counts: Option<Tensor>,
    pairs: Option<PairTensors>,
}

/// Where per-pair data lie.
#[derive(Debug)]
struct PairTensors {
    expert: Tensor,
    gate_weight: Tensor,
    score: Option<ScoreTensors>,
}

#[derive(Debug)]
enum ScoreTensors {
    Score(Tensor),
    Norms { h: Tensor, dy: Tensor },
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
            let recorded = pairs.expert.shape[0];
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
            header.scored = pairs.score.is_some();
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
        let [_, layers, tokens, top_k] = tensors.expert.shape[..] else {
            unreachable!("four axes, checked when the trace was opened");
        };
        let dim = (layers, tokens, top_k);
        let at = TraceError::io(&self.path);
        let record = tensors.read(&mut self.file, index, dim).map_err(at)?;
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
        result.map_err(|(place, fault)| {
            let step = Some(u64::from(self.header.number(step)));
            TraceError::invalid(&self.path, Place { step, ..place }, fault)
        })
    }
}

impl PairTensors {
    fn find(tensors: &Tensors) -> Result<Option<Self>, Fault> {
        let ids = [Dtype::U8, Dtype::U16, Dtype::I32];
        let Some(expert) = tensors.find("expert", &ids, "U8, U16 or I32")? else {
            return Ok(None);
        };
        let [steps, layers, tokens, _] = expert.axes(["steps", "layers", "tokens", "k"])?;
        let gate_weight = tensors.floats("gate_weight")?;
        let gate_weight = gate_weight.ok_or(Fault::NoTensor("gate_weight"))?;
        gate_weight.require(&expert.shape)?;
        let score = match tensors.floats("score")? {
            Some(score) => {
                score.require(&expert.shape)?;
                Some(ScoreTensors::Score(score))
            }
            None => match (tensors.floats("norm_h")?, tensors.floats("norm_dy")?) {
                (Some(h), Some(dy)) => {
                    h.require(&expert.shape)?;
                    dy.require(&[steps, layers, tokens])?;
                    Some(ScoreTensors::Norms { h, dy })
                }
                _ => None,
            },
        };
        Ok(Some(Self {
            expert,
            gate_weight,
            score,
        }))
    }

    /// One step, unchecked but for the norms.
    fn read(
        &self,
        file: &mut File,
        index: usize,
        dim: (usize, usize, usize),
    ) -> std::io::Result<Located<PairRecord>> {
        let len = dim.0 * dim.1 * dim.2;
        let at = index * len;
        let expert = match self.expert.dtype {
            Dtype::U8 => read(file, &self.expert, at, len, |[id]| i32::from(id))?,
            Dtype::U16 => read(file, &self.expert, at, len, |id| {
                u16::from_le_bytes(id).into()
            })?,
            _ => read(file, &self.expert, at, len, i32::from_le_bytes)?,
        };
        let gate_weight = read(file, &self.gate_weight, at, len, f32::from_le_bytes)?;
        let mut record = PairRecord {
            expert: shaped(dim, expert),
            gate_weight: shaped(dim, gate_weight),
            score: None,
        };
        match &self.score {
            None => {}
            Some(ScoreTensors::Score(score)) => {
                let score = read(file, score, at, len, f32::from_le_bytes)?;
                record.score = Some(shaped(dim, score));
            }
            Some(ScoreTensors::Norms { h, dy }) => {
                let tokens = dim.0 * dim.1;
                let dy = read(file, dy, index * tokens, tokens, f32::from_le_bytes)?;
                let h = read(file, h, at, len, f32::from_le_bytes)?;
                match scores(&record, &shaped(dim, h), &dy) {
                    Ok(score) => record.score = Some(score),
                    Err(fault) => return Ok(Err(fault)),
                }
            }
        }
        Ok(Ok(record))
    }
}

/// p |dy| |h| of every pair that is not masked. `dy`: `[layers * tokens]`.
fn scores(record: &PairRecord, h: &Array3<f32>, dy: &[f32]) -> Located<Array3<f32>> {
    let tokens = h.dim().1;
    let mut scores = Array3::zeros(h.dim());
    for (((layer, token, slot), score), id) in scores.indexed_iter_mut().zip(&record.expert) {
        if *id == -1 {
            continue;
        }
        let at = [layer, token, slot];
        for (what, value) in [("|dy|", dy[layer * tokens + token]), ("|h|", h[at])] {
            check::number(what, value)
                .map_err(|fault| (check::at_slot(layer, token, slot), fault))?;
        }
        *score = record.gate_weight[at] * dy[layer * tokens + token] * h[at];
    }
    Ok(scores)
}

/// The header by shapes and metadata, without what is recorded per pair.
fn sizes(
    metadata: BTreeMap<String, String>,
    counts: Option<&Tensor>,
    pairs: Option<&PairTensors>,
) -> Result<TraceHeader, Fault> {
    let pair_axes = pairs
        .map(|pairs| pairs.expert.axes(["steps", "layers", "tokens", "k"]))
        .transpose()?;
    let counted = counts
        .map(|counts| counts.axes(["steps", "layers", "ranks", "experts"]))
        .transpose()?;
    let (steps, layers) = match (counted, pair_axes) {
        (Some([steps, layers, ..]), _) | (None, Some([steps, layers, ..])) => (steps, layers),
        (None, None) => return Err(Fault::NoTensor("counts")),
    };
    if let (Some(_), Some([_, found, ..]), Some(pairs)) = (counted, pair_axes, pairs)
        && found != layers
    {
        return Err(Fault::Shape {
            tensor: pairs.expert.name,
            found: pairs.expert.shape.clone(),
            expected: format!("[steps, {layers}, tokens, k]"),
        });
    }
    let experts = size(
        &metadata,
        &["experts", "E"],
        counted.map(|axes| axes[3]),
        MOST,
    )?
    .ok_or(Fault::NoMetadata("experts"))?;
    let ranks = size(&metadata, &["ranks"], counted.map(|axes| axes[2]), MOST)?.unwrap_or(1);
    let top_k = size(
        &metadata,
        &["top_k", "K"],
        pair_axes.map(|axes| axes[3]),
        experts,
    )?;
    for (what, value, limit) in [
        ("experts", experts, MOST),
        ("ranks", ranks, MOST),
        ("experts per token", top_k.unwrap_or(1), experts),
        (
            "counts of a step",
            layers.saturating_mul(ranks).saturating_mul(experts),
            MOST_COUNTS as usize,
        ),
        ("steps", steps, MOST_STEPS as usize),
    ] {
        if value > limit {
            let (value, limit) = (value as u64, limit as u64);
            return Err(Fault::TooMany { what, value, limit });
        }
    }
    let tokens = pair_axes.map(|axes| axes[2]);
    if let Some(tokens) = tokens.filter(|tokens| !tokens.is_multiple_of(ranks)) {
        return Err(Fault::Shape {
            tensor: "expert",
            found: pairs.map_or_else(Vec::new, |pairs| pairs.expert.shape.clone()),
            expected: format!("a multiple of {ranks} ranks along its tokens, not {tokens}"),
        });
    }
    let known = tokens.map(|tokens| tokens / ranks);
    let tokens_per_rank = size(&metadata, &["tokens_per_rank"], known, u32::MAX as usize)?;
    let first_step = number(&metadata, &["first_step"])?.map_or(0, |(_, step)| step);
    let last = i32::MAX as u64 - (steps as u64 - 1);
    if first_step > last {
        return Err(Fault::Metadata {
            key: "first_step",
            value: first_step.to_string(),
            expected: format!("0 to {last}"),
        });
    }
    Ok(TraceHeader {
        steps,
        layers,
        ranks,
        experts,
        top_k,
        first_step: first_step as u32,
        tokens_per_rank,
        recorded: Vec::new(),
        scored: false,
        metadata,
        numbers: None,
    })
}

/// The header with the steps that have per-pair data. Without `numbers` they are the first ones.
fn with_recorded(
    mut header: TraceHeader,
    counted: bool,
    recorded: usize,
    numbers: Option<Vec<i32>>,
) -> Result<TraceHeader, Fault> {
    let first = if counted { header.first_step } else { 0 };
    let end = if counted {
        header.first_step + header.steps as u32
    } else {
        i32::MAX as u32
    };
    let numbers = numbers.unwrap_or_else(|| {
        (0..recorded)
            .map(|index| (header.first_step as usize + index) as i32)
            .collect()
    });
    let mut next = i64::from(first);
    for (index, &value) in numbers.iter().enumerate() {
        let value = i64::from(value);
        if !(next..i64::from(end)).contains(&value) {
            let last = end - 1;
            return Err(Fault::StepNumber {
                index,
                value,
                first,
                last,
            });
        }
        next = value + 1;
    }
    let numbers = numbers.into_iter().map(|number| number as u32);
    if counted {
        header.recorded = numbers.map(|number| number - first).collect();
    } else {
        let numbers: Vec<u32> = numbers.collect();
        header.first_step = numbers[0];
        header.numbers = Some(numbers);
        header.recorded = (0..recorded as u32).collect();
    }
    Ok(header)
}

/// `len` elements of a tensor from its element `from` on, all within the tensor.
fn read<T, const N: usize>(
    file: &mut File,
    tensor: &Tensor,
    from: usize,
    len: usize,
    decode: impl Fn([u8; N]) -> T,
) -> std::io::Result<Vec<T>> {
    file.seek(SeekFrom::Start(tensor.start + (from * N) as u64))?;
    let mut bytes = vec![0; len * N];
    file.read_exact(&mut bytes)?;
    Ok(bytes
        .as_chunks()
        .0
        .iter()
        .map(|word| decode(*word))
        .collect())
}

fn shaped<T>(dim: (usize, usize, usize), values: Vec<T>) -> Array3<T> {
    Array3::from_shape_vec(dim, values).expect("as many as were read")
}
