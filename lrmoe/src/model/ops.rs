//! Differentiable ops over rows of `f32`, each with its backward pass.
//!
//! A row's result depends on that row alone, whatever the number of rows and threads.

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, Error, Layout, Result, Shape, Storage, Tensor, WithDType,
};
use ndarray::ArrayView2;
use rayon::prelude::*;

/// Rows that one task takes at least.
const TASK_ROWS: usize = 64;
const NORM_EPSILON: f32 = 1e-6;

/// What `read` makes of the tensors' values, row-major. They are copied only where a tensor is not contiguous.
pub(super) fn with_values<const N: usize, R>(
    tensors: [&Tensor; N],
    read: impl FnOnce([&[f32]; N]) -> R,
) -> Result<R> {
    let tensors = tensors.iter().map(|tensor| tensor.contiguous());
    let tensors: Vec<Tensor> = tensors.collect::<Result<_>>()?;
    let guards: Vec<_> = tensors.iter().map(Tensor::storage_and_layout).collect();
    let mut slices = [&[][..]; N];
    for (values, (storage, layout)) in slices.iter_mut().zip(&guards) {
        let Storage::Cpu(storage) = &**storage else {
            candle_core::bail!("the model is on the CPU, a tensor of it is not");
        };
        *values = slice(storage, layout, "values")?;
    }
    Ok(read(slices))
}

pub(super) fn tensor(values: Vec<f32>, shape: &Shape) -> Result<Tensor> {
    Tensor::from_vec(values, shape.clone(), &candle_core::Device::Cpu)
}

/// The values of a contiguous tensor.
pub(super) fn slice<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
    op: &'static str,
) -> Result<&'a [T]> {
    let (start, end) = layout
        .contiguous_offsets()
        .ok_or(Error::RequiresContiguous { op })?;
    Ok(&storage.as_slice()?[start..end])
}

/// A contiguous tensor of two dimensions.
pub(super) fn view<'a>(
    storage: &'a CpuStorage,
    layout: &Layout,
    op: &'static str,
) -> Result<ArrayView2<'a, f32>> {
    let values = slice(storage, layout, op)?;
    ArrayView2::from_shape(layout.shape().dims2()?, values).map_err(Error::wrap)
}

/// Last dimension, at least 1 so that it can cut rows.
fn row_length(shape: &Shape) -> usize {
    shape.dims().last().map_or(1, |&length| length.max(1))
}

/// Computes each output row from the input row of the same number.
fn map_rows(
    input: &[f32],
    length: usize,
    row: impl Fn(usize, &[f32], &mut [f32]) + Sync,
) -> Vec<f32> {
    let mut output = vec![0.0; input.len()];
    output
        .par_chunks_mut(length)
        .zip(input.par_chunks(length))
        .enumerate()
        .with_min_len(TASK_ROWS)
        .for_each(|(number, (output, input))| row(number, input, output));
    output
}

/// Computes each output row from the rows of that number of two inputs.
fn zip_rows(
    first: &[f32],
    second: &[f32],
    length: usize,
    row: impl Fn(&[f32], &[f32], &mut [f32]) + Sync,
) -> Vec<f32> {
    map_rows(first, length, |number, first, output| {
        row(first, &second[number * length..][..length], output);
    })
}

/// Sums and maxima go on in so many lanes, which are then taken together: a compiler may not do that by itself.
const LANES: usize = 8;

fn fold(values: &[f32], start: f32, add: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let blocks = values.chunks_exact(LANES);
    let rest = blocks.remainder();
    for block in blocks {
        for (lane, value) in lanes.iter_mut().zip(block) {
            *lane = add(*lane, *value);
        }
    }
    lanes.iter().chain(rest).copied().fold(start, add)
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_blocks, b_blocks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = (a_blocks.remainder().iter().zip(b_blocks.remainder()))
        .map(|(a, b)| a * b)
        .sum();
    for (a, b) in a_blocks.zip(b_blocks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// `x / sqrt(mean(x^2) + 1e-6) * scale` over the last dimension; `scale` is `[D]`.
pub(super) fn rms_norm(x: &Tensor, scale: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op2(&scale.contiguous()?, RmsNorm)
}

struct RmsNorm;

impl RmsNorm {
    /// 1 / root mean square of a row.
    fn inverse(row: &[f32]) -> f32 {
        1.0 / (dot(row, row) / row.len() as f32 + NORM_EPSILON).sqrt()
    }

    /// With `n = x * r`: `dx = r * (scale dy - n mean(scale dy n))`, `dscale = sum of dy n`.
    fn gradients([xs, dys, scale]: [&[f32]; 3]) -> (Vec<f32>, Vec<f32>) {
        let width = scale.len();
        let dx = zip_rows(xs, dys, width, |x, dy, dx| {
            let inverse = Self::inverse(x);
            for ((dx, dy), scale) in dx.iter_mut().zip(dy).zip(scale) {
                *dx = dy * scale;
            }
            let mean = dot(dx, x) * inverse * inverse / width as f32;
            for (dx, x) in dx.iter_mut().zip(x) {
                *dx = inverse * (*dx - x * mean);
            }
        });
        let mut dscale = vec![0.0; width];
        for (x, dy) in xs.chunks_exact(width).zip(dys.chunks_exact(width)) {
            let inverse = Self::inverse(x);
            for ((dscale, x), dy) in dscale.iter_mut().zip(x).zip(dy) {
                *dscale += x * inverse * dy;
            }
        }
        (dx, dscale)
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        scale: &CpuStorage,
        scale_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = slice(x, x_layout, self.name())?;
        let scale: &[f32] = slice(scale, scale_layout, self.name())?;
        let y = map_rows(x, scale.len(), |_, x, y| {
            let inverse = Self::inverse(x);
            for ((y, x), scale) in y.iter_mut().zip(x).zip(scale) {
                *y = x * inverse * scale;
            }
        });
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        scale: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dscale) = with_values([x, dy, scale], Self::gradients)?;
        Ok((
            Some(tensor(dx, x.shape())?),
            Some(tensor(dscale, scale.shape())?),
        ))
    }
}

/// Softmax over the last dimension.
pub(super) fn softmax(x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op1(Softmax)
}

struct Softmax;

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let length = row_length(layout.shape());
        let y = map_rows(slice(x, layout, self.name())?, length, |_, x, y| {
            exponentials(x, 1.0, y);
        });
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let length = row_length(y.shape());
        let dx = with_values([y, dy], |[y, dy]| {
            zip_rows(y, dy, length, |y, dy, dx| {
                dx.copy_from_slice(dy);
                softmax_gradient(y, 1.0, dx);
            })
        })?;
        Ok(Some(tensor(dx, y.shape())?))
    }
}

/// Makes the gradient for `y = softmax(scale * x)` that for `x`: `scale * y * (dy - sum(y dy))`.
pub(super) fn softmax_gradient(y: &[f32], scale: f32, gradient: &mut [f32]) {
    let mean = dot(y, gradient);
    for (gradient, y) in gradient.iter_mut().zip(y) {
        *gradient = scale * y * (*gradient - mean);
    }
}

/// Writes the softmax of `scale * x`; returns the logarithm of the sum of exponentials.
pub(super) fn exponentials(x: &[f32], scale: f32, y: &mut [f32]) -> f32 {
    let largest = fold(x, f32::NEG_INFINITY, f32::max);
    for (y, x) in y.iter_mut().zip(x) {
        *y = (scale * (x - largest)).exp();
    }
    let sum = fold(y, 0.0, |a, b| a + b);
    for y in y.iter_mut() {
        *y /= sum;
    }
    scale * largest + sum.ln()
}

/// Mean over tokens of `-log softmax(logits)[target]`; logits `[tokens, classes]`, 0 without tokens.
pub(super) fn cross_entropy(logits: &Tensor, targets: Vec<u32>) -> Result<Tensor> {
    logits.contiguous()?.apply_op1(CrossEntropy { targets })
}

struct CrossEntropy {
    /// `[tokens]`
    targets: Vec<u32>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, classes) = layout.shape().dims2()?;
        let logits: &[f32] = slice(logits, layout, self.name())?;
        let losses: Vec<f32> = logits
            .par_chunks(classes.max(1))
            .zip(&self.targets)
            .with_min_len(TASK_ROWS)
            .map_init(
                || vec![0.0; classes],
                |scratch, (row, &target)| exponentials(row, 1.0, scratch) - row[target as usize],
            )
            .collect();
        let sum: f64 = losses.iter().map(|&loss| f64::from(loss)).sum();
        let mean = (sum / tokens.max(1) as f64) as f32;
        Ok((CpuStorage::F32(vec![mean]), Shape::from(())))
    }

    /// `dlogits = (softmax - one at the target) / tokens * dloss`
    fn bwd(&self, logits: &Tensor, _loss: &Tensor, dloss: &Tensor) -> Result<Option<Tensor>> {
        let (tokens, classes) = logits.dims2()?;
        let factor = dloss.to_scalar::<f32>()? / tokens.max(1) as f32;
        let dx = with_values([logits], |[logits]| {
            map_rows(logits, classes, |token, row, dx| {
                exponentials(row, 1.0, dx);
                dx[self.targets[token] as usize] -= 1.0;
                for dx in dx {
                    *dx *= factor;
                }
            })
        })?;
        Ok(Some(tensor(dx, logits.shape())?))
    }
}
