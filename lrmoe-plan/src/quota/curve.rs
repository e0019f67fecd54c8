//! Value curves of experts: how many of each expert's pairs are worth how much.

use lrmoe_metric::Profile;

use crate::Loads;

/// Pairs of each expert by falling value: `levels[l][e]` pairs of expert e have the l-th highest value.
///
/// Over the levels they sum to the loads. A greedy needs only the order of the values, so levels carry none.
/// An expert whose histogram is empty takes the sum of all histograms.
pub(super) fn levels(loads: &Loads, profile: Option<&Profile>) -> Vec<Vec<u32>> {
    let Some(profile) = profile else {
        return vec![loads.per_expert().to_vec()];
    };
    let mut pooled = vec![0.0; Profile::BUCKETS];
    for expert in 0..loads.experts() {
        for (sum, &count) in pooled.iter_mut().zip(profile.counts(expert)) {
            *sum += f64::from(count);
        }
    }
    let mut levels = vec![vec![0; loads.experts()]; Profile::BUCKETS];
    for (expert, &load) in loads.per_expert().iter().enumerate() {
        let own: Vec<f64> = profile.counts(expert).iter().map(|&n| n.into()).collect();
        let seen = own.iter().any(|&n| n > 0.0);
        let histogram = if seen { &own } else { &pooled };
        for (level, count) in levels.iter_mut().zip(scale(histogram, load)) {
            level[expert] = count;
        }
    }
    levels.retain(|level| level.iter().any(|&n| n > 0));
    levels
}

/// Scales a histogram that is not all zero to `load` pairs, highest bucket first.
///
/// The pairs in the highest b buckets, b = 1, 2, .., are rounded, so that no rounding error adds up.
fn scale(histogram: &[f64], load: u32) -> impl Iterator<Item = u32> {
    let total: f64 = histogram.iter().rev().sum();
    histogram
        .iter()
        .rev()
        .scan((0.0, 0), move |(seen, given), &count| {
            *seen += count;
            let upto = (f64::from(load) * (*seen / total)).round() as u32;
            let here = upto - *given;
            *given = upto;
            Some(here)
        })
}

#[cfg(test)]
mod tests {
    use super::scale;

    #[test]
    fn scaled_histograms_sum_to_the_load() {
        assert_eq!(scale(&[1.0, 2.0, 1.0], 8).collect::<Vec<_>>(), [2, 4, 2]);
        assert_eq!(scale(&[0.1; 7], 3).sum::<u32>(), 3);
        assert_eq!(scale(&[0.0, 0.3, 0.0], 5).collect::<Vec<_>>(), [0, 5, 0]);
        assert_eq!(scale(&[1e-30, 1e30], u32::MAX).sum::<u32>(), u32::MAX);
    }
}
