//! Sums of products of some rows, for some output rows of gradients.

use std::ops::Range;

use super::super::{
    element::Storage,
    isa::Isa,
    kernel::{Ahead, Block, LANES, Start, VECTOR},
    pack::{Panel, pack, padded, panels, transpose, words},
    stream,
    tile::{ROWS, UNIT, cut, take},
};

/// Output rows whose sums stay in the first cache with the right factors, a multiple of [`UNIT`].
pub(super) const OUTPUTS: usize = 96;

/// Left factors: tile after tile of rows, as columns `[features, height]`, the height a multiple of [`UNIT`].
pub(super) struct Left<'a, T> {
    pub(super) tiles: &'a [T],
    pub(super) features: usize,
}

/// Right factors: rows `[rows, width]`.
pub(super) struct Right<'a, T> {
    pub(super) rows: &'a [T],
    pub(super) width: usize,
}

/// Some rows of an instance, in tiles.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    pub(super) isa: Isa,
    pub(super) rows: usize,
    pub(super) height: usize,
    /// Whether the sums go on from what is there.
    pub(super) add: bool,
}

impl Terms {
    /// Words of k that `rows` rows are.
    fn depth<T: Storage>(self, rows: usize) -> usize {
        words::<T>(if self.isa == Isa::Amx {
            rows.next_multiple_of(UNIT)
        } else {
            rows
        })
    }

    /// Sums products of rows to output rows of gradients `[outputs, width]`, each with the feature of the left factor that its first one
    /// belongs to.
    pub(super) fn sum<T: Storage>(
        self,
        left: Left<'_, T>,
        right: Right<'_, T>,
        gradients: &mut [Option<(usize, &mut [f32])>],
        packed: &mut [u32],
        sums: &mut [f32],
    ) {
        let width = right.width;
        let first = gradients.iter().flatten().next();
        let before = first.map_or(0, |(_, gradient)| stream::before_lines(gradient));
        let of_panel = self.depth::<T>(self.rows) * LANES;
        let panels = line_panels(width, before);
        for group in cut(0..panels.clone().count(), packed.len() / of_panel) {
            let group = panels.clone().skip(group.start).take(group.len());
            for (columns, packed) in group.clone().zip(packed.chunks_mut(of_panel)) {
                let panel = Panel {
                    start: columns.start,
                    lanes: padded(columns.len()),
                };
                let packed = &mut packed[..of_panel / LANES * panel.lanes];
                let (rows, end) = (right.rows, columns.end);
                pack(self.isa, rows, width, self.rows, end, panel, packed);
            }
            for (first, gradient) in gradients.iter_mut().flatten() {
                for outputs in cut(0..gradient.len() / width, OUTPUTS) {
                    let features = *first + outputs.start..*first + outputs.end;
                    let gradient = &mut gradient[outputs.start * width..outputs.end * width];
                    for (columns, packed) in group.clone().zip(packed.chunks(of_panel)) {
                        let lanes = padded(columns.len());
                        let sums = &mut sums[..outputs.len() * lanes];
                        if self.add {
                            let rows = gradient.chunks_exact(width);
                            for (sums, row) in sums.chunks_exact_mut(lanes).zip(rows) {
                                sums[..columns.len()].copy_from_slice(&row[columns.clone()]);
                            }
                        }
                        let to = &mut gradient[columns.start..];
                        let lines = lanes == columns.len()
                            && width.is_multiple_of(VECTOR)
                            && stream::before_lines(to) == 0;
                        if lines && self.isa != Isa::Amx {
                            let to = Some((to, width));
                            self.add(&left, features.clone(), packed, lanes, sums, to);
                            continue;
                        }
                        self.add(&left, features.clone(), packed, lanes, sums, None);
                        let rows = gradient.chunks_exact_mut(width);
                        for (sums, row) in sums.chunks_exact(lanes).zip(rows) {
                            stream::copy(&sums[..columns.len()], &mut row[columns.clone()]);
                        }
                    }
                }
            }
        }
    }

    /// The terms of some output rows and one panel, to sums `[outputs, lanes]`; in the end to `to`, if given: lines, and elements from
    /// one row to the next.
    fn add<T: Storage>(
        self,
        left: &Left<'_, T>,
        features: Range<usize>,
        packed: &[u32],
        lanes: usize,
        sums: &mut [f32],
        mut to: Option<(&mut [f32], usize)>,
    ) {
        for tile in cut(0..self.rows, self.height) {
            let height = tile.len().next_multiple_of(UNIT);
            let columns = &left.tiles[tile.start * left.features + features.start * height..];
            Block {
                ahead: Some(ahead(columns, features.len(), height)),
                a: columns,
                a_row: height,
                m: features.len(),
                b: &packed[words::<T>(tile.start) * lanes..],
                lanes,
                k: self.depth::<T>(tile.len()),
                c: &mut *sums,
                c_row: lanes,
                to: to.take_if(|_| tile.end == self.rows),
                start: if self.add || tile.start > 0 {
                    Start::Chain
                } else {
                    Start::Zero
                },
            }
            .multiply(self.isa);
        }
    }

    /// The features `outputs` of rows as tiles of columns, zero past the last row.
    pub(super) fn transpose<'a, T: Storage>(
        self,
        rows: &[T],
        width: usize,
        outputs: Range<usize>,
        mut scratch: &'a mut [u32],
    ) -> &'a [T] {
        let paired = take(&mut scratch, words::<T>(ROWS) * LANES);
        for tile in cut(0..self.rows, self.height) {
            let height = words::<T>(tile.len().next_multiple_of(UNIT));
            let from = &rows[tile.start * width..];
            let to = &mut scratch[words::<T>(tile.start) * outputs.len()..];
            for panel in panels(outputs.len()) {
                let of_rows = Panel {
                    start: outputs.start + panel.start,
                    ..panel
                };
                let paired = &mut paired[..height * panel.lanes];
                pack(
                    self.isa,
                    from,
                    width,
                    tile.len(),
                    outputs.end,
                    of_rows,
                    paired,
                );
                let features = panel.lanes.min(outputs.len() - panel.start);
                let to = &mut to[panel.start * height..][..features * height];
                transpose(self.isa, paired, panel.lanes, height, features, to, height);
            }
        }
        bytemuck::cast_slice(scratch)
    }
}

/// The columns after the `count` ones at `a`, of `height` each: one run of lines.
fn ahead<T>(a: &[T], count: usize, height: usize) -> Ahead {
    Ahead {
        start: a.as_ptr().wrapping_add(count * height).cast(),
        row: stream::LINE,
        lines: 1,
        rows: count * height * size_of::<T>() / stream::LINE,
    }
}

/// Cuts the columns of gradients into panels that end where cache lines do, given the columns before the first whole line.
fn line_panels(width: usize, before_lines: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let absent = (VECTOR - before_lines) % VECTOR;
    panels(width + absent).map(move |Panel { start, lanes }| {
        start.saturating_sub(absent)..(start + lanes - absent).min(width)
    })
}
