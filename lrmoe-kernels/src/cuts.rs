//! The host's part of a selection on a device: where experts are cut, and what ranks agree on.

use lrmoe_metric::{Error as MetricError, Exchange};

use crate::Error;

/// Low bit and number of bits of the key that each round looks at: the same on all ranks, whatever their backend.
pub(crate) const ROUNDS: [(u32, u32); 3] = [(21, 11), (10, 11), (0, 10)];
/// Bits of a pair id that a round among equal keys looks at.
pub(crate) const TIE_BITS: u32 = 11;

// What is done with an expert's pairs; as in the devices' sources.
const KEEP_NONE: u32 = 0;
const KEEP_ALL: u32 = 1;
const KEEP_EQUAL: u32 = 2;
const KEEP_SOME_EQUAL: u32 = 3;
const DROP_EQUAL: u32 = 4;
/// Words of an expert's cut: key, how many equal ones are kept, how many there are, what is done.
pub(crate) const CUT: usize = 4;

/// What every rank knows before it looks at keys: this rank's part if all have theirs, and the loads of experts over all ranks.
pub(crate) fn agree<T, E: Exchange>(
    local: Result<T, Error>,
    own_loads: &[u32],
    exchange: &mut E,
) -> Result<(T, Vec<u32>), Error> {
    let mut loads = own_loads.to_vec();
    loads.push(local.is_err().into());
    exchange.sum(&mut loads).map_err(MetricError::Exchange)?;
    let failed = loads.pop().unwrap_or(0);
    let local = settle(local, failed)?;
    let total = loads.iter().map(|&load| u64::from(load)).sum();
    if u32::try_from(total).is_err() {
        return Err(MetricError::TooManyPairsOverall { pairs: total }.into());
    }
    Ok((local, loads))
}

/// This rank's result of a step that all ranks have just compared: its own error, else that of another rank (`failed` not 0).
pub(crate) fn settle<T>(local: Result<T, Error>, failed: u32) -> Result<T, Error> {
    match local {
        Ok(_) if failed != 0 => Err(MetricError::Elsewhere.into()),
        local => local,
    }
}

/// Cuts of all experts before the first round.
pub(crate) fn first_cuts(loads: &[u32], quotas: &[u32]) -> Vec<u32> {
    let cut = |(&load, &quota): (&u32, &u32)| match quota {
        _ if quota >= load => [0, 0, 0, KEEP_ALL],
        0 => [0, 0, 0, KEEP_NONE],
        quota => [0, quota, 0, KEEP_EQUAL],
    };
    loads.iter().zip(quotas).flat_map(cut).collect()
}

/// Whether an expert keeps some but not all of its pairs.
pub(crate) fn is_any_cut(loads: &[u32], quotas: &[u32]) -> bool {
    let mut each = loads.iter().zip(quotas);
    each.any(|(load, quota)| (1..*load).contains(quota))
}

/// Bits of the pair ids of so many pairs. Within this mask, the complement of a pair id is as large as the id is small.
pub(crate) fn pair_mask(pairs: usize) -> u32 {
    let bits = usize::BITS - pairs.saturating_sub(1).leading_zeros();
    u32::MAX >> (u32::BITS - bits.clamp(1, u32::BITS))
}

/// Ties at the cuts, dealt to ranks.
#[derive(Debug)]
pub(crate) struct Dealt {
    /// Cuts among the equal keys of each expert, by pair id.
    pub(crate) ties: Vec<u32>,
    /// Whether this rank keeps some but not all of its ties, so that they have to be looked for.
    pub(crate) some: bool,
}

/// Gives the ties at the cuts to lower ranks first, in place; nothing if there are none. `own` are the counts of this rank in the last round.
pub(crate) fn deal_ties<E: Exchange>(
    cuts: &mut [u32],
    own: &[u32],
    exchange: &mut E,
) -> Result<Option<Dealt>, Error> {
    let mut ties = vec![0; cuts.len()];
    let buckets = own.len() / (cuts.len() / CUT).max(1);
    let (of_experts, _) = cuts.as_chunks_mut::<CUT>();
    let mut tied: Vec<_> = (of_experts.iter_mut().enumerate())
        .filter(|(_, [_, take, equal, what])| *what == KEEP_EQUAL && *equal > *take)
        .collect();
    if tied.is_empty() {
        return Ok(None);
    }
    let bucket = |key: u32| key as usize & (buckets - 1);
    let mine: Vec<_> = tied
        .iter()
        .map(|(expert, [key, ..])| own[expert * buckets + bucket(*key)])
        .collect();
    let mut all = vec![0; mine.len() * exchange.ranks()];
    let gathered = exchange.all_gather(&mine, &mut all);
    gathered.map_err(MetricError::Exchange)?;
    let lower = &all[..mine.len() * exchange.rank()];
    let mut some = false;
    for (at, (expert, [_, take, _, what])) in tied.iter_mut().enumerate() {
        let before: u32 = lower.iter().skip(at).step_by(mine.len()).sum();
        let left = take.saturating_sub(before);
        if left == 0 {
            *what = DROP_EQUAL;
        } else if left < mine[at] {
            *what = KEEP_SOME_EQUAL;
            ties[*expert * CUT..][..CUT].copy_from_slice(&[0, left, 0, KEEP_SOME_EQUAL]);
            some = true;
        }
    }
    Ok(Some(Dealt { ties, some }))
}
