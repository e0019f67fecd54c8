//! What was measured, as figures.

use std::collections::BTreeMap;

use lrmoe_plan::Stash;
use serde::{Deserialize, Serialize};

use super::Settings;
use super::measure::{Contender, Lap, Rounds, Step};
use super::workload::Workload;
use crate::layer::Stage;

/// Over the rounds that count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Median.
    pub median: f64,
    /// Least.
    pub best: f64,
}

impl Timing {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Self {
            median: (low + high) / 2.0,
            best: values[0],
        }
    }
}

/// Forward or backward pass of one contender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    /// Pairs that it computes.
    pub rows: u64,
    /// Rows of the busiest expert over the mean.
    pub load_max_over_mean: f64,
    /// Seconds.
    pub seconds: Timing,
    /// Seconds of each stage by [`Stage::name`], of those that take any; `other` is what no stage accounts for.
    pub stages: BTreeMap<String, Timing>,
    /// GFLOP/s of the experts' products in the stage `forward` or `backward`: three products of a row with a gated expert's matrices forward, six
    /// backward, and two that are recomputed where the forward pass did not keep them.
    pub gflops: f64,
}

/// One contender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContenderReport {
    /// `dropless` or `lrmoe@RETENTION`, with the stash mode behind it if that is not `recompute`.
    pub name: String,
    /// Share of the pairs that was to run backward.
    pub retention: f64,
    /// Forward pass.
    pub forward: Pass,
    /// Backward pass.
    pub backward: Pass,
    /// Backward pass over that of `dropless` in the same round; `best` is of the least seconds of each.
    pub backward_over_dropless: Timing,
    /// Both passes over those of `dropless`, likewise.
    pub step_over_dropless: Timing,
    /// Score, select, route and compact in the backward pass over the whole backward pass of `dropless`, medians.
    pub selection_over_dropless: f64,
    /// Bytes at the peak of a step above weights, gradients and the input; `None` where the system does not tell.
    pub peak_bytes: Option<u64>,
    /// Of these, token buffers that the layer counts.
    pub buffer_bytes: u64,
}

/// A benchmark's outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Name of the sizes.
    pub model: String,
    /// Experts of the layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Model width.
    pub width: usize,
    /// Hidden width of an expert.
    pub hidden: usize,
    /// Activation of the experts.
    pub activation: String,
    /// Type of weights and rows.
    pub dtype: String,
    /// Where the experts run.
    pub device: String,
    /// Tokens of a step.
    pub tokens: usize,
    /// Exponent of the experts' popularity.
    pub zipf: f64,
    /// What pairs are judged by.
    pub score: String,
    /// Most rows that the layer takes forward at once.
    pub chunk_rows: u64,
    /// Seed of weights, input and selection.
    pub seed: u64,
    /// Threads that compute.
    pub threads: usize,
    /// Rounds that count.
    pub steps: usize,
    /// Rounds before them that do not, after one for the memory.
    pub warmup: usize,
    /// Cores' worth of arithmetic that all threads had together: the least beside a step of each round.
    pub cores: Vec<f64>,
    /// Rounds done again because the threads had too few cores.
    pub repeated_rounds: usize,
    /// Rounds that count though they had too few.
    pub short_rounds: usize,
    /// LRMoE by ascending retention in each stash mode, then dropless, last in the first of the modes: what others are compared to.
    pub contenders: Vec<ContenderReport>,
}

pub(super) fn report(
    settings: &Settings,
    workload: &Workload,
    contenders: &[Contender],
    rounds: &Rounds,
) -> Report {
    let mut loads = vec![0; settings.experts];
    for id in &workload.expert_ids {
        loads[*id as usize] += 1;
    }
    let dropless = &contenders.last().expect("dropless comes last").steps;
    Report {
        model: settings.model.clone(),
        experts: settings.experts,
        top_k: settings.top_k,
        width: settings.shape.width,
        hidden: settings.shape.hidden,
        activation: settings.shape.activation.name().to_owned(),
        dtype: settings.dtype.to_string(),
        device: settings.device.to_string(),
        tokens: settings.tokens,
        zipf: settings.zipf,
        score: settings.score.to_string(),
        chunk_rows: settings.chunk_rows,
        seed: settings.seed,
        threads: rayon::current_num_threads(),
        steps: settings.steps,
        warmup: settings.warmup,
        cores: rounds.cores.clone(),
        repeated_rounds: rounds.repeated,
        short_rounds: rounds.short,
        contenders: contenders
            .iter()
            .map(|contender| of_contender(settings, contender, &loads, dropless))
            .collect(),
    }
}

/// What LRMoE adds to a backward pass.
const SELECTION: [Stage; 4] = [Stage::Score, Stage::Select, Stage::Route, Stage::Compact];

fn of_contender(
    settings: &Settings,
    contender: &Contender,
    loads: &[u32],
    dropless: &[Step],
) -> ContenderReport {
    let steps = &contender.steps;
    let matrices = if settings.shape.activation.is_gated() {
        3
    } else {
        2
    };
    let forward = pass(
        settings,
        steps,
        |s| s.forward,
        loads,
        Stage::Forward,
        matrices,
    );
    let retained = &contender.retained;
    let again = if contender.stash == Stash::Recompute {
        matrices - 1
    } else {
        0
    };
    let products = 2 * matrices + again;
    let backward = pass(
        settings,
        steps,
        |s| s.backward,
        retained,
        Stage::Backward,
        products,
    );
    let selection = |step: &Step| {
        SELECTION
            .iter()
            .map(|stage| step.backward.stages.0[*stage as usize])
            .sum::<f64>()
    };
    let over = |of: fn(&Step) -> f64| {
        let ratios = steps
            .iter()
            .zip(dropless)
            .map(|(own, full)| of(own) / of(full));
        let least = |steps: &[Step]| steps.iter().map(of).fold(f64::INFINITY, f64::min);
        Timing {
            median: Timing::of(ratios).median,
            best: least(steps) / least(dropless),
        }
    };
    ContenderReport {
        name: contender.name(),
        retention: contender.retention,
        forward,
        backward,
        backward_over_dropless: over(|step| step.backward.total),
        step_over_dropless: over(|step| step.forward.total + step.backward.total),
        selection_over_dropless: Timing::of(
            steps
                .iter()
                .zip(dropless)
                .map(|(own, full)| selection(own) / full.backward.total),
        )
        .median,
        peak_bytes: contender.peak,
        buffer_bytes: contender.buffers,
    }
}

/// `experts`: the stage in which the experts multiply each row by this many matrices.
fn pass(
    settings: &Settings,
    steps: &[Step],
    lap: fn(&Step) -> Lap,
    rows: &[u32],
    experts: Stage,
    products: usize,
) -> Pass {
    let laps: Vec<Lap> = steps.iter().map(lap).collect();
    let of_stage = |stage: Stage| Timing::of(laps.iter().map(|lap| lap.stages.0[stage as usize]));
    // One rank waits for nobody.
    let named = Stage::ALL.into_iter().filter(|stage| *stage != Stage::Wait);
    let mut stages: BTreeMap<String, Timing> = named
        .map(|stage| (stage.name().to_owned(), of_stage(stage)))
        .filter(|(_, timing)| timing.median > 0.0)
        .collect();
    let other = laps.iter().map(|lap| lap.total - lap.stages.total());
    stages.insert("other".to_owned(), Timing::of(other));
    let total: u64 = rows.iter().map(|n| u64::from(*n)).sum();
    let most = rows.iter().copied().max().unwrap_or(0);
    let flop = 2.0
        * products as f64
        * total as f64
        * (settings.shape.width * settings.shape.hidden) as f64;
    Pass {
        rows: total,
        load_max_over_mean: if total == 0 {
            1.0
        } else {
            f64::from(most) * rows.len() as f64 / total as f64
        },
        seconds: Timing::of(laps.iter().map(|lap| lap.total)),
        stages,
        gflops: flop / of_stage(experts).median / 1e9,
    }
}
