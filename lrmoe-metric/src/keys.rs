use rayon::prelude::*;

use crate::boundary::{Boundary, First, boundaries};
use crate::buckets::Histogram;
use crate::error::check_length;
use crate::exchange::settle;
use crate::grouped::{Grouped, Window};
use crate::pairs::{CHUNK, MASKED, slot};
use crate::{Error, Exchange, Pairs};

/// The pairs of a rank that were kept by their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeySelection {
    /// Local pair ids, ascending.
    pub pairs: Vec<u32>,
    /// Per expert (`[experts]`) the key that follows the kept ones over all ranks: the (q+1)-th largest, 0 if there is none.
    pub next: Vec<u32>,
}

/// Keys (`[tokens * top_k]`) of a caller's own scores: the bits of the f32, with subnormals and -0 as +0. Those of masked pairs are 0,
/// whatever their score.
///
/// # Errors
///
/// [`Error::Length`], [`Error::NanScore`], [`Error::NegativeScore`]; of several bad scores the first is named. The error is this rank's
/// alone: other ranks learn of it from the caller.
pub fn keys_from_scores(pairs: &Pairs<'_>, scores: &[f32]) -> Result<Vec<u32>, Error> {
    check_length("scores", scores.len(), pairs.len())?;
    // Not so for a NaN, which compares as false.
    let good = |id: i32, score: f32| (id == MASKED) | (score >= 0.0);
    let mut keys = vec![0; scores.len()];
    let all_good = keys
        .par_chunks_mut(CHUNK)
        .zip(pairs.expert_ids().par_chunks(CHUNK))
        .zip(scores.par_chunks(CHUNK))
        .map(|((keys, ids), scores)| {
            let mut all_good = true;
            for ((key, &id), &score) in keys.iter_mut().zip(ids).zip(scores) {
                all_good &= good(id, score);
                let counts = (id != MASKED) & (score >= f32::MIN_POSITIVE);
                *key = if counts { score.to_bits() } else { 0 };
            }
            all_good
        })
        .reduce(|| true, |a, b| a & b);
    if all_good {
        return Ok(keys);
    }
    let mut each = pairs.expert_ids().iter().zip(scores);
    let bad = each.position(|(&id, &score)| !good(id, score)).unwrap_or(0);
    Err(bad_score(pairs, bad, scores[bad]))
}

fn bad_score(pairs: &Pairs<'_>, at: usize, score: f32) -> Error {
    let (pair, expert) = (pairs.global(at), slot(pairs.expert_ids()[at]));
    if score.is_nan() {
        Error::NanScore { pair, expert }
    } else {
        Error::NegativeScore {
            pair,
            expert,
            score,
        }
    }
}

/// Keeps per expert, over all ranks, the `min(quotas[e], n[e])` pairs with the largest keys, ties to the smaller global pair id.
///
/// `keys` is `[tokens * top_k]`, `quotas` is `[experts]` and the same on every rank; `first_pair` of the pairs ascends with the rank. The
/// order is that of the `u32` keys, whatever they stand for.
///
/// Exchanged are the loads, then for the experts that keep some but not all of their pairs three rounds of histograms (2^11, 2^11 and 2^10
/// buckets per expert; with one rank none), the numbers of ties where a tie is cut, and the keys that follow. No pair leaves its rank.
///
/// # Errors
///
/// [`Error::Length`], [`Error::TooManyPairsOverall`], [`Error::Exchange`]; [`Error::Elsewhere`] on the ranks that have no error of their own
/// when another has.
pub fn select_keys<E: Exchange>(
    pairs: &Pairs<'_>,
    keys: &[u32],
    quotas: &[u32],
    exchange: &mut E,
) -> Result<KeySelection, Error> {
    let (mut grouped, mut kept) = (Grouped::default(), Vec::new());
    let next = select_checked(pairs, Ok(keys), quotas, exchange, (&mut grouped, &mut kept))?;
    Ok(KeySelection { pairs: kept, next })
}

/// [`select_keys`] where forming the keys may have failed on this rank; the others then learn of it. Makes `kept` the kept pairs and gives
/// the keys that follow.
pub(crate) fn select_checked<E: Exchange>(
    pairs: &Pairs<'_>,
    keys: Result<&[u32], Error>,
    quotas: &[u32],
    exchange: &mut E,
    (grouped, kept): (&mut Grouped, &mut Vec<u32>),
) -> Result<Vec<u32>, Error> {
    let ranks = exchange.ranks();
    let local = keys.and_then(|keys| {
        check_length("keys", keys.len(), pairs.len())?;
        check_length("quotas", quotas.len(), pairs.experts())?;
        let histogram = Histogram::new(pairs, keys, ranks);
        Ok((keys, histogram))
    });
    let mut loads = match &local {
        Ok((_, histogram)) => histogram.loads(),
        Err(_) => vec![0; pairs.experts()],
    };
    loads.push(local.is_err().into());
    exchange.sum(&mut loads).map_err(Error::Exchange)?;
    let failed = loads.pop().unwrap_or(0);
    let (keys, histogram) = settle(local, failed)?;
    let total = loads.iter().map(|&load| u64::from(load)).sum();
    if u32::try_from(total).is_err() {
        return Err(Error::TooManyPairsOverall { pairs: total });
    }

    let quotas = (&*loads, quotas);
    let cuts = cut(pairs, keys, histogram, quotas, grouped, exchange)?;
    let floors = floors(pairs, keys, grouped, &cuts, exchange)?;
    let next = next(grouped, &cuts, exchange)?;
    let above = |pair: u32| {
        let (id, key) = (pairs.expert_ids()[pair as usize], keys[pair as usize]);
        let floor = floors.get(slot(id)).copied().unwrap_or(u64::MAX);
        order(key, pair) > floor
    };
    grouped.keep(above, kept);
    Ok(next)
}

/// Which of an expert's pairs are kept, over all ranks.
#[derive(Clone, Copy)]
enum Cut {
    All,
    None,
    At(Boundary),
}

/// Where each expert is cut; makes `grouped` the pairs of this rank that may be kept.
fn cut<E: Exchange>(
    pairs: &Pairs<'_>,
    keys: &[u32],
    mut histogram: Histogram,
    (loads, quotas): (&[u32], &[u32]),
    grouped: &mut Grouped,
    exchange: &mut E,
) -> Result<Vec<Cut>, Error> {
    let buckets = histogram.buckets;
    let mut cuts = Vec::with_capacity(loads.len());
    let mut windows = Vec::with_capacity(loads.len());
    let mut experts = Vec::new();
    for (expert, (&load, &quota)) in loads.iter().zip(quotas).enumerate() {
        if quota >= load {
            cuts.push(Cut::All);
            windows.push(Window::BOTTOM);
            continue;
        }
        cuts.push(Cut::None);
        // If none is kept, the largest key on this rank is in its last bucket.
        let last = histogram.of(expert).iter().rposition(|&count| count > 0);
        windows.push(Window {
            low: last.map_or(u32::MAX, |bucket| buckets.first(bucket)),
            ..Window::TOP
        });
        if quota > 0 {
            experts.push(expert);
        }
    }
    histogram.keep(&experts);
    if !experts.is_empty() {
        let sum = exchange.sum(&mut histogram.counts);
        sum.map_err(Error::Exchange)?;
    }
    let first: Vec<_> = histogram
        .counts
        .chunks_exact(buckets.len())
        .zip(&experts)
        .map(|(counts, &expert)| First::new(counts, quotas[expert]))
        .collect();
    for (first, &expert) in first.iter().zip(&experts) {
        windows[expert] = first.window(buckets);
    }
    grouped.fill(pairs, keys, &windows);
    let boundaries = boundaries(grouped, &experts, &first, exchange)?;
    for (&expert, boundary) in experts.iter().zip(boundaries) {
        cuts[expert] = Cut::At(boundary);
    }
    Ok(cuts)
}

/// The order of pairs: by key, then by smaller id.
fn order(key: u32, pair: u32) -> u64 {
    u64::from(key) << 32 | u64::from(!pair)
}

/// Per expert the `order` above which this rank's pairs are kept.
fn floors<E: Exchange>(
    pairs: &Pairs<'_>,
    keys: &[u32],
    grouped: &Grouped,
    cuts: &[Cut],
    exchange: &mut E,
) -> Result<Vec<u64>, Error> {
    // Local ids are below u32::MAX, so every order is above 0 and above that of its key with u32::MAX.
    let floor = |cut: &Cut| match cut {
        Cut::All => 0,
        Cut::None => u64::MAX,
        Cut::At(boundary) => order(boundary.key, u32::MAX),
    };
    let mut floors = cuts.iter().map(floor).collect::<Vec<_>>();
    let ties = ties(grouped, cuts, exchange)?;
    if ties.is_empty() {
        return Ok(floors);
    }
    let mut left = vec![0; cuts.len()];
    let mut all_left = 0;
    for tie in ties {
        floors[tie.expert] = order(tie.key, 0);
        left[tie.expert] = tie.take;
        all_left += tie.take;
    }
    for pair in grouped.open() {
        if all_left == 0 {
            break;
        }
        let (id, key) = (pairs.expert_ids()[pair as usize], keys[pair as usize]);
        let Some(left) = left.get_mut(slot(id)).filter(|left| **left > 0) else {
            continue;
        };
        let floor = &mut floors[slot(id)];
        if u64::from(key) == *floor >> 32 {
            *floor = order(key, pair + 1);
            *left -= 1;
            all_left -= 1;
        }
    }
    Ok(floors)
}

/// An expert of whose pairs with the boundary key this rank keeps the first `take`, but not all.
struct Tie {
    expert: usize,
    key: u32,
    take: u32,
}

/// Gives the ties at the boundaries to lower ranks first.
fn ties<E: Exchange>(grouped: &Grouped, cuts: &[Cut], exchange: &mut E) -> Result<Vec<Tie>, Error> {
    let tied: Vec<_> = cuts
        .iter()
        .enumerate()
        .filter_map(|(expert, cut)| match cut {
            Cut::At(boundary) if boundary.equal > boundary.take => Some((expert, boundary)),
            _ => None,
        })
        .collect();
    if tied.is_empty() {
        return Ok(Vec::new());
    }
    let mine: Vec<_> = tied
        .par_iter()
        .map(|(expert, boundary)| grouped.count(*expert, boundary.key))
        .collect();
    let mut all = vec![0; mine.len() * exchange.ranks()];
    exchange
        .all_gather(&mine, &mut all)
        .map_err(Error::Exchange)?;
    let lower = &all[..mine.len() * exchange.rank()];
    let tie = |(at, (&(expert, boundary), &mine)): (usize, (&(usize, &Boundary), &u32))| {
        let before: u32 = lower.iter().skip(at).step_by(tied.len()).sum();
        let take = boundary.take.saturating_sub(before);
        (take < mine).then_some(Tie {
            expert,
            key: boundary.key,
            take,
        })
    };
    Ok(tied.iter().zip(&mine).enumerate().filter_map(tie).collect())
}

/// Per expert the largest key over all ranks that was not kept, 0 if there is none.
fn next<E: Exchange>(grouped: &Grouped, cuts: &[Cut], exchange: &mut E) -> Result<Vec<u32>, Error> {
    let local = |(expert, cut): (usize, &Cut)| match cut {
        Cut::All => 0,
        Cut::None => grouped.largest_up_to(expert, u32::MAX),
        Cut::At(boundary) if boundary.equal > boundary.take => boundary.key,
        Cut::At(boundary) => grouped.largest_up_to(expert, boundary.key.saturating_sub(1)),
    };
    let mut next: Vec<_> = cuts.par_iter().enumerate().map(local).collect();
    exchange.max(&mut next).map_err(Error::Exchange)?;
    Ok(next)
}
