use std::{array, ops::Range};

use ndarray::ArrayViewMut2;

use super::{
    Workspace,
    element::Storage,
    forward::project,
    isa::{Isa, vectorised},
    kernel::LANES,
    pack::{RowStores, columns_to_rows, padded, rows_to_columns, rows_to_panels, words},
    product::{Left, packed_words, rows_times_weights},
    sums::{add_columns, numbers},
    tile::{Columns, FEATURES, ROWS, UNIT, blocks, cut, share, take, tile_rows, tiles},
    wgrad::{self, Kept, write_gradients},
};
use crate::{Activation, BackwardRows, Error, PreActivations, WeightGradients, ffn::Experts};

/// What the backward pass writes for each row.
#[derive(Debug)]
pub(super) struct Outputs<'a, T> {
    /// `[rows, D]`.
    pub(super) dx: ArrayViewMut2<'a, T>,
    /// `[rows]`.
    pub(super) dp: &'a mut [f32],
}

pub(super) fn backward<T: Storage>(
    experts: &Experts<'_, T>,
    inputs: &BackwardRows<'_, T>,
    stash: Option<&PreActivations<'_, T>>,
    workspace: &mut Workspace,
    outputs: Outputs<'_, T>,
    gradients: &mut WeightGradients<'_>,
    accumulate: &[bool],
) -> Result<(), Error> {
    let (width, hidden_width) = (experts.shape.width, experts.shape.hidden);
    let isa = Isa::detect().for_experts::<T>(width, hidden_width);
    let of_pre = experts.pre_activations() * hidden_width;
    let x = inputs.x.to_slice().expect("checked layout");
    let dy = inputs.dy.to_slice().expect("checked layout");
    let stash = stash.map(|stash| {
        let matrices = [stash.gate, Some(stash.up)];
        matrices.map(|rows| rows.map(|rows| rows.to_slice().expect("checked layout")))
    });
    let mut dx = outputs.dx.into_slice().expect("checked layout");
    let mut dp = outputs.dp;
    let height = tile_rows(experts);
    let mut sums = workspace.sums.take();
    let mut tile_sums = sums.as_mut().map(|sums| sums.start(experts, height));
    let kept = [
        of_pre * kept_rows(experts, experts.instances()),
        hidden_width * dp.len(),
    ];
    let words = Scratch::words(experts, height).max(wgrad::scratch_words(experts));
    let (scratch, [pre, hidden]) = workspace.for_backward::<T>(words, kept)?;

    let (mut pre_left, mut hidden_left) = (&mut *pre, &mut *hidden);
    let tiles = tiles(experts, height).map(|(instance, rows)| Tile {
        dx: split(&mut dx, rows.len() * width),
        dp: split(&mut dp, rows.len()),
        pre: split(&mut pre_left, of_pre * rows.len().next_multiple_of(UNIT)),
        hidden: split(&mut hidden_left, rows.len() * hidden_width),
        stash: stash.map(|stash| {
            let part = rows.start * hidden_width..rows.end * hidden_width;
            stash.map(|all| all.map(|all| &all[part.clone()]))
        }),
        x: &x[rows.start * width..rows.end * width],
        dy: &dy[rows.start * width..rows.end * width],
        gate_weights: &inputs.gate_weights[rows.clone()],
        weights: &inputs.weights[rows],
        sums: tile_sums.as_mut().map(|sums| split(sums, numbers(experts))),
        instance,
    });
    share(scratch, tiles, |scratch, tile| {
        let scratch = Scratch::cut(scratch.words(), experts, height);
        backward_tile(isa, experts, tile, scratch);
    });
    let kept = Kept {
        x,
        dy,
        pre,
        hidden,
        height,
    };
    write_gradients(isa, experts, &kept, scratch, gradients, accumulate);
    if let Some(sums) = &mut sums {
        sums.finish(experts, height);
    }
    workspace.sums = sums;
    Ok(())
}

/// Rows of the first instances, each instance's padded to whole units.
pub(super) fn kept_rows<T: Storage>(experts: &Experts<'_, T>, instances: usize) -> usize {
    let rows = (0..instances).map(|i| experts.rows_of(i).len().next_multiple_of(UNIT));
    rows.sum()
}

fn split<'a, T>(values: &mut &'a mut [T], length: usize) -> &'a mut [T] {
    values
        .split_off_mut(..length)
        .expect("values for each row of x")
}

struct Tile<'a, T> {
    instance: usize,
    x: &'a [T],
    dy: &'a [T],
    gate_weights: &'a [f32],
    weights: &'a [f32],
    /// Pre-activations of gate and up, `[rows, F]` each.
    stash: Option<[Option<&'a [T]>; 2]>,
    dx: &'a mut [T],
    dp: &'a mut [f32],
    pre: &'a mut [T],
    hidden: &'a mut [T],
    /// Of h and its derivatives, times w.
    sums: Option<&'a mut [f32]>,
}

/// Buffers of a thread, for tiles of a height.
struct Scratch<'a> {
    /// Pre-activations, later their gradients: columns `[F, height]`.
    gate: &'a mut [f32],
    up: &'a mut [f32],
    /// x in panels, then rows of dy.
    wide: &'a mut [u32],
    /// Rows of the pre-activations' gradients.
    pre: &'a mut [u32],
    /// Rows of b, then of dx, [`FEATURES`] columns at a time.
    sums: &'a mut [f32],
    /// A block of columns of b, and of h.
    b: &'a mut [f32],
    h: &'a mut [f32],
    /// Packed weights.
    packed: &'a mut [u32],
}

impl<'a> Scratch<'a> {
    fn sizes<T: Storage>(experts: &Experts<'_, T>, height: usize) -> [usize; 8] {
        let (width, hidden) = (experts.shape.width, experts.shape.hidden);
        let x = padded(words::<T>(width) * height);
        let block = FEATURES * LANES;
        [
            hidden * height,
            hidden * height,
            x.max(Left::<T>::words(height, width, 1)),
            Left::<T>::words(height, hidden, experts.pre_activations()),
            FEATURES * height.next_multiple_of(UNIT),
            block,
            block,
            packed_words(width, hidden),
        ]
    }

    fn words<T: Storage>(experts: &Experts<'_, T>, height: usize) -> usize {
        Self::sizes(experts, height).into_iter().map(padded).sum()
    }

    fn cut<T: Storage>(mut words: &'a mut [u32], experts: &Experts<'_, T>, height: usize) -> Self {
        let [gate, up, wide, pre, sums, b, h, packed] =
            Self::sizes(experts, height).map(|length| take(&mut words, length));
        let floats = bytemuck::cast_slice_mut;
        Self {
            gate: floats(gate),
            up: floats(up),
            wide,
            pre,
            sums: floats(sums),
            b: floats(b),
            h: floats(h),
            packed,
        }
    }
}

fn backward_tile<T: Storage>(
    isa: Isa,
    experts: &Experts<'_, T>,
    mut tile: Tile<'_, T>,
    mut scratch: Scratch<'_>,
) {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let rows = tile.dp.len();
    recompute(isa, experts, &tile, &mut scratch);

    let mut dy = Left::<T>::take(scratch.wide, isa, rows, width, 1);
    dy.copy(tile.dy, width);
    let mut pre = Left::<T>::take(scratch.pre, isa, rows, hidden, experts.pre_activations());
    let mut of_rows = [0.0; ROWS];
    let down = experts.down(tile.instance);
    let (packed, sums) = (&mut *scratch.packed, &mut *scratch.sums);
    rows_times_weights(
        isa,
        &dy,
        &[down],
        hidden,
        packed,
        sums,
        |features, b, stride| {
            for block in blocks(features, rows) {
                let columns = Piece {
                    gate: &mut scratch.gate[block.place.clone()],
                    up: &mut scratch.up[block.place.clone()],
                    b: &mut scratch.b[..block.place.len()],
                    h: &mut scratch.h[..block.place.len()],
                };
                let count = (rows - block.panel.start).min(block.panel.lanes);
                let b = &b[block.panel.start * stride..];
                rows_to_columns::<f32>(isa, b, stride, count, block.panel.lanes, columns.b);
                differentiate(
                    isa,
                    experts,
                    &mut tile,
                    &block,
                    columns,
                    &mut pre,
                    &mut of_rows,
                );
            }
        },
    );
    for (dp, sum) in tile.dp.iter_mut().zip(of_rows) {
        *dp = sum as f32;
    }

    // dx = W_gate^T dgate + W_up^T dup
    let up = experts.up(tile.instance);
    let matrices = experts
        .gate(tile.instance)
        .map_or([up; 2], |gate| [gate, up]);
    let matrices = &matrices[2 - experts.pre_activations()..];
    rows_times_weights(
        isa,
        &pre,
        matrices,
        width,
        packed,
        sums,
        |columns, sums, stride| {
            narrow_rows(isa, sums, stride, tile.dx, width, columns);
        },
    );
}

/// Pre-activations, from x or as the forward pass left them.
fn recompute<T: Storage>(
    isa: Isa,
    experts: &Experts<'_, T>,
    tile: &Tile<'_, T>,
    scratch: &mut Scratch<'_>,
) {
    let hidden = experts.shape.hidden;
    let rows = tile.dp.len();
    let Some(stash) = tile.stash else {
        rows_to_panels(isa, tile.x, experts.shape.width, scratch.wide);
        for range in cut(0..hidden, FEATURES) {
            let place = range.start * padded(rows)..range.end * padded(rows);
            let to = (&mut scratch.gate[place.clone()], &mut scratch.up[place]);
            project(
                isa,
                experts,
                tile.instance,
                range,
                (scratch.wide, rows),
                scratch.packed,
                to,
            );
        }
        return;
    };
    for block in cut(0..hidden, FEATURES).flat_map(|features| blocks(features, rows)) {
        let (start, lanes) = (block.panel.start, block.panel.lanes);
        let count = (rows - start).min(lanes);
        for (kept, to) in stash.iter().zip([&mut *scratch.gate, &mut *scratch.up]) {
            if let Some(kept) = kept {
                let kept = &kept[start * hidden + block.features.start..];
                let to = &mut to[block.place.clone()];
                rows_to_columns(isa, kept, hidden, count, lanes, to);
            }
        }
    }
}

/// A block of columns `[features, lanes]`: pre-activations and b = W_down^T dy; room for h.
struct Piece<'a> {
    gate: &'a mut [f32],
    up: &'a mut [f32],
    b: &'a mut [f32],
    h: &'a mut [f32],
}

/// From a block's pre-activations and b: their gradients with p as rows in `left`, and times w as columns in `tile.pre`;
/// h times w p as rows; and into `sums` the rows' `<b, h>`, in f64 in ascending order of features.
fn differentiate<T: Storage>(
    isa: Isa,
    experts: &Experts<'_, T>,
    tile: &mut Tile<'_, T>,
    block: &Columns,
    columns: Piece<'_>,
    left: &mut Left<'_, T>,
    sums: &mut [f64; ROWS],
) {
    let Piece { gate, up, b, h } = columns;
    let (hidden, activation) = (experts.shape.hidden, experts.shape.activation);
    let (from, lanes, first) = (block.panel.start, block.panel.lanes, block.features.start);
    let rows = tile.dp.len();
    let count = (rows - from).min(lanes);
    let lanes_of = |values: &[f32]| -> [f32; LANES] {
        array::from_fn(|lane| values.get(from + lane).copied().unwrap_or(0.0))
    };
    let (p, w) = (lanes_of(tile.gate_weights), lanes_of(tile.weights));
    if let Some(sums) = &mut tile.sums {
        add_columns(isa, activation, gate, up, lanes, &w, sums, first);
    }
    hidden_gradients(
        isa,
        activation,
        Piece { gate, up, b, h },
        lanes,
        &p,
        &w,
        &mut sums[from..],
    );
    columns_to_rows(
        isa,
        h,
        lanes,
        count,
        &mut tile.hidden[from * hidden + first..],
        RowStores::ordinary(hidden),
    );
    let gated = experts.pre_activations() > 1;
    let matrices = [gated.then_some(gate), Some(up)];
    for (part, columns) in matrices.into_iter().flatten().enumerate() {
        let to = &mut left.rows[from * left.stride + part * left.part + first..];
        columns_to_rows(
            isa,
            columns,
            lanes,
            count,
            to,
            RowStores::ordinary(left.stride),
        );
        let kept = rows.next_multiple_of(UNIT);
        let pre = &mut tile.pre[(part * hidden + first) * kept..];
        keep_columns(isa, columns, lanes, &w, pre, kept, from);
    }
}

vectorised! {
/// From pre-activations and b = W_down^T dy: gradients of the pre-activations with p in their place; h times w p; and the rows' `<b, h>` added to
/// `sums`, in f64 in ascending order of features.
fn hidden_gradients(
    activation: Activation,
    columns: Piece<'_>,
    lanes: usize,
    p: &[f32; LANES],
    w: &[f32; LANES],
    sums: &mut [f64],
) {
    let Piece { gate, up, b, h } = columns;
    for (h, b) in h.chunks_exact_mut(lanes).zip(b.chunks_exact(lanes)) {
        for ((h, b), p) in h.iter_mut().zip(b).zip(p) {
            *h = b * p;
        }
    }
    activation.differentiate(gate, up, h);
    for (h, b) in h.chunks_exact_mut(lanes).zip(b.chunks_exact(lanes)) {
        for ((((h, b), p), w), sum) in h.iter_mut().zip(b).zip(p).zip(w).zip(&mut *sums) {
            *sum += f64::from(*b) * f64::from(*h);
            *h *= w * p;
        }
    }
}

/// Columns times w to columns of tiles `[features, height]`, from `first` on, zero to the end.
fn keep_columns<T: Storage>(columns: &[f32], lanes: usize, w: &[f32; LANES], to: &mut [T], height: usize, first: usize) {
    for (column, to) in columns.chunks_exact(lanes).zip(to.chunks_exact_mut(height)) {
        let (to, rest) = to[first..].split_at_mut(lanes);
        for ((to, d), w) in to.iter_mut().zip(column).zip(w) {
            *to = T::narrowed(d * w);
        }
        rest.fill(T::default());
    }
}

/// Rows `stride` apart to the columns `outputs` of rows of `width`.
fn narrow_rows<T: Storage>(rows: &[f32], stride: usize, to: &mut [T], width: usize, outputs: Range<usize>) {
    for (from, to) in rows.chunks_exact(stride).zip(to.chunks_exact_mut(width)) {
        for (to, &from) in to[outputs.start..outputs.end].iter_mut().zip(from) {
            *to = T::narrowed(from);
        }
    }
}
}
