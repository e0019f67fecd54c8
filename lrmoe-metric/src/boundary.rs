use rayon::prelude::*;

use crate::buckets::Buckets;
use crate::grouped::{Grouped, Window};
use crate::{Error, Exchange};

/// Low bit and number of bits of the key that each further round of a selection over several ranks looks at.
const ROUNDS: [(u32, u32); 2] = [(10, 11), (0, 10)];
/// Buckets of a further histogram on one rank.
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

/// What the first round says about an expert whose quota is at least 1 and below its load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct First {
    /// The bucket with the last key that is kept.
    bucket: usize,
    /// Which of the bucket's keys, from the largest, that is.
    take: u32,
    /// The bucket with the next key.
    next: usize,
}

impl First {
    /// From the counts by bucket over all ranks.
    pub(crate) fn new(counts: &[u32], quota: u32) -> Self {
        let (bucket, take) = descend(counts, quota);
        let next = if take < counts[bucket] {
            Some(bucket)
        } else {
            counts[..bucket].iter().rposition(|&count| count > 0)
        };
        Self {
            bucket,
            take,
            next: next.unwrap_or(0),
        }
    }

    pub(crate) fn window(self, buckets: Buckets) -> Window {
        Window {
            low: buckets.first(self.next),
            high: buckets.last(self.bucket),
        }
    }
}

/// Boundaries of the `experts` after the first round.
pub(crate) fn boundaries<E: Exchange>(
    grouped: &mut Grouped,
    experts: &[usize],
    first: &[First],
    exchange: &mut E,
) -> Result<Vec<Boundary>, Error> {
    if experts.is_empty() {
        Ok(Vec::new())
    } else if exchange.ranks() == 1 {
        let each = grouped.windows(experts).into_par_iter().zip(first);
        Ok(each.map(|(keys, first)| local(keys, first.take)).collect())
    } else {
        distributed(grouped, experts, first, exchange)
    }
}

/// Radix select over ranks: counts by the next bits of the keys in the boundary bucket are summed, and the bucket refined.
fn distributed<E: Exchange>(
    grouped: &Grouped,
    experts: &[usize],
    first: &[First],
    exchange: &mut E,
) -> Result<Vec<Boundary>, Error> {
    let mut found: Vec<_> = first
        .iter()
        .map(|first| Boundary {
            key: first.bucket as u32,
            take: first.take,
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
                    if key >> (low + bits) == boundary.key {
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

/// The boundary on one rank, from the keys in the window: the buckets divide the range of the remaining keys, so that one round usually leaves few.
fn local(mut keys: &mut [u32], mut take: u32) -> Boundary {
    while keys.len() > FEW {
        let (low, high) = range(keys);
        if low == high {
            return Boundary {
                key: low,
                take,
                equal: keys.len() as u32,
            };
        }
        let bits = u32::BITS - (high - low).leading_zeros();
        let shift = bits.saturating_sub(BUCKETS.ilog2());
        let bucket_of = |key: u32| ((key - low) >> shift) as usize;
        let mut counts = [0; BUCKETS];
        for &key in &*keys {
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
        keys = retained(keys, |key| bucket_of(key) == bucket);
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

/// The keys to keep, moved to the front.
fn retained(keys: &mut [u32], keep: impl Fn(u32) -> bool) -> &mut [u32] {
    let mut kept = 0;
    for at in 0..keys.len() {
        keys[kept] = keys[at];
        kept += usize::from(keep(keys[kept]));
    }
    &mut keys[..kept]
}

/// The smallest and the largest key.
fn range(keys: &[u32]) -> (u32, u32) {
    keys.iter().fold((u32::MAX, 0), |(low, high), &key| {
        (low.min(key), high.max(key))
    })
}

#[cfg(test)]
mod tests {
    use super::{Boundary, FEW, local};

    #[test]
    fn local_as_by_a_sort() {
        // Scattered; so few values that a bucket holds one; clusters far apart; one value, and two.
        let values: [fn(u32) -> u32; 5] = [
            |x| x,
            |x| x % 700,
            |x| (x % 5) << 28 | x >> 24,
            |_| 7,
            |x| u32::MAX - x % 2,
        ];
        for value in values {
            let scattered = (1..=8 * FEW as u32).map(|i| value(i.wrapping_mul(0x9e37_79b9)));
            let keys: Vec<u32> = scattered.collect();
            let mut sorted = keys.clone();
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            for place in (0..keys.len())
                .step_by(keys.len() / 37)
                .chain([keys.len() - 1])
            {
                let key = sorted[place];
                let larger = sorted.partition_point(|&other| other > key);
                let equal = sorted.partition_point(|&other| other >= key) - larger;
                let expected = Boundary {
                    key,
                    take: (place + 1 - larger) as u32,
                    equal: equal as u32,
                };
                assert_eq!(local(&mut keys.clone(), place as u32 + 1), expected);
            }
        }
    }
}
