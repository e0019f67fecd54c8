//! Slots, placement and forward rows that fit into the budgets.

use super::PlanRequest;
use super::rows::spread;
use crate::arithmetic::{product, sum};
use crate::flow::{balance, fits};
use crate::memory::budget_too_small;
use crate::policy::enough_slots;
use crate::{Error, MemoryModel, Placement, PlacementRequest};

/// Where experts live and the forward pass runs.
pub(super) struct Layout {
    pub(super) slots: Vec<u32>,
    pub(super) placement: Placement,
    pub(super) by_rank: Vec<Vec<u32>>,
    pub(super) forward_rows: Vec<u64>,
}

/// A placement on slots, before its rows.
struct Placed {
    /// Slots that take memory.
    slots: Vec<u32>,
    placement: Placement,
    by_rank: Vec<Vec<u32>>,
}

/// The layout on the slots given, or on those that [`plan`](super::plan) describes.
pub(super) fn lay_out(request: &PlanRequest<'_>, wanted: u64) -> Result<Layout, Error> {
    match request.slots {
        Some(slots) => {
            enough_slots(request.loads.experts(), slots)?;
            let placed = place(request, slots, false)?;
            let needed = |placed: &Placed| needed(request, placed, slots);
            spread_forward(request, placed)
                .map_err(|placed| budget_too_small(&needed(&placed), request.budget))
        }
        None => choose(request, wanted),
    }
}

fn place(request: &PlanRequest<'_>, slots: &[u32], trim: bool) -> Result<Placed, Error> {
    let placement = request.placement.place(&PlacementRequest {
        loads: request.loads,
        previous: request.previous,
        slots,
        topology: request.topology,
    })?;
    let (ranks, experts) = (request.topology.ranks(), request.loads.experts());
    crate::error::expect("ranks of the placement", ranks, placement.ranks())?;
    crate::error::expect("experts of the placement", experts, placement.experts())?;
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
    let by_rank = placement.by_rank();
    Ok(Placed {
        slots,
        placement,
        by_rank,
    })
}

/// Gives the placement back if the forward rows do not fit.
fn spread_forward(request: &PlanRequest<'_>, placed: Placed) -> Result<Layout, Placed> {
    let rows = limits(request, &placed.slots, |rank| request.budget[rank])
        .and_then(|limits| spread(request.loads.per_expert(), &placed.by_rank, &limits));
    match rows {
        Some(forward_rows) => {
            let Placed {
                slots,
                placement,
                by_rank,
            } = placed;
            Ok(Layout {
                slots,
                placement,
                by_rank,
                forward_rows,
            })
        }
        None => Err(placed),
    }
}

/// Slots derived from the budgets.
fn choose(request: &PlanRequest<'_>, wanted: u64) -> Result<Layout, Error> {
    let fitting = fitting_slots(request, 0);
    let beside_rows = fitting_slots(request, reserve(request, wanted));
    if let (Some(fitting), Some(beside_rows)) = (fitting, beside_rows) {
        for slots in attempts(&fitting, &beside_rows, request.loads.experts()) {
            match place(request, &slots, true) {
                Ok(placed) => {
                    if let Ok(layout) = spread_forward(request, placed) {
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

/// Slots to try in turn: those beside the balanced rows first, then fewer, then more.
fn attempts<'a>(
    fitting: &'a [u32],
    beside_rows: &'a [u32],
    experts: usize,
) -> impl Iterator<Item = Vec<u32>> + 'a {
    let total = |slots: &[u32]| slots.iter().map(|&s| u64::from(s)).sum::<u64>();
    let enough = move |slots: &Vec<u32>| total(slots) >= experts as u64;
    let capped = |most: u32| fitting.iter().map(|&s| s.min(most)).collect::<Vec<_>>();
    let most = |slots: &[u32]| slots.iter().copied().max().unwrap_or(0);
    let least = (1..=most(fitting)).map(capped).find(enough);
    let first: Vec<u32> = least.map_or(beside_rows.to_vec(), |least| {
        let pairs = least.iter().zip(beside_rows);
        pairs.map(|(&a, &b)| a.max(b)).collect()
    });
    let turn = most(&first);
    let rest = (1..=turn).rev().chain(turn + 1..=most(fitting)).map(capped);
    let rest: Vec<_> = rest.filter(|slots| *slots != first).collect();
    std::iter::once(first).chain(rest).filter(enough)
}

/// The most slots, at most one per expert, that each rank can hold beside `rows` bytes; none if a rank cannot hold what
/// takes memory without slots.
fn fitting_slots(request: &PlanRequest<'_>, rows: u64) -> Option<Vec<u32>> {
    let (experts, ranks) = (request.loads.experts(), request.topology.ranks());
    let bare = request.memory.without_rows(0, experts, ranks);
    let slot = request.memory.shape.slot_bytes().max(1);
    let fitting = |&budget: &u64| {
        let left = budget.checked_sub(bare)?.saturating_sub(rows);
        Some((left / slot).min(experts as u64) as u32)
    };
    request.budget.iter().map(fitting).collect()
}

/// Bytes of a rank's balanced share of forward and retained rows.
fn reserve(request: &PlanRequest<'_>, wanted: u64) -> u64 {
    let ranks = request.topology.ranks() as u64;
    let forward = u64::from(request.loads.total()).div_ceil(ranks);
    let retained = wanted.div_ceil(ranks).min(request.rows_in_time(0));
    sum(&[
        forward_bytes(request.memory, forward),
        product(&[retained, request.memory.retained_row_bytes()]),
    ])
}

/// Bytes that forward rows take in buffers and stash.
fn forward_bytes(memory: &MemoryModel, rows: u64) -> u64 {
    sum(&[
        product(&[rows.min(memory.chunk_rows), memory.forward_row_bytes()]),
        product(&[rows, memory.stash_per_forward_row()]),
    ])
}

/// The most forward rows that fit into `bytes`.
fn most_forward_rows(memory: &MemoryModel, bytes: u64) -> u64 {
    let (buffer, stash) = (memory.forward_row_bytes(), memory.stash_per_forward_row());
    match bytes.checked_sub(forward_bytes(memory, memory.chunk_rows)) {
        Some(left) => memory
            .chunk_rows
            .saturating_add(left.checked_div(stash).unwrap_or(u64::MAX)),
        None => bytes / sum(&[buffer, stash]),
    }
}

/// The most forward rows of each rank; none if a rank cannot hold its slots.
fn limits(
    request: &PlanRequest<'_>,
    slots: &[u32],
    budget: impl Fn(usize) -> u64,
) -> Option<Vec<u64>> {
    let (experts, ranks) = (request.loads.experts(), slots.len());
    let most = |(rank, &slots): (usize, &u32)| {
        let held = request.memory.without_rows(slots, experts, ranks);
        let left = budget(rank).checked_sub(held)?;
        Some(most_forward_rows(request.memory, left).min(request.loads.total().into()))
    };
    slots.iter().enumerate().map(most).collect()
}

/// Bytes that each rank needs on the smallest uniform budget with which the placement works.
fn needed(request: &PlanRequest<'_>, placed: &Placed, slots: &[u32]) -> Vec<u64> {
    let (experts, ranks) = (request.loads.experts(), slots.len());
    let pairs = request.loads.per_expert();
    let held = |slots: &[u32]| -> Vec<u64> {
        let held = |&slots| request.memory.without_rows(slots, experts, ranks);
        slots.iter().map(held).collect()
    };
    let bytes = |rows: &[u64]| -> Vec<u64> {
        let held = held(&placed.slots);
        let with = |(held, &rows)| sum(&[held, forward_bytes(request.memory, rows)]);
        held.into_iter().zip(rows).map(with).collect()
    };
    let most = |bytes: &[u64]| bytes.iter().copied().fold(0, u64::max);
    let reserved = held(slots);
    let works = |budget: u64| {
        limits(request, &placed.slots, |_| budget)
            .is_some_and(|limits| fits(pairs, &placed.by_rank, &limits))
    };
    let free = balance(pairs, &placed.by_rank).rank_loads;
    let (mut low, mut high) = (most(&reserved), most(&bytes(&free)));
    while low < high {
        let middle = low + (high - low) / 2;
        if works(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let rows = limits(request, &placed.slots, |_| low)
        .and_then(|limits| spread(pairs, &placed.by_rank, &limits));
    let rows = rows.unwrap_or(free);
    let both = bytes(&rows).into_iter().zip(reserved);
    both.map(|(rows, slots)| rows.max(slots)).collect()
}

/// Bytes that each rank needs on the smallest uniform budget from which slots can be derived.
fn least_needed(request: &PlanRequest<'_>) -> Result<Vec<u64>, Error> {
    let (experts, ranks) = (request.loads.experts(), request.topology.ranks());
    let most = |bytes: &[u64]| bytes.iter().copied().fold(0, u64::max);
    let mut best: Option<Vec<u64>> = None;
    let mut refused = None;
    for slots in experts.div_ceil(ranks) as u32..=experts as u32 {
        let held = request.memory.without_rows(slots, experts, ranks);
        if best.as_deref().is_some_and(|best| most(best) <= held) {
            break;
        }
        let slots = vec![slots; ranks];
        match place(request, &slots, true) {
            Ok(placed) => {
                let needed = needed(request, &placed, &slots);
                if best
                    .as_deref()
                    .is_none_or(|best| most(&needed) < most(best))
                {
                    best = Some(needed);
                }
            }
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    match (best, refused) {
        (None, Some(error)) => Err(error),
        (best, _) => Ok(best.unwrap_or_default()),
    }
}
