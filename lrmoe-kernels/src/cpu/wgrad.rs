//! Weight gradients: sums over an instance's rows in row order, straight into where they go.

use std::ops::Range;

use super::{
    element::Storage,
    isa::Isa,
    kernel::{Ahead, Block, DEPTH, LANES, Start},
    pack::{Panel, pack, panels, transpose, words},
    tile::{FEATURES, ROWS, UNIT, cut, share, take},
    workspace::Buffer,
};
use crate::{WeightGradients, ffn::Experts};

/// Output rows of the gate and the up gradient that are one piece of work.
const INWARD: usize = FEATURES;
/// Output rows of the down gradient that are one piece of work.
const OUTWARD: usize = 256;
/// Output rows of a gradient whose sums stay in the second cache, a multiple of [`UNIT`].
const OUTPUTS: usize = 96;
/// Rows whose terms are added before the next ones are looked at.
const CHUNK: usize = 2 * ROWS;

/// Rows of all instances, as the backward pass has them in hand.
#[derive(Debug)]
pub(super) struct Kept<'a, T> {
    /// `[rows, D]`.
    pub(super) x: &'a [T],
    /// `[rows, D]`.
    pub(super) dy: &'a [T],
    /// Gradients of the pre-activations, times w: tile after tile, gate (when gated) and up, `[F, height]` each, the height a multiple of
    /// [`UNIT`].
    pub(super) pre: &'a [T],
    /// Input of the down projection, times w p, `[rows, F]`.
    pub(super) hidden: &'a [T],
    /// Rows of a tile.
    pub(super) height: usize,
}

/// Writes those of all instances, zeros for one without rows, or adds to them.
pub(super) fn write_gradients<T: Storage>(
    isa: Isa,
    experts: &Experts<'_, T>,
    kept: &Kept<'_, T>,
    scratch: &mut [Buffer],
    gradients: &mut WeightGradients<'_>,
    accumulate: &[bool],
) {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let one = width * hidden;
    let mut gate = gradients
        .gate
        .as_mut()
        .map(|gate| gate.as_slice_mut().expect("checked layout"));
    let up = gradients.up.as_slice_mut().expect("checked layout");
    let down = gradients.down.as_slice_mut().expect("checked layout");
    let instances = up
        .chunks_exact_mut(one)
        .zip(down.chunks_exact_mut(one))
        .enumerate();
    let mut kept_before = 0;
    let pieces = instances.flat_map(move |(instance, (up, down))| {
        let rows = experts.rows_of(instance);
        let before = kept_before;
        kept_before += rows.len().next_multiple_of(UNIT);
        let mut gate = gate
            .as_mut()
            .map(|gate| gate.split_off_mut(..one).expect("as many as of up"));
        let of_up = rows.clone();
        let inward = up
            .chunks_mut(INWARD * width)
            .enumerate()
            .map(move |(i, up)| {
                let gate = gate
                    .as_mut()
                    .map(|gate| gate.split_off_mut(..up.len()).expect("as long as up"));
                Piece {
                    rows: of_up.clone(),
                    before,
                    first: i * INWARD,
                    add: accumulate[instance],
                    matrices: Matrices::Inward(gate, up),
                }
            });
        let outward = down
            .chunks_mut(OUTWARD * hidden)
            .enumerate()
            .map(move |(i, down)| Piece {
                rows: rows.clone(),
                before,
                first: i * OUTWARD,
                add: accumulate[instance],
                matrices: Matrices::Down(down),
            });
        inward.chain(outward)
    });
    share(scratch, pieces, |scratch, piece| {
        write_piece(isa, experts, kept, piece, scratch.words());
    });
}

/// Some output rows of the matrices of one instance.
struct Piece<'a> {
    /// The instance's rows.
    rows: Range<usize>,
    /// Rows kept of the instances before, in whole units.
    before: usize,
    first: usize,
    /// Whether the sums go on from what is there.
    add: bool,
    matrices: Matrices<'a>,
}

enum Matrices<'a> {
    /// Gate and up.
    Inward(Option<&'a mut [f32]>, &'a mut [f32]),
    Down(&'a mut [f32]),
}

fn write_piece<T: Storage>(
    isa: Isa,
    experts: &Experts<'_, T>,
    kept: &Kept<'_, T>,
    piece: Piece<'_>,
    mut scratch: &mut [u32],
) {
    let Piece {
        rows,
        before,
        first,
        add,
        mut matrices,
    } = piece;
    if rows.is_empty() && add {
        return;
    }
    if rows.is_empty() {
        match matrices {
            Matrices::Inward(gate, up) => gate
                .into_iter()
                .chain([up])
                .for_each(|matrix| matrix.fill(0.0)),
            Matrices::Down(down) => down.fill(0.0),
        }
        return;
    }
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let of_pre = experts.pre_activations() * hidden;
    let packed = take(&mut scratch, words::<T>(CHUNK) * LANES);
    let spare = bytemuck::cast_slice_mut(take(&mut scratch, OUTPUTS * LANES));
    for chunk in cut(0..rows.len(), CHUNK) {
        let of_chunk = |features: usize| {
            (rows.start + chunk.start) * features..(rows.start + chunk.end) * features
        };
        let terms = Terms {
            isa,
            rows: chunk.len(),
            height: kept.height,
            add: add || chunk.start > 0,
        };
        match &mut matrices {
            Matrices::Inward(gate, up) => {
                let left = Left {
                    tiles: &kept.pre[(before + chunk.start) * of_pre..],
                    features: of_pre,
                };
                let of_up = first + of_pre - hidden;
                let gate = gate.as_mut().map(|gate| (first, &mut **gate));
                let mut gradients = [gate, Some((of_up, &mut **up))];
                let right = Right {
                    rows: &kept.x[of_chunk(width)],
                    width,
                };
                terms.sum(left, right, gradients.as_mut_slice(), packed, spare);
            }
            Matrices::Down(down) => {
                let outputs = first..first + down.len() / hidden;
                let features = outputs.len();
                let tiles = terms.transpose(&kept.dy[of_chunk(width)], width, outputs, scratch);
                let right = Right {
                    rows: &kept.hidden[of_chunk(hidden)],
                    width: hidden,
                };
                terms.sum(
                    Left { tiles, features },
                    right,
                    &mut [Some((0, &mut **down))],
                    packed,
                    spare,
                );
            }
        }
    }
}

/// Left factors: tile after tile of rows, as columns `[features, height]`, the height a multiple of [`UNIT`].
struct Left<'a, T> {
    tiles: &'a [T],
    features: usize,
}

/// Right factors: rows `[rows, width]`.
struct Right<'a, T> {
    rows: &'a [T],
    width: usize,
}

/// Some rows of an instance, in tiles.
#[derive(Clone, Copy)]
struct Terms {
    isa: Isa,
    rows: usize,
    height: usize,
    /// Whether there were rows before.
    add: bool,
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
    fn sum<T: Storage>(
        self,
        left: Left<'_, T>,
        right: Right<'_, T>,
        gradients: &mut [Option<(usize, &mut [f32])>],
        packed: &mut [u32],
        spare: &mut [f32],
    ) {
        let width = right.width;
        for panel in panels(width) {
            let packed = &mut packed[..self.depth::<T>(self.rows) * panel.lanes];
            pack(self.isa, right.rows, width, self.rows, width, panel, packed);
            for (first, gradient) in gradients.iter_mut().flatten() {
                for outputs in cut(0..gradient.len() / width, OUTPUTS) {
                    let gradient = &mut gradient[outputs.start * width..outputs.end * width];
                    let features = *first + outputs.start..*first + outputs.end;
                    if panel.start + panel.lanes <= width {
                        let gradient = &mut gradient[panel.start..];
                        self.add(&left, features, packed, panel.lanes, gradient, width);
                    } else {
                        let spare = &mut spare[..outputs.len() * panel.lanes];
                        copy_columns(
                            gradient,
                            (panel.start, width),
                            spare,
                            (0, panel.lanes),
                            width - panel.start,
                        );
                        self.add(&left, features, packed, panel.lanes, spare, panel.lanes);
                        copy_columns(
                            spare,
                            (0, panel.lanes),
                            gradient,
                            (panel.start, width),
                            width - panel.start,
                        );
                    }
                }
            }
        }
    }

    /// The terms of some output rows and one panel.
    fn add<T: Storage>(
        self,
        left: &Left<'_, T>,
        features: Range<usize>,
        packed: &[u32],
        lanes: usize,
        gradient: &mut [f32],
        stride: usize,
    ) {
        let isa = self.isa;
        for tile in cut(0..self.rows, self.height) {
            let height = tile.len().next_multiple_of(UNIT);
            let columns = &left.tiles[tile.start * left.features + features.start * height..];
            for rows in cut(tile.clone(), DEPTH) {
                Block {
                    ahead: Ahead::weights(gradient.as_ptr().wrapping_add(6 * stride), stride),
                    a: &columns[rows.start - tile.start..],
                    a_row: height,
                    m: features.len(),
                    b: &packed[words::<T>(rows.start) * lanes..],
                    lanes,
                    k: self.depth::<T>(rows.len()),
                    c: &mut *gradient,
                    c_row: stride,
                    start: if self.add || rows.start > 0 {
                        Start::Chain
                    } else {
                        Start::Zero
                    },
                }
                .multiply(isa);
            }
        }
    }

    /// The features `outputs` of rows as tiles of columns, zero past the last row.
    fn transpose<'a, T: Storage>(
        self,
        rows: &[T],
        width: usize,
        outputs: Range<usize>,
        mut scratch: &'a mut [u32],
    ) -> &'a [T] {
        let paired = take(&mut scratch, words::<T>(ROWS) * OUTWARD);
        for tile in cut(0..self.rows, self.height) {
            let height = words::<T>(tile.len().next_multiple_of(UNIT));
            let panel = Panel {
                start: outputs.start,
                lanes: outputs.len(),
            };
            let paired = &mut paired[..height * outputs.len()];
            let from = &rows[tile.start * width..];
            pack(self.isa, from, width, tile.len(), width, panel, paired);
            let to = &mut scratch[words::<T>(tile.start) * outputs.len()..][..paired.len()];
            transpose(
                self.isa,
                paired,
                outputs.len(),
                height,
                outputs.len(),
                to,
                height,
            );
        }
        bytemuck::cast_slice(scratch)
    }
}

/// Copies columns of rows: each side has its first column and the elements from one row to the next.
fn copy_columns(
    from: &[f32],
    (first, stride): (usize, usize),
    to: &mut [f32],
    (to_first, to_stride): (usize, usize),
    columns: usize,
) {
    for (from, to) in from
        .chunks_exact(stride)
        .zip(to.chunks_exact_mut(to_stride))
    {
        to[to_first..to_first + columns].copy_from_slice(&from[first..first + columns]);
    }
}

/// Words of scratch for each thread.
pub(super) fn scratch_words<T: Storage>() -> usize {
    let chunk = words::<T>(CHUNK);
    chunk * (LANES + OUTWARD) + words::<T>(ROWS) * OUTWARD + OUTPUTS * LANES
}
