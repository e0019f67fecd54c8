use ndarray::{ArrayViewMut3, s};

use super::{
    gemm::multiply,
    tile::{ROWS, instance_lanes, lanes, matrix, matrix_mut, share},
};
use crate::{WeightGradients, ffn::Experts};

/// Output rows of a gradient matrix that are one piece of work.
const BLOCK: usize = 64;

/// Rows of all instances, as the backward pass has them in hand.
pub(super) struct Kept<'a> {
    /// `[rows, D]`.
    pub(super) x: &'a [f32],
    /// `[rows, D]`.
    pub(super) dy: &'a [f32],
    /// Gradients of the pre-activations, times w: tile after tile, gate (when gated) and up, `[F, lanes]` each.
    pub(super) pre: &'a [f32],
    /// Input of the down projection, times w p, `[rows, F]`.
    pub(super) hidden: &'a [f32],
}

/// Sums the outer products of each instance's rows, in row order whatever the number of threads.
pub(super) fn write_gradients(
    experts: &Experts<'_>,
    kept: &Kept<'_>,
    gradients: &mut WeightGradients<'_>,
) {
    let last = experts.pre_activations() - 1;
    let gate = gradients
        .gate
        .as_mut()
        .map(|gate| pieces(experts, Matrix::Pre(0), gate));
    let up = pieces(experts, Matrix::Pre(last), &mut gradients.up);
    let down = pieces(experts, Matrix::Down, &mut gradients.down);
    let all = gate.into_iter().flatten().chain(up).chain(down);
    let mut no_scratch = vec![(); rayon::current_num_threads()];
    share(&mut no_scratch, all, |(), piece| {
        write_piece(experts, kept, piece)
    });
}

#[derive(Clone, Copy)]
enum Matrix {
    /// Gate or up: which of the pre-activations.
    Pre(usize),
    Down,
}

/// Some output rows of one matrix of one instance.
struct Piece<'a> {
    matrix: Matrix,
    instance: usize,
    /// Lanes of the tiles of all instances before.
    lanes_before: usize,
    first: usize,
    gradient: &'a mut [f32],
}

fn pieces<'a>(
    experts: &Experts<'a>,
    matrix: Matrix,
    gradient: &'a mut ArrayViewMut3<'_, f32>,
) -> impl Iterator<Item = Piece<'a>> + Send + use<'a> {
    let (_, outputs, inputs) = gradient.dim();
    let experts = *experts;
    let instances = gradient
        .as_slice_mut()
        .expect("checked layout")
        .chunks_mut(outputs * inputs);
    let mut lanes_before = 0;
    let with_lanes = instances.enumerate().map(move |(instance, gradient)| {
        let before = lanes_before;
        lanes_before += instance_lanes(&experts, instance);
        (instance, before, gradient)
    });
    with_lanes.flat_map(move |(instance, lanes_before, gradient)| {
        let blocks = gradient.chunks_mut(BLOCK * inputs).enumerate();
        blocks.map(move |(block, gradient)| Piece {
            matrix,
            instance,
            lanes_before,
            first: block * BLOCK,
            gradient,
        })
    })
}

fn write_piece<'a>(experts: &Experts<'_>, kept: &Kept<'a>, piece: Piece<'_>) {
    let (width, hidden) = (experts.shape.width, experts.shape.hidden);
    let rows = experts.rows_of(piece.instance);
    if rows.is_empty() {
        return piece.gradient.fill(0.0);
    }
    let of_rows = |values: &'a [f32], features: usize| {
        matrix(
            &values[rows.start * features..rows.end * features],
            rows.len(),
        )
    };
    match piece.matrix {
        Matrix::Down => {
            let outputs = piece.gradient.len() / hidden;
            let dy = of_rows(kept.dy, width);
            let dy = dy.slice(s![.., piece.first..piece.first + outputs]);
            multiply(
                matrix_mut(piece.gradient, outputs),
                dy.t(),
                of_rows(kept.hidden, hidden),
                false,
            );
        }
        Matrix::Pre(which) => {
            let outputs = piece.gradient.len() / width;
            let x = of_rows(kept.x, width);
            let per_lane = experts.pre_activations() * hidden;
            for from in (0..rows.len()).step_by(ROWS) {
                let to = rows.len().min(from + ROWS);
                let lanes = lanes(to - from);
                let tile = (piece.lanes_before + from) * per_lane + which * hidden * lanes;
                let d = &kept.pre[tile + piece.first * lanes..][..outputs * lanes];
                let d = matrix(d, outputs).slice_move(s![.., ..to - from]);
                let gradient = matrix_mut(piece.gradient, outputs);
                multiply(gradient, d, x.slice(s![from..to, ..]), from > 0);
            }
        }
    }
}
