//! What each expert gets by load before the rest goes by value.

use lrmoe_metric::Profile;

use super::QuotaPolicy;
use super::apportion::{apportion, apportion_within, divide};
use crate::Loads;

const LARGEST: f64 = (1u64 << 40) as f64;

/// Floors of all experts when `sum` pairs are retained, at most the loads; they sum to at most `sum`.
pub(super) fn floors(
    loads: &Loads,
    sum: u64,
    policy: QuotaPolicy,
    profile: Option<&Profile>,
    floor: u32,
) -> Vec<u32> {
    // Floors before rounding are counted in units of 1 / (2 * total) of a pair.
    let unit = 2 * u128::from(loads.total());
    if unit == 0 {
        return vec![0; loads.experts()];
    }
    let by_load = |half_shares: u128| {
        let exact = move |&n: &u32| half_shares * u128::from(sum) * u128::from(n);
        loads.per_expert().iter().map(exact).collect::<Vec<_>>()
    };
    let mut exact = match (policy, profile) {
        (QuotaPolicy::Value, Some(_)) => by_load(0),
        (QuotaPolicy::Blend, Some(_)) => by_load(1),
        (QuotaPolicy::Neyman, Some(profile)) => {
            let shares = apportion_within(sum, &spreads(loads, profile), loads.per_expert());
            shares.iter().map(|&n| u128::from(n) * unit).collect()
        }
        (QuotaPolicy::Proportional, _) | (_, None) => by_load(2),
    };
    if floor > 0 {
        for (exact, &n) in exact.iter_mut().zip(loads.per_expert()) {
            *exact = (*exact).max(u128::from(floor.min(n)) * unit);
        }
    }
    round(&exact, unit, sum)
}

/// Rounds up if the sum allows it, else scales to the sum or, if only rounding exceeds it, rounds down.
fn round(exact: &[u128], unit: u128, sum: u64) -> Vec<u32> {
    let total: u128 = exact.iter().sum();
    if total >= u128::from(sum) * unit {
        return narrow(apportion(sum, exact));
    }
    let (down, up): (Vec<u64>, Vec<u64>) = exact
        .iter()
        .map(|&x| {
            let (whole, part) = divide(x, unit);
            (whole, whole + u64::from(part > 0))
        })
        .unzip();
    narrow(if up.iter().sum::<u64>() <= sum {
        up
    } else {
        down
    })
}

/// Pairs times root mean square score of each expert, as whole numbers in proportion to each other, the largest
/// [`LARGEST`]: coarse enough to make equal what only rounding errors make unequal.
///
/// An expert whose histogram is empty takes the mean over all pairs seen.
fn spreads(loads: &Loads, profile: &Profile) -> Vec<u128> {
    let moments: Vec<(f64, f64)> = (0..profile.experts())
        .map(|expert| moments(profile.counts(expert)))
        .collect();
    let pooled = moments
        .iter()
        .fold((0.0, 0.0), |all, m| (all.0 + m.0, all.1 + m.1));
    let weight = |(&(squares, seen), &n): (&(f64, f64), &u32)| {
        let (squares, seen) = if seen > 0.0 { (squares, seen) } else { pooled };
        f64::from(n) * (squares / seen).sqrt()
    };
    let weights: Vec<f64> = moments.iter().zip(loads.per_expert()).map(weight).collect();
    let largest = weights.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let whole = |weight: f64| (weight / largest * LARGEST).round() as u128;
    weights.into_iter().map(whole).collect()
}

/// Sum of squared scores, in some unit, and number of pairs of a histogram.
fn moments(counts: &[f32]) -> (f64, f64) {
    let (mut squares, mut seen) = (0.0, 0.0);
    for (bucket, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0.0) {
        seen += f64::from(count);
        if bucket > 0 {
            squares += f64::from(count) * power_of_two(bucket);
        }
    }
    (squares, seen)
}

/// In proportion to the squared score of a bucket from 1: those of neighbouring buckets differ by a factor of two.
fn power_of_two(bucket: usize) -> f64 {
    f64::from_bits((1023 + bucket as u64) << 52)
}

/// Counts that are known to be at most a load.
fn narrow(counts: Vec<u64>) -> Vec<u32> {
    counts.into_iter().map(|n| n as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::moments;

    #[test]
    fn zeros_are_seen_and_weigh_nothing() {
        assert_eq!(moments(&[3.0, 0.0, 1.0, 2.0]), (4.0 + 2.0 * 8.0, 6.0));
    }
}
