//! Slots, placement and forward rows that fit into the budgets.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::PlanRequest;
use super::budget::{fewest_slots, least_needed, limits, needed, reserve};
use super::rows::spread;
use crate::arithmetic::left;
use crate::error::expect;
use crate::flow::Flow;
use crate::memory::budget_too_small;
use crate::policy::enough_slots;
use crate::{Error, Memory, MemoryModel, Placement, PlacementRequest};

/// Where experts live and the forward pass runs.
pub(super) struct Layout {
    /// Slots that take memory, `[ranks]`.
    pub(super) slots: Vec<u32>,
    pub(super) placement: Placement,
    /// Over the placement.
    pub(super) flow: Flow,
    /// Empty until they have been spread.
    pub(super) forward_rows: Vec<u64>,
}

impl Layout {
    /// Memory of a rank with so many retained rows.
    pub(super) fn memory_of(&self, model: &MemoryModel, rank: usize, retained: u64) -> Memory {
        let (slots, forward) = (self.slots[rank], self.forward_rows[rank]);
        model.of_rank(&self.placement, rank, slots, forward, retained)
    }

    /// Spreads the forward rows; whether they fit.
    fn spread(&mut self, request: &PlanRequest<'_>) -> bool {
        let rows = limits(request, &self.slots, |rank| request.budget[rank])
            .and_then(|limits| spread(&mut self.flow, request.loads.per_expert(), &limits));
        self.forward_rows = rows.unwrap_or_default();
        !self.forward_rows.is_empty()
    }
}

/// The layout on the slots given, or on those that [`plan`](super::plan) describes.
pub(super) fn lay_out(request: &PlanRequest<'_>, wanted: u64) -> Result<Layout, Error> {
    let Some(slots) = request.slots else {
        return choose(request, wanted);
    };
    enough_slots(request.loads.experts(), slots)?;
    let mut layout = place(request, slots, false)?;
    if layout.spread(request) {
        return Ok(layout);
    }
    let needed = needed(request, &mut layout, slots);
    Err(budget_too_small(&needed, request.budget))
}

/// What the policy places on the slots; with `trim`, slots that it leaves unused take no memory.
pub(super) fn place(request: &PlanRequest<'_>, slots: &[u32], trim: bool) -> Result<Layout, Error> {
    let placement = request.placement.place(&PlacementRequest {
        loads: request.loads,
        previous: request.previous,
        slots,
        topology: request.topology,
    })?;
    let (ranks, experts) = (request.topology.ranks(), request.loads.experts());
    expect("ranks of the placement", ranks, placement.ranks())?;
    expect("experts of the placement", experts, placement.experts())?;
    let used = |rank| placement.on_rank(rank).len();
    for (rank, &slots) in slots.iter().enumerate() {
        let needed = used(rank);
        if needed > slots as usize {
            return Err(Error::RankSlots {
                rank,
                slots,
                needed,
            });
        }
    }
    let slots = if trim {
        (0..ranks).map(|rank| used(rank) as u32).collect()
    } else {
        slots.to_vec()
    };
    let flow = Flow::over(&placement);
    Ok(Layout {
        slots,
        placement,
        flow,
        forward_rows: Vec::new(),
    })
}

/// Slots derived from the budgets.
fn choose(request: &PlanRequest<'_>, wanted: u64) -> Result<Layout, Error> {
    let fitting = fitting_slots(request, 0);
    let beside_rows = fitting_slots(request, reserve(request, wanted));
    if let (Some(fitting), Some(beside_rows)) = (fitting, beside_rows) {
        for slots in attempts(request, &fitting, &beside_rows) {
            match place(request, &slots, true) {
                Ok(mut layout) => {
                    if layout.spread(request) {
                        return Ok(layout);
                    }
                }
                Err(Error::RankSlots { .. }) => {}
                Err(other) => return Err(other),
            }
        }
    }
    let needed = least_needed(request)?;
    Err(budget_too_small(&needed, request.budget))
}

/// Slots to try in turn: as many as fit beside the balanced rows, then fewer, then more. With the same budget
/// everywhere they are [`fewest_slots`] or the same everywhere, which is what [`least_needed`] looks at.
fn attempts<'a>(
    request: &'a PlanRequest<'_>,
    fitting: &'a [u32],
    beside_rows: &[u32],
) -> impl Iterator<Item = Vec<u32>> + 'a {
    let experts = request.loads.experts();
    let most = |slots: &[u32]| slots.iter().copied().max().unwrap_or(0);
    let level = |most: u32| fitting.iter().map(|&slots| slots.min(most)).collect();
    let fewest = fewest_slots(experts, fitting.len())
        .into_iter()
        .zip(fitting);
    let fewest: Vec<u32> = fewest.map(|(few, &fitting)| few.min(fitting)).collect();
    let first = topped_up(request, fitting, beside_rows);
    let turn = most(&first);
    let fewer = (1..=turn).rev().map(level).chain([fewest]);
    let more = (turn + 1..=most(fitting)).map(level);
    let repeated = first.clone();
    let others = fewer.chain(more).filter(move |slots| *slots != repeated);
    let all = std::iter::once(first).chain(others);
    all.filter(move |slots| enough_slots(experts, slots).is_ok())
}

/// Adds slots until every expert has one: where there are fewest, among these where the budget is largest.
fn topped_up(request: &PlanRequest<'_>, fitting: &[u32], slots: &[u32]) -> Vec<u32> {
    let mut slots = slots.to_vec();
    let entry = |rank: usize, slots: u32| {
        let budget = request.budget[rank];
        (slots < fitting[rank]).then_some((Reverse(slots), budget, Reverse(rank)))
    };
    let ranks = slots.iter().enumerate();
    let mut heap: BinaryHeap<_> = ranks
        .filter_map(|(rank, &slots)| entry(rank, slots))
        .collect();
    let total: u64 = slots.iter().map(|&slots| u64::from(slots)).sum();
    for _ in total..request.loads.experts() as u64 {
        let Some((_, _, Reverse(rank))) = heap.pop() else {
            break;
        };
        slots[rank] += 1;
        heap.extend(entry(rank, slots[rank]));
    }
    slots
}

/// The most slots, at most one per expert, that each rank can hold beside `rows` bytes; none if a rank cannot hold what
/// takes memory without slots.
fn fitting_slots(request: &PlanRequest<'_>, rows: u64) -> Option<Vec<u32>> {
    let (experts, ranks) = (request.loads.experts(), request.topology.ranks());
    let bare = request.memory.without_rows(0, experts, ranks);
    let slot = request.memory.shape.slot_bytes().max(1);
    let fitting = |&budget: &u64| {
        let left = left(budget, bare)?.saturating_sub(rows);
        Some((left / slot).min(experts as u64) as u32)
    };
    request.budget.iter().map(fitting).collect()
}
