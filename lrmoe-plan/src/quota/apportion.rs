//! Largest remainder apportionment, in exact integers.

/// Shares `seats` in proportion to `weights`; ties go to the lower index.
///
/// No share exceeds its exact part rounded up. All zero if all weights are zero.
pub(super) fn apportion(seats: u64, weights: &[u128]) -> Vec<u64> {
    let total: u128 = weights.iter().sum();
    if total == 0 {
        return vec![0; weights.len()];
    }
    let exact = |&weight: &u128| u128::from(seats) * weight;
    let mut shares: Vec<u64> = weights.iter().map(|w| (exact(w) / total) as u64).collect();
    let left = seats - shares.iter().sum::<u64>();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(exact(&weights[i]) % total));
    for &i in &order[..left as usize] {
        shares[i] += 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::apportion;

    #[test]
    fn largest_remainders_and_ties() {
        assert_eq!(apportion(10, &[1, 1, 1]), [4, 3, 3]);
        assert_eq!(apportion(10, &[6, 6, 2]), [4, 4, 2]);
        assert_eq!(apportion(3, &[0, 5, 0]), [0, 3, 0]);
        assert_eq!(apportion(3, &[0, 0]), [0, 0]);
        assert_eq!(apportion(0, &[2, 1]), [0, 0]);
    }
}
