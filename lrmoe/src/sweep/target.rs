//! How soon groups come to losses.

use serde::Serialize;

use super::curve::{Passed, SIZES};
use super::grid::Grid;
use super::report::{Finished, at_sizes, paired, points};
use super::spread::Spread;

/// Where the ceiling's way the targets lie if none are given.
const TARGETS: [f64; 3] = [1.0 / 2.0, 2.0 / 3.0, 5.0 / 6.0];

/// How soon a group came to a loss.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TargetReport {
    /// The loss, nats per byte.
    pub target: f64,
    /// Runs that reached it.
    pub reached: usize,
    /// Finished runs.
    pub runs: usize,
    /// Over those that did.
    pub figures: Option<Reached>,
}

/// What a loss took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reached {
    /// Steps.
    pub steps: Spread,
    /// Measured seconds in the MoE layers.
    pub moe_seconds: Option<Spread>,
    /// Measured seconds saved against the quickest `symi` group that reached it with all seeds, as a share, seed by seed.
    pub moe_seconds_saved: Option<Spread>,
    /// Modelled seconds in the MoE layers, as in [`Figures`](super::Figures).
    pub modelled: [Spread; SIZES],
    /// The same of modelled seconds.
    pub modelled_saved: [Option<Spread>; SIZES],
    /// Sent from rank to rank backward.
    pub backward_bytes: Spread,
}

impl TargetReport {
    pub(super) fn of(
        runs: &Finished<'_>,
        symi: &[&Finished<'_>],
        target: f64,
        grid: &Grid,
    ) -> Self {
        let reached = |runs: &Finished<'_>| -> Vec<(u64, Passed)> {
            let all = runs.iter();
            all.filter_map(|(seed, curve)| Some((*seed, curve.reached(target)?)))
                .collect()
        };
        let mine = reached(runs);
        let others: Vec<_> = symi.iter().map(|runs| reached(runs)).collect();
        let whole = others.iter().filter(|runs| runs.len() == grid.seeds.len());
        let whole: Vec<_> = whole.collect();
        let saved = |of: &dyn Fn(&Passed) -> f64| {
            let sum = |runs: &&&Vec<(u64, Passed)>| runs.iter().map(|(_, at)| of(at)).sum::<f64>();
            let best = whole.iter().min_by(|a, b| sum(a).total_cmp(&sum(b)))?;
            let pairs = paired(&mine, best);
            let saved: Vec<f64> = pairs
                .map(|(mine, best)| 1.0 - of(mine) / of(best))
                .collect();
            Spread::of(&saved)
        };
        let spread = |of: fn(&Passed) -> f64| {
            let values: Vec<f64> = mine.iter().map(|(_, at)| of(at)).collect();
            Spread::of(&values)
        };
        let places: Vec<Passed> = mine.iter().map(|(_, at)| *at).collect();
        let seconds = |of: Option<Spread>| of.filter(|_| grid.timed);
        let figures = || {
            Some(Reached {
                steps: spread(|at| at.steps)?,
                moe_seconds: seconds(spread(|at| at.moe_seconds)),
                moe_seconds_saved: seconds(saved(&|at| at.moe_seconds)),
                modelled: at_sizes(&places)?,
                modelled_saved: std::array::from_fn(|size| saved(&|at| at.modelled[size])),
                backward_bytes: spread(|at| at.backward_bytes)?,
            })
        };
        Self {
            target,
            reached: mine.len(),
            runs: runs.len(),
            figures: figures(),
        }
    }
}

/// Losses of the ceiling on its way, rounded to thousandths.
pub(super) fn derived(ceiling: &Finished<'_>) -> Vec<f64> {
    let points = points(ceiling, false);
    let Some(last) = points.last() else {
        return Vec::new();
    };
    let at = |share: f64| {
        let step = share * last.step;
        let after = points.iter().position(|point| point.step >= step)?;
        let before = after.saturating_sub(1);
        let (a, b) = (&points[before], &points[after]);
        let part = match b.step > a.step {
            true => ((step - a.step) / (b.step - a.step)).max(0.0),
            false => 0.0,
        };
        Some((1e3 * (a.loss + part * (b.loss - a.loss))).round() / 1e3)
    };
    let mut targets: Vec<f64> = TARGETS.into_iter().filter_map(at).collect();
    targets.sort_by(|a, b| b.total_cmp(a));
    targets.dedup();
    targets
}
