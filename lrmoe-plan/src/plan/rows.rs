//! How rows spread over the ranks.

use crate::flow::{Flow, balance};

/// Rows of each rank when `per_expert` pairs are spread so that the largest rank takes as few as possible, none more than
/// its limit; none if they do not fit.
pub(super) fn spread(per_expert: &[u32], by_rank: &[Vec<u32>], limits: &[u64]) -> Option<Vec<u64>> {
    let free = balance(per_expert, by_rank);
    let within = |(rows, limit): (&u64, &u64)| rows <= limit;
    if free.rank_loads.iter().zip(limits).all(within) {
        return Some(free.rank_loads);
    }
    let mut largest = free.largest;
    loop {
        let rooms: Vec<u64> = limits.iter().map(|&limit| limit.min(largest)).collect();
        let mut flow = Flow::new(per_expert.len(), by_rank, &rooms);
        let stuck = (0..per_expert.len()).find(|&expert| {
            let pairs = per_expert[expert].into();
            flow.push(expert, pairs) < pairs
        });
        if stuck.is_none() {
            return Some(flow.rank_loads());
        }
        let (experts, hosts) = flow.full_set();
        let pairs = chosen(&experts, per_expert).map(|&n| u64::from(n)).sum();
        let rooms = chosen(&hosts, limits).copied().collect();
        largest = level(pairs, rooms)?;
    }
}

fn chosen<'a, T>(mask: &'a [bool], of: &'a [T]) -> impl Iterator<Item = &'a T> {
    mask.iter()
        .zip(of)
        .filter(|(chosen, _)| **chosen)
        .map(|(_, x)| x)
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
