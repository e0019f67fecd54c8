//! The order of keys before all of a layer's norms are known.

use rayon::prelude::*;

use crate::draw;
use crate::norm::NOT_FINITE;
use crate::score::{flushed_gate, product};
use crate::{Draw, Method, Pairs, SquaredNorm};

/// Pairs whose random numbers are made together.
const BLOCK: usize = 256;

/// What [`select`](crate::select()) makes the key of a pair of, besides the squared norm of its row: for scores of a gate weight and one norm that
/// the forward pass finds row by row ([`Score::Forward`](crate::Score::Forward)).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EarlyKey {
    /// Squared gate weight.
    pub gate: f32,
    /// Squared reciprocal of u with [`Method::Priority`], 1 with [`Method::Top`].
    pub draw: f32,
}

impl EarlyKey {
    /// A number that grows with the key of a pair whose row has this norm, whatever the scale of the layer turns out to be: pairs are in the
    /// order of their keys, unless a square score is below `2^-125` (then it counts as zero) or past f32, relative to the layer's largest norm.
    pub fn order(self, norm: SquaredNorm) -> u64 {
        let value = product(product(self.gate, norm.significand), self.draw);
        match norm.scale {
            _ if value == 0.0 => 0,
            NOT_FINITE => u64::MAX,
            scale => u64::from(value.to_bits()) + (u64::from(scale) << 24),
        }
    }
}

/// Makes `keys` those of all pairs of a rank, `[tokens * top_k]`, in the memory of earlier ones.
pub fn early_keys(method: Method, pairs: &Pairs<'_>, draw: Draw, keys: &mut Vec<EarlyKey>) {
    keys.resize(pairs.len(), EarlyKey::default());
    let fill = |(block, (keys, gates)): (usize, (&mut [EarlyKey], &[f32]))| {
        let mut bits = [0; BLOCK];
        if method == Method::Priority {
            draw.fill(pairs.global(block * BLOCK), &mut bits[..keys.len()]);
        }
        for ((key, &gate), bits) in keys.iter_mut().zip(gates).zip(bits) {
            let gate = flushed_gate(gate);
            let reciprocal = match method {
                Method::Priority => draw::reciprocal(bits),
                Method::Top => 1.0,
            };
            *key = EarlyKey {
                gate: product(gate, gate),
                draw: reciprocal * reciprocal,
            };
        }
    };
    keys.par_chunks_mut(BLOCK)
        .zip(pairs.gate_weights().par_chunks(BLOCK))
        .enumerate()
        .with_min_len(16)
        .for_each(fill);
}
