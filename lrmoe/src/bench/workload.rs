//! What goes into the layer.

use lrmoe_kernels::FfnShape;
use ndarray::Array2;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Gumbel, StandardNormal};
use rayon::prelude::*;

use super::Settings;
use crate::layer::ExpertParameters;

/// Input of forward and backward pass.
#[derive(Debug)]
pub(super) struct Workload {
    /// `[tokens, width]`.
    pub(super) x: Array2<f32>,
    /// dL/dy, `[tokens, width]`.
    pub(super) dy: Array2<f32>,
    /// `[tokens, top_k]`.
    pub(super) expert_ids: Array2<i32>,
    /// `[tokens, top_k]`; those of a token add up to 1.
    pub(super) gate_weights: Array2<f32>,
}

impl Workload {
    pub(super) fn new(settings: &Settings) -> Self {
        let mut random = generator(settings.seed, INPUT);
        let (rows, pairs) = (
            (settings.tokens, settings.shape.width),
            (settings.tokens, settings.top_k),
        );
        let mut normal =
            |dim, scale| Array2::from_shape_simple_fn(dim, || scale * normal(&mut random));
        let (x, dy) = (normal(rows, 1.0), normal(rows, 0.01));
        let mut gate_weights = normal(pairs, 1.0);
        for mut token in gate_weights.rows_mut() {
            token.mapv_inplace(f32::exp);
            let sum = token.sum();
            token.mapv_inplace(|p| p / sum);
        }
        Self {
            x,
            dy,
            expert_ids: expert_ids(settings, &mut generator(settings.seed, ROUTING)),
            gate_weights,
        }
    }

    /// Its first token alone.
    pub(super) fn one_token(&self) -> Self {
        let first = |rows: &Array2<f32>| rows.slice(ndarray::s![..1, ..]).to_owned();
        Self {
            x: first(&self.x),
            dy: first(&self.dy),
            expert_ids: self.expert_ids.slice(ndarray::s![..1, ..]).to_owned(),
            gate_weights: first(&self.gate_weights),
        }
    }
}

/// A token's experts, distinct, by descending key.
fn expert_ids(settings: &Settings, random: &mut ChaCha8Rng) -> Array2<i32> {
    let noise = Gumbel::new(0.0, 1.0).expect("a finite place and a positive scale");
    let popularity: Vec<f64> = (0..settings.experts)
        .map(|expert| -settings.zipf * (expert as f64 + 1.0).ln())
        .collect();
    let mut keys = Vec::with_capacity(settings.experts);
    let mut ids = Array2::zeros((settings.tokens, settings.top_k));
    for mut token in ids.rows_mut() {
        keys.clear();
        keys.extend(
            popularity
                .iter()
                .zip(0..)
                .map(|(key, expert)| (key + noise.sample(random), expert)),
        );
        let descending = |a: &(f64, i32), b: &(f64, i32)| b.0.total_cmp(&a.0);
        keys.select_nth_unstable_by(settings.top_k - 1, descending);
        keys[..settings.top_k].sort_unstable_by(descending);
        for (id, (_, expert)) in token.iter_mut().zip(&keys) {
            *id = *expert;
        }
    }
    ids
}

/// Weights of an expert, uniform with deviation 0.02.
pub(super) fn expert_parameters(shape: &FfnShape, seed: u64, expert: usize) -> ExpertParameters {
    let matrix = |which: u64| {
        let mut values = vec![0.0; shape.width * shape.hidden];
        let first = (expert as u64 * 3 + which) << 32;
        values
            .par_chunks_mut(PART)
            .enumerate()
            .for_each(|(index, part)| {
                let mut random = generator(seed, WEIGHTS + first + index as u64);
                let bound = 0.02 * 3_f32.sqrt();
                part.fill_with(|| bound * (2.0 * random.random::<f32>() - 1.0));
            });
        values
    };
    ExpertParameters {
        gate: shape.activation.is_gated().then(|| matrix(0)),
        up: matrix(1),
        down: matrix(2),
    }
}

/// Weights that a thread draws at a time, from a stream of their own.
const PART: usize = 1 << 16;

/// Streams of random numbers.
const INPUT: u64 = 0;
const ROUTING: u64 = 1;
const WEIGHTS: u64 = 2;

fn generator(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(stream);
    random
}

fn normal(random: &mut ChaCha8Rng) -> f32 {
    StandardNormal.sample(random)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::tiny;

    #[test]
    fn experts_are_drawn_by_popularity_and_distinct() {
        let settings = Settings {
            tokens: 20_000,
            zipf: 1.0,
            experts: 4,
            top_k: 2,
            ..tiny()
        };
        let Workload {
            expert_ids,
            gate_weights,
            ..
        } = Workload::new(&settings);
        let share = |slot: usize, expert: i32| {
            let column = expert_ids.column(slot);
            column.iter().filter(|id| **id == expert).count() as f64 / 20_000.0
        };
        // Weights 12, 6, 4, 3 of 25; the second draw is among what the first left.
        let weights = [12.0, 6.0, 4.0, 3.0].map(|w: f64| w / 25.0);
        for expert in 0..4 {
            let w = weights[expert];
            let second: f64 = (0..4)
                .filter(|first| *first != expert)
                .map(|first| weights[first] * w / (1.0 - weights[first]))
                .sum();
            // Four deviations of a share over 20,000 draws.
            assert!((share(0, expert as i32) - w).abs() < 0.015, "{expert}");
            assert!((share(1, expert as i32) - second).abs() < 0.015, "{expert}");
        }
        assert!(expert_ids.rows().into_iter().all(|ids| ids[0] != ids[1]));
        assert!(
            gate_weights
                .rows()
                .into_iter()
                .all(|p| (p.sum() - 1.0).abs() < 1e-5)
        );
    }
}
