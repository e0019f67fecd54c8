use std::fmt;
use std::str::FromStr;

use crate::error::check_length;
use crate::exchange::settle;
use crate::pairs::slot;
use crate::{Error, Exchange, Pairs, Scores, Selection};

/// Scores are summed in units of this power of two below the largest of their expert.
const BITS: i32 = 31;
/// Sums travel in parts of 16 bits, so that those of 65,536 ranks add up within u32.
const PARTS: usize = 4;
const INFINITE: u32 = 0x7f80_0000;

/// What the weights of an expert's kept pairs are multiplied by, to stand for those that [`Method::Top`](crate::Method::Top) left out.
///
/// [`Method::Priority`](crate::Method::Priority) needs none: its weights do that already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rescale {
    /// Nothing.
    #[default]
    None,
    /// Pairs of the expert over those kept.
    Count,
    /// Sum of the scores of the expert's pairs over that of those kept; 1 if all are 0 or one is infinite.
    Mass,
}

impl fmt::Display for Rescale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Count => "count",
            Self::Mass => "mass",
        })
    }
}

impl FromStr for Rescale {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "none" => Ok(Self::None),
            "count" => Ok(Self::Count),
            "mass" => Ok(Self::Mass),
            _ => Err(Error::UnknownRescale { name: name.into() }),
        }
    }
}

/// Multiplies the weights of kept pairs by their expert's factor over all ranks.
///
/// `scores` are those that `selection` was made by. Sums over pairs are sums of integers (for `mass` of scores in units of `2^-31` of the
/// power of two below the expert's largest), so that factors do not depend on the number of ranks or threads, or on what has formed the
/// scores. `count` exchanges two values per expert, `mass` nine.
///
/// # Errors
///
/// [`Error::Length`] for lists that do not belong to `pairs`, [`Error::Exchange`]; [`Error::Elsewhere`] on the ranks that have no error of
/// their own when another has. The weights are then unchanged.
pub fn rescale<E: Exchange>(
    rescale: Rescale,
    pairs: &Pairs<'_>,
    scores: &Scores,
    selection: &mut Selection,
    exchange: &mut E,
) -> Result<(), Error> {
    if rescale == Rescale::None {
        return Ok(());
    }
    let local = check(pairs, scores, selection);
    let mut failed = [u32::from(local.is_err())];
    exchange.max(&mut failed).map_err(Error::Exchange)?;
    settle(local, failed[0])?;
    let kept = selection.pairs.as_slice();
    let factors = match rescale {
        Rescale::None => return Ok(()),
        Rescale::Count => sum_ratios(pairs, kept, |_, _| 1, exchange)?,
        Rescale::Mass => {
            let largest = largest(pairs, scores, exchange)?;
            let units: Vec<Option<f64>> = largest.into_iter().map(unit).collect();
            let mass = |expert: usize, pair: usize| {
                let score = f64::from(scores.squared()[pair]).sqrt();
                units[expert].map_or(0, |unit| (score * unit) as u64)
            };
            sum_ratios(pairs, kept, mass, exchange)?
        }
    };
    for (weight, &pair) in selection.weights.iter_mut().zip(&selection.pairs) {
        *weight *= factors[slot(pairs.expert_ids()[pair as usize])];
    }
    Ok(())
}

fn check(pairs: &Pairs<'_>, scores: &Scores, selection: &Selection) -> Result<(), Error> {
    check_length("scores", scores.squared().len(), pairs.len())?;
    check_length("weights", selection.weights.len(), selection.pairs.len())?;
    let unmasked = |pair: &&u32| {
        let id = pairs.expert_ids().get(**pair as usize);
        id.is_some_and(|id| *id >= 0)
    };
    let known = selection.pairs.iter().filter(unmasked).count();
    check_length("kept pairs", selection.pairs.len(), known)
}

/// Bits of the largest squared score of each expert over all ranks.
fn largest<E: Exchange>(
    pairs: &Pairs<'_>,
    scores: &Scores,
    exchange: &mut E,
) -> Result<Vec<u32>, Error> {
    let mut largest = vec![0; pairs.experts()];
    for (&id, squared) in pairs.expert_ids().iter().zip(scores.squared()) {
        if let Some(largest) = largest.get_mut(slot(id)) {
            *largest = squared.to_bits().max(*largest);
        }
    }
    exchange.max(&mut largest).map_err(Error::Exchange)?;
    Ok(largest)
}

/// The power of two that takes scores below `2^32`, whole, of an expert whose largest squared score this is; `None` where sums say nothing.
fn unit(largest: u32) -> Option<f64> {
    if largest == 0 || largest >= INFINITE {
        return None;
    }
    // The root of a number in [2^e, 2^(e + 1)) is below 2^(floor(e / 2) + 1).
    let exponent = (largest >> 23) as i32 - 127;
    Some(f64::from(BITS - exponent.div_euclid(2)).exp2())
}

/// Per expert the sum over its pairs over the sum over those kept, on all ranks; 1 where that is not above 0.
fn sum_ratios<E: Exchange>(
    pairs: &Pairs<'_>,
    kept: &[u32],
    term: impl Fn(usize, usize) -> u64,
    exchange: &mut E,
) -> Result<Vec<f32>, Error> {
    let mut sums = vec![[0_u64; 2]; pairs.experts()];
    for (pair, &id) in pairs.expert_ids().iter().enumerate() {
        if let Some(sums) = sums.get_mut(slot(id)) {
            sums[0] += term(slot(id), pair);
        }
    }
    for pair in kept.iter().map(|pair| *pair as usize) {
        let expert = slot(pairs.expert_ids()[pair]);
        sums[expert][1] += term(expert, pair);
    }
    let parts =
        |sum: &u64| std::array::from_fn::<_, PARTS, _>(|i| (sum >> (16 * i)) as u32 & 0xffff);
    let mut shared: Vec<u32> = sums.iter().flatten().flat_map(parts).collect();
    exchange.sum(&mut shared).map_err(Error::Exchange)?;
    let whole = |parts: &[u32]| {
        let parts = parts.iter().enumerate();
        parts
            .map(|(i, part)| u64::from(*part) << (16 * i))
            .sum::<u64>()
    };
    let ratio = |parts: &[u32]| {
        let (all, kept) = (whole(&parts[..PARTS]), whole(&parts[PARTS..]));
        if kept == 0 {
            1.0
        } else {
            (all as f64 / kept as f64) as f32
        }
    };
    Ok(shared.chunks_exact(2 * PARTS).map(ratio).collect())
}
