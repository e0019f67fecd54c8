//! Products of a tile with an expert's weights, `[out, in]` as they lie.

use std::ops::Range;

use half::bf16;

use super::{
    element::Storage,
    isa::Isa,
    kernel::{Ahead, Block, LANES, Start, VECTOR},
    pack::{Panel, pack, padded, panels, words},
    stream::LINE,
    tile::{FEATURES, UNIT, cut},
};

/// Most words of k that sums stay in registers for. That much of 256 rows, and as much of [`FEATURES`] columns, fit into the second cache.
const DEPTH: usize = 512;

/// Words of scratch for weights that are moved, of matrices `[a, b]` and `[b, a]`: a group of rows in [`weights_times_columns`], a panel of
/// columns in [`rows_times_weights`].
pub(super) fn packed_words(a: usize, b: usize) -> usize {
    const MOST: usize = if group::<bf16>() > LANES {
        group::<bf16>()
    } else {
        LANES
    };
    let most = padded(a.max(b));
    most.min(MOST) * most.min(DEPTH)
}

/// Rows of a left factor, which stay near while the panels of the right one pass; whole steps of every kernel.
const fn group<T: Storage>() -> usize {
    if T::PER_WORD == 1 { 24 } else { 96 }
}

/// Most words of k of a panel of weights that is packed: that of f32 stays in the first cache while all rows pass.
const fn packed_depth<T: Storage>() -> usize {
    if T::PER_WORD == 1 { 128 } else { DEPTH }
}

/// Cuts `words` words of k into nearly equal parts of whole lines.
fn depths(words: usize, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let count = words.div_ceil(most);
    let depth = padded(words.div_ceil(count.max(1))).max(1);
    cut(0..words, depth)
}

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
    for k in depths(words, DEPTH) {
        let taken = k.start * T::PER_WORD..width.min(k.end * T::PER_WORD);
        for matrix in 0..matrices.len() {
            // Where the first rows after those of this matrix begin.
            let after = match matrices.get(matrix + 1) {
                Some((next, _)) => next.at(k.start, 0),
                None if k.end < words => matrices[0].0.at(k.end, 0),
                None => matrices[0].0.at(0, matrices[0].0.outputs.len()),
            };
            let (right, columns) = &mut matrices[matrix];
            let all = right.outputs.len();
            for group in cut(0..all, group::<T>()) {
                let next = Ahead {
                    start: if group.end < all {
                        right.at(k.start, group.end)
                    } else {
                        after
                    },
                    row: width * size_of::<T>(),
                    lines: k.len().div_ceil(VECTOR),
                    rows: group.len(),
                };
                let from = (right.outputs.start + group.start) * width;
                let weights = &right.weights[from..][..group.len() * width];
                let (a, a_row) = if width.is_multiple_of(T::PER_WORD) {
                    (&weights[taken.start..], width)
                } else {
                    whole_words(weights, width, taken.clone(), packed)
                };
                for panel in panels(rows) {
                    let columns = &mut columns[panel.start * all..][..panel.lanes * all];
                    Block {
                        a,
                        a_row,
                        m: group.len(),
                        b: &x[panel.start * words + k.start * panel.lanes..],
                        lanes: panel.lanes,
                        k: k.len(),
                        c: &mut columns[group.start * panel.lanes..],
                        c_row: panel.lanes,
                        to: None,
                        start: if k.start > 0 { Start::Add } else { Start::Zero },
                        ahead: Some(
                            next.part(panel.start..panel.start + panel.lanes, padded(rows)),
                        ),
                    }
                    .multiply(isa);
                }
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
    let stride = words::<T>(part.len()) * T::PER_WORD;
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

/// The rows `outputs` of weights `[outputs, width]`.
#[derive(Clone, Debug)]
pub(super) struct Right<'a, T> {
    pub(super) weights: &'a [T],
    pub(super) width: usize,
    pub(super) outputs: Range<usize>,
}

impl<T: Storage> Right<'_, T> {
    /// Word `k` of the output `output`; may be past the end.
    fn at(&self, k: usize, output: usize) -> *const u8 {
        let from = (self.outputs.start + output) * self.width + k * T::PER_WORD;
        self.weights.as_ptr().wrapping_add(from).cast()
    }
}

/// A block of weights `[inputs, outputs]` as the right factor.
struct Step<'a, T> {
    weights: &'a [T],
    /// Where the left factor's part for these weights begins.
    from: usize,
    outputs: Range<usize>,
    /// Words.
    k: Range<usize>,
    /// Whether others of the same outputs came before.
    add: bool,
}

/// Rows times weights `[inputs, width]`, summed over the parts of the rows and a matrix for each. Gives `[height, stride]` to `take` for each of
/// [`FEATURES`] columns, with the stride.
pub(super) fn rows_times_weights<T: Storage>(
    isa: Isa,
    left: &Left<'_, T>,
    matrices: &[&[T]],
    width: usize,
    packed: &mut [u32],
    sums: &mut [f32],
    mut take: impl FnMut(Range<usize>, &[f32], usize),
) {
    let steps = cut(0..width, FEATURES).flat_map(|outputs| {
        matrices
            .iter()
            .enumerate()
            .flat_map(move |(part, weights)| {
                let outputs = outputs.clone();
                depths(words::<T>(weights.len() / width), packed_depth::<T>()).map(move |k| Step {
                    weights,
                    from: part * left.part,
                    outputs: outputs.clone(),
                    add: part > 0 || k.start > 0,
                    k,
                })
            })
    });
    let mut steps = steps.peekable();
    while let Some(step) = steps.next() {
        let next = steps.peek();
        multiply_step(isa, left, &step, next, width, packed, sums);
        if next.is_none_or(|next| !next.add) {
            let stride = padded(step.outputs.len());
            take(step.outputs, &sums[..left.height * stride], stride);
        }
    }
}

/// Also fetches the weights of the next step.
fn multiply_step<T: Storage>(
    isa: Isa,
    left: &Left<'_, T>,
    step: &Step<'_, T>,
    next: Option<&Step<'_, T>>,
    width: usize,
    packed: &mut [u32],
    sums: &mut [f32],
) {
    let Step {
        weights,
        outputs,
        k,
        ..
    } = step;
    let inputs = weights.len() / width;
    let of_k = k.start * T::PER_WORD..inputs.min(k.end * T::PER_WORD);
    let stride = padded(outputs.len());
    let next = next.map(|next| lines_of(next, width));
    let all = left.height * panels(outputs.len()).count();
    let mut done = 0;
    for panel in panels(outputs.len()) {
        let packed = &mut packed[..panel.lanes * k.len()];
        let of_weights = Panel {
            start: outputs.start + panel.start,
            ..panel
        };
        let weights = &weights[of_k.start * width..];
        pack(
            isa,
            weights,
            width,
            of_k.len(),
            outputs.end,
            of_weights,
            packed,
        );
        for rows in cut(0..left.height, group::<T>()) {
            let before = done;
            done += rows.len();
            Block {
                a: &left.rows[rows.start * left.stride + step.from + of_k.start..],
                a_row: left.stride,
                m: rows.len(),
                b: packed,
                lanes: panel.lanes,
                k: k.len(),
                c: &mut sums[rows.start * stride + panel.start..],
                c_row: stride,
                to: None,
                start: if step.add { Start::Add } else { Start::Zero },
                ahead: next.map(|next| next.part(before..done, all)),
            }
            .multiply(isa);
        }
    }
}

/// The lines of a step's weights, but for odd ends.
fn lines_of<T: Storage>(step: &Step<'_, T>, width: usize) -> Ahead {
    Ahead {
        start: step
            .weights
            .as_ptr()
            .wrapping_add(step.k.start * T::PER_WORD * width + step.outputs.start)
            .cast(),
        row: width * size_of::<T>(),
        lines: (step.outputs.len() * size_of::<T>() / LINE).max(1),
        rows: step.k.len() * T::PER_WORD,
    }
}
