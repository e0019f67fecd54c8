//! Value curves of experts: how many of each expert's pairs are worth how much.

use std::ops::Range;

use lrmoe_metric::Profile;

use super::apportion::apportion;
use crate::Loads;

/// Pairs of each expert by falling value, in levels: all pairs of a level are worth the same.
///
/// A greedy needs only the order of the values, so levels carry none.
pub(super) struct Curves {
    /// Pairs of each expert in the levels before each, `[experts, levels + 1]`: 0 first, the loads last.
    before: Vec<u32>,
    levels: usize,
}

impl Curves {
    /// One level.
    pub(super) fn flat(loads: &Loads) -> Self {
        Self {
            before: loads.per_expert().iter().flat_map(|&n| [0, n]).collect(),
            levels: 1,
        }
    }

    /// The buckets of a profile that is not empty, highest first, each expert's histogram scaled to its load. An expert whose
    /// histogram is empty takes the sum of all histograms.
    pub(super) fn from_profile(loads: &Loads, profile: &Profile) -> Self {
        let buckets = used_buckets(profile);
        let levels = buckets.len();
        let mut before = vec![0; loads.experts() * (levels + 1)];
        let mut pooled = None;
        for ((expert, &load), before) in loads
            .per_expert()
            .iter()
            .enumerate()
            .zip(before.chunks_exact_mut(levels + 1))
        {
            let own = &profile.counts(expert)[buckets.clone()];
            if !scale(own, load, &mut before[1..]) {
                let pooled = pooled.get_or_insert_with(|| pool(profile, buckets.clone()));
                scale(pooled, load, &mut before[1..]);
            }
        }
        Self { before, levels }
    }

    /// Sets the quotas of `experts` to sum to `target`, at most their loads, with no regard to capacities: the floors by falling value, then
    /// what is above them by falling value; the last level in proportion to the pairs that each expert has in it.
    pub(super) fn share_out(
        &self,
        experts: &[u32],
        floors: &[u32],
        target: u64,
        quotas: &mut [u32],
    ) {
        let below = target < total(experts.iter().map(|&e| floors[e as usize]));
        let taken = |levels: usize, expert: u32| {
            let expert = expert as usize;
            let upto = self.before[expert * (self.levels + 1) + levels];
            if below {
                upto.min(floors[expert])
            } else {
                upto.max(floors[expert])
            }
        };
        // The last level before which no more than the target is taken.
        let (mut level, mut end, mut sum) = (0, self.levels + 1, None);
        while level + 1 < end {
            let middle = level.midpoint(end);
            let here = total(experts.iter().map(|&e| taken(middle, e)));
            if here <= target {
                (level, sum) = (middle, Some(here));
            } else {
                end = middle;
            }
        }
        for &expert in experts {
            quotas[expert as usize] = taken(level, expert);
        }
        let sum = sum.unwrap_or_else(|| total(experts.iter().map(|&e| quotas[e as usize])));
        if sum < target && level < self.levels {
            let in_level = |&e: &u32| u128::from(taken(level + 1, e) - quotas[e as usize]);
            let weights: Vec<u128> = experts.iter().map(in_level).collect();
            for (&expert, share) in experts.iter().zip(apportion(target - sum, &weights)) {
                quotas[expert as usize] += share as u32;
            }
        }
    }
}

fn total(counts: impl Iterator<Item = u32>) -> u64 {
    counts.map(u64::from).sum()
}

/// From the lowest to the highest bucket in which any expert has pairs.
fn used_buckets(profile: &Profile) -> Range<usize> {
    let mut bits = [0; Profile::BUCKETS];
    for counts in profile.to_counts().chunks_exact(Profile::BUCKETS) {
        for (bits, count) in bits.iter_mut().zip(counts) {
            *bits |= count.to_bits();
        }
    }
    let first = bits.iter().position(|&bits| bits > 0).unwrap_or(0);
    let last = bits.iter().rposition(|&bits| bits > 0).unwrap_or(first);
    first..last + 1
}

/// Sum of all histograms.
fn pool(profile: &Profile, buckets: Range<usize>) -> Vec<f64> {
    let mut pooled = vec![0.0; buckets.len()];
    for expert in 0..profile.experts() {
        for (sum, &count) in pooled
            .iter_mut()
            .zip(&profile.counts(expert)[buckets.clone()])
        {
            *sum += f64::from(count);
        }
    }
    pooled
}

/// Adds up a histogram, highest bucket first, scaled to `load` pairs; returns whether it has any.
///
/// Sums are rounded, not buckets, so that no rounding error adds up.
fn scale<T: Copy + Into<f64>>(histogram: &[T], load: u32, upto: &mut [u32]) -> bool {
    let counts = || histogram.iter().rev().map(|&count| count.into());
    let total: f64 = counts().sum();
    if total <= 0.0 {
        return false;
    }
    let scale = f64::from(load) / total;
    let mut seen = 0.0;
    for (upto, count) in upto.iter_mut().zip(counts()) {
        seen += count;
        *upto = (seen * scale + 0.5) as u32;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::{Profile, scale, used_buckets};

    fn scaled(histogram: &[f64], load: u32) -> Vec<u32> {
        let mut upto = vec![0; histogram.len()];
        assert!(scale(histogram, load, &mut upto));
        upto
    }

    #[test]
    fn buckets_in_use() {
        let used = |in_use: &[usize]| {
            let mut counts = vec![0.0; 2 * Profile::BUCKETS];
            in_use.iter().for_each(|&at| counts[at] = 0.5);
            used_buckets(&Profile::from_counts(2, counts).unwrap())
        };
        assert_eq!(used(&[]), 0..1);
        assert_eq!(used(&[7]), 7..8);
        assert_eq!(used(&[7, Profile::BUCKETS + 3, 255]), 3..256);
    }

    #[test]
    fn scaled_histograms_reach_the_load() {
        assert_eq!(scaled(&[1.0, 2.0, 1.0], 8), [2, 6, 8]);
        assert_eq!(scaled(&[0.1; 7], 3)[6], 3);
        assert_eq!(scaled(&[0.0, 0.3, 0.0], 5), [0, 5, 5]);
        assert_eq!(scaled(&[1e-30, 1e30], u32::MAX), [u32::MAX; 2]);
        assert_eq!(scaled(&[1e-9; 100], u32::MAX)[99], u32::MAX);
        assert!(!scale(&[0.0f32; 3], 5, &mut [0; 3]));
    }
}
