//! Several policies from the same start on the same data, side by side.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;

use super::record::StepRecord;
use super::run::{Observer, checkpoint_path, reached_target};
use super::threads::train;
use crate::config::TrainConfig;
use crate::error::Error;
use crate::files;
use crate::text::Corpus;

/// What a comparison found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Held-out loss that ended each run, nats per byte.
    pub target_loss: Option<f32>,
    /// Cores of the machine that measured.
    pub cores: usize,
    /// Cluster of the modelled times.
    pub cluster: String,
    /// Whether the runs were interrupted, so that the last ones are missing or short.
    pub interrupted: bool,
    /// Run by run, in the order asked for.
    pub runs: Vec<Outcome>,
}

/// One run of a comparison, summed over its steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// `POLICY` or `lrmoe@RETENTION`.
    pub name: String,
    /// Steps until the target was reached, or all of them.
    pub steps: u32,
    /// Whether the target was reached; `None` without a target.
    pub reached: Option<bool>,
    /// Last loss on held-out text, nats per byte.
    pub held_out_loss: Option<f32>,
    /// Share of the loss between `lrmoe@0` (experts frozen) and `dropless` that the run keeps, where both ran as many steps.
    pub gap_kept: Option<f64>,
    /// Measured wall seconds in the MoE layers, the slowest rank of each step.
    pub moe_seconds: f64,
    /// The same work on the modelled cluster.
    pub modelled_moe_seconds: f64,
    /// Bytes sent from rank to rank forward.
    pub forward_bytes: u64,
    /// Bytes sent from rank to rank backward.
    pub backward_bytes: u64,
    /// Bytes sent from rank to rank for gradient reduction and weight delivery.
    pub update_bytes: u64,
    /// Largest token buffers of a rank.
    pub peak_buffer_bytes: u64,
    /// Pairs dropped in forward and backward, over all pairs.
    pub dropped: f64,
    /// Pairs that ran backward, over all pairs.
    pub retention: f64,
}

impl Outcome {
    fn new(name: &str, records: &[StepRecord], target: Option<f32>) -> Self {
        let sum = |of: fn(&StepRecord) -> u64| records.iter().map(of).sum::<u64>();
        let routed = sum(|record| {
            record
                .layers
                .iter()
                .flat_map(|layer| &layer.load)
                .map(|load| u64::from(*load))
                .sum()
        });
        let share = |pairs: u64| {
            if routed == 0 {
                0.0
            } else {
                pairs as f64 / routed as f64
            }
        };
        let held_out_loss = records.iter().rev().find_map(|record| record.held_out_loss);
        Self {
            name: name.to_owned(),
            steps: records.last().map_or(0, |record| record.step),
            reached: target.map(|target| held_out_loss.is_some_and(|loss| loss <= target)),
            held_out_loss,
            gap_kept: None,
            moe_seconds: records.iter().map(|record| record.moe_seconds).sum(),
            modelled_moe_seconds: records
                .iter()
                .map(|record| record.modelled_moe_seconds)
                .sum(),
            forward_bytes: sum(|record| record.forward_bytes),
            backward_bytes: sum(|record| record.backward_bytes),
            update_bytes: sum(|record| record.update_bytes),
            peak_buffer_bytes: records
                .iter()
                .map(|record| record.buffer_bytes)
                .max()
                .unwrap_or(0),
            dropped: share(sum(|record| {
                record
                    .layers
                    .iter()
                    .map(|layer| u64::from(layer.dropped))
                    .sum()
            })),
            retention: share(sum(|record| {
                record.layers.iter().map(|layer| layer.retained).sum()
            })),
        }
    }
}

/// Runs the contenders of `config` one after another, each in its own folder of `OUT`, and writes `OUT/compare.json`.
/// `observer` gives each run somebody who follows it. After `stop` the runs that are left are not started.
///
/// # Errors
/// As `train`.
pub fn compare(
    config: &TrainConfig,
    corpus: &Corpus,
    stop: &AtomicBool,
    mut observer: impl FnMut(&str) -> Box<dyn Observer>,
) -> Result<Comparison, Error> {
    if config.out.join("steps.jsonl").exists() && !config.overwrite {
        return Err(Error::OutExists(config.out.clone()));
    }
    let mut runs = Vec::new();
    for contender in &config.compare {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let out = config.out.join(&contender.name);
        let own = TrainConfig {
            policy: contender.policy.clone(),
            layer_retention: config
                .layer_retention
                .clone()
                .filter(|_| contender.layers_differ),
            // A comparison that was cut short may not have come to this one.
            resume: config.resume && checkpoint_path(&out).exists(),
            out,
            ..config.clone()
        };
        let mut records = train(&own, corpus, stop, observer(&contender.name).as_mut())?;
        // A resumed run may have gone beyond the target that is asked for now.
        let reached = records
            .iter()
            .position(|record| reached_target(config, record));
        records.truncate(reached.map_or(records.len(), |index| index + 1));
        runs.push(Outcome::new(&contender.name, &records, config.target_loss));
    }
    share_gaps(&mut runs);
    let comparison = Comparison {
        target_loss: config.target_loss,
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        cluster: config.cluster.name.clone(),
        interrupted: stop.load(Ordering::Relaxed),
        runs,
    };
    std::fs::create_dir_all(&config.out).map_err(Error::io(&config.out))?;
    let json = serde_json::to_vec_pretty(&comparison).expect("a comparison has only string keys");
    files::write(&compare_path(&config.out), &json)?;
    Ok(comparison)
}

pub(super) fn compare_path(out: &Path) -> std::path::PathBuf {
    out.join("compare.json")
}

/// Fills in what each run keeps of the gap between frozen experts and dropless training, at equal steps.
fn share_gaps(runs: &mut [Outcome]) {
    let find = |name: &str| {
        runs.iter()
            .find(|run| run.name == name)
            .map(|run| (run.steps, run.held_out_loss))
    };
    let (Some((floor_steps, Some(floor))), Some((steps, Some(ceiling)))) =
        (find("lrmoe@0"), find("dropless"))
    else {
        return;
    };
    for run in runs
        .iter_mut()
        .filter(|run| run.steps == steps && floor_steps == steps && floor > ceiling)
    {
        run.gap_kept = run
            .held_out_loss
            .map(|loss| f64::from(floor - loss) / f64::from(floor - ceiling));
    }
}

impl std::fmt::Display for Comparison {
    /// A Markdown table and a line on what its columns mean.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new();
        let measured = format!("MoE s, measured ({} cores)", self.cores);
        let modelled = format!("MoE s, modelled ({})", self.cluster);
        let header = [
            "policy",
            "steps",
            "held-out loss",
            "gap kept",
            "retained",
            "dropped",
            &measured,
            &modelled,
            "MB forward",
            "MB backward",
            "MB update",
            "peak buffers, MB",
        ];
        table.load_style(ASCII_MARKDOWN).set_header(header);
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let mega = |bytes: u64| format!("{:.1}", bytes as f64 / 1e6);
        for run in &self.runs {
            let missed = if run.reached == Some(false) {
                " (target not reached)"
            } else {
                ""
            };
            table.add_row([
                run.name.clone(),
                format!("{}{missed}", run.steps),
                run.held_out_loss
                    .map_or_else(|| "-".to_owned(), |loss| format!("{loss:.3}")),
                run.gap_kept.map_or_else(|| "-".to_owned(), percent),
                percent(run.retention),
                percent(run.dropped),
                format!("{:.2}", run.moe_seconds),
                format!("{:.4}", run.modelled_moe_seconds),
                mega(run.forward_bytes),
                mega(run.backward_bytes),
                mega(run.update_bytes),
                mega(run.peak_buffer_bytes),
            ]);
        }
        writeln!(f, "{table}")?;
        if let Some(target) = self.target_loss {
            writeln!(
                f,
                "Figures until the held-out loss first reached {target} nats per byte."
            )?;
        }
        write!(
            f,
            "Bytes are sums over all ranks of what left a rank; buffers are those of the rank that held most."
        )
    }
}
