use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayView2, ArrayViewMut2};

use super::{
    Workspace,
    gemm::multiply,
    tile::{lanes, matrix, matrix_mut, share, take, tiles, to_columns, to_rows, widest},
};
use crate::{Activation, ffn::Experts};

pub(super) fn forward(
    experts: &Experts<'_>,
    x: ArrayView2<'_, f32>,
    workspace: &mut Workspace,
    out: ArrayViewMut2<'_, f32>,
    h_norms: Option<&mut [SquaredNorm]>,
) {
    let width = experts.shape.width;
    let x = x.to_slice().expect("checked layout");
    let mut out = out.into_slice().expect("checked layout");
    let mut h_norms = h_norms.unwrap_or_default();
    let with_norms = !h_norms.is_empty();
    let tiles = tiles(experts).map(|(instance, rows)| Tile {
        instance,
        x: &x[rows.start * width..rows.end * width],
        out: out
            .split_off_mut(..rows.len() * width)
            .expect("a row of out for each of x"),
        h_norms: with_norms.then(|| {
            h_norms
                .split_off_mut(..rows.len())
                .expect("a norm for each row of x")
        }),
    });
    // x (later y), the pre-activations, and h as rows.
    let features = width + (experts.pre_activations() + 1) * experts.shape.hidden;
    let scratch = workspace.scratch(features * widest(experts));
    share(scratch, tiles, |scratch, tile| {
        forward_tile(experts, tile, scratch)
    });
}

struct Tile<'a> {
    instance: usize,
    x: &'a [f32],
    out: &'a mut [f32],
    h_norms: Option<&'a mut [SquaredNorm]>,
}

fn forward_tile(experts: &Experts<'_>, tile: Tile<'_>, mut scratch: &mut [f32]) {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let count = tile.x.len() / width;
    let lanes = lanes(count);
    let wide = take(&mut scratch, width * lanes);
    let h = take(&mut scratch, hidden * lanes);
    let gate = take(
        &mut scratch,
        (experts.pre_activations() - 1) * hidden * lanes,
    );

    to_columns(tile.x, width, wide);
    project(experts, tile.instance, wide, gate, h);
    activate(experts.shape.activation, gate, h);

    if let Some(h_norms) = tile.h_norms {
        let rows = take(&mut scratch, hidden * count);
        to_rows(h, hidden, rows);
        for (norm, row) in h_norms.iter_mut().zip(rows.chunks_exact(hidden)) {
            *norm = SquaredNorm::of(row);
        }
    }
    let down = experts.down(tile.instance);
    multiply(matrix_mut(wide, width), down, matrix(h, hidden), false);
    to_rows(wide, width, tile.out);
}

/// `up = W_up x` and, when gated, `gate = W_gate x`, from and to tiles.
pub(super) fn project(
    experts: &Experts<'_>,
    instance: usize,
    x: &[f32],
    gate: &mut [f32],
    up: &mut [f32],
) {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let x = matrix(x, width);
    if let Some(weights) = experts.gate(instance) {
        multiply(matrix_mut(gate, hidden), weights, x, false);
    }
    multiply(matrix_mut(up, hidden), experts.up(instance), x, false);
}

/// Turns pre-activations into the down projection's input, in place of `up`.
fn activate(activation: Activation, gate: &[f32], up: &mut [f32]) {
    if activation.is_gated() {
        for (up, &gate) in up.iter_mut().zip(gate) {
            *up = activation.hidden(gate, *up);
        }
    } else {
        for up in up {
            *up = activation.hidden(0.0, *up);
        }
    }
}
