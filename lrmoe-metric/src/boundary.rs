use rayon::prelude::*;

use crate::grouped::Grouped;
use crate::{Error, Exchange};

/// Low bit and number of bits of the key that each round of a distributed selection looks at.
const ROUNDS: [(u32, u32); 3] = [(21, 11), (10, 11), (0, 10)];
/// Buckets of a histogram on one rank.
const BUCKETS: usize = 1 << 11;
/// So few keys are not worth a histogram.
const FEW: usize = 128;

/// Where an expert's keys are cut: of its `equal` pairs with the key `key`, over all ranks, `take` (at least 1) are kept; all with larger
/// keys are kept, none with smaller ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Boundary {
    pub(crate) key: u32,
    pub(crate) take: u32,
    pub(crate) equal: u32,
}

/// Boundaries of the `experts`, whose quotas are at least 1 and below their loads.
pub(crate) fn boundaries<E: Exchange>(
    grouped: &Grouped,
    experts: &[usize],
    quotas: &[u32],
    exchange: &mut E,
) -> Result<Vec<Boundary>, Error> {
    if experts.is_empty() {
        Ok(Vec::new())
    } else if exchange.ranks() == 1 {
        let local = |&expert: &usize| local(grouped.of(expert), quotas[expert]);
        Ok(experts.par_iter().map(local).collect())
    } else {
        distributed(grouped, experts, quotas, exchange)
    }
}

/// Radix select over ranks: counts by the next bits of the keys in the boundary bucket are summed, and the bucket refined.
fn distributed<E: Exchange>(
    grouped: &Grouped,
    experts: &[usize],
    quotas: &[u32],
    exchange: &mut E,
) -> Result<Vec<Boundary>, Error> {
    let mut found: Vec<_> = experts
        .iter()
        .map(|&expert| Boundary {
            key: 0,
            take: quotas[expert],
            equal: 0,
        })
        .collect();
    for (low, bits) in ROUNDS {
        let buckets = 1 << bits;
        let mut counts = vec![0; experts.len() * buckets];
        counts
            .par_chunks_exact_mut(buckets)
            .zip(experts)
            .zip(&found)
            .for_each(|((counts, &expert), boundary)| {
                for &key in grouped.of(expert).flatten() {
                    // In the first round there are no higher bits.
                    if u64::from(key) >> (low + bits) == boundary.key.into() {
                        counts[(key >> low) as usize & (buckets - 1)] += 1;
                    }
                }
            });
        exchange.sum(&mut counts).map_err(Error::Exchange)?;
        for (boundary, counts) in found.iter_mut().zip(counts.chunks_exact(buckets)) {
            let (bucket, take) = descend(counts, boundary.take);
            boundary.key = boundary.key << bits | bucket as u32;
            boundary.take = take;
            boundary.equal = counts[bucket];
        }
    }
    Ok(found)
}

/// The bucket that holds the `take`-th largest item, and which of the bucket's items it is.
fn descend(counts: &[u32], mut take: u32) -> (usize, u32) {
    let mut bucket = counts.len() - 1;
    while bucket > 0 && counts[bucket] < take {
        take -= counts[bucket];
        bucket -= 1;
    }
    (bucket, take)
}

/// The boundary on one rank: the buckets divide the range of the remaining keys, so that one round usually leaves few.
fn local<'a>(parts: impl Iterator<Item = &'a [u32]>, quota: u32) -> Boundary {
    let mut keys = Vec::new();
    parts.for_each(|part| keys.extend_from_slice(part));
    let mut take = quota;
    while keys.len() > FEW {
        let (low, high) = range(&keys);
        let bits = u32::BITS - (high - low).leading_zeros();
        let shift = bits.saturating_sub(BUCKETS.ilog2());
        let bucket_of = |key: u32| ((key - low) >> shift) as usize;
        let mut counts = [0; BUCKETS];
        for &key in &keys {
            counts[bucket_of(key)] += 1;
        }
        let (bucket, rest) = descend(&counts, take);
        take = rest;
        if shift == 0 {
            return Boundary {
                key: low + bucket as u32,
                take,
                equal: counts[bucket],
            };
        }
        keys.retain(|&key| bucket_of(key) == bucket);
    }
    let (_, &mut key, _) = keys.select_nth_unstable_by(take as usize - 1, |a, b| b.cmp(a));
    let larger = keys.iter().filter(|&&other| other > key).count() as u32;
    let equal = keys.iter().filter(|&&other| other == key).count() as u32;
    Boundary {
        key,
        take: take - larger,
        equal,
    }
}

/// The smallest and the largest key.
fn range(keys: &[u32]) -> (u32, u32) {
    keys.iter().fold((u32::MAX, 0), |(low, high), &key| {
        (low.min(key), high.max(key))
    })
}
