//! How many of each expert's pairs run backward.

mod apportion;
mod curve;

use std::fmt;
use std::str::FromStr;

use lrmoe_metric::Profile;
use serde::Serialize;

use crate::error::expect;
use crate::flow::{Flow, fits};
use crate::{Error, Loads, Placement};
use apportion::apportion;

/// Slices in which experts of equal value take room in turn, so that those that share a full rank get alike.
const SLICES: u64 = 64;

/// Quotas: how many of each expert's pairs, over all ranks, run backward, `[experts]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Quotas(Vec<u32>);

impl Quotas {
    /// Everything: the quotas are the loads.
    pub fn all(loads: &Loads) -> Self {
        Self(loads.per_expert().to_vec())
    }

    /// The quota of each expert.
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }

    /// Sum over the experts.
    pub fn total(&self) -> u32 {
        self.0.iter().sum()
    }
}

/// How much of the retained pairs is shared out by load; the rest goes by value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QuotaPolicy {
    /// All of it by load.
    #[default]
    Proportional,
    /// Half by load, half by value.
    Blend,
    /// All of it by value.
    Value,
}

impl QuotaPolicy {
    /// Twice the share that goes by load.
    fn half_shares(self) -> u128 {
        match self {
            Self::Proportional => 2,
            Self::Blend => 1,
            Self::Value => 0,
        }
    }
}

impl fmt::Display for QuotaPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Proportional => "proportional",
            Self::Blend => "blend",
            Self::Value => "value",
        })
    }
}

impl FromStr for QuotaPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "proportional" => Ok(Self::Proportional),
            "blend" => Ok(Self::Blend),
            "value" => Ok(Self::Value),
            _ => Err(Error::UnknownName {
                what: "quota policy",
                name: name.to_owned(),
                expected: "proportional, blend, value",
            }),
        }
    }
}

/// What [`quotas`] decides on.
#[derive(Clone, Copy, Debug)]
pub struct QuotaRequest<'a> {
    /// Pairs of the step.
    pub loads: &'a Loads,
    /// Where the retained pairs can run.
    pub placement: &'a Placement,
    /// Retained rows that each rank can take, `[ranks]`.
    pub capacities: &'a [u64],
    /// Share of all pairs to retain, 0 to 1.
    pub retention: f64,
    /// How the retained pairs are shared out.
    pub policy: QuotaPolicy,
    /// Values of pairs as seen in earlier steps; without one, or with an empty one, all pairs are worth the same.
    pub profile: Option<&'a Profile>,
    /// Pairs that every expert keeps if it has them and all floors together allow it.
    pub floor: u32,
}

impl QuotaRequest<'_> {
    fn check(&self) -> Result<(), Error> {
        let experts = self.loads.experts();
        expect(
            "experts of the placement",
            experts,
            self.placement.experts(),
        )?;
        expect("capacities", self.placement.ranks(), self.capacities.len())?;
        if let Some(profile) = self.profile {
            expect("experts of the profile", experts, profile.experts())?;
        }
        Ok(())
    }
}

/// Pairs that a retention asks for.
pub(crate) fn wanted(loads: &Loads, retention: f64) -> Result<u64, Error> {
    if !(0.0..=1.0).contains(&retention) {
        return Err(Error::OutOfRange {
            what: "retention",
            value: retention,
            range: "0 to 1",
        });
    }
    Ok((retention * f64::from(loads.total())).round() as u64)
}

/// Divides the retained pairs of a step among the experts.
///
/// `Q = round(retention * total)`, or as many pairs as can be routed within the capacities if that is less, and
/// always `sum q = Q` and `q[e] <= n[e]`. Among all `q` that can be routed, those are chosen that
/// 1. meet the floors `min(n[e], max(floor, ceil(beta * Q / total * n[e])))`, with beta = 1 for
///    `proportional`, 0.5 for `blend` and 0 for `value`; if they cannot all be routed, as much of them as can be;
/// 2. retain the most value: the highest buckets of the profile, each expert's histogram scaled to its load.
///
/// Floors whose sum exceeds Q are, unrounded, scaled to sum to Q and shared out by largest remainder; if only
/// rounding takes them past Q they are rounded down. So `proportional` is largest remainder apportionment
/// where capacities do not bind, and nothing is kept at retention 0. Without a profile every policy is
/// `proportional`.
///
/// Vectors that can be routed form a polymatroid, for which the greedy by falling value is optimal. Pairs of
/// one value are shared out in proportion to how many each expert has of it; ties go to the lower expert id.
/// Same inputs give the same quotas.
///
/// # Errors
///
/// [`Error::Mismatch`] if the inputs have different numbers of experts or ranks, [`Error::OutOfRange`] for the
/// retention.
pub fn quotas(request: &QuotaRequest<'_>) -> Result<Quotas, Error> {
    request.check()?;
    let loads = request.loads.per_expert();
    let by_rank = request.placement.by_rank();
    let wanted = wanted(request.loads, request.retention)?;
    let sum = wanted.min(routable(loads, &by_rank, request.capacities));

    let profile = request.profile.filter(|profile| !profile.is_empty());
    let policy = match profile {
        Some(_) => request.policy,
        None => QuotaPolicy::Proportional,
    };
    let floors = floors(request.loads, sum, policy, request.floor);
    let levels = curve::levels(request.loads, profile);

    let free = unconstrained(&levels, &floors, sum);
    if fits(&free, &by_rank, request.capacities) {
        return Ok(Quotas(free));
    }
    let mut flow = Flow::new(loads.len(), &by_rank, request.capacities);
    let mut quotas = vec![0; loads.len()];
    let (below, above) = split(&levels, &floors);
    for level in below.iter().chain(&above) {
        fill(level, &mut quotas, sum, &mut flow);
    }
    Ok(Quotas(quotas))
}

/// How many pairs can be routed within the capacities.
fn routable(loads: &[u32], by_rank: &[Vec<u32>], capacities: &[u64]) -> u64 {
    let mut flow = Flow::new(loads.len(), by_rank, capacities);
    loads
        .iter()
        .enumerate()
        .map(|(expert, &load)| flow.push(expert, load.into()))
        .sum()
}

/// Floors of all experts; they sum to at most `sum`.
fn floors(loads: &Loads, sum: u64, policy: QuotaPolicy, floor: u32) -> Vec<u32> {
    let unit = 2 * u128::from(loads.total());
    if unit == 0 {
        return vec![0; loads.experts()];
    }
    // Exact floors before rounding, in parts of a pair.
    let exact: Vec<u128> = loads
        .per_expert()
        .iter()
        .map(|&n| {
            let by_load = policy.half_shares() * u128::from(sum) * u128::from(n);
            by_load.max(u128::from(floor.min(n)) * unit)
        })
        .collect();
    let total: u128 = exact.iter().sum();
    let rounded_up: u128 = exact.iter().map(|x| x.div_ceil(unit)).sum();
    if rounded_up <= sum.into() {
        exact.iter().map(|x| x.div_ceil(unit) as u32).collect()
    } else if total >= u128::from(sum) * unit {
        narrow(apportion(sum, &exact))
    } else {
        exact.iter().map(|x| (x / unit) as u32).collect()
    }
}

/// Quotas that sum to `sum` with no regard to capacities.
fn unconstrained(levels: &[Vec<u32>], floors: &[u32], sum: u64) -> Vec<u32> {
    let mut quotas = floors.to_vec();
    let mut left = sum - total(floors);
    for level in split(levels, floors).1 {
        let take = if total(&level) <= left {
            level
        } else {
            let weights: Vec<u128> = level.iter().map(|&n| n.into()).collect();
            narrow(apportion(left, &weights))
        };
        left -= total(&take);
        for (quota, taken) in quotas.iter_mut().zip(take) {
            *quota += taken;
        }
    }
    quotas
}

/// Splits the levels into each expert's best `floors[e]` pairs and the rest.
fn split(levels: &[Vec<u32>], floors: &[u32]) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let mut left = floors.to_vec();
    levels
        .iter()
        .map(|level| {
            let below: Vec<u32> = level
                .iter()
                .zip(&mut left)
                .map(|(&n, left)| {
                    let taken = n.min(*left);
                    *left -= taken;
                    taken
                })
                .collect();
            let above = level.iter().zip(&below).map(|(n, b)| n - b).collect();
            (below, above)
        })
        .unzip()
}

/// Takes pairs of one value while they can be routed and the quotas sum to less than `sum`.
fn fill(level: &[u32], quotas: &mut [u32], sum: u64, flow: &mut Flow<'_>) {
    let mut left = sum - total(quotas);
    for slice in 0..SLICES {
        for (expert, &pairs) in level.iter().enumerate() {
            let upto = |slice| u64::from(pairs) * slice / SLICES;
            let offered = (upto(slice + 1) - upto(slice)).min(left);
            let taken = flow.push(expert, offered);
            quotas[expert] += taken as u32;
            left -= taken;
        }
    }
}

fn total(counts: &[u32]) -> u64 {
    counts.iter().map(|&n| u64::from(n)).sum()
}

/// Counts that are known to be at most a load.
fn narrow(counts: Vec<u64>) -> Vec<u32> {
    counts.into_iter().map(|n| n as u32).collect()
}
