//! The most valuable quotas that can be routed, by decomposition.

use super::curve::Curves;
use crate::flow::Flow;

/// Where retained pairs can run: experts of each rank, and what each rank can take.
#[derive(Clone, Copy)]
pub(super) struct Room<'a> {
    pub(super) by_rank: &'a [Vec<u32>],
    pub(super) capacities: &'a [u64],
}

/// Experts that share `target` pairs among themselves, on ranks that no other part uses.
struct Part {
    experts: Vec<u32>,
    target: u64,
}

/// Experts that ask for more than all their ranks can take, and these ranks.
struct Cut {
    experts: Vec<bool>,
    ranks: Vec<bool>,
}

/// Quotas that sum to `target`, which is at most what can be routed.
///
/// Each part shares out its target with no regard to capacities. If that can be routed, it is done. Otherwise a minimum
/// cut shows the experts that ask for too much: in the best quotas they fill their ranks exactly, so they become a part with
/// these ranks, and the others one with the rest. There are at most as many parts as experts, and one flow tries
/// all of them.
pub(super) fn decompose(curves: &Curves, floors: &[u32], target: u64, room: Room<'_>) -> Vec<u32> {
    let mut quotas = vec![0; floors.len()];
    let mut by_rank = room.by_rank.to_vec();
    let mut parts = vec![Part {
        experts: (0..floors.len() as u32).collect(),
        target,
    }];
    while !parts.is_empty() {
        for part in &parts {
            curves.share_out(&part.experts, floors, part.target, &mut quotas);
        }
        let mut cut = Cut {
            experts: vec![false; floors.len()],
            ranks: vec![false; by_rank.len()],
        };
        let mut flow = Flow::new(floors.len(), &by_rank, room.capacities);
        let mut smaller = Vec::new();
        for part in parts {
            let capacity = cut.extend(&part.experts, &quotas, &mut flow, room.capacities);
            let inside = |e: &u32| cut.experts[*e as usize];
            let (over, others): (Vec<u32>, Vec<u32>) = part.experts.into_iter().partition(inside);
            if over.is_empty() {
                continue;
            }
            let rest = part.target - capacity;
            for (experts, target) in [(over, capacity), (others, rest)] {
                smaller.push(Part { experts, target });
            }
        }
        parts = smaller;
        cut.separate(&mut by_rank);
    }
    quotas
}

impl Cut {
    /// Pushes the quotas of a part and takes in the experts that there is no room for; returns what their ranks can take.
    fn extend(
        &mut self,
        experts: &[u32],
        quotas: &[u32],
        flow: &mut Flow<'_>,
        capacities: &[u64],
    ) -> u64 {
        let mut capacity = 0;
        for expert in experts.iter().map(|&e| e as usize) {
            let quota = quotas[expert].into();
            if self.experts[expert] || flow.push(expert, quota) == quota {
                continue;
            }
            let (experts, ranks) = flow.full_set();
            for (mine, full) in self.experts.iter_mut().zip(experts) {
                *mine |= full;
            }
            for ((mine, full), &of_rank) in self.ranks.iter_mut().zip(ranks).zip(capacities) {
                if full && !*mine {
                    *mine = true;
                    capacity += of_rank;
                }
            }
        }
        capacity
    }

    /// Takes the instances of all other experts off the ranks inside.
    fn separate(&self, by_rank: &mut [Vec<u32>]) {
        for (here, _) in by_rank
            .iter_mut()
            .zip(&self.ranks)
            .filter(|(_, full)| **full)
        {
            here.retain(|&e| self.experts[e as usize]);
        }
    }
}
