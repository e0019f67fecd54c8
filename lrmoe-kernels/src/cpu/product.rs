//! Products of a tile with an expert's weights, `[out, in]` as they lie.

use std::ops::Range;

use super::{
    element::Storage,
    isa::Isa,
    kernel::{Ahead, Block, DEPTH, LANES, Start, VECTOR},
    pack::{Panel, pack, padded, panels, words},
    tile::{UNIT, cut},
};

/// Panels of weights that are packed at a time, so that they stay in the second cache.
const WEIGHT_PANELS: usize = 8;

/// Words of scratch for weights that are moved: by rows in [`weights_times_columns`], by columns in [`rows_times_weights`].
pub(super) const PACKED_WORDS: usize = WEIGHT_PANELS * LANES * DEPTH;

/// `W x`, for output features `outputs` (at most [`FEATURES`]) of one or more matrices and x in panels of `rows` rows: for each panel
/// `[outputs, lanes]`.
pub(super) fn weights_times_columns<T: Storage>(
    isa: Isa,
    matrices: &mut [(Right<'_, T>, &mut [f32])],
    x: &[u32],
    rows: usize,
    packed: &mut [u32],
) {
    let Some(width) = matrices.first().map(|(weights, _)| weights.width) else {
        return;
    };
    let words = words::<T>(width);
    for k in cut(0..words, DEPTH) {
        let taken = k.start * T::PER_WORD..width.min(k.end * T::PER_WORD);
        for panel in panels(rows) {
            for (
                Right {
                    weights, outputs, ..
                },
                columns,
            ) in &mut *matrices
            {
                let m = outputs.len();
                let block = &weights[outputs.start * width..outputs.end * width];
                let next = if taken.end < width {
                    outputs.start * width + taken.end
                } else {
                    outputs.end * width
                };
                let (a, a_row) = if width.is_multiple_of(T::PER_WORD) {
                    (&block[taken.start..], width)
                } else {
                    whole_words(block, width, taken.clone(), packed)
                };
                Block {
                    a,
                    a_row,
                    m,
                    b: &x[panel.start * words + k.start * panel.lanes..],
                    lanes: panel.lanes,
                    k: k.len(),
                    c: &mut columns[panel.start * m..][..panel.lanes * m],
                    c_row: panel.lanes,
                    start: if k.start > 0 { Start::Add } else { Start::Zero },
                    ahead: Ahead::weights(weights.as_ptr().wrapping_add(next), width),
                }
                .multiply(isa);
            }
        }
    }
}

/// Copies a part of rows of odd length, so that each begins and ends with a whole word; and the elements from one to the next.
fn whole_words<'a, T: Storage>(
    rows: &[T],
    length: usize,
    part: Range<usize>,
    to: &'a mut [u32],
) -> (&'a [T], usize) {
    let stride = DEPTH * T::PER_WORD;
    let to = bytemuck::cast_slice_mut::<u32, T>(to);
    for (row, to) in rows.chunks_exact(length).zip(to.chunks_exact_mut(stride)) {
        let (to, rest) = to.split_at_mut(part.len());
        to.copy_from_slice(&row[part.clone()]);
        rest.fill(T::default());
    }
    (to, stride)
}

/// Copies rows to others that are longer, and fills those with zeros.
fn copy_rows<T: Storage>(rows: &[T], length: usize, to: &mut [T], to_length: usize) {
    for (row, to) in rows
        .chunks_exact(length)
        .zip(to.chunks_exact_mut(to_length))
    {
        to[..length].copy_from_slice(row);
        to[length..].fill(T::default());
    }
}

/// Rows as the left factor of a product with weights.
#[derive(Debug)]
pub(super) struct Left<'a, T> {
    /// `[height, stride]`.
    pub(super) rows: &'a mut [T],
    /// Elements from one row to the next.
    pub(super) stride: usize,
    /// Elements from one part of a row to the next.
    pub(super) part: usize,
    /// Rows, with those that fill the last step of the instruction set; what they give means nothing.
    height: usize,
}

impl<'a, T: Storage> Left<'a, T> {
    /// Words of scratch that [`Self::take`] takes at most.
    pub(super) fn words(rows: usize, features: usize, parts: usize) -> usize {
        rows.next_multiple_of(UNIT) * Self::stride(features, parts) / T::PER_WORD
    }

    /// Room for rows of `parts` times `features` elements, each part in whole words. Any content, but zeros between the parts.
    pub(super) fn take(
        scratch: &'a mut [u32],
        isa: Isa,
        rows: usize,
        features: usize,
        parts: usize,
    ) -> Self {
        let height = if isa == Isa::Amx {
            rows.next_multiple_of(UNIT)
        } else {
            rows
        };
        let part = words::<T>(features) * T::PER_WORD;
        let stride = Self::stride(features, parts);
        let rows = &mut bytemuck::cast_slice_mut(scratch)[..height * stride];
        if part > features {
            for row in rows.chunks_exact_mut(stride) {
                row.chunks_exact_mut(part)
                    .for_each(|part| part[features..].fill(T::default()));
            }
        }
        Self {
            rows,
            stride,
            part,
            height,
        }
    }

    /// One line more than rows fill, as rows that lie a power of two apart would compete for a few lines of the first cache.
    fn stride(features: usize, parts: usize) -> usize {
        (padded(words::<T>(features) * parts) + VECTOR) * T::PER_WORD
    }

    pub(super) fn copy(&mut self, rows: &[T], features: usize) {
        copy_rows(rows, features, self.rows, self.stride);
    }
}

/// Columns of a product with weights `[inputs, outputs]` that are computed together.
pub(super) fn output_blocks(outputs: usize) -> impl Iterator<Item = Range<usize>> {
    cut(0..outputs, WEIGHT_PANELS * LANES)
}

/// One block of weights: the columns `outputs` of `[k, width]`, or the rows `outputs` of `[outputs, width]`.
#[derive(Clone, Debug)]
pub(super) struct Right<'a, T> {
    pub(super) weights: &'a [T],
    pub(super) width: usize,
    pub(super) outputs: Range<usize>,
}

/// Where a product goes: rows `stride` apart.
#[derive(Debug)]
pub(super) struct Target<'a> {
    pub(super) rows: &'a mut [f32],
    pub(super) stride: usize,
}

/// The part of the rows that begins at element `from`, times the weights, to `to`, or added to it.
pub(super) fn rows_times_weights<T: Storage>(
    isa: Isa,
    left: &Left<'_, T>,
    from: usize,
    right: Right<'_, T>,
    packed: &mut [u32],
    to: Target<'_>,
    add: bool,
) {
    let Right {
        weights,
        width,
        outputs,
    } = right;
    let inputs = weights.len() / width;
    for k in cut(0..words::<T>(inputs), DEPTH) {
        let rows = k.start * T::PER_WORD..inputs.min(k.end * T::PER_WORD);
        for panel in panels(outputs.len()) {
            let of_weights = Panel {
                start: outputs.start + panel.start,
                ..panel
            };
            let weights = &weights[rows.start * width..];
            let packed = &mut packed[panel.start * k.len()..][..panel.lanes * k.len()];
            pack(
                isa,
                weights,
                width,
                rows.len(),
                outputs.end,
                of_weights,
                packed,
            );
        }
        for panel in panels(outputs.len()) {
            let next = rows.end * width + outputs.start + panel.start;
            Block {
                a: &left.rows[from + rows.start..],
                a_row: left.stride,
                m: left.height,
                b: &packed[panel.start * k.len()..],
                lanes: panel.lanes,
                k: k.len(),
                c: &mut to.rows[panel.start..],
                c_row: to.stride,
                start: if add || k.start > 0 {
                    Start::Add
                } else {
                    Start::Zero
                },
                ahead: Ahead {
                    start: weights.as_ptr().wrapping_add(next).cast(),
                    row: width * size_of::<T>(),
                    lines: if T::PER_WORD == 1 { 2 } else { 1 },
                    last: DEPTH * LANES / VECTOR - 1,
                },
            }
            .multiply(isa);
        }
    }
}
