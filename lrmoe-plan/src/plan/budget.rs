//! Forward rows that fit into a budget, and the smallest budget that works.

use super::PlanRequest;
use super::layout::{Layout, place};
use super::rows::spread;
use crate::arithmetic::{left, product, sum};
use crate::{Error, MemoryModel};

/// Slots for every expert once, as even as possible.
pub(super) fn fewest_slots(experts: usize, ranks: usize) -> Vec<u32> {
    let of = |rank: usize| experts / ranks + usize::from(rank < experts % ranks);
    (0..ranks).map(|rank| of(rank) as u32).collect()
}

/// Bytes of a rank's balanced share of forward and retained rows.
pub(super) fn reserve(request: &PlanRequest<'_>, wanted: u64) -> u64 {
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
    match left(bytes, forward_bytes(memory, memory.chunk_rows)) {
        Some(left) => memory
            .chunk_rows
            .saturating_add(left.checked_div(stash).unwrap_or(u64::MAX)),
        None => bytes / sum(&[buffer, stash]),
    }
}

/// The most forward rows of each rank; none if a rank cannot hold its slots.
pub(super) fn limits(
    request: &PlanRequest<'_>,
    slots: &[u32],
    budget: impl Fn(usize) -> u64,
) -> Option<Vec<u64>> {
    let (experts, ranks) = (request.loads.experts(), slots.len());
    let most = |(rank, &slots): (usize, &u32)| {
        let held = request.memory.without_rows(slots, experts, ranks);
        let left = left(budget(rank), held)?;
        Some(most_forward_rows(request.memory, left).min(request.loads.total().into()))
    };
    slots.iter().enumerate().map(most).collect()
}

/// Bytes that each rank needs on the smallest uniform budget with which the placement works.
pub(super) fn needed(request: &PlanRequest<'_>, layout: &mut Layout, slots: &[u32]) -> Vec<u64> {
    let (experts, ranks) = (request.loads.experts(), slots.len());
    let pairs = request.loads.per_expert();
    let held = |slots: &[u32]| -> Vec<u64> {
        let held = |&slots| request.memory.without_rows(slots, experts, ranks);
        slots.iter().map(held).collect()
    };
    let used = held(&layout.slots);
    let bytes = |rows: &[u64]| -> Vec<u64> {
        let with = |(&held, &rows)| sum(&[held, forward_bytes(request.memory, rows)]);
        used.iter().zip(rows).map(with).collect()
    };
    let reserved = held(slots);
    let free = vec![u64::from(request.loads.total()); ranks];
    let free = spread(&mut layout.flow, pairs, &free).expect("all pairs fit on any rank");
    let (mut low, mut high) = (most(&reserved), most(&bytes(&free)));
    while low < high {
        let middle = low + (high - low) / 2;
        let works = limits(request, &layout.slots, |_| middle).is_some_and(|limits| {
            layout.flow.fill_within(pairs, &limits);
            layout.flow.is_settled()
        });
        if works {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let rows = limits(request, &layout.slots, |_| low)
        .and_then(|limits| spread(&mut layout.flow, pairs, &limits));
    let both = bytes(&rows.unwrap_or(free)).into_iter().zip(reserved);
    both.map(|(rows, slots)| rows.max(slots)).collect()
}

/// Bytes that each rank needs on the smallest uniform budget from which slots can be derived.
pub(super) fn least_needed(request: &PlanRequest<'_>) -> Result<Vec<u64>, Error> {
    let (experts, ranks) = (request.loads.experts(), request.topology.ranks());
    let mut best: Option<Vec<u64>> = None;
    let mut refused = None;
    let even = (experts.div_ceil(ranks)..=experts).map(|slots| vec![slots as u32; ranks]);
    for slots in std::iter::once(fewest_slots(experts, ranks)).chain(even) {
        let held = request.memory.without_rows(slots[0], experts, ranks);
        if best.as_deref().is_some_and(|best| most(best) <= held) {
            break;
        }
        match place(request, &slots, true) {
            Ok(mut layout) => {
                let needed = needed(request, &mut layout, &slots);
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

fn most(bytes: &[u64]) -> u64 {
    bytes.iter().copied().fold(0, u64::max)
}
