//! Causal multi-head attention with a rotary position encoding, as one op.
//!
//! One op rather than a dozen: candle would keep and sum a gradient for every step between. Each sequence is a task, head by head and a block of
//! queries at a time, so that attention weights stay in the cache and what a query cannot see is not computed. The backward pass computes them again.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, s};
use rayon::prelude::*;

use super::ops::{exponentials, slice, softmax_gradient, tensor, with_values};

/// Queries of a block.
const BLOCK: usize = 64;

/// Angles of the rotary position encoding.
#[derive(Debug)]
pub(super) struct RotaryTable {
    /// `[context, half a head]`
    cos: Vec<f32>,
    /// `[context, half a head]`
    sin: Vec<f32>,
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
        let (cos, sin) = (0..context)
            .flat_map(|position| (0..half).map(move |pair| turn(position, pair)))
            .unzip();
        Arc::new(Self { cos, sin, half })
    }

    /// Turns value i of a head with value i + half, forth (`sign` 1) or back (-1).
    fn turn(&self, position: usize, sign: f32, x: &[f32], y: &mut [f32]) {
        let turns = position * self.half..(position + 1) * self.half;
        let (cos, sin) = (&self.cos[turns.clone()], &self.sin[turns]);
        let ((x_a, x_b), (y_a, y_b)) = (x.split_at(self.half), y.split_at_mut(self.half));
        let inputs = x_a.iter().zip(x_b).zip(cos.iter().zip(sin));
        let outputs = y_a.iter_mut().zip(y_b);
        for ((y_a, y_b), ((x_a, x_b), (cos, sin))) in outputs.zip(inputs) {
            let sin = sign * sin;
            *y_a = x_a * cos - x_b * sin;
            *y_b = x_a * sin + x_b * cos;
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

/// One head of one sequence: rotated queries and keys, values, `[length, head size]`.
struct Head {
    q: Array2<f32>,
    k: Array2<f32>,
    v: Array2<f32>,
    /// Attention weights of a block of queries, `[block, length]`.
    weights: Array2<f32>,
    scores: Array2<f32>,
    scale: f32,
}

impl Head {
    /// Computes the attention weights of the queries `first..last` over the keys `..last`: 0 where a key comes after its query.
    fn weigh(&mut self, first: usize, last: usize) {
        let mut scores = self.scores.slice_mut(s![..last - first, ..last]);
        let q = self.q.slice(s![first..last, ..]);
        general_mat_mul(1.0, &q, &self.k.slice(s![..last, ..]).t(), 0.0, &mut scores);
        let mut weights = self.weights.slice_mut(s![..last - first, ..last]);
        for ((query, scores), mut weights) in (first..)
            .zip(scores.outer_iter())
            .zip(weights.outer_iter_mut())
        {
            let scores = scores.to_slice().expect("rows are contiguous");
            let weights = weights.as_slice_mut().expect("rows are contiguous");
            exponentials(&scores[..=query], self.scale, &mut weights[..=query]);
            weights[query + 1..].fill(0.0);
        }
    }
}

impl Attention {
    fn size(&self) -> usize {
        2 * self.rotary.half
    }

    fn width(&self) -> usize {
        self.heads * self.size()
    }

    /// Head `head` of a sequence of `qkv` rows.
    fn head(&self, qkv: ArrayView2<'_, f32>, head: usize) -> Head {
        let part = |part: usize| {
            let first = part * self.width() + head * self.size();
            qkv.slice(s![.., first..first + self.size()])
        };
        let block = BLOCK.min(self.length);
        Head {
            q: self.turned(part(0), 1.0),
            k: self.turned(part(1), 1.0),
            v: part(2).to_owned(),
            weights: Array2::zeros((block, self.length)),
            scores: Array2::zeros((block, self.length)),
            scale: (self.size() as f32).powf(-0.5),
        }
    }

    fn turned(&self, rows: ArrayView2<'_, f32>, sign: f32) -> Array2<f32> {
        let mut output = Array2::zeros(rows.dim());
        for (position, (row, mut output)) in
            rows.outer_iter().zip(output.outer_iter_mut()).enumerate()
        {
            let row = row.to_slice().expect("rows are contiguous");
            let output = output.as_slice_mut().expect("rows are contiguous");
            self.rotary.turn(position, sign, row, output);
        }
        output
    }

    /// The blocks of queries of a sequence.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let length = self.length;
        (0..length)
            .step_by(BLOCK)
            .map(move |first| (first, length.min(first + BLOCK)))
    }

    /// Computes rows of `columns` for each sequence, from its rows of `qkv` and its number.
    fn per_sequence(
        &self,
        qkv: &[f32],
        columns: usize,
        sequence: impl Fn(usize, ArrayView2<'_, f32>, &mut [f32]) + Sync,
    ) -> Vec<f32> {
        let inputs = 3 * self.width();
        let mut output = vec![0.0; qkv.len() / inputs * columns];
        output
            .par_chunks_mut(self.length * columns)
            .zip(qkv.par_chunks(self.length * inputs))
            .enumerate()
            .for_each(|(number, (output, qkv))| {
                let qkv = ArrayView2::from_shape((self.length, inputs), qkv)
                    .expect("sequences are whole");
                sequence(number, qkv, output);
            });
        output
    }

    fn forward(&self, qkv: &[f32]) -> Vec<f32> {
        self.per_sequence(qkv, self.width(), |_, qkv, output| {
            let shape = (self.length, self.width());
            let mut output = ArrayViewMut2::from_shape(shape, output).expect("sequences are whole");
            for number in 0..self.heads {
                let mut head = self.head(qkv, number);
                let columns = number * self.size()..(number + 1) * self.size();
                for (first, last) in self.blocks() {
                    head.weigh(first, last);
                    let weights = head.weights.slice(s![..last - first, ..last]);
                    let mut output = output.slice_mut(s![first..last, columns.clone()]);
                    general_mat_mul(
                        1.0,
                        &weights,
                        &head.v.slice(s![..last, ..]),
                        0.0,
                        &mut output,
                    );
                }
            }
        })
    }

    fn backward(&self, qkv: &[f32], dmixed: &[f32]) -> Vec<f32> {
        let width = self.width();
        self.per_sequence(qkv, 3 * width, |number, qkv, dqkv| {
            let dmixed = &dmixed[number * self.length * width..][..self.length * width];
            let dmixed =
                ArrayView2::from_shape((self.length, width), dmixed).expect("sequences are whole");
            let shape = (self.length, 3 * width);
            let mut dqkv = ArrayViewMut2::from_shape(shape, dqkv).expect("sequences are whole");
            for number in 0..self.heads {
                let columns = number * self.size()..(number + 1) * self.size();
                let head = self.head(qkv, number);
                let gradients = self.head_backward(head, dmixed.slice(s![.., columns]));
                for (part, gradient) in gradients.iter().enumerate() {
                    let first = part * width + number * self.size();
                    dqkv.slice_mut(s![.., first..first + self.size()])
                        .assign(gradient);
                }
            }
        })
    }

    /// Gradients of one head's queries, keys and values before rotation, `[length, head size]` each.
    fn head_backward(&self, mut head: Head, dmixed: ArrayView2<'_, f32>) -> [Array2<f32>; 3] {
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| Array2::zeros(head.q.dim()));
        for (first, last) in self.blocks() {
            head.weigh(first, last);
            let seen = s![..last, ..];
            let weights = head.weights.slice(s![..last - first, ..last]);
            let dmixed = dmixed.slice(s![first..last, ..]);
            // Of the scores no more is needed: their place takes the gradients of the weights, and then their own.
            let mut dscores = head.scores.slice_mut(s![..last - first, ..last]);
            general_mat_mul(1.0, &dmixed, &head.v.slice(seen).t(), 0.0, &mut dscores);
            for (weights, mut dscores) in weights.outer_iter().zip(dscores.outer_iter_mut()) {
                softmax_gradient(
                    weights.to_slice().expect("rows are contiguous"),
                    head.scale,
                    dscores.as_slice_mut().expect("rows are contiguous"),
                );
            }
            let q = head.q.slice(s![first..last, ..]);
            general_mat_mul(1.0, &weights.t(), &dmixed, 1.0, &mut dv.slice_mut(seen));
            general_mat_mul(1.0, &dscores.t(), &q, 1.0, &mut dk.slice_mut(seen));
            let mut dq = dq.slice_mut(s![first..last, ..]);
            general_mat_mul(1.0, &dscores, &head.k.slice(seen), 0.0, &mut dq);
        }
        [
            self.turned(dq.view(), -1.0),
            self.turned(dk.view(), -1.0),
            dv,
        ]
    }
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, columns) = layout.shape().dims2()?;
        let mixed = self.forward(slice(qkv, layout, self.name())?);
        Ok((CpuStorage::F32(mixed), Shape::from((tokens, columns / 3))))
    }

    fn bwd(&self, qkv: &Tensor, _mixed: &Tensor, dmixed: &Tensor) -> Result<Option<Tensor>> {
        let dqkv = with_values([qkv, dmixed], |[qkv, dmixed]| self.backward(qkv, dmixed))?;
        Ok(Some(tensor(dqkv, qkv.shape())?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor, Var};

    use super::{BLOCK, RotaryTable, attention};

    const HEADS: usize = 2;
    const SIZE: usize = 4;
    const WIDTH: usize = HEADS * SIZE;

    /// Numbers in [-1, 1) without a pattern of the length of a block.
    fn numbers(count: usize, salt: usize) -> Vec<f32> {
        let number = |i: usize| (i * 7919 + salt * 104_729) % 2003;
        (0..count)
            .map(|i| number(i) as f32 / 1001.5 - 1.0)
            .collect()
    }

    /// Value `i` of a head of the token at `position`, rotated.
    fn rotated(rows: &[f64], position: usize, first: usize, i: usize) -> f64 {
        let row = &rows[position * 3 * WIDTH + first..][..SIZE];
        let half = SIZE / 2;
        let angle = position as f64 * 10_000_f64.powf(-((i % half) as f64) / half as f64);
        let (sin, cos) = angle.sin_cos();
        match i < half {
            true => row[i] * cos - row[i + half] * sin,
            false => row[i - half] * sin + row[i] * cos,
        }
    }

    /// One sequence in plain loops: the sum of the outputs times `dmixed`.
    fn plain(rows: &[f64], dmixed: &[f32]) -> f64 {
        let length = dmixed.len() / WIDTH;
        let mut sum = 0.0;
        for head in 0..HEADS {
            let [q, k, v] = [0, 1, 2].map(|part| part * WIDTH + head * SIZE);
            for query in 0..length {
                let score = |key: usize| {
                    let product = |i| rotated(rows, query, q, i) * rotated(rows, key, k, i);
                    ((0..SIZE).map(product).sum::<f64>() / (SIZE as f64).sqrt()).exp()
                };
                let scores: Vec<f64> = (0..=query).map(score).collect();
                let total: f64 = scores.iter().sum();
                for (key, score) in scores.iter().enumerate() {
                    let value = |i: usize| {
                        let gradient = dmixed[query * WIDTH + head * SIZE + i];
                        f64::from(gradient) * rows[key * 3 * WIDTH + v + i]
                    };
                    sum += score / total * (0..SIZE).map(value).sum::<f64>();
                }
            }
        }
        sum
    }

    #[test]
    fn blocks_of_queries_agree_with_plain_loops() {
        for length in [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3] {
            let (sequences, values) = (2, length * 3 * WIDTH);
            let rows = numbers(sequences * values, length);
            let dmixed = numbers(sequences * length * WIDTH, length + 1);
            let shape = (sequences * length, 3 * WIDTH);
            let qkv = Var::from_vec(rows.clone(), shape, &Device::Cpu).unwrap();
            let rotary = RotaryTable::new(length, SIZE);
            let mixed = attention(&qkv, &rotary, HEADS, length).unwrap();
            let weights = Tensor::from_slice(&dmixed, (sequences * length, WIDTH), &Device::Cpu);
            let sum = mixed.mul(&weights.unwrap()).unwrap().sum_all().unwrap();
            let store = sum.backward().unwrap();
            let gradient = store.get(&qkv).unwrap().flatten_all().unwrap();
            let gradient = gradient.to_vec1::<f32>().unwrap();

            let mut expected = 0.0;
            for sequence in 0..sequences {
                let dmixed = &dmixed[sequence * length * WIDTH..][..length * WIDTH];
                let first = sequence * values;
                let mut rows: Vec<f64> = rows[first..first + values]
                    .iter()
                    .map(|&x| x.into())
                    .collect();
                expected += plain(&rows, dmixed);
                // Every value of the tokens beside the ends of blocks, and some of the others.
                let checked =
                    (0..values).filter(|i| (i / (3 * WIDTH) + 1) % BLOCK < 2 || i % 37 == 0);
                for i in checked {
                    let mut at = |shift: f64| {
                        rows[i] += shift;
                        let sum = plain(&rows, dmixed);
                        rows[i] -= shift;
                        sum
                    };
                    let plain = (at(1e-5) - at(-1e-5)) / 2e-5;
                    let mine = f64::from(gradient[first + i]);
                    // Sums of up to `length` products of numbers below 1, in f32.
                    assert!(
                        (mine - plain).abs() < 1e-5,
                        "{length}, {i}: {mine}, must be {plain}"
                    );
                }
            }
            let sum = f64::from(sum.to_scalar::<f32>().unwrap());
            assert!(
                (sum - expected).abs() < 1e-4,
                "{length}: {sum}, must be {expected}"
            );
        }
    }
}
