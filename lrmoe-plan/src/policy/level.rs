//! Placements whose ranks all bear the mean load.

/// What one rank gets: experts with the pairs of each.
pub(super) type Group = Vec<(u32, u64)>;

/// The experts of each group.
pub(super) fn experts(groups: impl IntoIterator<Item = Group>) -> Vec<Vec<u32>> {
    let experts = |group: Group| group.into_iter().map(|(e, _)| e).collect();
    groups.into_iter().map(experts).collect()
}

/// Divides all pairs among ranks with `slots`, at most `level` to a rank, with few instances; none if that
/// fails.
///
/// This is the alias method (Walker 1977) for more than two slots. With the experts sorted by what they have
/// left, a window of as many as the rank has slots moves up until its sum reaches the level. All but the last
/// go to the rank whole, the last tops it up and is sorted in again with the rest.
///
/// It cannot fail for R ranks with s slots each, at most (s - 1) R + 1 experts, and a level of at least the mean:
/// - The window before the one that reached the level has a smaller sum, so its upper s - 1 experts fit. If the
///   lowest window reaches the level, its experts go one by one while they fit. If no window reaches it, the
///   highest one fits whole; it has at least the mean, because s experts are at least an R-th of all.
/// - Either way what remains is at most the level for each remaining rank, and s - 1 experts or more are gone
///   (fewer only if there were fewer than allowed). With one rank left, all remaining experts fit into it.
///
/// Ranks with few slots come first, so that they still find large experts.
pub(super) fn level(per_expert: &[u32], slots: &[usize], level: u64) -> Option<Vec<Group>> {
    let mut left: Vec<(u64, u32)> = per_expert.iter().map(|&n| n.into()).zip(0..).collect();
    left.sort_unstable();
    let mut order: Vec<usize> = (0..slots.len()).collect();
    order.sort_by_key(|&rank| slots[rank]);

    let mut groups = vec![Group::new(); slots.len()];
    for rank in order {
        let width = slots[rank].min(left.len());
        if width == 0 {
            continue;
        }
        let first = reaching(&left, width, level);
        let (mut end, mut room) = (first, level);
        while end < first + width && left[end].0 <= room {
            room -= left[end].0;
            end += 1;
        }
        groups[rank].extend(left[first..end].iter().map(|&(n, e)| (e, n)));
        if end < first + width && room > 0 {
            let (n, expert) = left.remove(end);
            groups[rank].push((expert, room));
            let rest = (n - room, expert);
            left.drain(first..end);
            left.insert(left.partition_point(|&other| other < rest), rest);
        } else {
            left.drain(first..end);
        }
    }
    left.is_empty().then_some(groups)
}

/// Start of the window of `width` experts to take from: one past the last whose sum is below `level`, unless
/// that is the highest window or there is none.
fn reaching(left: &[(u64, u32)], width: usize, level: u64) -> usize {
    let last = left.len() - width;
    let sum = |start: usize| left[start..start + width].iter().map(|x| x.0).sum::<u64>();
    let (mut low, mut high) = (0, last);
    while low < high {
        let middle = low.midpoint(high);
        if sum(middle) < level {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::level;

    #[test]
    fn windows_by_hand() {
        // A window of exactly the level goes whole.
        let whole = level(&[1, 2, 3, 4], &[2, 2], 5).unwrap();
        assert_eq!(whole, [[(1, 2), (2, 3)], [(0, 1), (3, 4)]]);
        // Nothing of an expert for which there is no room.
        let full = level(&[2, 3, 5, 5], &[3, 3, 3], 5).unwrap();
        assert_eq!(full, [vec![(0, 2), (1, 3)], vec![(2, 5)], vec![(3, 5)]]);
        // The last of a window tops it up.
        let topped_up = level(&[9, 1], &[2, 2], 5).unwrap();
        assert_eq!(topped_up, [vec![(1, 1), (0, 4)], vec![(0, 5)]]);
        assert_eq!(level(&[9, 1, 1, 1], &[2, 2], 6), None);
    }
}
