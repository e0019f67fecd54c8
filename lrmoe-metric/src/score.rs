use std::fmt;
use std::str::FromStr;

use rayon::prelude::*;

use crate::error::check_length;
use crate::exchange::settle;
use crate::norm::NOT_FINITE;
use crate::pairs::CHUNK;
use crate::{Error, Exchange, Pairs, SquaredNorm};

/// Bits of `2^-125`. Products below it count as zero, so that it does not matter whether a device flushes before or after rounding.
const LEAST: u32 = 0x0100_0000;
/// `2^-62`; gate weights below it count as zero, so that their squares do not come near [`LEAST`].
const LEAST_GATE: f32 = 1.0 / (1u64 << 62) as f32;

/// By what pairs are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Score {
    /// `p |dy| |h|`, the Frobenius norm of the pair's term in the gradient of the down projection.
    DownGrad,
    /// `p |h|`, known in the forward pass.
    Forward,
    /// The gate weight `p`.
    Gate,
    /// Nothing: all pairs are equal to [`Method::Priority`](crate::Method::Priority), so that it samples uniformly with weights near n/q;
    /// [`Method::Top`](crate::Method::Top) takes the order of the top 30 random bits.
    Random,
}

impl Score {
    /// Whether the score needs the norms of dy.
    pub fn needs_dy(self) -> bool {
        self == Self::DownGrad
    }

    /// Whether the score needs the norms of h.
    pub fn needs_h(self) -> bool {
        matches!(self, Self::DownGrad | Self::Forward)
    }

    fn needs_gate(self) -> bool {
        self != Self::Random
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::DownGrad => "down-grad",
            Self::Forward => "forward",
            Self::Gate => "gate",
            Self::Random => "random",
        })
    }
}

impl FromStr for Score {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "down-grad" => Ok(Self::DownGrad),
            "forward" => Ok(Self::Forward),
            "gate" => Ok(Self::Gate),
            "random" => Ok(Self::Random),
            _ => Err(Error::UnknownScore { name: name.into() }),
        }
    }
}

/// Squared scores of all pairs of a rank: the true ones times `4^-exponent`.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    pub(crate) kind: Score,
    squared: Vec<f32>,
    exponent: i32,
}

impl Default for Scores {
    /// Of no pairs.
    fn default() -> Self {
        Self::from_squared(Score::Random, Vec::new(), 0)
    }
}

impl Scores {
    /// Scores as another backend formed them: see [`squared`](Self::squared) and [`exponent`](Self::exponent).
    pub fn from_squared(kind: Score, squared: Vec<f32>, exponent: i32) -> Self {
        Self {
            kind,
            squared,
            exponent,
        }
    }

    /// Scaled squared score of each pair, `[tokens * top_k]`; 0 where masked.
    ///
    /// With rows of at most `2^14` elements, values stay below `2^36 p^2`; past f32 a finite score is [`f32::MAX`].
    pub fn squared(&self) -> &[f32] {
        &self.squared
    }

    /// The true squared score is `squared * 4^exponent`.
    pub fn exponent(&self) -> i32 {
        self.exponent
    }
}

/// Scores the pairs of a rank by `((p * p) * |dy|^2) * |h|^2`, leaving out what `kind` does not need.
///
/// `dy` holds a norm per token, `h` one per pair; norms that `kind` does not need are not looked at, nor those of masked pairs. The norms
/// are taken relative to the largest scale over all ranks, which costs one [`Exchange::max`] of three values. Only f32 multiplies and
/// integer tests are used, so every backend finds the same bits.
///
/// Gate weights below `2^-62`, and products below `2^-125` where the largest norms are scaled to `[2, 4)` per element, count as zero.
/// A pair with an infinite factor has an infinite score, unless another factor is zero.
///
/// # Errors
///
/// [`Error::MissingNorms`], [`Error::Length`], [`Error::NanScore`] (a factor is NaN, or one is infinite and another zero),
/// [`Error::Exchange`]; [`Error::Elsewhere`] on the ranks that have no error of their own when another has.
pub fn score<E: Exchange>(
    kind: Score,
    pairs: &Pairs<'_>,
    dy: Option<&[SquaredNorm]>,
    h: Option<&[SquaredNorm]>,
    exchange: &mut E,
) -> Result<Scores, Error> {
    let mut scores = Scores::default();
    score_into(kind, pairs, dy, h, exchange, &mut scores)?;
    Ok(scores)
}

/// As [`score`], in the memory of earlier scores, which an error leaves as they were.
///
/// # Errors
///
/// As for [`score`].
pub fn score_into<E: Exchange>(
    kind: Score,
    pairs: &Pairs<'_>,
    dy: Option<&[SquaredNorm]>,
    h: Option<&[SquaredNorm]>,
    exchange: &mut E,
    scores: &mut Scores,
) -> Result<(), Error> {
    let local = Factors::new(kind, pairs, dy, h)
        .and_then(|factors| factors.largest_scales().map(|scales| (factors, scales)));
    let mut shared = match &local {
        Ok((_, [dy, h])) => [*dy, *h, 0],
        Err(_) => [0, 0, 1],
    };
    exchange.max(&mut shared).map_err(Error::Exchange)?;
    let [dy_scale, h_scale, failed] = shared;
    let (factors, _) = settle(local, failed)?;
    scores.kind = kind;
    scores.exponent = [(factors.dy, dy_scale), (factors.h, h_scale)]
        .iter()
        .filter(|(norms, scale)| norms.is_some() && *scale > 0)
        .map(|(_, scale)| *scale as i32 - 128)
        .sum();
    factors.fill_squared(dy_scale, h_scale, &mut scores.squared);
    Ok(())
}

/// The factors of a score that are in use.
struct Factors<'a> {
    pairs: &'a Pairs<'a>,
    gate: Option<&'a [f32]>,
    dy: Option<&'a [SquaredNorm]>,
    h: Option<&'a [SquaredNorm]>,
}

impl<'a> Factors<'a> {
    fn new(
        kind: Score,
        pairs: &'a Pairs<'a>,
        dy: Option<&'a [SquaredNorm]>,
        h: Option<&'a [SquaredNorm]>,
    ) -> Result<Self, Error> {
        let norms = |needed: bool, norms: Option<&'a [SquaredNorm]>, what, length| {
            if !needed {
                return Ok(None);
            }
            let norms = norms.ok_or(Error::MissingNorms { score: kind, what })?;
            check_length("squared norms", norms.len(), length)?;
            Ok(Some(norms))
        };
        Ok(Self {
            pairs,
            gate: kind.needs_gate().then(|| pairs.gate_weights()),
            dy: norms(kind.needs_dy(), dy, "dy", pairs.tokens())?,
            h: norms(kind.needs_h(), h, "h", pairs.len())?,
        })
    }

    fn tokens_per_task(&self) -> usize {
        (CHUNK / self.pairs.top_k()).max(1)
    }

    /// Largest scales of the finite rows of dy and h that unmasked pairs use; an error for the first pair whose score is NaN.
    fn largest_scales(&self) -> Result<[u32; 2], Error> {
        let step = self.tokens_per_task();
        // In the order of the pairs, so that the first error stays.
        let larger = |a: Result<[u32; 2], Error>, b| {
            let ([a_dy, a_h], [b_dy, b_h]): (_, [u32; 2]) = (a?, b?);
            Ok([a_dy.max(b_dy), a_h.max(b_h)])
        };
        (0..self.pairs.tokens().div_ceil(step))
            .into_par_iter()
            .map(|task| self.scan(task * step..((task + 1) * step).min(self.pairs.tokens())))
            .reduce(|| Ok([0, 0]), larger)
    }

    fn scan(&self, tokens: std::ops::Range<usize>) -> Result<[u32; 2], Error> {
        let top_k = self.pairs.top_k();
        let finite = |norm: SquaredNorm| {
            if norm.scale == NOT_FINITE {
                0
            } else {
                norm.scale
            }
        };
        let mut largest = [0, 0];
        for token in tokens {
            let dy = self.dy.map_or(ONE, |dy| dy[token]);
            for pair in token * top_k..(token + 1) * top_k {
                let Some(expert) = self.pairs.expert(pair) else {
                    continue;
                };
                let h = self.h.map_or(ONE, |h| h[pair]);
                let gate = self.gate.map_or(1.0, |gate| gate[pair]);
                if (gate_class(gate) * norm_class(dy) * norm_class(h)).is_nan() {
                    return Err(Error::NanScore {
                        pair: self.pairs.global(pair),
                        expert,
                    });
                }
                largest = [finite(dy).max(largest[0]), finite(h).max(largest[1])];
            }
        }
        Ok(largest)
    }

    /// Makes `squared` the squared scores of all pairs, none of which is NaN.
    fn fill_squared(&self, dy_scale: u32, h_scale: u32, squared: &mut Vec<f32>) {
        let top_k = self.pairs.top_k();
        let step = self.tokens_per_task();
        squared.resize(self.pairs.len(), 0.0);
        let fill = |(task, out): (usize, &mut [f32])| {
            for (row, out) in out.chunks_exact_mut(top_k).enumerate() {
                let token = task * step + row;
                let dy = self.dy.map(|dy| dy[token].relative_to(dy_scale));
                for (slot, out) in out.iter_mut().enumerate() {
                    let pair = token * top_k + slot;
                    if self.pairs.expert(pair).is_none() {
                        *out = 0.0;
                        continue;
                    }
                    let gate = self.gate.map_or(1.0, |gate| flushed_gate(gate[pair]));
                    let mut score = product(gate, gate);
                    if let Some(dy) = dy {
                        score = product(score, dy);
                    }
                    if let Some(h) = self.h {
                        score = product(score, h[pair].relative_to(h_scale));
                    }
                    // Finite factors have finite products, and an infinite one meets a zero here only after a product was flushed.
                    *out = if score.is_finite() {
                        score
                    } else {
                        f32::INFINITY
                    };
                }
            }
        };
        squared
            .par_chunks_mut(step * top_k)
            .enumerate()
            .for_each(fill);
    }
}

/// Stands for a factor that is left out.
const ONE: SquaredNorm = SquaredNorm {
    significand: 4.0,
    scale: 1,
};

/// 0, 1, infinity or NaN: what a norm does to the kind of a product.
fn norm_class(norm: SquaredNorm) -> f32 {
    match norm.scale {
        0 => 0.0,
        NOT_FINITE => norm.significand,
        _ => 1.0,
    }
}

/// 0, 1, infinity or NaN: what a squared gate weight does to the kind of a product.
fn gate_class(gate: f32) -> f32 {
    match flushed_gate(gate) {
        0.0 => 0.0,
        gate if gate.is_finite() => 1.0,
        gate => gate * gate,
    }
}

pub(crate) fn flushed_gate(gate: f32) -> f32 {
    if gate.abs() < LEAST_GATE { 0.0 } else { gate }
}

/// `a * b` of values that are not negative: 0 below `2^-125`, and infinite only if one of them is.
pub(crate) fn product(a: f32, b: f32) -> f32 {
    let product = a * b;
    if product.to_bits() < LEAST {
        0.0
    } else if product == f32::INFINITY && a.is_finite() && b.is_finite() {
        f32::MAX
    } else {
        product
    }
}
