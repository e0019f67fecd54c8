//! Per-pair data in a file.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use ndarray::Array3;
use safetensors::tensor::Dtype;

use super::check::{self, Located};
use super::error::Fault;
use super::header::PairRecord;
use super::layout::{Tensor, Tensors};

/// Where per-pair data lie.
#[derive(Debug)]
pub(super) struct PairTensors {
    /// Recorded steps, layers, tokens, k.
    pub(super) axes: [usize; 4],
    expert: Tensor,
    gate_weight: Tensor,
    score: Option<ScoreTensors>,
}

#[derive(Debug)]
enum ScoreTensors {
    Score(Tensor),
    Norms { h: Tensor, dy: Tensor },
}

impl PairTensors {
    /// `None` without `expert`.
    pub(super) fn find(tensors: &Tensors) -> Result<Option<Self>, Fault> {
        let ids = [Dtype::U8, Dtype::U16, Dtype::I32];
        let Some(expert) = tensors.find("expert", &ids, "U8, U16 or I32")? else {
            return Ok(None);
        };
        let axes = expert.axes(["steps", "layers", "tokens", "k"])?;
        let [steps, layers, tokens, _] = axes;
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
            axes,
            expert,
            gate_weight,
            score,
        }))
    }

    pub(super) fn is_scored(&self) -> bool {
        self.score.is_some()
    }

    /// One step, unchecked but for the norms.
    pub(super) fn read(
        &self,
        file: &mut File,
        index: usize,
    ) -> std::io::Result<Located<PairRecord>> {
        let [_, layers, tokens, top_k] = self.axes;
        let dim = (layers, tokens, top_k);
        let len = layers * tokens * top_k;
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
                .map_err(|fault| Box::new((check::at_slot(layer, token, slot), fault)))?;
        }
        *score = record.gate_weight[at] * dy[layer * tokens + token] * h[at];
    }
    Ok(scores)
}

/// `len` elements of a tensor from its element `from` on, all within the tensor.
pub(super) fn read<T, const N: usize>(
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

pub(super) fn shaped<T>(dim: (usize, usize, usize), values: Vec<T>) -> Array3<T> {
    Array3::from_shape_vec(dim, values).expect("as many as were read")
}
