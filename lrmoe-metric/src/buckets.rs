use rayon::prelude::*;

use crate::Pairs;
use crate::pairs::slot;

/// Bits of the first round over several ranks: the same on all of them, whatever their keys.
const SHARED_BITS: u32 = 11;
/// Counters of one rank's first round: they are hit at random, so they should stay in the nearest cache.
const COUNTERS: usize = 1 << 14;
/// Keys that are looked at to find out where most are.
const SAMPLE: usize = 1 << 10;
/// So many pairs are worth a table of their own.
const PART: usize = 1 << 16;
/// Counters between the rows of a table, so that the same bucket of all experts does not fall on the same few lines of the cache.
const PADDING: usize = 16;

/// The buckets of the first round: `2^shift` keys each, the first from `low` on, the last to `high`; these two also hold what lies outside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buckets {
    low: u32,
    high: u32,
    shift: u32,
}

impl Buckets {
    /// The same buckets for any keys.
    fn shared() -> Self {
        Self {
            low: 0,
            high: u32::MAX,
            shift: u32::BITS - SHARED_BITS,
        }
    }

    /// Buckets where most of these keys are: scores span few of the exponents that an f32 has. Whatever the sample misses only leaves
    /// more for later rounds.
    fn over(pairs: &Pairs<'_>, keys: &[u32]) -> Self {
        let ids = pairs.expert_ids().iter();
        let mut sample: Vec<_> = ids
            .zip(keys)
            .step_by(keys.len().div_ceil(SAMPLE).max(1))
            .filter(|&(&id, &key)| slot(id) < pairs.experts() && key > 0)
            .map(|(_, &key)| key)
            .collect();
        sample.sort_unstable();
        let outside = sample.len() / 128;
        let low = sample.get(outside).copied().unwrap_or(0);
        let high = sample.iter().rev().nth(outside).copied().unwrap_or(0);
        let width = u32::BITS - (high - low).leading_zeros();
        let each = COUNTERS.min(keys.len()) / pairs.experts().max(1);
        let bits = each.max(16).ilog2().min(SHARED_BITS);
        Self {
            low,
            high,
            shift: width.saturating_sub(bits),
        }
    }

    /// Number of buckets.
    pub(crate) fn len(self) -> usize {
        self.of(self.high) + 1
    }

    fn of(self, key: u32) -> usize {
        ((key.clamp(self.low, self.high) - self.low) >> self.shift) as usize
    }

    /// The smallest key of a bucket.
    pub(crate) fn first(self, bucket: usize) -> u32 {
        match bucket {
            0 => 0,
            _ => self.low + ((bucket as u32) << self.shift),
        }
    }

    /// The largest key of a bucket.
    pub(crate) fn last(self, bucket: usize) -> u32 {
        if bucket + 1 == self.len() {
            u32::MAX
        } else {
            self.first(bucket + 1) - 1
        }
    }
}

/// The first look at a rank's keys: how many each expert has in each bucket.
pub(crate) struct Histogram {
    pub(crate) buckets: Buckets,
    /// `[experts, buckets]`.
    pub(crate) counts: Vec<u32>,
}

impl Histogram {
    pub(crate) fn new(pairs: &Pairs<'_>, keys: &[u32], ranks: usize) -> Self {
        let buckets = if ranks == 1 {
            Buckets::over(pairs, keys)
        } else {
            Buckets::shared()
        };
        let stride = buckets.len() + PADDING;
        let parts = (pairs.len() / PART).clamp(1, rayon::current_num_threads());
        let part = pairs.len().div_ceil(parts).max(1);
        let tables: Vec<_> = pairs
            .expert_ids()
            .par_chunks(part)
            .zip(keys.par_chunks(part))
            .map(|(ids, keys)| count(ids, keys, pairs.experts(), buckets, stride))
            .collect();
        let mut counts = vec![0; pairs.experts() * buckets.len()];
        let rows = counts.chunks_exact_mut(buckets.len());
        for (expert, counts) in rows.enumerate() {
            for table in &tables {
                for (count, part) in counts.iter_mut().zip(&table[expert * stride..]) {
                    *count += part;
                }
            }
        }
        Self { buckets, counts }
    }

    /// Unmasked pairs of each expert, `[experts]`.
    pub(crate) fn loads(&self) -> Vec<u32> {
        let experts = self.counts.chunks_exact(self.buckets.len());
        experts.map(|counts| counts.iter().sum()).collect()
    }

    /// The counts of an expert, `[buckets]`.
    pub(crate) fn of(&self, expert: usize) -> &[u32] {
        &self.counts[expert * self.buckets.len()..][..self.buckets.len()]
    }

    /// Drops the counts of all but these `experts`, which ascend.
    pub(crate) fn keep(&mut self, experts: &[usize]) {
        let length = self.buckets.len();
        for (to, &from) in experts.iter().enumerate() {
            if to != from {
                let counts = from * length..(from + 1) * length;
                self.counts.copy_within(counts, to * length);
            }
        }
        self.counts.truncate(experts.len() * length);
    }
}

/// Counts by expert and bucket, `[experts + 1, stride]`; the last row is that of masked pairs.
fn count(ids: &[i32], keys: &[u32], experts: usize, buckets: Buckets, stride: usize) -> Vec<u32> {
    let mut counts = vec![0; (experts + 1) * stride];
    for (&id, &key) in ids.iter().zip(keys) {
        counts[slot(id).min(experts) * stride + buckets.of(key)] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MASKED;
    use ndarray::Array2;

    fn over(keys: &[u32], masked: impl Fn(usize) -> bool) -> (u32, u32, u32) {
        let id = |(token, _)| if masked(token) { MASKED } else { 1 };
        let ids = Array2::from_shape_fn((keys.len(), 1), id);
        let gates = Array2::ones((keys.len(), 1));
        let pairs = Pairs::new(ids.view(), gates.view(), 2, 0).unwrap();
        let buckets = Buckets::over(&pairs, keys);
        (buckets.low, buckets.high, buckets.shift)
    }

    #[test]
    fn buckets_are_where_most_keys_are() {
        // Half of as many buckets as keys, 32, over 7 bits.
        let keys: Vec<u32> = (0..100).map(|i| 1000 + i).collect();
        assert_eq!(over(&keys, |_| false), (1000, 1099, 2));
        // Neither keys of nobody nor those of nothing.
        let others: Vec<u32> = (0..100)
            .map(|i| if i < 10 { 0 } else { 1000 + i })
            .collect();
        assert_eq!(over(&others, |i| i >= 90), (1010, 1089, 2));
        assert_eq!(over(&[], |_| false), (0, 0, 0));
        // Of 1,000 keys in the sample, 10 apart, 7 on either side are left out; 2^11 buckets over 14 bits.
        let many: Vec<u32> = (1..=10_000).collect();
        assert_eq!(over(&many, |_| false), (71, 9921, 3));
    }
}
