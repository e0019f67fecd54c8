//! Largest remainder apportionment, in exact integers.

use std::cmp::Reverse;

/// Shares `seats` in proportion to `weights`; ties go to the lower index.
///
/// No share exceeds its exact part rounded up. All zero if all weights are zero. A seat times the sum of the weights
/// fits in u128.
pub(super) fn apportion(seats: u64, weights: &[u128]) -> Vec<u64> {
    let total: u128 = weights.iter().sum();
    if total == 0 {
        return vec![0; weights.len()];
    }
    let parts = weights
        .iter()
        .map(|&w| divide(u128::from(seats) * w, total));
    let (mut shares, remainders): (Vec<u64>, Vec<u128>) = parts.unzip();
    let left = (seats - shares.iter().sum::<u64>()) as usize;
    if left > 0 {
        let mut order: Vec<usize> = (0..weights.len()).collect();
        let by_remainder = |&i: &usize| (Reverse(remainders[i]), i);
        order.select_nth_unstable_by_key(left - 1, by_remainder);
        for &i in &order[..left] {
            shares[i] += 1;
        }
    }
    shares
}

/// [`apportion`] with at most `limits[i]` seats for i: who would get more gets the limit, and the rest is apportioned
/// among the others; among those without weight in proportion to their limits. The limits sum to `seats` or more.
pub(super) fn apportion_within(seats: u64, weights: &[u128], limits: &[u32]) -> Vec<u64> {
    let mut shares: Vec<Option<u64>> = vec![None; weights.len()];
    loop {
        let open = |i: &usize| shares[*i].is_none();
        let open: Vec<usize> = (0..weights.len()).filter(open).collect();
        let left = seats - shares.iter().flatten().sum::<u64>();
        let mut parts: Vec<u128> = open.iter().map(|&i| weights[i]).collect();
        if parts.iter().all(|&weight| weight == 0) {
            parts = open.iter().map(|&i| limits[i].into()).collect();
        }
        let given = apportion(left, &parts);
        let over = |(&i, &share): (&usize, &u64)| share > limits[i].into();
        let settled = !open.iter().zip(&given).any(over);
        for (&i, share) in open.iter().zip(given) {
            if settled || share > limits[i].into() {
                shares[i] = Some(share.min(limits[i].into()));
            }
        }
        if settled {
            return shares.into_iter().flatten().collect();
        }
    }
}

/// Quotient and remainder; the quotient fits in u64. Division in 128 bits is slow.
pub(super) fn divide(number: u128, by: u128) -> (u64, u128) {
    match (u64::try_from(number), u64::try_from(by)) {
        (Ok(number), Ok(by)) => (number / by, (number % by).into()),
        _ => ((number / by) as u64, number % by),
    }
}

#[cfg(test)]
mod tests {
    use super::{apportion, apportion_within};

    #[test]
    fn largest_remainders_and_ties() {
        assert_eq!(apportion(10, &[1, 1, 1]), [4, 3, 3]);
        assert_eq!(apportion(10, &[6, 6, 2]), [4, 4, 2]);
        assert_eq!(apportion(3, &[0, 5, 0]), [0, 3, 0]);
        assert_eq!(apportion(3, &[0, 0]), [0, 0]);
        assert_eq!(apportion(0, &[2, 1]), [0, 0]);
        // Past 64 bits too.
        assert_eq!(apportion(10, &[6 << 70, 6 << 70, 2 << 70]), [4, 4, 2]);
    }

    #[test]
    fn limits() {
        assert_eq!(apportion_within(10, &[8, 1, 1], &[4, 9, 9]), [4, 3, 3]);
        assert_eq!(apportion_within(10, &[8, 2, 0], &[4, 3, 9]), [4, 3, 3]);
        assert_eq!(apportion_within(6, &[5, 0, 0], &[2, 2, 6]), [2, 1, 3]);
        assert_eq!(apportion_within(5, &[1, 9], &[1, 4]), [1, 4]);
        assert_eq!(apportion_within(0, &[], &[]), []);
    }
}
