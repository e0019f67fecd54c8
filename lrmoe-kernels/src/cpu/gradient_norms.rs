//! Norms of the rows' terms in the weight gradients, by plain products: an oracle for scores, with none of the tiles.

use std::ops::Range;

use ndarray::{Array2, ArrayView2, linalg::general_mat_mul, s};
use rayon::prelude::*;

use crate::{Activation, BackwardRows, FfnElement, ffn::Experts};

/// Rows of a task.
const BLOCK: usize = 64;

/// Writes those of all rows, `[rows]`.
pub(super) fn gradient_norms<T: FfnElement>(
    experts: &Experts<'_, T>,
    inputs: &BackwardRows<'_, T>,
    norms: &mut [f32],
) {
    for instance in 0..experts.instances() {
        let rows = experts.rows_of(instance);
        let matrices = Matrices::of(experts, instance);
        let blocks = norms[rows.clone()].par_chunks_mut(BLOCK).enumerate();
        blocks.for_each(|(block, norms)| {
            let first = rows.start + block * BLOCK;
            matrices.norms_of(inputs, first..first + norms.len(), norms);
        });
    }
}

/// Weights of an instance in f32.
struct Matrices {
    activation: Activation,
    gate: Option<Array2<f32>>,
    up: Array2<f32>,
    down: Array2<f32>,
}

impl Matrices {
    fn of<T: FfnElement>(experts: &Experts<'_, T>, instance: usize) -> Self {
        let (width, hidden) = (experts.shape.width, experts.shape.hidden);
        let wide = |values: &[T], shape: (usize, usize)| {
            let view = ArrayView2::from_shape(shape, values).expect("checked shape");
            view.mapv(T::to_f32)
        };
        Self {
            activation: experts.shape.activation,
            gate: experts
                .gate(instance)
                .map(|gate| wide(gate, (hidden, width))),
            up: wide(experts.up(instance), (hidden, width)),
            down: wide(experts.down(instance), (width, hidden)),
        }
    }

    fn norms_of<T: FfnElement>(
        &self,
        inputs: &BackwardRows<'_, T>,
        rows: Range<usize>,
        norms: &mut [f32],
    ) {
        let wide = |all: &ArrayView2<'_, T>| all.slice(s![rows.clone(), ..]).mapv(T::to_f32);
        let (x, dy) = (wide(&inputs.x), wide(&inputs.dy));
        let mut up = product(&x, self.up.t());
        let mut gate = match &self.gate {
            Some(gate) => product(&x, gate.t()),
            None => Array2::zeros((rows.len(), 0)),
        };
        // The gradient of h, in place of which `differentiate` puts h.
        let mut h = product(&dy, self.down.view());
        let p = &inputs.gate_weights[rows];
        for (mut dh, p) in h.rows_mut().into_iter().zip(p) {
            dh *= *p;
        }
        let [of_gate, of_up, of_h] =
            [&mut gate, &mut up, &mut h].map(|all| all.as_slice_mut().expect("made in rows"));
        self.activation.differentiate(of_gate, of_up, of_h);
        for (row, norm) in norms.iter_mut().enumerate() {
            let square = |all: &Array2<f32>| -> f64 {
                let row = all.row(row);
                row.iter().map(|value| f64::from(*value).powi(2)).sum()
            };
            let down = f64::from(p[row]).powi(2) * square(&dy) * square(&h);
            let inward = (square(&gate) + square(&up)) * square(&x);
            *norm = (down + inward).sqrt() as f32;
        }
    }
}

fn product(a: &Array2<f32>, b: ArrayView2<'_, f32>) -> Array2<f32> {
    let mut product = Array2::zeros((a.nrows(), b.ncols()));
    general_mat_mul(1.0, a, &b, 0.0, &mut product);
    product
}
