use rayon::prelude::*;

use crate::error::check_length;
use crate::exchange::settle;
use crate::norm::NOT_FINITE;
use crate::pairs::CHUNK;
use crate::{Error, Exchange, Pairs, Row, Score, SquaredNorm};

/// Bits of `2^-125`. Products below it count as zero, so that it does not matter whether a device flushes before or after rounding.
const LEAST: u32 = 0x0100_0000;
/// `2^-62`; gate weights below it count as zero, so that their squares do not come near [`LEAST`].
const LEAST_GATE: f32 = 1.0 / (1u64 << 62) as f32;

/// The largest exponent of scores: that of two norms with the smallest scale, which is 127 below 128.
const EXPONENTS: i32 = 254;

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
        Self {
            kind: Score::Random,
            squared: Vec::new(),
            exponent: 0,
        }
    }
}

impl Scores {
    /// Scores as another backend formed them: see [`squared`](Self::squared) and [`exponent`](Self::exponent). -0 becomes +0.
    ///
    /// # Errors
    ///
    /// [`Error::SquaredScore`] for the first that is negative or NaN, [`Error::ScoreExponent`].
    pub fn from_squared(kind: Score, mut squared: Vec<f32>, exponent: i32) -> Result<Self, Error> {
        if !(-EXPONENTS..=EXPONENTS).contains(&exponent) {
            return Err(Error::ScoreExponent { exponent });
        }
        let bad = squared
            .iter()
            .position(|&squared| squared.is_nan() || squared < 0.0);
        if let Some(pair) = bad {
            let squared = squared[pair];
            return Err(Error::SquaredScore { pair, squared });
        }
        squared.iter_mut().for_each(|squared| *squared += 0.0);
        Ok(Self {
            kind,
            squared,
            exponent,
        })
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

/// Scores the pairs of a rank by `((p * p) * |dy|^2) * |row|^2`, leaving out what is no factor of `kind`.
///
/// `dy` holds a norm per token; `rows` those of [`kind.row()`](Score::row), per token for x, else per pair. Norms that are no factor are not
/// looked at, nor those of masked pairs. The norms are taken relative to the largest scale over all ranks, which costs one [`Exchange::max`] of three values. Only f32 multiplies and
/// integer tests are used, so every backend finds the same bits.
///
/// Gate weights below `2^-62`, and products below `2^-125` where the largest norms are scaled to `[2, 4)` per element, count as zero.
/// A pair with an infinite factor has an infinite score, unless another factor is zero.
///
/// # Errors
///
/// [`Error::MissingNorms`], [`Error::Length`], [`Error::NanScore`] (a factor is NaN, or one is infinite and another zero),
/// [`Error::Norm`], [`Error::Exchange`]; [`Error::Elsewhere`] on the ranks that have no error of their own when another has.
pub fn score<E: Exchange>(
    kind: Score,
    pairs: &Pairs<'_>,
    dy: Option<&[SquaredNorm]>,
    rows: Option<&[SquaredNorm]>,
    exchange: &mut E,
) -> Result<Scores, Error> {
    let mut scores = Scores::default();
    score_into(kind, pairs, dy, rows, exchange, &mut scores)?;
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
    rows: Option<&[SquaredNorm]>,
    exchange: &mut E,
    scores: &mut Scores,
) -> Result<(), Error> {
    let local = Factors::new(kind, pairs, dy, rows)
        .and_then(|factors| factors.largest_scales().map(|scales| (factors, scales)));
    let mut shared = match &local {
        Ok((_, [dy, rows])) => [*dy, *rows, 0],
        Err(_) => [0, 0, 1],
    };
    exchange.max(&mut shared).map_err(Error::Exchange)?;
    let [dy_scale, rows_scale, failed] = shared;
    let (factors, _) = settle(local, failed)?;
    scores.kind = kind;
    scores.exponent = [(factors.dy, dy_scale), (factors.rows, rows_scale)]
        .iter()
        .filter(|(norms, scale)| norms.is_some() && *scale > 0)
        .map(|(_, scale)| *scale as i32 - 128)
        .sum();
    factors.fill_squared(dy_scale, rows_scale, &mut scores.squared);
    Ok(())
}

/// The factors of a score that are in use.
struct Factors<'a> {
    pairs: &'a Pairs<'a>,
    gate: Option<&'a [f32]>,
    dy: Option<&'a [SquaredNorm]>,
    rows: Option<&'a [SquaredNorm]>,
    /// The rows that `rows` are norms of.
    row: Option<Row>,
    /// Whether `rows` has a norm per token, not per pair.
    per_token: bool,
}

impl<'a> Factors<'a> {
    fn new(
        kind: Score,
        pairs: &'a Pairs<'a>,
        dy: Option<&'a [SquaredNorm]>,
        rows: Option<&'a [SquaredNorm]>,
    ) -> Result<Self, Error> {
        let norms = |what: Option<&'static str>, norms: Option<&'a [SquaredNorm]>, length| {
            let Some(what) = what else {
                return Ok(None);
            };
            let norms = norms.ok_or(Error::MissingNorms { score: kind, what })?;
            check_length("squared norms", norms.len(), length)?;
            Ok(Some(norms))
        };
        let row = kind.row();
        let per_token = row.is_some_and(Row::is_per_token);
        let count = if per_token {
            pairs.tokens()
        } else {
            pairs.len()
        };
        Ok(Self {
            pairs,
            gate: kind.has_gate().then(|| pairs.gate_weights()),
            dy: norms(kind.has_dy().then_some("dy"), dy, pairs.tokens())?,
            rows: norms(row.map(Row::name), rows, count)?,
            row,
            per_token,
        })
    }

    /// Checks the norms of dy and of the row of a pair.
    fn check_norms(&self, pair: usize, dy: SquaredNorm, row: SquaredNorm) -> Result<(), Error> {
        for (what, norm) in [("dy", dy), (self.row.map_or("", Row::name), row)] {
            if !norm.is_of_a_row() {
                return Err(Error::Norm {
                    what,
                    pair: self.pairs.global(pair),
                    significand: norm.significand,
                    scale: norm.scale,
                });
            }
        }
        Ok(())
    }

    fn row(&self, token: usize, pair: usize) -> Option<SquaredNorm> {
        let at = if self.per_token { token } else { pair };
        self.rows.map(|rows| rows[at])
    }

    fn tokens_per_task(&self) -> usize {
        (CHUNK / self.pairs.top_k()).max(1)
    }

    /// Largest scales of the finite norms of dy and of rows that unmasked pairs use; an error for the first pair whose score is NaN or whose
    /// norms are none.
    fn largest_scales(&self) -> Result<[u32; 2], Error> {
        let step = self.tokens_per_task();
        // In the order of the pairs, so that the first error stays.
        let larger = |a: Result<[u32; 2], Error>, b| {
            let ([a_dy, a_row], [b_dy, b_row]): (_, [u32; 2]) = (a?, b?);
            Ok([a_dy.max(b_dy), a_row.max(b_row)])
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
                let row = self.row(token, pair).unwrap_or(ONE);
                self.check_norms(pair, dy, row)?;
                let gate = self.gate.map_or(1.0, |gate| gate[pair]);
                if (gate_class(gate) * norm_class(dy) * norm_class(row)).is_nan() {
                    return Err(Error::NanScore {
                        pair: self.pairs.global(pair),
                        expert,
                    });
                }
                largest = [finite(dy).max(largest[0]), finite(row).max(largest[1])];
            }
        }
        Ok(largest)
    }

    /// Makes `squared` the squared scores of all pairs, none of which is NaN.
    fn fill_squared(&self, dy_scale: u32, rows_scale: u32, squared: &mut Vec<f32>) {
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
                    if let Some(row) = self.row(token, pair) {
                        score = product(score, row.relative_to(rows_scale));
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
        NOT_FINITE => norm.significand,
        _ if norm.significand == 0.0 => 0.0,
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
