//! How rows spread over the ranks.

use crate::flow::{Flow, mean_load};

/// Rows of each rank when `per_expert` pairs are spread so that the largest rank takes as few as possible, none more than
/// its limit; none if they do not fit.
pub(super) fn spread(flow: &mut Flow, per_expert: &[u32], limits: &[u64]) -> Option<Vec<u64>> {
    let mut largest = flow.balance(per_expert, mean_load(per_expert, limits.len()));
    let rows = flow.rank_loads();
    if rows.iter().zip(limits).all(|(rows, limit)| rows <= limit) {
        return Some(rows);
    }
    loop {
        let rooms: Vec<u64> = limits.iter().map(|&limit| limit.min(largest)).collect();
        flow.fill_within(per_expert, &rooms);
        if flow.is_settled() {
            return Some(flow.rank_loads());
        }
        let full = flow.full_experts().iter();
        let pairs = full.map(|&e| u64::from(per_expert[e as usize])).sum();
        let vessels = flow.full_ranks().map(|rank| limits[rank]);
        largest = level(pairs, vessels.collect())?;
    }
}

/// The lowest level up to which `pairs` fill vessels of the given sizes; none if they do not fit.
fn level(mut pairs: u64, mut vessels: Vec<u64>) -> Option<u64> {
    vessels.sort_unstable();
    for (filled, &size) in vessels.iter().enumerate() {
        let level = pairs.div_ceil((vessels.len() - filled) as u64);
        if level <= size {
            return Some(level);
        }
        pairs -= size;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::level;

    #[test]
    fn levels_of_vessels() {
        assert_eq!(level(10, vec![4, 9, 1]), Some(5));
        assert_eq!(level(9, vec![3, 3, 3]), Some(3));
        assert_eq!(level(10, vec![3, 3, 3]), None);
        assert_eq!(level(7, vec![u64::MAX, 0]), Some(7));
    }
}
