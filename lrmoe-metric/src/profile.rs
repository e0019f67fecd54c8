use rayon::prelude::*;

use crate::error::check_length;
use crate::exchange::settle;
use crate::pairs::{CHUNK, slot};
use crate::{Error, Exchange, Pairs, Scores};

/// Parts of a bucket.
const FINE: f64 = 64.0;

/// Per expert a histogram of the scores of its pairs over all ranks, kept as an exponential moving average over steps.
///
/// A bucket is the exponent field (0..=255) of the true squared score as an f32 would have it: 0 for scores of zero, 255 for infinities,
/// others clamped to 1..=254. Neighbouring buckets are a factor of `sqrt(2)` apart in the score.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// `[experts, BUCKETS]`.
    counts: Vec<f32>,
}

impl Profile {
    /// Buckets per expert.
    pub const BUCKETS: usize = 256;

    /// A profile in which nothing has been observed.
    ///
    /// # Panics
    ///
    /// If `experts` histograms are more than a [`Vec`] can hold.
    pub fn new(experts: usize) -> Self {
        Self {
            counts: vec![0.0; experts.saturating_mul(Self::BUCKETS)],
        }
    }

    /// Takes up a stored profile, `[experts, BUCKETS]`, as [`to_counts`](Self::to_counts) gave it.
    ///
    /// # Errors
    ///
    /// [`Error::Length`], [`Error::ProfileCount`].
    pub fn from_counts(experts: usize, counts: Vec<f32>) -> Result<Self, Error> {
        let expected = experts.saturating_mul(Self::BUCKETS);
        check_length("profile counts", counts.len(), expected)?;
        match counts
            .iter()
            .position(|count| !(0.0..f32::INFINITY).contains(count))
        {
            Some(at) => Err(Error::ProfileCount {
                expert: at / Self::BUCKETS,
                bucket: at % Self::BUCKETS,
                count: counts[at],
            }),
            None => Ok(Self { counts }),
        }
    }

    /// All counts, `[experts, BUCKETS]`, for a checkpoint.
    pub fn to_counts(&self) -> &[f32] {
        &self.counts
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.counts.len() / Self::BUCKETS
    }

    /// Whether no pair has been observed yet.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|&count| count == 0.0)
    }

    /// Averaged number of pairs per bucket, `[BUCKETS]`, of an expert.
    ///
    /// # Panics
    ///
    /// If `expert` is not below [`experts`](Self::experts).
    pub fn counts(&self, expert: usize) -> &[f32] {
        &self.counts[expert * Self::BUCKETS..][..Self::BUCKETS]
    }

    /// The score, not squared, that a bucket stands for: 0 for bucket 0, else the geometric middle of its scores.
    pub fn bucket_score(bucket: usize) -> f64 {
        match bucket {
            0 => 0.0,
            bucket => ((bucket as f64 - 127.0 + 0.5) / 2.0).exp2(),
        }
    }

    /// Adds the scores of a step: counts become `decay * old + (1 - decay) * new`, or the new ones where nothing was observed before.
    ///
    /// `decay` in `[0, 1)` is the same on every rank. Costs one [`Exchange::sum`] of `experts * BUCKETS + 1` values.
    ///
    /// # Errors
    ///
    /// [`Error::Decay`], [`Error::ProfileExperts`], [`Error::Length`], [`Error::Exchange`]; [`Error::Elsewhere`] on the ranks that have no
    /// error of their own when another has. The profile is then unchanged.
    pub fn observe<E: Exchange>(
        &mut self,
        pairs: &Pairs<'_>,
        scores: &Scores,
        decay: f32,
        exchange: &mut E,
    ) -> Result<(), Error> {
        let local = self.check(pairs, scores, decay);
        let mut counts = match local {
            Ok(()) => histogram(pairs, scores),
            Err(_) => vec![0; pairs.experts() * Self::BUCKETS],
        };
        counts.push(local.is_err().into());
        exchange.sum(&mut counts).map_err(Error::Exchange)?;
        settle(local, counts.pop().unwrap_or(0))?;
        let decay = if self.is_empty() { 0.0 } else { decay };
        for (old, new) in self.counts.iter_mut().zip(counts) {
            *old = decay * *old + (1.0 - decay) * new as f32;
        }
        Ok(())
    }

    /// The profile of recalibrated scores `s / S^alpha`, where S is the sum of an expert's scores when it has `loads[e]` pairs, `[experts]`,
    /// and `alpha` lies in [0, 1]; all of them times one number, which leaves the largest S as it is.
    ///
    /// The pairs of an expert compare with each other as before, and so nothing changes in a selection within given quotas. What changes is how
    /// experts compare: at 1 all of them weigh the same, whatever the sizes of their gradients. A histogram moves by a number of buckets that
    /// is seldom whole; a count is then shared out to the two nearest.
    ///
    /// # Errors
    ///
    /// [`Error::Recalibration`], [`Error::Length`].
    pub fn recalibrated(&self, loads: &[u32], alpha: f64) -> Result<Self, Error> {
        if !(0.0..=1.0).contains(&alpha) {
            return Err(Error::Recalibration { alpha });
        }
        check_length("loads", loads.len(), self.experts())?;
        let logs: Vec<f64> = (0..self.experts())
            .map(|expert| self.log_sum(expert, loads[expert]))
            .collect();
        let largest = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut moved = Self::new(self.experts());
        for ((to, from), log) in (moved.counts.chunks_exact_mut(Self::BUCKETS))
            .zip(self.counts.chunks_exact(Self::BUCKETS))
            .zip(logs)
        {
            if !log.is_finite() {
                to.copy_from_slice(from);
                continue;
            }
            // Two buckets are a factor of two; rounded, so that the last bits of a logarithm do not matter.
            let buckets = (2.0 * alpha * (largest - log) * FINE).round() / FINE;
            shift(from, buckets, to);
        }
        Ok(moved)
    }

    /// Binary logarithm of the sum of the scores of an expert that has `load` pairs; infinite if the sum is 0.
    fn log_sum(&self, expert: usize, load: u32) -> f64 {
        let (mut sum, mut seen) = (0.0, 0.0);
        for (bucket, &count) in self.counts(expert).iter().enumerate() {
            sum += f64::from(count) * Self::bucket_score(bucket);
            seen += f64::from(count);
        }
        let mean = if seen > 0.0 { sum / seen } else { 0.0 };
        (f64::from(load) * mean).log2()
    }

    fn check(&self, pairs: &Pairs<'_>, scores: &Scores, decay: f32) -> Result<(), Error> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::Decay { decay });
        }
        if self.experts() != pairs.experts() {
            return Err(Error::ProfileExperts {
                profile: self.experts(),
                pairs: pairs.experts(),
            });
        }
        check_length("scores", scores.squared().len(), pairs.len())
    }
}

/// A histogram moved up, its zeros and infinities left where they are. Counts that meet in the last bucket stay within f32.
fn shift(from: &[f32], buckets: f64, to: &mut [f32]) {
    let last = Profile::BUCKETS - 2;
    let (whole, part) = (buckets as usize, buckets.fract() as f32);
    to[0] = from[0];
    to[last + 1] = from[last + 1];
    let mut add = |bucket: usize, count: f32| {
        let to = &mut to[bucket.min(last)];
        *to = (*to + count).min(f32::MAX);
    };
    for (bucket, count) in from.iter().enumerate().take(last + 1).skip(1) {
        add(bucket + whole, (1.0 - part) * count);
        add(bucket + whole + 1, part * count);
    }
}

/// Unmasked pairs of this rank per expert and bucket.
fn histogram(pairs: &Pairs<'_>, scores: &Scores) -> Vec<u32> {
    // As many tables as threads, however many pairs.
    let parts = (pairs.len() / CHUNK).clamp(1, rayon::current_num_threads());
    let part = pairs.len().div_ceil(parts).max(1);
    let empty = || vec![0; pairs.experts() * Profile::BUCKETS];
    let count = |(ids, squared): (&[i32], &[f32])| {
        let mut counts = empty();
        let (experts, _) = counts.as_chunks_mut::<{ Profile::BUCKETS }>();
        for (&id, &squared) in ids.iter().zip(squared) {
            if let Some(counts) = experts.get_mut(slot(id)) {
                counts[bucket(squared, scores.exponent())] += 1;
            }
        }
        counts
    };
    pairs
        .expert_ids()
        .par_chunks(part)
        .zip(scores.squared().par_chunks(part))
        .map(count)
        .reduce_with(|mut left, right| {
            left.iter_mut()
                .zip(right)
                .for_each(|(left, right)| *left += right);
            left
        })
        .unwrap_or_else(empty)
}

fn bucket(squared: f32, exponent: i32) -> usize {
    match squared.to_bits() >> 23 {
        0 => 0,
        255 => 255,
        field => (field as i32 + 2 * exponent).clamp(1, 254) as usize,
    }
}
