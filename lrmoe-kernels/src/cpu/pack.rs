//! How rows and columns become factors of products, and back.

use std::{array, ops::Range};

use super::{
    element::Storage,
    isa::{Isa, vectorised},
    kernel::{LANES, VECTOR},
    stream::{self, LINE},
    transpose::{Square, transpose_square},
};

/// Lanes `[start, start + lanes)` of a packed factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Panel {
    pub(super) start: usize,
    pub(super) lanes: usize,
}

/// Cuts `columns` columns into panels of nearly equal width; the last one's lanes may pass the end.
pub(super) fn panels(columns: usize) -> impl Iterator<Item = Panel> + Clone {
    let vectors = columns.div_ceil(VECTOR);
    let count = columns.div_ceil(LANES);
    (0..count).map(move |i| {
        let (from, to) = (i * vectors / count, (i + 1) * vectors / count);
        Panel {
            start: from * VECTOR,
            lanes: (to - from) * VECTOR,
        }
    })
}

/// Columns with those that fill the last vector.
pub(super) fn padded(columns: usize) -> usize {
    columns.next_multiple_of(VECTOR)
}

/// Words that hold this many elements.
pub(super) fn words<T: Storage>(elements: usize) -> usize {
    elements.div_ceil(T::PER_WORD)
}

/// Elements `[2 i]` and `[2 i + 1]` of a row as word i, or each alone, 0 past the end.
#[inline(always)]
fn word<T: Storage>(row: &[T], i: usize) -> u32 {
    let bits = |i: usize| row.get(i).map_or(0, |x| x.bits());
    if T::PER_WORD == 1 {
        bits(i)
    } else {
        bits(2 * i) | bits(2 * i + 1) << 16
    }
}

vectorised! {
/// Packs columns `[panel.start, ..)` of `rows` rows (`stride` apart) for a product over the rows: `[words, lanes]`, zero past the last
/// column, and past the last row up to the end of `to`.
pub(super) fn pack<T: Storage>(from: &[T], stride: usize, rows: usize, columns: usize, panel: Panel, to: &mut [u32]) {
    let width = columns.saturating_sub(panel.start).min(panel.lanes);
    let row = |r: usize| &from[r * stride + panel.start..][..width];
    let full = words::<T>(rows);
        for (i, to) in to.chunks_exact_mut(panel.lanes).enumerate() {
        if i >= full {
            to.fill(0);
            continue;
        }
        let (to, rest) = to.split_at_mut(width);
        rest.fill(0);
        each(row(i * T::PER_WORD), to, |x, to| *to = x.bits());
        if T::PER_WORD == 2 && 2 * i + 1 < rows {
            each(row(2 * i + 1), to, |x, to| *to |= x.bits() << 16);
        }
    }
}
}

/// Does `work` for the elements of both slices, up to the end of the shorter one.
///
/// Whole vectors take a path without a call: left to itself the compiler makes copies of any length of them, which are slow at this one.
#[inline(always)]
fn each<A: Copy, B>(from: &[A], to: &mut [B], work: impl Fn(A, &mut B)) {
    for (from, to) in from.chunks(VECTOR).zip(to.chunks_mut(VECTOR)) {
        let whole = (
            <&[A; VECTOR]>::try_from(from),
            <&mut [B; VECTOR]>::try_from(&mut *to),
        );
        if let (Ok(from), Ok(to)) = whole {
            for (&from, to) in from.iter().zip(to) {
                work(from, to);
            }
        } else {
            each_of_part(from, to, &work);
        }
    }
}

#[cold]
#[inline(never)]
fn each_of_part<A: Copy, B>(from: &[A], to: &mut [B], work: &impl Fn(A, &mut B)) {
    for (&from, to) in from.iter().zip(to) {
        work(from, to);
    }
}

vectorised! {
/// Writes `[rows, columns]` words (`stride` apart) as `[columns, rows]` (`to_stride` apart).
pub(super) fn transpose(from: &[u32], stride: usize, rows: usize, columns: usize, to: &mut [u32], to_stride: usize) {
    for r in (0..rows).step_by(VECTOR) {
        for c in (0..columns).step_by(VECTOR) {
            let (height, width) = (VECTOR.min(rows - r), VECTOR.min(columns - c));
            let mut square = [[0; VECTOR]; VECTOR];
            for (i, square) in square[..height].iter_mut().enumerate() {
                each(&from[(r + i) * stride + c..][..width], square, |x, to| *to = x);
            }
            transpose_square(&mut square);
            for (j, row) in square[..width].iter().enumerate() {
                each(row, &mut to[(c + j) * to_stride + r..][..height], |x, to| *to = x);
            }
        }
    }
}
}

vectorised! {
/// Packs rows as the columns of a product over their elements: for each panel of rows `[words, lanes]`, zero past the last row.
pub(super) fn rows_to_panels<T: Storage>(rows: &[T], features: usize, to: &mut [u32]) {
    let (count, words) = (rows.len() / features, words::<T>(features));
        for panel in panels(count) {
            let to = &mut to[panel.start * words..][..panel.lanes * words];
            for lane in (0..panel.lanes).step_by(VECTOR) {
                let row = |i: usize| {
                    let row = panel.start + lane + i;
                    rows.get(row * features..(row + 1) * features).unwrap_or_default()
                };
                for w in (0..words).step_by(VECTOR) {
                    let width = VECTOR.min(words - w);
                    let mut square: Square = array::from_fn(|i| {
                        let row = row(i);
                        let from = w * T::PER_WORD;
                        match row.get(from..from + VECTOR * T::PER_WORD) {
                            Some(whole) => array::from_fn(|j| word(whole, j)),
                            None => array::from_fn(|j| word(row, w + j)),
                        }
                    });
                    transpose_square(&mut square);
                    for (j, row) in square[..width].iter().enumerate() {
                        to[(w + j) * panel.lanes + lane..][..VECTOR].copy_from_slice(row);
                    }
                }
            }
        }
}
}

/// Rows and their places, both ascending.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowPlaces<'a> {
    pub(super) rows: &'a [u32],
    pub(super) places: &'a [u32],
    /// Places that come before the first to write to.
    pub(super) before: usize,
}

impl RowPlaces<'_> {
    /// Those of the rows of a range.
    pub(super) fn within(self, range: Range<usize>) -> Self {
        let before = |bound: usize| self.rows.partition_point(|row| (*row as usize) < bound);
        let mine = before(range.start)..before(range.end);
        Self {
            rows: &self.rows[mine.clone()],
            places: &self.places[mine],
            before: self.before,
        }
    }
}

/// How columns become rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowStores {
    /// Elements from one row to the next.
    stride: usize,
    /// Whole lines past the caches, until [`stream::finish`].
    streamed: bool,
}

impl RowStores {
    pub(super) fn ordinary(stride: usize) -> Self {
        Self {
            stride,
            streamed: false,
        }
    }

    /// Past the caches where rows `to` and their pieces of `features` elements are whole lines.
    pub(super) fn streamed<T: Storage>(stride: usize, features: usize, to: &[T]) -> Self {
        let whole = |elements: usize| elements.is_multiple_of(VECTOR);
        let streamed = T::PER_WORD == 1
            && whole(stride)
            && whole(features)
            && to.as_ptr().addr().is_multiple_of(LINE);
        Self { stride, streamed }
    }

    #[inline(always)]
    fn store<T: Storage>(self, row: &[u32; VECTOR], to: &mut [T]) {
        if self.streamed {
            assert_eq!(to.len(), VECTOR);
            // SAFETY: `streamed` found elements of 32 bits, rows and pieces of whole lines, and `to` at the start of one.
            unsafe { stream::lines(row.as_ptr().cast(), to.as_mut_ptr().cast(), 1) };
        } else {
            each(row, to, |bits, to| *to = T::narrowed(f32::from_bits(bits)));
        }
    }
}

/// Rows `[lane, lane + VECTOR)` of features `[f, f + width)` of columns.
#[inline(always)]
fn square_of(columns: &[f32], lanes: usize, lane: usize, f: usize, width: usize) -> Square {
    let column = |i: usize| {
        let column = &columns[(f + i) * lanes + lane..][..VECTOR];
        array::from_fn(|j| column[j].to_bits())
    };
    // Whole squares, nearly all, are not zeroed first; so in `rows_to_columns`.
    let mut square: Square = if width == VECTOR {
        array::from_fn(column)
    } else {
        array::from_fn(|i| if i < width { column(i) } else { [0; VECTOR] })
    };
    transpose_square(&mut square);
    square
}

vectorised! {
/// Narrows columns `[features, lanes]` to `count` rows of elements.
pub(super) fn columns_to_rows<T: Storage>(columns: &[f32], lanes: usize, count: usize, to: &mut [T], stores: RowStores) {
    let features = columns.len() / lanes;
    for lane in (0..count).step_by(VECTOR) {
        for f in (0..features).step_by(VECTOR) {
            let width = VECTOR.min(features - f);
            let square = square_of(columns, lanes, lane, f, width);
            for (i, row) in square[..VECTOR.min(count - lane)].iter().enumerate() {
                stores.store(row, &mut to[(lane + i) * stores.stride + f..][..width]);
            }
        }
    }
}
}

vectorised! {
/// Narrows some of the rows that columns `[features, lanes]` are, which begin with row `first`, to the places of rows of elements.
pub(super) fn columns_to_places<T: Storage>(columns: &[f32], lanes: usize, first: usize, chosen: RowPlaces<'_>, to: &mut [T], stores: RowStores) {
    let features = columns.len() / lanes;
    let RowPlaces { rows, mut places, before } = chosen;
    let lane = |row: u32| row as usize - first;
    for rows in rows.chunk_by(|a, b| lane(*a) / VECTOR == lane(*b) / VECTOR) {
        let start = lane(rows[0]) / VECTOR * VECTOR;
        let (mine, rest) = places.split_at(rows.len());
        places = rest;
        for f in (0..features).step_by(VECTOR) {
            let width = VECTOR.min(features - f);
            let square = square_of(columns, lanes, start, f, width);
            for (row, place) in rows.iter().zip(mine) {
                let to = &mut to[(*place as usize - before) * stores.stride + f..][..width];
                stores.store(&square[lane(*row) - start], to);
            }
        }
    }
}
}

vectorised! {
/// Widens `count` rows of `features` elements, `stride` apart, to columns `[features, lanes]`, zero past the last row.
pub(super) fn rows_to_columns<T: Storage>(rows: &[T], stride: usize, count: usize, lanes: usize, to: &mut [f32]) {
    let features = to.len() / lanes;
        for lane in (0..lanes).step_by(VECTOR) {
            for f in (0..features).step_by(VECTOR) {
                let width = VECTOR.min(features - f);
                let row = |i: usize| &rows[(lane + i) * stride + f..][..width];
                let mut square: Square = if width == VECTOR && lane + VECTOR <= count {
                    array::from_fn(|i| {
                        let row = row(i);
                        array::from_fn(|j| row[j].widened().to_bits())
                    })
                } else {
                    let mut square = [[0; VECTOR]; VECTOR];
                    for (i, square) in square.iter_mut().enumerate().take(count.saturating_sub(lane)) {
                        each(row(i), square, |x, to| *to = x.widened().to_bits());
                    }
                    square
                };
                transpose_square(&mut square);
                for (i, column) in square[..width].iter().enumerate() {
                    let to = &mut to[(f + i) * lanes + lane..][..VECTOR];
                    each(column, to, |bits, to| *to = f32::from_bits(bits));
                }
            }
        }
}
}
