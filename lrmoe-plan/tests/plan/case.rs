//! Requests for placements.

use lrmoe_plan::ndarray::Array2;
use lrmoe_plan::{Loads, Placement};
use proptest::prelude::*;

/// Loads that all come from one source rank.
pub(crate) fn one_rank_loads(per_expert: &[u32]) -> Loads {
    Loads::new(Array2::from_shape_vec((1, per_expert.len()), per_expert.to_vec()).unwrap()).unwrap()
}

/// Experts of each rank.
pub(crate) fn experts(placement: &Placement) -> Vec<&[u32]> {
    (0..placement.ranks())
        .map(|r| placement.local_experts(r))
        .collect()
}

/// Loads, slots that hold every expert, a previous placement within the slots, ranks per node.
pub(crate) fn cases() -> impl Strategy<Value = (Vec<u32>, Vec<u32>, Placement, usize)> {
    (1usize..=5, 1usize..=8).prop_flat_map(|(ranks, experts)| {
        (
            prop::collection::vec(prop_oneof![0u32..5, 0u32..1000], experts),
            prop::collection::vec(0u32..5, ranks),
            prop::collection::vec(any::<prop::sample::Index>(), experts + 6),
            1usize..4,
        )
            .prop_map(move |(loads, mut slots, picks, per_node)| {
                let missing = (experts as u32).saturating_sub(slots.iter().sum());
                slots[ranks / 2] += missing;
                let mut by_rank = vec![Vec::new(); ranks];
                for (i, pick) in picks.iter().enumerate() {
                    let expert = (i % experts) as u32;
                    let open: Vec<usize> = (0..ranks)
                        .filter(|&r| {
                            by_rank[r].len() < slots[r] as usize && !by_rank[r].contains(&expert)
                        })
                        .collect();
                    if !open.is_empty() {
                        by_rank[*pick.get(&open)].push(expert);
                    }
                }
                (
                    loads,
                    slots,
                    Placement::new(experts, by_rank).unwrap(),
                    per_node,
                )
            })
    })
}
