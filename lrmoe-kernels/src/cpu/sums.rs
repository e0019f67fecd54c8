//! Sums over an instance's rows of the down projection's input and of its derivatives.

use std::array;

use super::{
    element::Storage,
    isa::{Isa, vectorised},
    kernel::{LANES, VECTOR},
    tile::tiles,
};
use crate::{Activation, ffn::Experts};

/// Of each instance the sums over the rows of a call, times a weight of the row, of the down projection's input h and of its derivatives by
/// the pre-activations: h, dh/dgate (gated activations only), dh/dup.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HiddenSums {
    /// `[instances, parts, F]`
    sums: Vec<f64>,
    /// Numbers of an instance: parts times F.
    of_instance: usize,
    /// `[tiles, parts, F]`
    tiles: Vec<f32>,
}

impl HiddenSums {
    /// Of an instance of the last call, `[3, F]` with gated activations, else `[2, F]`.
    pub fn of(&self, instance: usize) -> &[f64] {
        &self.sums[instance * self.of_instance..][..self.of_instance]
    }

    /// Number of instances of the last call.
    pub fn instances(&self) -> usize {
        self.sums.len().checked_div(self.of_instance).unwrap_or(0)
    }

    pub(super) fn bytes(&self) -> usize {
        self.sums.capacity() * size_of::<f64>() + self.tiles.capacity() * size_of::<f32>()
    }

    /// Zeros for the sums of each tile.
    pub(super) fn start<T: Storage>(
        &mut self,
        experts: &Experts<'_, T>,
        height: usize,
    ) -> &mut [f32] {
        self.of_instance = numbers(experts);
        self.tiles.clear();
        let count = tiles(experts, height).count();
        self.tiles.resize(count * self.of_instance, 0.0);
        &mut self.tiles
    }

    /// Adds the sums of the tiles up in row order.
    pub(super) fn finish<T: Storage>(&mut self, experts: &Experts<'_, T>, height: usize) {
        self.sums.clear();
        self.sums
            .resize(experts.instances() * self.of_instance, 0.0);
        let of_tiles = self.tiles.chunks_exact(self.of_instance);
        for ((instance, _), tile) in tiles(experts, height).zip(of_tiles) {
            let sums = &mut self.sums[instance * self.of_instance..][..self.of_instance];
            for (sum, &part) in sums.iter_mut().zip(tile) {
                *sum += f64::from(part);
            }
        }
    }
}

/// Numbers of a tile: h and its derivatives.
pub(super) fn numbers<T: Storage>(experts: &Experts<'_, T>) -> usize {
    (1 + experts.pre_activations()) * experts.shape.hidden
}

/// A row's weight in each lane, 0 past the last row.
pub(super) fn lane_weights(rows: usize, weight: impl Fn(usize) -> f32) -> [f32; LANES] {
    array::from_fn(|lane| if lane < rows { weight(lane) } else { 0.0 })
}

vectorised! {
/// Adds the sums of pre-activations in columns `[features, lanes]` to those of a tile `[parts, F]`, from feature `first` on.
pub(super) fn add_columns(
    activation: Activation,
    gate: &[f32],
    up: &[f32],
    lanes: usize,
    weights: &[f32; LANES],
    tile: &mut [f32],
    first: usize,
) {
    let gated = activation.is_gated();
    let parts = 2 + usize::from(gated);
    let hidden = tile.len() / parts;
    let columns = gate.chunks_exact(lanes).zip(up.chunks_exact(lanes));
    for (feature, (gate, up)) in columns.enumerate() {
        let mut by_gate = [0.0; LANES];
        let mut by_up = [0.0; LANES];
        let mut h = [1.0; LANES];
        by_up[..lanes].copy_from_slice(up);
        if gated {
            by_gate[..lanes].copy_from_slice(gate);
        }
        activation.differentiate(&mut by_gate[..lanes], &mut by_up[..lanes], &mut h[..lanes]);
        let at = first + feature;
        tile[at] += weighted(&h[..lanes], weights);
        tile[(parts - 1) * hidden + at] += weighted(&by_up[..lanes], weights);
        if gated {
            tile[hidden + at] += weighted(&by_gate[..lanes], weights);
        }
    }
}
}

/// The sum of whole vectors of values times weights, pairwise within a vector.
#[inline(always)]
fn weighted(values: &[f32], weights: &[f32; LANES]) -> f32 {
    let mut sums = [0.0; VECTOR];
    let vectors = values.as_chunks::<VECTOR>().0.iter();
    for (values, weights) in vectors.zip(weights.as_chunks::<VECTOR>().0) {
        for ((sum, value), weight) in sums.iter_mut().zip(values).zip(weights) {
            *sum += weight * value;
        }
    }
    let mut distance = VECTOR / 2;
    while distance > 0 {
        for i in 0..distance {
            sums[i] += sums[i + distance];
        }
        distance /= 2;
    }
    sums[0]
}
