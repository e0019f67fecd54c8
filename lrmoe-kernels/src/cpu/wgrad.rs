//! Weight gradients: sums over an instance's rows in row order, gathered in registers or the first cache and written once.

mod terms;

use std::ops::Range;

use self::terms::{Left, OUTPUTS, Right, Terms};
use super::{
    element::Storage,
    isa::Isa,
    kernel::{LANES, VECTOR},
    pack::{padded, panels, words},
    stream,
    tile::{ROWS, UNIT, cut, height_of, share, take},
    workspace::Buffer,
};
use crate::{WeightGradients, ffn::Experts};

/// Words of left factors that are one piece of work: they stay in the second cache while one panel of right factors follows another.
const LEFT_WORDS: usize = 1 << 18;
/// Most words of rows whose terms are added before the next ones are looked at.
const CHUNK_WORDS: usize = 2 * ROWS;
/// Words of panels of right factors that are packed at a time: gradients are written in stretches as long as these, as each line that follows
/// in another page costs a look-up of the page.
const RIGHT_WORDS: usize = 1 << 17;

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
    /// Most rows of a tile.
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
        let add = accumulate[instance];
        let of_up = rows.clone();
        let outputs = outputs_of_piece(experts, instance, experts.pre_activations());
        let inward = up
            .chunks_mut(outputs * width)
            .enumerate()
            .map(move |(i, up)| {
                let gate = gate
                    .as_mut()
                    .map(|gate| gate.split_off_mut(..up.len()).expect("as long as up"));
                Piece {
                    rows: of_up.clone(),
                    before,
                    first: i * outputs,
                    add,
                    matrices: Matrices::Inward(gate, up),
                }
            });
        let outputs = outputs_of_piece(experts, instance, 1);
        let outward = down
            .chunks_mut(outputs * hidden)
            .enumerate()
            .map(move |(i, down)| Piece {
                rows: rows.clone(),
                before,
                first: i * outputs,
                add,
                matrices: Matrices::Down(down),
            });
        inward.chain(outward)
    });
    share(scratch, pieces, |scratch, piece| {
        write_piece(isa, experts, kept, piece, scratch.words());
        stream::finish();
    });
}

/// Output rows that a piece takes of each of so many matrices: as many as possible, since each packs the right factors anew, but with a few
/// pieces for each thread. Nothing in a result depends on it.
fn outputs_of_piece<T: Storage>(
    experts: &Experts<'_, T>,
    instance: usize,
    matrices: usize,
) -> usize {
    const PIECES_PER_THREAD: usize = 8;
    let words = chunk_words::<T>(experts.rows_of(instance).len()).max(1);
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let all = (experts.pre_activations() * hidden + width) * experts.instances();
    let fair = all / (PIECES_PER_THREAD * rayon::current_num_threads());
    let outputs = fair.min(LEFT_WORDS / words) / matrices;
    (outputs / UNIT * UNIT).max(UNIT)
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
    if rows.is_empty() {
        if !add {
            match matrices {
                Matrices::Inward(gate, up) => {
                    gate.into_iter().chain([up]).for_each(stream::zero);
                }
                Matrices::Down(down) => stream::zero(down),
            }
        }
        return;
    }
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let of_pre = experts.pre_activations() * hidden;
    let packed = right_words(chunk_words::<T>(rows.len()), width.max(hidden));
    let packed = take(&mut scratch, packed);
    let sums = bytemuck::cast_slice_mut(take(&mut scratch, OUTPUTS * LANES));
    let height = height_of(rows.len(), kept.height);
    // Whole tiles.
    let chunk_rows = CHUNK_WORDS * T::PER_WORD / height * height;
    for chunk in cut(0..rows.len(), chunk_rows) {
        let of_chunk = |features: usize| {
            (rows.start + chunk.start) * features..(rows.start + chunk.end) * features
        };
        let terms = Terms {
            isa,
            rows: chunk.len(),
            height,
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
                terms.sum(left, right, gradients.as_mut_slice(), packed, sums);
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
                    sums,
                );
            }
        }
    }
}

/// Words of scratch for each thread.
pub(super) fn scratch_words<T: Storage>(experts: &Experts<'_, T>) -> usize {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let rows = (0..experts.instances()).map(|i| experts.rows_of(i).len());
    let depth = chunk_words::<T>(rows.max().unwrap_or(0));
    let left = LEFT_WORDS.min(depth * width.next_multiple_of(UNIT));
    padded(left) + right_words(depth, width.max(hidden)) + (OUTPUTS + words::<T>(ROWS)) * LANES
}

/// Words of the largest chunk of an instance with so many rows.
fn chunk_words<T: Storage>(rows: usize) -> usize {
    words::<T>(rows.next_multiple_of(UNIT)).min(CHUNK_WORDS)
}

/// Words for packed panels of gradients of this width.
fn right_words(depth: usize, width: usize) -> usize {
    // One panel more than without lines, and an empty chunk takes none.
    let panels = panels(width + VECTOR).count();
    RIGHT_WORDS.min(depth.max(1) * LANES * panels)
}
