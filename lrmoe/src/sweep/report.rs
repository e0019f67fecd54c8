//! What a sweep found.

use serde::Serialize;

use super::curve::{Curve, Passed};
use super::grid::{Grid, Group};
use super::run::{State, Sweep};
use super::spread::Spread;
use crate::policy::Policy;

/// Gap that a comparison needs at least, as a share of the ceiling's loss.
const LEAST_GAP: f64 = 0.1;
/// Where the ceiling's way the targets lie if none are given.
const TARGETS: [f64; 3] = [1.0 / 2.0, 2.0 / 3.0, 5.0 / 6.0];

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

/// What the figures of a sweep rest on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Header {
    /// What the sweep is about.
    pub title: String,
    /// Seeds of every group.
    pub seeds: Vec<u64>,
    /// Names of sizes and settings with their values, those of all groups.
    pub settings: Vec<(String, String)>,
    /// Cores of the machine that made the report.
    pub cores: usize,
    /// Whether measured seconds are given.
    pub timed: bool,
    /// Held-out losses whose reaching is reported, nats per byte, falling.
    pub targets: Vec<f64>,
    /// Runs of the grid.
    pub runs: usize,
    /// Those that are not finished.
    pub missing: Vec<String>,
    /// What to be wary of.
    pub notes: Vec<String>,
    /// What is counted, and how.
    pub counted: Vec<String>,
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
    /// The same work on the modelled cluster.
    pub modelled_moe_seconds: Spread,
    /// Sent from rank to rank backward.
    pub backward_bytes: Spread,
    /// Sent from rank to rank forward, backward and with the update.
    pub bytes: Spread,
}

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
    /// Modelled seconds in the MoE layers.
    pub modelled_moe_seconds: Spread,
    /// The same of modelled seconds.
    pub modelled_moe_seconds_saved: Option<Spread>,
    /// Sent from rank to rank backward.
    pub backward_bytes: Spread,
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
    /// Modelled ones.
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
type Finished<'a> = Vec<(u64, &'a Curve)>;

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
            modelled_moe_seconds: of(|at| at.modelled_moe_seconds)?,
            backward_bytes: of(|at| at.backward_bytes)?,
            bytes: of(|at| at.bytes)?,
        })
    }
}

impl TargetReport {
    fn of(runs: &Finished<'_>, symi: &[&Finished<'_>], target: f64, grid: &Grid) -> Self {
        let reached = |runs: &Finished<'_>| -> Vec<(u64, Passed)> {
            let all = runs.iter();
            all.filter_map(|(seed, curve)| Some((*seed, curve.reached(target)?)))
                .collect()
        };
        let mine = reached(runs);
        let others: Vec<_> = symi.iter().map(|runs| reached(runs)).collect();
        let whole = others.iter().filter(|runs| runs.len() == grid.seeds.len());
        let whole: Vec<_> = whole.collect();
        let saved = |of: fn(&Passed) -> f64| {
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
        let seconds = |of: Option<Spread>| of.filter(|_| grid.timed);
        let figures = || {
            Some(Reached {
                steps: spread(|at| at.steps)?,
                moe_seconds: seconds(spread(|at| at.moe_seconds)),
                moe_seconds_saved: seconds(saved(|at| at.moe_seconds)),
                modelled_moe_seconds: spread(|at| at.modelled_moe_seconds)?,
                modelled_moe_seconds_saved: saved(|at| at.modelled_moe_seconds),
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

/// What both have of a seed.
fn paired<'a, T>(
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
fn points(runs: &Finished<'_>, timed: bool) -> Vec<Point> {
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
            modelled_moe_seconds: of(|at| at.modelled_moe_seconds).mean,
            bytes: of(|at| at.bytes).mean,
        }
    };
    (0..evaluations.unwrap_or(0)).map(point).collect()
}

/// Losses of the ceiling on its way, rounded to thousandths.
fn derived(ceiling: &Finished<'_>) -> Vec<f64> {
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

impl Header {
    fn of(sweep: &Sweep, targets: Vec<f64>, gap: Option<&Gap>) -> Self {
        let grid = sweep.grid();
        let missing = sweep.runs().iter();
        let missing = missing.filter(|run| !matches!(run.state, State::Finished(_)));
        let missing: Vec<String> = missing.map(|run| run.name.clone()).collect();
        let mut notes = Vec::new();
        if !missing.is_empty() {
            notes.push(format!(
                "{} of {} runs are not finished",
                missing.len(),
                sweep.runs().len()
            ));
        }
        match gap {
            _ if grid.ceiling.is_none() || grid.floor.is_none() => notes.push(
                "no share of the gap can be given: mark a dropless group with `control = \"ceiling\"` and one of retention 0 with `control = \"floor\"`"
                    .to_owned(),
            ),
            Some(gap) if gap.share_of_loss < LEAST_GAP => notes.push(format!(
                "the gap between frozen experts and dropless is {:.1} % of the loss, less than {:.0} %: these runs are too short, or their model has too little need of \
                 its experts, to tell methods apart well",
                100.0 * gap.share_of_loss,
                100.0 * LEAST_GAP
            )),
            _ => {}
        }
        if grid.seeds.len() < 3 {
            notes.push("fewer than three seeds: the spread says little".to_owned());
        }
        let mut counted = vec![
            "held-out loss: of the end of the run, nats per byte; +- is the standard error over the seeds".to_owned(),
            "of the gap: (floor - loss) / (floor - ceiling), seed by seed, then mean and standard error".to_owned(),
            "to a loss: until the held-out loss first came down to it, between two evaluations in proportion, over the runs that came to it".to_owned(),
            "saved: against the `symi` group that needed least, of those that came to the loss with every seed; seed by seed".to_owned(),
            "modelled: the same rows and bytes on the cluster named above, at the sizes of this model".to_owned(),
            "MB: sent from rank to rank, all ranks together; buffers: largest token buffers of a rank".to_owned(),
        ];
        match grid.timed {
            true => counted.push(
                "measured: wall time in the MoE layers, of the slowest rank in each step"
                    .to_owned(),
            ),
            false => counted.push(
                "measured seconds are left out: these runs had the machine not for themselves"
                    .to_owned(),
            ),
        }
        Self {
            title: grid.title.clone(),
            seeds: grid.seeds.clone(),
            settings: settings(grid),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            timed: grid.timed,
            targets,
            runs: sweep.runs().len(),
            missing,
            notes,
            counted,
        }
    }
}

/// Sizes and settings that all groups share.
fn settings(grid: &Grid) -> Vec<(String, String)> {
    let of = |group: &Group| {
        let (config, model) = (&group.config, &group.config.model);
        let text: Vec<_> = config
            .text
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        [
            ("text", text.join(", ")),
            (
                "model",
                format!(
                    "{} layers, D {}, {} heads, E {}, k {}, F {}, {}",
                    model.layers,
                    model.width,
                    model.heads,
                    model.experts,
                    model.top_k,
                    model.hidden,
                    config.activation
                ),
            ),
            (
                "training",
                format!(
                    "{} steps of {} tokens, learning rate {}, balance loss {}",
                    config.steps,
                    config.batch * model.context,
                    config.learning_rate,
                    config.balance_loss
                ),
            ),
            (
                "ranks",
                format!(
                    "{} ranks of {} slots, {}",
                    config.ranks, config.slots, config.device
                ),
            ),
            ("cluster", config.cluster.name.clone()),
        ]
    };
    let Some(first) = grid.groups.first() else {
        return Vec::new();
    };
    let others: Vec<_> = grid.groups.iter().map(of).collect();
    let shared = of(first)
        .into_iter()
        .enumerate()
        .map(|(index, (name, value))| {
            let value = match others.iter().all(|other| other[index].1 == value) {
                true => value,
                false => "differs between groups, see their names".to_owned(),
            };
            (name.to_owned(), value)
        });
    shared.collect()
}
