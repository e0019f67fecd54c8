use std::ops::Range;

use lrmoe_metric::SquaredNorm;
use ndarray::{ArrayView2, ArrayViewMut2};

use super::{
    Workspace,
    element::Storage,
    isa::{Isa, vectorised},
    pack::{
        RowPlaces, RowStores, columns_to_places, columns_to_rows, padded, rows_to_panels, words,
    },
    product::{Right, packed_words, weights_times_columns},
    stream,
    sums::{add_columns, lane_weights, numbers},
    tile::{FEATURES, blocks, cut, share, take, tile_rows, tiles},
};
use crate::{Activation, Error, ffn::Experts};

/// What the forward pass writes.
#[derive(Debug)]
pub(super) struct Outputs<'a, T> {
    /// `[rows, D]`.
    pub(super) out: ArrayViewMut2<'a, T>,
    /// `[rows]`, where asked for.
    pub(super) h_norms: Option<&'a mut [SquaredNorm]>,
    /// Pre-activations, where asked for.
    pub(super) stash: Option<Stash<'a, T>>,
}

/// Where pre-activations are kept.
#[derive(Debug)]
pub(super) struct Stash<'a, T> {
    /// Of gate and up, `[rows, F]`.
    pub(super) matrices: [Option<&'a mut [T]>; 2],
    /// The rows that are kept, of all.
    pub(super) chosen: Option<RowPlaces<'a>>,
}

impl<'a, T> Stash<'a, T> {
    /// Splits off what belongs to some rows; those before them have been.
    fn split(&mut self, rows: Range<usize>, hidden: usize) -> Self {
        let mut places = rows.len();
        let chosen = self.chosen.as_mut().map(|all| {
            let mine = all.within(rows);
            let end = mine
                .places
                .last()
                .map_or(all.before, |last| *last as usize + 1);
            places = end - std::mem::replace(&mut all.before, end);
            mine
        });
        let part =
            |all: &mut Option<&'a mut [T]>| all.as_mut().map(|all| split(all, places * hidden));
        Self {
            matrices: self.matrices.each_mut().map(part),
            chosen,
        }
    }

    /// Writes `count` rows, given as columns of gate and up from feature `feature` on. The first is row `rows[0]` of all, and `rows[1]` of those that
    /// were split off.
    fn write(
        &mut self,
        isa: Isa,
        columns: [&[f32]; 2],
        (lanes, count): (usize, usize),
        rows: [usize; 2],
        (feature, hidden): (usize, usize),
    ) where
        T: Storage,
    {
        let [first, here] = rows;
        for (columns, rows) in columns.into_iter().zip(self.matrices.iter_mut()) {
            let Some(rows) = rows else { continue };
            match self.chosen {
                None => {
                    let rows = &mut rows[here * hidden + feature..];
                    let stores = RowStores::streamed(hidden, columns.len() / lanes, rows);
                    columns_to_rows(isa, columns, lanes, count, rows, stores);
                }
                Some(chosen) => {
                    let mine = chosen.within(first..first + count);
                    let rows = rows.get_mut(feature..).unwrap_or_default();
                    let stores = RowStores::ordinary(hidden);
                    columns_to_places(isa, columns, lanes, first, mine, rows, stores);
                }
            }
        }
    }
}

pub(super) fn forward<T: Storage>(
    experts: &Experts<'_, T>,
    x: ArrayView2<'_, T>,
    workspace: &mut Workspace,
    outputs: Outputs<'_, T>,
) -> Result<(), Error> {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let isa = Isa::detect().for_experts::<T>(width, hidden);
    let x = x.to_slice().expect("checked layout");
    let mut out = outputs.out.into_slice().expect("checked layout");
    let mut h_norms = outputs.h_norms;
    let mut stash = outputs.stash;
    let height = tile_rows(experts);
    let mut sums = workspace.sums.take();
    let mut tile_sums = sums.as_mut().map(|sums| sums.start(experts, height));
    let tiles = tiles(experts, height).map(|(instance, rows)| Tile {
        instance,
        sums: tile_sums.as_mut().map(|sums| split(sums, numbers(experts))),
        x: &x[rows.start * width..rows.end * width],
        out: split(&mut out, rows.len() * width),
        h_norms: h_norms.as_mut().map(|norms| split(norms, rows.len())),
        stash: stash
            .as_mut()
            .map(|stash| stash.split(rows.clone(), hidden)),
        first: rows.start,
    });
    let scratch = workspace.scratch(scratch_words(experts, height))?;
    share(scratch, tiles, |scratch, tile| {
        forward_tile(isa, experts, tile, scratch.words());
    });
    if let Some(sums) = &mut sums {
        sums.finish(experts, height);
    }
    workspace.sums = sums;
    Ok(())
}

fn split<'a, T>(values: &mut &'a mut [T], length: usize) -> &'a mut [T] {
    values
        .split_off_mut(..length)
        .expect("a value for each row of x")
}

fn scratch_words<T: Storage>(experts: &Experts<'_, T>, height: usize) -> usize {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let columns = words::<T>(width) + words::<T>(hidden) + 2 * FEATURES;
    padded(columns * height) + padded(height * hidden) + packed_words(width, hidden) + 64
}

struct Tile<'a, T> {
    instance: usize,
    x: &'a [T],
    out: &'a mut [T],
    h_norms: Option<&'a mut [SquaredNorm]>,
    stash: Option<Stash<'a, T>>,
    /// The first of its rows.
    first: usize,
    /// Of h and its derivatives.
    sums: Option<&'a mut [f32]>,
}

fn forward_tile<T: Storage>(
    isa: Isa,
    experts: &Experts<'_, T>,
    tile: Tile<'_, T>,
    mut scratch: &mut [u32],
) {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let rows = tile.x.len() / width;
    let lanes = padded(rows);
    let x = take(&mut scratch, words::<T>(width) * lanes);
    let h = take(&mut scratch, words::<T>(hidden) * lanes);
    let gate: &mut [f32] = bytemuck::cast_slice_mut(take(&mut scratch, FEATURES * lanes));
    let up: &mut [f32] = bytemuck::cast_slice_mut(take(&mut scratch, FEATURES * lanes));
    let h_rows: &mut [f32] = bytemuck::cast_slice_mut(take(&mut scratch, rows * hidden));
    let (mut stash, mut sums) = (tile.stash, tile.sums);

    rows_to_panels(isa, tile.x, width, x);
    for range in cut(0..hidden, FEATURES) {
        project(
            isa,
            experts,
            tile.instance,
            range.clone(),
            (x, rows),
            scratch,
            (gate, up),
        );
        for block in blocks(0..range.len(), rows) {
            let first = range.start;
            let (panel, lanes) = (block.panel, block.panel.lanes);
            let (gate, up) = (&mut gate[block.place.clone()], &mut up[block.place]);
            let count = (rows - panel.start).min(lanes);
            if let Some(stash) = &mut stash {
                let rows = [tile.first + panel.start, panel.start];
                stash.write(isa, [gate, up], (lanes, count), rows, (first, hidden));
            }
            if let Some(sums) = &mut sums {
                let activation = experts.shape.activation;
                let once = lane_weights(count, |_| 1.0);
                add_columns(isa, activation, gate, up, lanes, &once, sums, first);
            }
            activate::<T>(isa, experts.shape.activation, gate, up);
            if tile.h_norms.is_some() {
                columns_to_rows(
                    isa,
                    up,
                    lanes,
                    count,
                    &mut h_rows[panel.start * hidden + first..],
                    RowStores::ordinary(hidden),
                );
            }
            let h = &mut h[panel.start * words::<T>(hidden)..];
            pack_columns::<T>(isa, up, lanes, &mut h[first / T::PER_WORD * lanes..]);
        }
    }
    if stash.is_some() {
        stream::finish();
    }
    if let Some(norms) = tile.h_norms {
        for (norm, row) in norms.iter_mut().zip(h_rows.chunks_exact(hidden)) {
            *norm = SquaredNorm::of(row);
        }
    }
    let y = &mut *up;
    let down = experts.down(tile.instance);
    for range in cut(0..width, FEATURES) {
        let down = Right {
            weights: down,
            width: hidden,
            outputs: range.clone(),
        };
        weights_times_columns(isa, &mut [(down, &mut *y)], h, rows, scratch);
        for block in blocks(0..range.len(), rows) {
            let (from, lanes) = (block.panel.start, block.panel.lanes);
            let out = &mut tile.out[from * width + range.start..];
            columns_to_rows(
                isa,
                &y[block.place],
                lanes,
                (rows - from).min(lanes),
                out,
                RowStores::ordinary(width),
            );
        }
    }
}

/// Gate (when gated) and up of the features `outputs` from x in panels.
pub(super) fn project<T: Storage>(
    isa: Isa,
    experts: &Experts<'_, T>,
    instance: usize,
    outputs: Range<usize>,
    (x, rows): (&[u32], usize),
    packed: &mut [u32],
    (gate, up): (&mut [f32], &mut [f32]),
) {
    let block = |weights| Right {
        weights,
        width: experts.shape.width,
        outputs: outputs.clone(),
    };
    let up = (block(experts.up(instance)), up);
    match experts.gate(instance) {
        Some(weights) => {
            weights_times_columns(isa, &mut [(block(weights), gate), up], x, rows, packed)
        }
        None => weights_times_columns(isa, &mut [up], x, rows, packed),
    }
}

vectorised! {
/// Turns pre-activations into the down projection's input, as it is stored, in place of `up`.
fn activate<T: Storage>(activation: Activation, gate: &[f32], up: &mut [f32]) {
    activation.hidden(gate, up);
    for h in up {
        *h = T::narrowed(*h).widened();
    }
}

/// Packs columns `[features, lanes]` as the right factor of a product over features.
fn pack_columns<T: Storage>(columns: &[f32], lanes: usize, to: &mut [u32]) {
    let words = columns.chunks(T::PER_WORD * lanes);
    for (columns, to) in words.zip(to.chunks_exact_mut(lanes)) {
        let (low, high) = columns.split_at(lanes);
        if T::PER_WORD == 1 || high.is_empty() {
            for (to, &low) in to.iter_mut().zip(low) {
                *to = T::narrowed(low).bits();
            }
        } else {
            for ((to, &low), &high) in to.iter_mut().zip(low).zip(high) {
                *to = T::narrowed(low).bits() | T::narrowed(high).bits() << 16;
            }
        }
    }
}
}
