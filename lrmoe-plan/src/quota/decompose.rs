//! The most valuable quotas that can be routed, by decomposition.

use super::curve::Curves;
use crate::flow::Flow;

/// Experts that share `target` pairs among themselves, on ranks that no other part uses.
struct Part {
    experts: Vec<u32>,
    target: u64,
}

/// Quotas that sum to `target`, which is at most what can be routed.
///
/// Each part shares out its target with no regard to capacities. If that can be routed, it is done. Otherwise a minimum
/// cut shows the experts that ask for too much: in the best quotas they fill their ranks exactly, so they become a part with
/// these ranks, and the others one with the rest. There are at most as many parts as experts, and one flow tries
/// all of them. It loses the instances that the cuts leave without use.
pub(super) fn decompose(
    curves: &Curves,
    floors: &[u32],
    target: u64,
    flow: &mut Flow,
    capacities: &[u64],
) -> Vec<u32> {
    let mut quotas = vec![0; floors.len()];
    let mut parts = vec![Part {
        experts: (0..floors.len() as u32).collect(),
        target,
    }];
    while !parts.is_empty() {
        for part in &parts {
            curves.share_out(&part.experts, floors, part.target, &mut quotas);
        }
        flow.fill_within(&quotas, capacities);
        if flow.is_settled() {
            break;
        }
        let cut = Cut::new(flow, capacities);
        parts = parts.into_iter().flat_map(|part| cut.split(part)).collect();
        cut.separate(flow);
    }
    quotas
}

/// Experts that ask for more than all their ranks can take, and these ranks.
struct Cut {
    /// Experts inside.
    inside: Vec<bool>,
    ranks: Vec<usize>,
    /// What the ranks can take, counted at one of the experts inside that each hosts.
    capacity: Vec<u64>,
}

impl Cut {
    /// The minimum cut that a flow which is not settled has come upon.
    fn new(flow: &Flow, capacities: &[u64]) -> Self {
        let mut inside = vec![false; flow.hosts().experts()];
        for &expert in flow.full_experts() {
            inside[expert as usize] = true;
        }
        let ranks: Vec<usize> = flow.full_ranks().collect();
        let mut capacity = vec![0; inside.len()];
        for &rank in &ranks {
            let mut here = flow.hosts().on_rank(rank).iter().map(|i| i.expert as usize);
            if let Some(expert) = here.find(|&expert| inside[expert]) {
                capacity[expert] += capacities[rank];
            }
        }
        Self {
            inside,
            ranks,
            capacity,
        }
    }

    /// The parts that `part` falls into, none if it is done.
    fn split(&self, part: Part) -> impl Iterator<Item = Part> {
        let inside = |&expert: &u32| self.inside[expert as usize];
        let (over, others): (Vec<u32>, Vec<u32>) = part.experts.into_iter().partition(inside);
        let capacity = over.iter().map(|&e| self.capacity[e as usize]).sum();
        let rest = part.target.saturating_sub(capacity);
        let parts = if over.is_empty() {
            [None, None]
        } else {
            [(over, capacity), (others, rest)]
                .map(|(experts, target)| Some(Part { experts, target }))
        };
        parts.into_iter().flatten()
    }

    /// Takes all other experts off the ranks inside.
    fn separate(&self, flow: &mut Flow) {
        for &rank in &self.ranks {
            let here = flow.hosts().on_rank(rank).iter().map(|i| i.expert);
            let others: Vec<u32> = here.filter(|&e| !self.inside[e as usize]).collect();
            for expert in others {
                flow.remove(rank, expert);
            }
        }
    }
}
