use std::fmt;
use std::str::FromStr;

use rayon::prelude::*;

use crate::draw;
use crate::error::check_length;
use crate::grouped::Grouped;
use crate::keys::select_checked;
use crate::pairs::CHUNK;
use crate::score::product;
use crate::{Draw, Error, Exchange, Pairs, Score, Scores};

/// Pairs whose keys are made together.
const BLOCK: usize = 256;

/// How pairs are chosen by their scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// Unbiased priority sampling (Duffield, Lund, Thorup, "Priority sampling for estimation of arbitrary subset sums", JACM 2007): the q
    /// largest `s/u`, u uniform in (0, 1], with weight `max(s, tau)/s`, tau the (q+1)-th largest.
    Priority,
    /// The q largest scores, with weight 1.
    Top,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Priority => "priority",
            Self::Top => "top",
        })
    }
}

impl FromStr for Method {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "priority" => Ok(Self::Priority),
            "top" => Ok(Self::Top),
            _ => Err(Error::UnknownMethod { name: name.into() }),
        }
    }
}

/// The pairs of a rank that were kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// Local pair ids, ascending.
    pub pairs: Vec<u32>,
    /// Weight of each kept pair's term in the weight gradients, at least 1.
    pub weights: Vec<f32>,
}

/// Keeps per expert, over all ranks, exactly `min(quotas[e], n[e])` pairs, ties to the smaller global pair id.
///
/// `quotas` is `[experts]`; `quotas` and `draw` are the same on every rank, and `first_pair` of the pairs ascends with the rank. Keys are the
/// bits of the squared score for `top`, and of the squared score times the squared reciprocal of u for `priority`; see
/// [`select_keys`](crate::select_keys) for what is exchanged.
///
/// The squared reciprocal is at most `2^48`, so that a key stays within f32 where `squared` is below `2^80`; past f32 it is that of
/// [`f32::MAX`], and infinite only for an infinite score. A weight is 1 for a score that is 0 or infinite.
///
/// # Errors
///
/// [`Error::Length`], [`Error::TooManyPairsOverall`], [`Error::Exchange`]; [`Error::Elsewhere`] on the ranks that have no error of their own
/// when another has.
pub fn select<E: Exchange>(
    method: Method,
    pairs: &Pairs<'_>,
    scores: &Scores,
    quotas: &[u32],
    draw: Draw,
    exchange: &mut E,
) -> Result<Selection, Error> {
    let mut selector = Selector::default();
    selector.select(method, pairs, scores, quotas, draw, exchange)?;
    Ok(selector.selection)
}

/// Selects again and again in the same memory: a selection of no more pairs than an earlier one allocates nothing that grows with them.
#[derive(Debug, Default)]
pub struct Selector {
    /// What the last selection kept.
    pub selection: Selection,
    keys: Vec<u32>,
    grouped: Grouped,
}

impl Selector {
    /// As [`select`], into `selection`, which means nothing after an error.
    ///
    /// # Errors
    ///
    /// As for [`select`].
    pub fn select<E: Exchange>(
        &mut self,
        method: Method,
        pairs: &Pairs<'_>,
        scores: &Scores,
        quotas: &[u32],
        draw: Draw,
        exchange: &mut E,
    ) -> Result<&Selection, Error> {
        let Self {
            selection,
            keys,
            grouped,
        } = self;
        let keys = check_length("scores", scores.squared().len(), pairs.len()).map(|()| {
            keys.resize(pairs.len(), 0);
            fill_keys(method, pairs, scores, draw, keys);
            keys.as_slice()
        });
        let Selection {
            pairs: kept,
            weights,
        } = selection;
        let next = select_checked(pairs, keys, quotas, exchange, (grouped, &mut *kept))?;
        weights.resize(kept.len(), 1.0);
        match method {
            Method::Top => weights.fill(1.0),
            Method::Priority => fill_weights(pairs, scores, (kept, &next), weights),
        }
        Ok(selection)
    }
}

fn fill_keys(method: Method, pairs: &Pairs<'_>, scores: &Scores, draw: Draw, keys: &mut [u32]) {
    let fill = |(chunk, (keys, squared)): (usize, (&mut [u32], &[f32]))| {
        let first = pairs.global(chunk * BLOCK);
        match method {
            Method::Priority => prioritize(draw, first, squared, keys),
            Method::Top if scores.kind == Score::Random => {
                draw.fill(first, keys);
                keys.iter_mut().for_each(|key| *key >>= 2);
            }
            Method::Top => (keys.iter_mut().zip(squared)).for_each(|(key, s)| *key = s.to_bits()),
        }
    };
    keys.par_chunks_mut(BLOCK)
        .zip(scores.squared().par_chunks(BLOCK))
        .enumerate()
        .with_min_len(CHUNK / BLOCK)
        .for_each(fill);
}

/// Keys of `priority` for at most [`BLOCK`] pairs. Each step has a loop of its own, so that the processor overlaps their long chains.
fn prioritize(draw: Draw, first: u64, squared: &[f32], keys: &mut [u32]) {
    let mut reciprocals = [0.0; BLOCK];
    draw.fill(first, keys);
    for (reciprocal, &bits) in reciprocals.iter_mut().zip(&*keys) {
        *reciprocal = draw::reciprocal(bits);
    }
    for ((key, &squared), reciprocal) in keys.iter_mut().zip(squared).zip(reciprocals) {
        *key = product(squared, reciprocal * reciprocal).to_bits();
    }
}

/// `max(s, tau)/s` of the kept pairs, from squares; 1 for scores that are 0 (kept only when tau is 0) or infinite. `next` is tau^2 of each
/// expert.
fn fill_weights(
    pairs: &Pairs<'_>,
    scores: &Scores,
    (kept, next): (&[u32], &[u32]),
    weights: &mut [f32],
) {
    let weight = |(weight, &pair): (&mut f32, &u32)| {
        let squared = scores.squared()[pair as usize];
        let threshold = pairs.expert(pair as usize).map_or(0, |expert| next[expert]);
        let ratio = f32::from_bits(threshold) / squared;
        *weight = if ratio > 1.0 && squared > 0.0 {
            ratio.sqrt()
        } else {
            1.0
        };
    };
    let each = weights.par_iter_mut().zip(kept);
    each.with_min_len(4096).for_each(weight);
}
