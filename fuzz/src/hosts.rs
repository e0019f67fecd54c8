//! Placements from bytes.

use lrmoe_plan::Placement;

/// Every expert on the ranks whose bits are set, and on one in any case.
pub(crate) fn placement(experts: usize, ranks: usize, hosts: &[u8]) -> Placement {
    let mut by_rank = vec![Vec::new(); ranks];
    for expert in 0..experts {
        let bits = hosts.get(expert).copied().unwrap_or(0);
        let home = expert % ranks;
        for (rank, here) in by_rank.iter_mut().enumerate() {
            if rank == home && bits & ((1 << ranks) - 1) == 0 || bits >> rank & 1 == 1 {
                here.push(expert as u32);
            }
        }
    }
    Placement::new(experts, by_rank).expect("every expert has a rank")
}

/// Ranks of each expert.
pub(crate) fn hosts(placement: &Placement) -> Vec<Vec<usize>> {
    let on = |expert: usize| {
        let here = |rank: &usize| placement.local_experts(*rank).contains(&(expert as u32));
        (0..placement.ranks()).filter(here).collect()
    };
    (0..placement.experts()).map(on).collect()
}
