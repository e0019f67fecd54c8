//! What the figures of a sweep rest on.

use std::path::PathBuf;

use serde::Serialize;

use super::grid::{Grid, Group};
use super::report::Gap;
use super::run::{Run, State, Sweep};

/// Gap that a comparison needs at least, as a share of the ceiling's loss.
const LEAST_GAP: f64 = 0.1;

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

impl Header {
    pub(super) fn of(sweep: &Sweep, targets: Vec<f64>, gap: Option<&Gap>) -> Self {
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
            "modelled: the rows and bytes of every step on the cluster named above; at the sizes of these runs, and at width and hidden width of other models in \
             bf16, with 4,096 tokens on each rank that spread over ranks and experts as recorded; saved as above"
                .to_owned(),
            "MB: sent from rank to rank, all ranks together; buffers: largest token buffers of a rank".to_owned(),
        ];
        if sweep.runs().iter().any(Run::has_oracle) {
            counted.push(
                "gradients: against those of all pairs, of every layer, mean over the steps of --oracle-every; error: relative; bias: relative error of the mean over \
                 draws, less what chance makes of it"
                    .to_owned(),
            );
        }
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
        // Where it lies on this machine says nothing elsewhere.
        let file = |path: &PathBuf| path.file_name().unwrap_or(path.as_os_str()).to_owned();
        let text = config.text.iter().map(file);
        let text: Vec<_> = text
            .map(|name| name.to_string_lossy().into_owned())
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
                    "{} steps of {} tokens, learning rate {}",
                    config.steps,
                    config.batch * model.context,
                    config.learning_rate
                ),
            ),
            ("balance loss", config.balance_loss.to_string()),
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
