use std::ops::Range;

use ndarray::ArrayViewMut2;

use super::{
    Workspace,
    forward::project,
    gemm::multiply,
    tile::{
        ROWS, instance_lanes, lanes, matrix, matrix_mut, share, take, tiles, to_columns, to_rows,
        widest,
    },
    wgrad::{Kept, write_gradients},
};
use crate::{Activation, BackwardRows, WeightGradients, ffn::Experts};

pub(super) fn backward(
    experts: &Experts<'_>,
    inputs: &BackwardRows<'_>,
    workspace: &mut Workspace,
    dx: ArrayViewMut2<'_, f32>,
    dp: &mut [f32],
    gradients: &mut WeightGradients<'_>,
) {
    let shape = experts.shape;
    let x = inputs.x.to_slice().expect("checked layout");
    let dy = inputs.dy.to_slice().expect("checked layout");
    let mut dx = dx.into_slice().expect("checked layout");
    let mut dp = dp;
    let lanes_in_all: usize = (0..experts.instances())
        .map(|i| instance_lanes(experts, i))
        .sum();
    let (scratch, pre, hidden) = workspace.for_backward(
        (2 * shape.width + shape.hidden) * widest(experts),
        experts.pre_activations() * shape.hidden * lanes_in_all,
        shape.hidden * dp.len(),
    );

    let (mut pre_left, mut hidden_left) = (&mut *pre, &mut *hidden);
    let tiles = tiles(experts).map(|(instance, rows)| {
        let of_lanes = experts.pre_activations() * shape.hidden * lanes(rows.len());
        let of_rows = |features: usize| ..rows.len() * features;
        Tile {
            dx: dx
                .split_off_mut(of_rows(shape.width))
                .expect("a row for each of x"),
            dp: dp
                .split_off_mut(of_rows(1))
                .expect("a value for each row of x"),
            pre: pre_left
                .split_off_mut(..of_lanes)
                .expect("lanes of all tiles"),
            hidden: hidden_left
                .split_off_mut(of_rows(shape.hidden))
                .expect("a row for each of x"),
            instance,
            rows,
        }
    });
    share(scratch, tiles, |scratch, tile| {
        backward_tile(experts, inputs, (x, dy), tile, scratch);
    });
    write_gradients(experts, &Kept { x, dy, pre, hidden }, gradients);
}

struct Tile<'a> {
    instance: usize,
    rows: Range<usize>,
    dx: &'a mut [f32],
    dp: &'a mut [f32],
    pre: &'a mut [f32],
    hidden: &'a mut [f32],
}

fn backward_tile(
    experts: &Experts<'_>,
    inputs: &BackwardRows<'_>,
    (x, dy): (&[f32], &[f32]),
    tile: Tile<'_>,
    mut scratch: &mut [f32],
) {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let lanes = lanes(tile.rows.len());
    let of_tile = tile.rows.start * width..tile.rows.end * width;
    let p = &inputs.gate_weights[tile.rows.clone()];
    let w = &inputs.weights[tile.rows.clone()];
    let wide = take(&mut scratch, width * lanes);
    let dy_columns = take(&mut scratch, width * lanes);
    let dh = take(&mut scratch, hidden * lanes);
    let (gate, up) = tile.pre.split_at_mut(tile.pre.len() - hidden * lanes);

    to_columns(&x[of_tile.clone()], width, wide);
    project(experts, tile.instance, wide, gate, up);
    to_columns(&dy[of_tile], width, dy_columns);
    let down = experts.down(tile.instance);
    multiply(
        matrix_mut(dh, hidden),
        down.t(),
        matrix(dy_columns, width),
        false,
    );

    differentiate(
        experts.shape.activation,
        p,
        Columns { gate, up, dh },
        tile.dp,
    );
    // dh now holds h.
    to_rows(dh, hidden, tile.hidden);
    for (row, (&p, &w)) in tile.hidden.chunks_exact_mut(hidden).zip(p.iter().zip(w)) {
        let factor = w * p;
        row.iter_mut().for_each(|h| *h *= factor);
    }

    let up_weights = experts.up(tile.instance);
    multiply(
        matrix_mut(wide, width),
        up_weights.t(),
        matrix(up, hidden),
        false,
    );
    if let Some(gate_weights) = experts.gate(tile.instance) {
        multiply(
            matrix_mut(wide, width),
            gate_weights.t(),
            matrix(gate, hidden),
            true,
        );
    }
    to_rows(wide, width, tile.dx);
    for column in tile.pre.chunks_exact_mut(lanes) {
        column.iter_mut().zip(w).for_each(|(d, &w)| *d *= w);
    }
}

/// Hidden columns of a tile, `[F, lanes]` each.
struct Columns<'a> {
    gate: &'a mut [f32],
    up: &'a mut [f32],
    dh: &'a mut [f32],
}

/// From the pre-activations and `dh` = W_down^T dy, in place: the gradients of the pre-activations with p, h in `dh`, and
/// `dp` = <dh, h>, summed in f64 in ascending order of features.
fn differentiate(activation: Activation, p: &[f32], columns: Columns<'_>, dp: &mut [f32]) {
    let Columns { gate, up, dh } = columns;
    let lanes = lanes(p.len());
    let mut sums = [0.0_f64; ROWS];
    for (feature, (up, dh)) in up
        .chunks_exact_mut(lanes)
        .zip(dh.chunks_exact_mut(lanes))
        .enumerate()
    {
        let gate = gate
            .get_mut(feature * lanes..(feature + 1) * lanes)
            .unwrap_or_default();
        for (lane, &p) in p.iter().enumerate() {
            let before = gate.get(lane).copied().unwrap_or_default();
            let b = dh[lane];
            let d = activation.hidden_and_gradients(before, up[lane], p * b);
            sums[lane] += f64::from(b) * f64::from(d.hidden);
            if let Some(gate) = gate.get_mut(lane) {
                *gate = d.gate;
            }
            (up[lane], dh[lane]) = (d.up, d.hidden);
        }
    }
    for (dp, sum) in dp.iter_mut().zip(sums) {
        *dp = sum as f32;
    }
}
