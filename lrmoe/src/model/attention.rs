//! Causal multi-head attention with a rotary position encoding, as one op.
//!
//! One op rather than a dozen: candle would keep and sum a gradient for every step between.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::ops::{TASK_ROWS, exponentials, map_rows, slice, softmax_gradient, tensor, values};

/// Angles of the rotary position encoding.
#[derive(Debug)]
pub(super) struct RotaryTable {
    /// (cos, sin) `[context, half a head]`
    turns: Vec<(f32, f32)>,
    half: usize,
}

impl RotaryTable {
    /// Position t turns pair i of a head by `t * 10000^(-i / half)`.
    pub(super) fn new(context: usize, head_size: usize) -> Arc<Self> {
        let half = head_size / 2;
        let turn = |position: usize, pair: usize| {
            let frequency = 10_000_f64.powf(-(pair as f64) / half as f64);
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            (cos as f32, sin as f32)
        };
        let turns = (0..context)
            .flat_map(|position| (0..half).map(move |pair| turn(position, pair)))
            .collect();
        Arc::new(Self { turns, half })
    }

    /// Turns value i of a head with value i + half, forth (`sign` 1) or back (-1).
    fn turn(&self, position: usize, sign: f32, x: &[f32], y: &mut [f32]) {
        let turns = &self.turns[position * self.half..][..self.half];
        let (x_a, x_b) = x.split_at(self.half);
        let (y_a, y_b) = y.split_at_mut(self.half);
        for (i, (cos, sin)) in turns.iter().enumerate() {
            let sin = sign * sin;
            y_a[i] = x_a[i] * cos - x_b[i] * sin;
            y_b[i] = x_a[i] * sin + x_b[i] * cos;
        }
    }
}

/// Attention over the projections `qkv` `[sequences * length, 3 * D]`, giving `[sequences * length, D]`.
pub(super) fn attention(
    qkv: &Tensor,
    rotary: &Arc<RotaryTable>,
    heads: usize,
    length: usize,
) -> Result<Tensor> {
    qkv.contiguous()?.apply_op1(Attention {
        rotary: Arc::clone(rotary),
        heads,
        length,
    })
}

struct Attention {
    rotary: Arc<RotaryTable>,
    heads: usize,
    /// Bytes of a sequence.
    length: usize,
}

/// Rotated queries and keys, values `[sequences * heads, length, head size]`, and attention weights
/// `[sequences * heads, length, length]`.
struct Inner {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
}

impl Attention {
    fn size(&self) -> usize {
        2 * self.rotary.half
    }

    fn scale(&self) -> f32 {
        (self.size() as f32).powf(-0.5)
    }

    fn inner(&self, qkv: &[f32]) -> Result<Inner> {
        let q = self.split(qkv, 3, 0)?;
        let k = self.split(qkv, 3, 1)?;
        let scores = q.matmul(&k.t()?)?;
        let (length, scale) = (self.length, self.scale());
        let weights = map_rows(&values(&scores)?, length, |row, scores, weights| {
            let seen = row % length + 1;
            exponentials(&scores[..seen], scale, &mut weights[..seen]);
        });
        Ok(Inner {
            weights: tensor(weights, scores.shape())?,
            q,
            k,
            v: self.split(qkv, 3, 2)?,
        })
    }

    /// One of the `parts` side by side in rows of tokens, cut into heads
    /// `[sequences * heads, length, head size]`; queries and keys are rotated.
    fn split(&self, rows: &[f32], parts: usize, part: usize) -> Result<Tensor> {
        let (heads, length, size) = (self.heads, self.length, self.size());
        let mut output = vec![0.0; rows.len() / parts];
        let groups = output.len() / (length * size);
        output
            .par_chunks_mut(size)
            .enumerate()
            .with_min_len(TASK_ROWS)
            .for_each(|(row, output)| {
                let (sequence, head, position) =
                    (row / length / heads, row / length % heads, row % length);
                let token = sequence * length + position;
                let input = &rows[((token * parts + part) * heads + head) * size..][..size];
                if is_rotated(parts, part) {
                    self.rotary.turn(position, 1.0, input, output);
                } else {
                    output.copy_from_slice(input);
                }
            });
        tensor(output, &Shape::from((groups, length, size)))
    }

    /// The reverse of [`split`](Self::split) for all parts: rows of tokens.
    fn join(&self, parts: &[&Tensor]) -> Result<Vec<f32>> {
        let (heads, length, size) = (self.heads, self.length, self.size());
        let inputs = parts
            .iter()
            .map(|part| values(part))
            .collect::<Result<Vec<_>>>()?;
        let mut output = vec![0.0; inputs.iter().map(Vec::len).sum()];
        output
            .par_chunks_mut(size)
            .enumerate()
            .with_min_len(TASK_ROWS)
            .for_each(|(row, output)| {
                let (head, part) = (row % heads, row / heads % parts.len());
                let token = row / heads / parts.len();
                let (sequence, position) = (token / length, token % length);
                let input = ((sequence * heads + head) * length + position) * size;
                let input = &inputs[part][input..][..size];
                if is_rotated(parts.len(), part) {
                    self.rotary.turn(position, -1.0, input, output);
                } else {
                    output.copy_from_slice(input);
                }
            });
        Ok(output)
    }
}

/// Of the parts q, k, v the first two are.
fn is_rotated(parts: usize, part: usize) -> bool {
    parts == 3 && part < 2
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, columns) = layout.shape().dims2()?;
        let Inner { v, weights, .. } = self.inner(slice(qkv, layout, self.name())?)?;
        let mixed = self.join(&[&weights.matmul(&v)?])?;
        Ok((CpuStorage::F32(mixed), Shape::from((tokens, columns / 3))))
    }

    fn bwd(&self, qkv: &Tensor, _mixed: &Tensor, dmixed: &Tensor) -> Result<Option<Tensor>> {
        let Inner { q, k, v, weights } = self.inner(&values(qkv)?)?;
        let dmixed = self.split(&values(dmixed)?, 1, 0)?;
        let dweights = dmixed.matmul(&v.t()?)?;
        let dscores = softmax_gradient(&weights, &dweights, self.scale())?;
        let dqkv = self.join(&[
            &dscores.matmul(&k)?,
            &dscores.t()?.matmul(&q)?,
            &weights.t()?.matmul(&dmixed)?,
        ])?;
        Ok(Some(tensor(dqkv, qkv.shape())?))
    }
}
