//! What a sweep found.

use serde::Serialize;

use super::curve::{Curve, Passed, SIZES};
use super::grid::{Grid, Group};
use super::header::Header;
use super::quality;
use super::run::{State, Sweep};
use super::spread::Spread;
use super::target::{TargetReport, derived};
use crate::policy::Policy;
use crate::train::LayerSummary;

/// A sweep's figures, over the runs that are finished.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What the figures rest on.
    pub header: Header,
    /// From the floor to the ceiling; `None` if the grid marks none or none of their seeds are finished.
    pub gap: Option<Gap>,
    /// Every group of which a run is finished, in the order of the grid.
    pub groups: Vec<GroupReport>,
    /// The tables of the grid.
    pub sections: Vec<SectionReport>,
}

/// The controls.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gap {
    /// Group of all pairs backward.
    pub ceiling: String,
    /// Group of frozen experts.
    pub floor: String,
    /// Loss of the floor less that of the ceiling, seed by seed, nats per byte.
    pub nats: Spread,
    /// The same over the ceiling's loss.
    pub share_of_loss: f64,
}

/// One group of runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupReport {
    /// Its name.
    pub name: String,
    /// `dropless`, `symi` or `lrmoe`.
    pub policy: String,
    /// `ceiling` or `floor`.
    pub control: Option<&'static str>,
    /// Steps of a run.
    pub steps: u32,
    /// At the end of the runs.
    pub end: Figures,
    /// Share of the gap between floor and ceiling that is kept, seed by seed.
    pub gap_kept: Option<Spread>,
    /// Pairs that ran backward, over all pairs.
    pub retention: f64,
    /// Pairs dropped in forward and backward, over all pairs.
    pub dropped: f64,
    /// Largest token buffers of a rank, bytes.
    pub peak_buffer_bytes: Spread,
    /// Target by target.
    pub targets: Vec<TargetReport>,
    /// Gradients against those of all pairs, layer by layer, mean over steps and seeds; empty where the oracle was not asked.
    pub quality: Vec<LayerSummary>,
    /// Evaluation by evaluation.
    pub curve: Vec<Point>,
}

/// Sums over the steps of a run, over the seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Held-out loss, nats per byte.
    pub loss: Spread,
    /// Measured wall seconds in the MoE layers, the slowest rank of each step.
    pub moe_seconds: Option<Spread>,
    /// The same work on the modelled cluster: at the sizes of the runs, then its loads at those of [`MODELLED_AT`](crate::train::MODELLED_AT).
    pub modelled: [Spread; SIZES],
    /// Sent from rank to rank backward.
    pub backward_bytes: Spread,
    /// Sent from rank to rank forward, backward and with the update.
    pub bytes: Spread,
}

/// An evaluation of a group, mean over the seeds; the loss with its band.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Steps done.
    pub step: f64,
    /// Held-out loss, nats per byte.
    pub loss: f64,
    /// Smallest over the seeds.
    pub loss_min: f64,
    /// Largest.
    pub loss_max: f64,
    /// Measured seconds in the MoE layers so far.
    pub moe_seconds: Option<f64>,
    /// Modelled ones at the sizes of the runs.
    pub modelled_moe_seconds: f64,
    /// Sent from rank to rank so far, in all.
    pub bytes: f64,
}

/// One table of the grid.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SectionReport {
    /// What it compares; may be empty.
    pub title: String,
    /// Indices into [`Report::groups`]: ceiling and floor first, then its own.
    pub groups: Vec<usize>,
}

/// The finished runs of a group: seed and curve.
pub(super) type Finished<'a> = Vec<(u64, &'a Curve)>;

impl Report {
    /// What the finished runs of a sweep say.
    pub fn of(sweep: &Sweep) -> Self {
        let grid = sweep.grid();
        let finished = |index: usize| -> Finished<'_> {
            let runs = sweep.runs().iter().filter(|run| run.group == index);
            runs.filter_map(|run| match &run.state {
                State::Finished(curve) => Some((run.seed, curve)),
                _ => None,
            })
            .collect()
        };
        let all: Vec<Finished<'_>> = (0..grid.groups.len()).map(finished).collect();
        let ceiling = grid.ceiling.map(|index| &all[index]);
        let floor = grid.floor.map(|index| &all[index]);
        let targets = grid.targets.clone();
        let targets = targets.unwrap_or_else(|| ceiling.map_or_else(Vec::new, derived));
        let controls = ceiling.zip(floor);
        let gap = gap(grid, controls);
        let symi: Vec<&Finished<'_>> = (grid.groups.iter().zip(&all))
            .filter(|(group, _)| matches!(group.config.policy, Policy::Symi { .. }))
            .map(|(_, runs)| runs)
            .collect();
        let (mut groups, mut places) = (Vec::new(), Vec::new());
        for (index, (group, runs)) in grid.groups.iter().zip(&all).enumerate() {
            places.push((!runs.is_empty()).then_some(groups.len()));
            if let Some(end) = Figures::of(runs, grid.timed, |curve| Some(curve.end())) {
                let against = |target| TargetReport::of(runs, &symi, target, grid);
                groups.push(GroupReport {
                    control: control(grid, index),
                    gap_kept: controls.and_then(|controls| kept(runs, controls)),
                    targets: targets.iter().copied().map(against).collect(),
                    ..GroupReport::of(group, runs, end, grid.timed)
                });
            }
        }
        let sections = grid.sections.iter().map(|section| {
            let controls = grid.ceiling.into_iter().chain(grid.floor);
            let own = section.groups.iter().copied();
            let own = own.filter(|index| control(grid, *index).is_none());
            SectionReport {
                title: section.title.clone(),
                groups: controls
                    .chain(own)
                    .filter_map(|index| places[index])
                    .collect(),
            }
        });
        let sections = sections.collect();
        Self {
            header: Header::of(sweep, targets, gap.as_ref()),
            gap,
            groups,
            sections,
        }
    }
}

impl GroupReport {
    fn of(group: &Group, runs: &Finished<'_>, end: Figures, timed: bool) -> Self {
        let spread = |of: fn(&Curve) -> f64| {
            let values: Vec<f64> = runs.iter().map(|(_, curve)| of(curve)).collect();
            Spread::of(&values).expect("a finished run")
        };
        Self {
            name: group.name.clone(),
            policy: group.config.policy.name().to_owned(),
            control: None,
            steps: group.config.steps,
            end,
            gap_kept: None,
            retention: spread(|curve| curve.retention).mean,
            dropped: spread(|curve| curve.dropped).mean,
            peak_buffer_bytes: spread(|curve| curve.peak_buffer_bytes as f64),
            targets: Vec::new(),
            quality: quality::mean_over(runs),
            curve: points(runs, timed),
        }
    }
}

impl Figures {
    /// Over the runs that come to the place; `None` without any.
    fn of(
        runs: &Finished<'_>,
        timed: bool,
        place: impl Fn(&Curve) -> Option<Passed>,
    ) -> Option<Self> {
        let places: Vec<Passed> = runs.iter().filter_map(|(_, curve)| place(curve)).collect();
        let of = |what: fn(&Passed) -> f64| {
            let values: Vec<f64> = places.iter().map(what).collect();
            Spread::of(&values)
        };
        Some(Self {
            loss: of(|at| at.loss)?,
            moe_seconds: of(|at| at.moe_seconds).filter(|_| timed),
            modelled: at_sizes(&places)?,
            backward_bytes: of(|at| at.backward_bytes)?,
            bytes: of(|at| at.bytes)?,
        })
    }
}

/// Modelled seconds over runs, size by size.
pub(super) fn at_sizes(places: &[Passed]) -> Option<[Spread; SIZES]> {
    let of = |size: usize| {
        let values: Vec<f64> = places.iter().map(|at| at.modelled[size]).collect();
        Spread::of(&values)
    };
    let spreads: Option<Vec<Spread>> = (0..SIZES).map(of).collect();
    spreads?.try_into().ok()
}

/// What both have of a seed.
pub(super) fn paired<'a, T>(
    mine: &'a [(u64, T)],
    others: &'a [(u64, T)],
) -> impl Iterator<Item = (&'a T, &'a T)> {
    mine.iter().filter_map(|(seed, mine)| {
        let other = others.iter().find(|(other, _)| other == seed)?;
        Some((mine, &other.1))
    })
}

fn control(grid: &Grid, index: usize) -> Option<&'static str> {
    match index {
        _ if grid.ceiling == Some(index) => Some("ceiling"),
        _ if grid.floor == Some(index) => Some("floor"),
        _ => None,
    }
}

/// The gap between the controls, over the seeds that both have.
fn gap(grid: &Grid, controls: Option<(&Finished<'_>, &Finished<'_>)>) -> Option<Gap> {
    let (ceiling, floor) = controls?;
    let pairs = || paired(ceiling, floor).map(|(a, b)| (a.end().loss, b.end().loss));
    let nats: Vec<f64> = pairs().map(|(ceiling, floor)| floor - ceiling).collect();
    let losses: Vec<f64> = pairs().map(|(ceiling, _)| ceiling).collect();
    let nats = Spread::of(&nats)?;
    let name = |index: Option<usize>| Some(grid.groups[index?].name.clone());
    Some(Gap {
        ceiling: name(grid.ceiling)?,
        floor: name(grid.floor)?,
        share_of_loss: nats.mean / Spread::of(&losses)?.mean,
        nats,
    })
}

/// Share of the gap that a group keeps, seed by seed; `None` where the floor is no worse than the ceiling.
fn kept(runs: &Finished<'_>, (ceiling, floor): (&Finished<'_>, &Finished<'_>)) -> Option<Spread> {
    let loss = |runs: &Finished<'_>, seed: u64| {
        let run = runs.iter().find(|(other, _)| *other == seed);
        run.map(|(_, curve)| curve.end().loss)
    };
    let share = |&(seed, curve): &(u64, &Curve)| {
        let (ceiling, floor) = (loss(ceiling, seed)?, loss(floor, seed)?);
        (floor > ceiling).then(|| (floor - curve.end().loss) / (floor - ceiling))
    };
    let shares: Vec<f64> = runs.iter().filter_map(share).collect();
    Spread::of(&shares)
}

/// The curve of a group, at the evaluations that all its runs have.
pub(super) fn points(runs: &Finished<'_>, timed: bool) -> Vec<Point> {
    let evaluations = runs.iter().map(|(_, curve)| curve.passed.len()).min();
    let point = |index: usize| {
        let of = |what: fn(&Passed) -> f64| {
            let values: Vec<f64> = runs
                .iter()
                .map(|(_, curve)| what(&curve.passed[index]))
                .collect();
            Spread::of(&values).expect("a finished run")
        };
        let loss = of(|at| at.loss);
        Point {
            step: of(|at| at.steps).mean,
            loss: loss.mean,
            loss_min: loss.min,
            loss_max: loss.max,
            moe_seconds: timed.then(|| of(|at| at.moe_seconds).mean),
            modelled_moe_seconds: of(|at| at.modelled[0]).mean,
            bytes: of(|at| at.bytes).mean,
        }
    };
    (0..evaluations.unwrap_or(0)).map(point).collect()
}
