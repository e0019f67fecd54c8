//! Tiles: up to [`ROWS`] rows of one instance, held as columns `[features, lanes]`.
//!
//! With rows as columns, every product with weights is `[out, in] [in, lanes]`, which `gemm` computes from weights
//! and tiles as they lie, vectorised over lanes. Lanes past the last row are zero, so that products
//! never have a single column, whose sums would be taken in another order.

use std::{ops::Range, sync::Mutex};

use ndarray::{ArrayView2, ArrayViewMut2};
use rayon::iter::{IndexedParallelIterator, IntoParallelRefMutIterator, ParallelIterator};

use crate::ffn::Experts;

/// Most rows of a tile.
pub(super) const ROWS: usize = 64;
/// Lanes of a tile are a multiple of this: a vector of the widest SIMD.
const LANES: usize = 16;

/// Lanes that hold `rows` rows.
pub(super) fn lanes(rows: usize) -> usize {
    rows.next_multiple_of(LANES)
}

/// Lanes of all tiles of an instance: only its last tile is padded.
pub(super) fn instance_lanes(experts: &Experts<'_>, instance: usize) -> usize {
    lanes(experts.rows_of(instance).len())
}

/// Lanes of the widest tile.
pub(super) fn widest(experts: &Experts<'_>) -> usize {
    let lanes = (0..experts.instances()).map(|instance| instance_lanes(experts, instance));
    lanes.max().unwrap_or(0).min(ROWS)
}

/// The next `length` values of a thread's scratch, with any content.
pub(super) fn take<'a>(scratch: &mut &'a mut [f32], length: usize) -> &'a mut [f32] {
    scratch
        .split_off_mut(..length)
        .expect("scratch for the widest tile")
}

/// The tiles of all instances in row order: (instance, rows).
pub(super) fn tiles(experts: &Experts<'_>) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..experts.instances()).flat_map(move |instance| {
        let rows = experts.rows_of(instance);
        let end = rows.end;
        rows.step_by(ROWS)
            .map(move |from| (instance, from..end.min(from + ROWS)))
    })
}

/// Does `work` for every item, each thread with a scratch of its own.
///
/// Items are made on demand, so nothing is allocated for them.
pub(super) fn share<S: Send, T: Send>(
    scratch: &mut [S],
    items: impl Iterator<Item = T> + Send,
    work: impl Fn(&mut S, T) + Sync,
) {
    let items = Mutex::new(items);
    let next = || {
        items
            .lock()
            .expect("no thread panics while it takes an item")
            .next()
    };
    scratch.par_iter_mut().with_max_len(1).for_each(|scratch| {
        while let Some(item) = next() {
            work(scratch, item);
        }
    });
}

pub(super) fn matrix(values: &[f32], rows: usize) -> ArrayView2<'_, f32> {
    let columns = values.len() / rows;
    ArrayView2::from_shape((rows, columns), values).expect("whole rows")
}

pub(super) fn matrix_mut(values: &mut [f32], rows: usize) -> ArrayViewMut2<'_, f32> {
    let columns = values.len() / rows;
    ArrayViewMut2::from_shape((rows, columns), values).expect("whole rows")
}

/// Features taken at a time when rows become columns or back, so that both sides stay in cache.
const BLOCK: usize = 16;

/// Writes `rows` `[n, features]` as the columns of a tile `[features, lanes]`, zero past column n.
pub(super) fn to_columns(rows: &[f32], features: usize, tile: &mut [f32]) {
    let lanes = tile.len() / features;
    for (block, tile) in tile.chunks_mut(BLOCK * lanes).enumerate() {
        for (lane, row) in rows.chunks_exact(features).enumerate() {
            let row = &row[block * BLOCK..];
            for (column, &value) in tile.chunks_exact_mut(lanes).zip(row) {
                column[lane] = value;
            }
        }
        for column in tile.chunks_exact_mut(lanes) {
            column[rows.len() / features..].fill(0.0);
        }
    }
}

/// Writes the first columns of a tile `[features, lanes]` as `rows` `[n, features]`.
pub(super) fn to_rows(tile: &[f32], features: usize, rows: &mut [f32]) {
    let lanes = tile.len() / features;
    for (block, tile) in tile.chunks(BLOCK * lanes).enumerate() {
        for (lane, row) in rows.chunks_exact_mut(features).enumerate() {
            let row = &mut row[block * BLOCK..];
            for (column, value) in tile.chunks_exact(lanes).zip(row) {
                *value = column[lane];
            }
        }
    }
}
