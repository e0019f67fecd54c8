//! What is run backward, where experts live, and what is dropped: the three training policies.

mod scope;

use std::fmt;
use std::str::FromStr;

use lrmoe_metric::{MASKED, Method, Rescale, Row, Score};
use lrmoe_plan::{
    Fixed, Loads, Lrmoe, Placement, PlacementPolicy, PlacementRequest, QuotaPolicy, Stash,
    symi_capacity, symi_replicas,
};
use ndarray::{Array2, ArrayView1};

use crate::config::{ConfigError, within};
use crate::error::Error;

pub use scope::Scope;

/// How one MoE layer treats its routed pairs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Policy {
    /// Every pair runs forward and backward; experts lie contiguously over the ranks and never move.
    Dropless,
    /// SYMI policy (`symi` in `lrmoe_plan`): replicas follow the previous step's loads, pairs beyond an expert's capacity
    /// are dropped in forward and backward, by global pair id.
    Symi {
        /// Capacity of all slots together, as a multiple of the routed pairs.
        capacity_factor: f64,
    },
    /// Every pair runs forward; the pairs selected within the quotas run backward, balanced over replicas.
    Lrmoe(Selecting),
}

/// How `Policy::Lrmoe` chooses the pairs that run backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selecting {
    /// Share of all pairs that runs backward, in [0, 1]. At 0 the experts are frozen.
    pub retention: f64,
    /// What a pair is judged by.
    pub score: Score,
    /// How scores become a selection.
    pub method: Method,
    /// How the retained pairs are divided among the experts.
    pub quotas: QuotaPolicy,
    /// Scores count divided by this power, 0 to 1, of the sum of their expert's scores. It changes nothing among the pairs of an expert, so it
    /// acts through the quotas alone: those that look at scores, and any where memory binds.
    pub recalibration: f64,
    /// What the weights of retained pairs are multiplied by; for `Method::Top` alone.
    pub rescale: Rescale,
    /// What pairs that are not selected are left out of.
    pub scope: Scope,
    /// Smallest quota of an expert that has pairs, as long as `retention` is above 0.
    pub floor: u32,
    /// Weight of a retained pair in dx; with `Scope::Wgrad` it is 1.
    pub dx_weight: DxWeight,
    /// Which pairs give the router a gradient.
    pub router_gradient: RouterGradient,
    /// What stands in the weight gradients for the pairs that do not run backward, beside the weights of those that do.
    pub compensation: Compensation,
}

/// Weight of a retained pair's term in dx.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DxWeight {
    /// 1: dx lacks what the dropped pairs would add.
    One,
    /// The selection weight: dx is unbiased too, with its variance.
    #[default]
    Selection,
}

/// Which pairs give the router a gradient, dL/dp = <dL/dy, expert output>.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RouterGradient {
    /// The retained pairs, with their selection weights: unbiased.
    #[default]
    Retained,
    /// All pairs, exactly. The rank that a pair comes from keeps its output row until the backward pass.
    All,
}

/// A score that is not known when pairs are chosen in the forward pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "stash mode forward-select chooses pairs in the forward pass, where score {score} is not known, as it needs dy; take score forward, out-norm, gate or random, or stash mode recompute or stash"
)]
pub struct UnknownForward {
    score: Score,
}

/// What stands in the weight gradients for the pairs that do not run backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compensation {
    /// Nothing.
    #[default]
    None,
    /// What sums over all pairs of an expert say: control variates with [`Method::Priority`], substitutes with [`Method::Top`]. On the CPU alone.
    Moments,
}

/// A name that is not among those known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} `{name}`, must be {expected}")]
pub struct UnknownName {
    what: &'static str,
    name: String,
    expected: &'static str,
}

impl fmt::Display for DxWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::One => "1",
            Self::Selection => "w",
        })
    }
}

impl FromStr for DxWeight {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "1" => Ok(Self::One),
            "w" => Ok(Self::Selection),
            _ => Err(UnknownName {
                what: "dx weight",
                name: name.into(),
                expected: "1 or w",
            }),
        }
    }
}

impl fmt::Display for RouterGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Retained => "retained",
            Self::All => "all",
        })
    }
}

impl FromStr for RouterGradient {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "retained" => Ok(Self::Retained),
            "all" => Ok(Self::All),
            _ => Err(UnknownName {
                what: "router gradient",
                name: name.into(),
                expected: "retained or all",
            }),
        }
    }
}

impl fmt::Display for Compensation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Moments => "moments",
        })
    }
}

impl FromStr for Compensation {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "none" => Ok(Self::None),
            "moments" => Ok(Self::Moments),
            _ => Err(UnknownName {
                what: "compensation",
                name: name.into(),
                expected: "none or moments",
            }),
        }
    }
}

impl Default for Selecting {
    /// Half of the pairs, unbiased by `down-grad` in every gradient, quotas in proportion to load.
    fn default() -> Self {
        Self {
            retention: 0.5,
            score: Score::DownGrad,
            method: Method::Priority,
            quotas: QuotaPolicy::Proportional,
            recalibration: 0.0,
            rescale: Rescale::None,
            scope: Scope::Pair,
            floor: 1,
            dx_weight: DxWeight::Selection,
            router_gradient: RouterGradient::Retained,
            compensation: Compensation::None,
        }
    }
}

impl Selecting {
    /// Checks what the parts do not check themselves.
    ///
    /// # Errors
    /// `ConfigError::OutOfRange`, `ConfigError::Rescale`, `ConfigError::Substitutes`.
    pub fn check(&self) -> Result<(), ConfigError> {
        within("retention", self.retention, 0.0..=1.0)?;
        within("recalibration", self.recalibration, 0.0..=1.0)?;
        match self.method {
            Method::Priority if self.rescale != Rescale::None => Err(ConfigError::Rescale {
                rescale: self.rescale,
            }),
            Method::Top
                if self.rescale != Rescale::None && self.compensation != Compensation::None =>
            {
                Err(ConfigError::Substitutes {
                    rescale: self.rescale,
                })
            }
            _ => Ok(()),
        }
    }
}

impl Policy {
    /// Name as on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Dropless => "dropless",
            Self::Symi { .. } => "symi",
            Self::Lrmoe(_) => "lrmoe",
        }
    }

    /// Whether no pair ever runs backward, so that the experts keep their weights.
    pub fn is_frozen(&self) -> bool {
        matches!(self, Self::Lrmoe(selecting) if selecting.retention == 0.0)
    }

    /// Checks settings that contradict each other.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        match self {
            Self::Lrmoe(selecting) => selecting.check(),
            _ => Ok(()),
        }
    }

    /// Whether random numbers have a say in which pairs run backward.
    pub(crate) fn draws(&self) -> bool {
        let Self::Lrmoe(selecting) = self else {
            return false;
        };
        selecting.method == Method::Priority || selecting.score == Score::Random
    }

    /// The rows of every pair whose norms the forward pass keeps for scores.
    pub(crate) fn forward_norms(&self) -> Option<Row> {
        let Self::Lrmoe(selecting) = self else {
            return None;
        };
        let kept = |row: &Row| matches!(row, Row::Hidden | Row::Output);
        selecting.score.row().filter(kept)
    }

    /// Whether scores need the norms of all gradients of every pair, from a backward pass before the selection.
    pub(crate) fn needs_full_gradients(&self) -> bool {
        matches!(self, Self::Lrmoe(selecting) if selecting.score == Score::FullGrad)
    }

    /// Whether every pair runs backward, with no weight in the weight gradients where it is not selected.
    pub(crate) fn runs_all_backward(&self) -> bool {
        matches!(self, Self::Lrmoe(selecting) if selecting.scope == Scope::Wgrad)
    }

    /// Whether the router's gradient needs every pair's output from the forward pass. Where all pairs run backward, that gives it.
    pub(crate) fn needs_outputs(&self) -> bool {
        matches!(self, Self::Lrmoe(selecting) if selecting.router_gradient == RouterGradient::All && selecting.scope == Scope::Pair)
    }

    /// Whether something stands for the pairs that do not run backward.
    pub(crate) fn compensates(&self) -> bool {
        matches!(self, Self::Lrmoe(selecting) if selecting.compensation != Compensation::None)
    }

    /// Checks that what is to be kept in the forward pass is known there. Policies that run every pair backward keep all of them.
    pub(crate) fn check_stash(&self, stash: Stash) -> Result<(), UnknownForward> {
        match self {
            Self::Lrmoe(Selecting { score, scope, .. })
                if stash == Stash::ForwardSelect && *scope == Scope::Pair && score.needs_dy() =>
            {
                Err(UnknownForward { score: *score })
            }
            _ => Ok(()),
        }
    }

    /// Whether the backward pass needs x of the tokens besides what computes the retained pairs.
    pub(crate) fn needs_x(&self) -> bool {
        let by_score = matches!(self, Self::Lrmoe(selecting)
            if matches!(selecting.score, Score::InputGrad | Score::FullGrad));
        by_score || self.compensates()
    }

    /// Whether all pairs that run forward run backward.
    pub(crate) fn retains_all(&self) -> bool {
        !matches!(self, Self::Lrmoe(_)) || self.runs_all_backward()
    }

    /// Weight of a retained pair in dx.
    pub(crate) fn dx_weight(&self) -> DxWeight {
        match self {
            Self::Lrmoe(selecting) if selecting.scope == Scope::Pair => selecting.dx_weight,
            _ => DxWeight::One,
        }
    }

    /// Placement of the next step, from the loads of this one.
    pub(crate) fn place(&self, request: &PlacementRequest<'_>) -> Result<Placement, Error> {
        Ok(match self {
            Self::Dropless => Fixed.place(request)?,
            Self::Symi { .. } => lrmoe_plan::Symi.place(request)?,
            Self::Lrmoe(_) => Lrmoe::default().place(request)?,
        })
    }
}

/// The SYMI policy's capacities: replica counts come from the previous step's loads, and so do the capacities they give.
#[derive(Clone, Debug)]
pub(crate) struct SymiCapacity {
    capacity_factor: f64,
    slots: u32,
    replicas: Vec<u32>,
}

impl SymiCapacity {
    /// Before the first step every expert counts as equally popular.
    pub(crate) fn new(capacity_factor: f64, slots: u32, experts: usize) -> Result<Self, Error> {
        let mut capacity = Self {
            capacity_factor,
            slots,
            replicas: Vec::new(),
        };
        capacity.follow(&vec![1; experts])?;
        Ok(capacity)
    }

    /// Takes the loads of the step just done as the popularity of the next.
    pub(crate) fn follow(&mut self, popularity: &[u32]) -> Result<(), Error> {
        self.replicas = symi_replicas(popularity, self.slots)?;
        Ok(())
    }

    pub(crate) fn replicas(&self) -> &[u32] {
        &self.replicas
    }

    pub(crate) fn set_replicas(&mut self, replicas: Vec<u32>) {
        self.replicas = replicas;
    }

    /// What is left of the loads when every expert takes its first pairs, by global pair id, up to its capacity.
    pub(crate) fn kept(&self, loads: &Loads) -> Result<Loads, Error> {
        let capacity = symi_capacity(
            &self.replicas,
            self.capacity_factor,
            u64::from(loads.total()),
            self.slots,
        )?;
        let kept = |(rank, expert): (usize, usize)| {
            capacity[expert]
                .saturating_sub(loads.before(rank, expert))
                .min(loads.counts()[[rank, expert]])
        };
        Ok(Loads::new(Array2::from_shape_fn(
            loads.counts().dim(),
            kept,
        ))?)
    }
}

/// Masks each expert's pairs beyond the first `kept[expert]`.
pub(crate) fn mask_beyond(kept: ArrayView1<'_, u32>, expert_ids: &mut [i32]) {
    let mut left = kept.to_vec();
    for id in expert_ids.iter_mut().filter(|id| **id >= 0) {
        match &mut left[*id as usize] {
            0 => *id = MASKED,
            left => *left -= 1,
        }
    }
}
