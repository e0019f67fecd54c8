//! How many of each expert's pairs run backward.

mod apportion;
mod curve;
mod decompose;
mod floors;
mod hold;

use std::fmt;
use std::str::FromStr;

use lrmoe_metric::Profile;
use serde::{Deserialize, Serialize};

use crate::error::expect;
use crate::flow::Flow;
use crate::{Error, Loads, Placement};
use curve::Curves;
use decompose::decompose;
use floors::floors;

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

/// How the retained pairs are shared out among the experts, where capacities do not bind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum QuotaPolicy {
    /// By load.
    #[default]
    Proportional,
    /// Half by load, half by value.
    Blend,
    /// By value.
    Value,
    /// By load times root mean square score (Neyman 1934): where pairs are drawn at random, this makes the variance of the
    /// experts' summed gradients smallest.
    Neyman,
}

impl fmt::Display for QuotaPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Proportional => "proportional",
            Self::Blend => "blend",
            Self::Value => "value",
            Self::Neyman => "neyman",
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
            "neyman" => Ok(Self::Neyman),
            _ => Err(Error::UnknownName {
                what: "quota policy",
                name: name.to_owned(),
                expected: "proportional, blend, value, neyman",
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
/// 1. meet the floors; if they cannot all be routed, as much of them as can be, the most valuable pairs first;
/// 2. retain the most value: the highest buckets of the profile, each expert's histogram scaled to its load.
///
/// The floor of an expert is `min(n[e], max(floor, share[e]))`, where
/// - `proportional`: `share[e] = Q / total * n[e]`, `blend`: half of that, `value`: 0, each rounded up;
/// - `neyman`: Q apportioned by largest remainder in proportion to `n[e]` times the root mean square of the expert's scores; who
///   would get more than `n[e]` gets that, and the others share the rest.
///
/// Floors whose sum exceeds Q are, unrounded, scaled to sum to Q and shared out by largest remainder; if only
/// rounding takes them past Q they are rounded down. So `proportional` is largest remainder apportionment
/// where capacities do not bind, and nothing is kept at retention 0. Without a profile every policy is
/// `proportional`.
///
/// Vectors that can be routed form a polymatroid, on which the greedy by falling value is optimal. It is computed by decomposition
/// (Groenevelt 1991), a few flows in all. Pairs of one value are shared out by largest remainder in proportion to how many each
/// expert has of it, among all experts or, where ranks are full, among those that share them; ties go to the lower expert id.
/// Same inputs give the same quotas.
///
/// # Errors
///
/// [`Error::Mismatch`] if the inputs have different numbers of experts or ranks, [`Error::OutOfRange`] for the
/// retention.
pub fn quotas(request: &QuotaRequest<'_>) -> Result<Quotas, Error> {
    quotas_on(request, &mut Flow::over(request.placement))
}

/// [`quotas`] with a flow over the placement. It may lose instances that cannot take any of the retained pairs.
pub(crate) fn quotas_on(request: &QuotaRequest<'_>, flow: &mut Flow) -> Result<Quotas, Error> {
    request.check()?;
    let wanted = wanted(request.loads, request.retention)?;
    let profile = request.profile.filter(|profile| !profile.is_empty());
    let curves = match profile {
        Some(profile) => Curves::from_profile(request.loads, profile),
        None => Curves::flat(request.loads),
    };
    let floors_of = |sum| floors(request.loads, sum, request.policy, profile, request.floor);

    let floors = floors_of(wanted);
    let experts: Vec<u32> = (0..floors.len() as u32).collect();
    let mut quotas = vec![0; floors.len()];
    curves.share_out(&experts, &floors, wanted, &mut quotas);
    flow.fill_within(&quotas, request.capacities);
    if flow.is_settled() {
        return Ok(Quotas(quotas));
    }
    flow.fill_within(request.loads.per_expert(), request.capacities);
    let most = u64::from(request.loads.total()) - flow.total_left();
    let (floors, sum) = if most < wanted {
        (floors_of(most), most)
    } else {
        (floors, wanted)
    };
    let quotas = decompose(&curves, &floors, sum, flow, request.capacities);
    Ok(Quotas(quotas))
}
