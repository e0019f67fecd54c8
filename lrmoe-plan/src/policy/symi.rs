use std::cmp::Reverse;

use crate::policy::{PlacementPolicy, PlacementRequest};
use crate::{Error, Placement};

/// The SYMI policy, re-derived from the paper: replicas in proportion to the last loads, experts contiguous over
/// the slots.
///
/// Slots are numbered rank by rank. Expert e takes the next `r[e]` of them, see [`symi_replicas`]; slots of one
/// expert on one rank are one instance.
#[derive(Clone, Copy, Debug, Default)]
pub struct Symi;

impl PlacementPolicy for Symi {
    fn name(&self) -> &'static str {
        "symi"
    }

    fn place(&self, request: &PlacementRequest<'_>) -> Result<Placement, Error> {
        request.check()?;
        let slots = request.slots.iter().map(|&s| u64::from(s)).sum::<u64>();
        let slots = u32::try_from(slots).map_err(|_| Error::OutOfRange {
            what: "slots over all ranks",
            value: slots as f64,
            range: "0 to 4294967295",
        })?;
        let replicas = symi_replicas(request.loads.per_expert(), slots)?;
        let mut experts = (0..).zip(replicas);
        let mut next = experts.next();
        let by_rank = request.slots.iter().map(|&slots| {
            let mut here = Vec::new();
            let mut free = slots;
            while free > 0
                && let Some((expert, left)) = &mut next
            {
                let taken = free.min(*left);
                here.push(*expert);
                free -= taken;
                *left -= taken;
                if *left == 0 {
                    next = experts.next();
                }
            }
            here
        });
        Placement::new(request.loads.experts(), by_rank.collect())
    }
}

/// Slots of each expert under the SYMI policy; they sum to `slots`.
///
/// With `goal[e] = per_expert[e] / total * slots`, or equal goals if there are no pairs: `r[e] = max(1,
/// floor(goal[e]))`; while these are too many, one is taken from the expert with the largest `r - goal` among
/// those with `r > 1`; while they are too few, one is given to the expert with the largest `goal - r`; ties to
/// the lowest expert id. Exact in integers.
///
/// # Errors
///
/// [`Error::NoExperts`], [`Error::TooFewSlots`] if there are fewer slots than experts, or
/// [`Error::TooManyPairs`] if the loads do not sum to a u32.
pub fn symi_replicas(per_expert: &[u32], slots: u32) -> Result<Vec<u32>, Error> {
    let experts = per_expert.len();
    if experts == 0 {
        return Err(Error::NoExperts);
    }
    if (slots as usize) < experts {
        return Err(Error::TooFewSlots {
            slots: slots.into(),
            experts,
        });
    }
    let pairs: u64 = per_expert.iter().map(|&n| u64::from(n)).sum();
    if pairs > u32::MAX.into() {
        return Err(Error::TooManyPairs { pairs });
    }
    // Goals in units of 1 / total of a slot.
    let (goals, total): (Vec<i128>, i128) = match pairs {
        0 => (vec![slots.into(); experts], experts as i128),
        _ => (
            per_expert
                .iter()
                .map(|&n| i128::from(n) * i128::from(slots))
                .collect(),
            pairs.into(),
        ),
    };
    let mut replicas: Vec<u32> = goals.iter().map(|g| (g / total).max(1) as u32).collect();
    let excess = |replicas: &[u32], e: usize| i128::from(replicas[e]) * total - goals[e];
    let mut used: u64 = replicas.iter().map(|&r| u64::from(r)).sum();
    while used > slots.into() {
        let Some(e) = (0..experts)
            .filter(|&e| replicas[e] > 1)
            .max_by_key(|&e| (excess(&replicas, e), Reverse(e)))
        else {
            break;
        };
        replicas[e] -= 1;
        used -= 1;
    }
    while used < slots.into() {
        let Some(e) = (0..experts).min_by_key(|&e| (excess(&replicas, e), e)) else {
            break;
        };
        replicas[e] += 1;
        used += 1;
    }
    Ok(replicas)
}

/// Pairs that each expert may keep under the SYMI policy: `floor(r[e] * CF * pairs / slots)`, at most `u32::MAX`.
///
/// `pairs` is T * k * N, all pairs of the layer. The capacity factor is read to nine decimals and the rest is
/// exact integer arithmetic, so a factor such as 0.7 means seven tenths, not the binary fraction just below it.
///
/// # Errors
///
/// [`Error::TooFewSlots`] if `slots` is zero, [`Error::TooManyPairs`] if `pairs` does not fit in
/// u32, [`Error::OutOfRange`] if the capacity factor is not in 0 to 1e9.
pub fn symi_capacity(
    replicas: &[u32],
    capacity_factor: f64,
    pairs: u64,
    slots: u32,
) -> Result<Vec<u32>, Error> {
    const BILLION: f64 = 1e9;
    if slots == 0 {
        return Err(Error::TooFewSlots {
            slots: 0,
            experts: replicas.len(),
        });
    }
    if pairs > u32::MAX.into() {
        return Err(Error::TooManyPairs { pairs });
    }
    if !(0.0..=BILLION).contains(&capacity_factor) {
        return Err(Error::OutOfRange {
            what: "capacity factor",
            value: capacity_factor,
            range: "0 to 1e9",
        });
    }
    let factor = (capacity_factor * BILLION).round() as u128;
    let per_slot = factor * u128::from(pairs);
    let unit = u128::from(slots) * BILLION as u128;
    Ok(replicas
        .iter()
        .map(|&r| u32::try_from(u128::from(r) * per_slot / unit).unwrap_or(u32::MAX))
        .collect())
}
