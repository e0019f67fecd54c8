//! What a trace looks like: imbalance, concentration and drift, layer by layer and over time.

use std::collections::BTreeMap;
use std::fmt;

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use indicatif::ProgressBar;
use lrmoe_plan::Fixed;
use ndarray::{Array2, Axis};
use serde::Serialize;

use super::error::TraceError;
use super::figures::{StepFigures, Sums, distance};
use super::{HeatMap, TraceHeader, TraceReader};

/// Most parts into which the steps are divided, for figures over time and the heat map.
const MOST_PARTS: usize = 200;
/// Lines of the table over time.
const LINES: usize = 12;

/// Figures of a trace. A mean over steps counts every step that has pairs alike.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// Steps.
    pub steps: usize,
    /// MoE layers.
    pub layers: usize,
    /// Source ranks.
    pub ranks: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts per token, where known.
    pub top_k: Option<usize>,
    /// Tokens of each rank in a step, where known.
    pub tokens_per_rank: Option<usize>,
    /// Number of the first step.
    pub first_step: u32,
    /// Steps that have per-pair data.
    pub recorded: usize,
    /// Whether these have scores.
    pub scored: bool,
    /// Pairs of all steps and layers.
    pub pairs: u64,
    /// What the file says about itself.
    pub metadata: BTreeMap<String, String>,
    /// Figures of each layer.
    pub per_layer: Vec<LayerFigures>,
    /// Figures of each part of the run.
    pub over_time: Vec<TimeFigures>,
}

/// Figures of a layer, means over its steps unless they say otherwise.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerFigures {
    /// Pairs of a step.
    pub pairs: f64,
    /// Load of the busiest expert over the mean.
    pub expert_max_over_mean: f64,
    /// The largest of it in any step.
    pub expert_max_over_mean_worst: f64,
    /// Load of the busiest rank over the mean, experts laid out contiguously over as many ranks as there are sources.
    pub rank_max_over_mean: f64,
    /// The largest of it in any step.
    pub rank_max_over_mean_worst: f64,
    /// Share of the pairs on the busiest expert.
    pub share_top_1: f64,
    /// Share on the busiest tenth of the experts, rounded up.
    pub share_top_10_percent: f64,
    /// Share on the busiest quarter, rounded up.
    pub share_top_25_percent: f64,
    /// Gini coefficient of the experts' loads: 0 if all are alike, towards 1 if one has all.
    pub gini: f64,
    /// Standard deviation of the experts' loads over their mean.
    pub variation: f64,
    /// Share of the pairs that would have to go to other experts to look like the step before (total variation distance).
    pub drift: f64,
    /// Experts without a pair.
    pub idle_experts: f64,
}

/// Figures of some steps, means over layers and steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TimeFigures {
    /// Number of the first step.
    pub first_step: u32,
    /// Number of the last.
    pub last_step: u32,
    /// Load of the busiest expert over the mean.
    pub expert_max_over_mean: f64,
    /// Load of the busiest rank over the mean.
    pub rank_max_over_mean: f64,
    /// Distance to the step before.
    pub drift: f64,
}

/// Reads the whole trace, one step at a time. The heat map is that of `layer`.
///
/// # Errors
/// What `TraceReader::step` finds; a layer that does not exist.
pub fn inspect(
    reader: &mut TraceReader,
    layer: usize,
    progress: &ProgressBar,
) -> Result<(Inspection, HeatMap), TraceError> {
    let header = reader.header().clone();
    reader.has_layer(layer)?;
    let per_part = header.steps.div_ceil(MOST_PARTS);
    let parts = header.steps.div_ceil(per_part);
    let placement = Fixed::placement(header.experts, header.ranks).expect("neither is 0");
    let mut layers = vec![Sums::default(); header.layers];
    let mut times = vec![Sums::default(); parts];
    let mut heat = Array2::zeros((header.experts, parts));
    let mut before = Array2::zeros((header.layers, header.experts));
    let mut pairs = 0;
    progress.set_length(header.steps as u64);
    for index in 0..header.recorded.len() {
        reader.pairs(index)?;
    }
    for step in 0..header.steps {
        let loads = reader
            .step(step)?
            .map(|count| u64::from(*count))
            .sum_axis(Axis(1));
        let part = step / per_part;
        for (index, loads) in loads.outer_iter().enumerate() {
            let Some(mut figures) = StepFigures::of(loads, &placement) else {
                continue;
            };
            figures.drift = distance(loads, before.row(index));
            layers[index].add(&figures);
            times[part].add(&figures);
        }
        let mut column = heat.column_mut(part);
        column += &loads.row(layer).map(|load| *load as f64);
        pairs += loads.sum();
        before = loads;
        progress.inc(1);
    }
    let bounds: Vec<(u32, u32)> = (0..parts)
        .map(|part| {
            let end = ((part + 1) * per_part).min(header.steps);
            (header.number(part * per_part), header.number(end - 1))
        })
        .collect();
    let over_time = times
        .iter()
        .zip(&bounds)
        .map(|(sums, bounds)| sums.time(*bounds));
    let over_time = over_time.collect();
    let per_layer = layers.iter().map(Sums::layer).collect();
    let inspection = Inspection::new(&header, pairs, per_layer, over_time);
    Ok((inspection, HeatMap::new(heat, layer, bounds)))
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = |n: Option<usize>| n.map_or_else(|| "unknown".to_owned(), |n| n.to_string());
        writeln!(
            f,
            "{} steps from {}, {} layers, {} ranks, {} experts, top-k {}, tokens per rank {}, {} pairs",
            self.steps,
            self.first_step,
            self.layers,
            self.ranks,
            self.experts,
            known(self.top_k),
            known(self.tokens_per_rank),
            self.pairs
        )?;
        let scores = if self.scored {
            "with scores"
        } else {
            "without scores"
        };
        match self.recorded {
            0 => writeln!(f, "no per-pair data")?,
            recorded => writeln!(f, "per-pair data of {recorded} steps, {scores}")?,
        }
        for (key, value) in &self.metadata {
            writeln!(f, "  {key}: {value}")?;
        }
        writeln!(
            f,
            "\nBy layer, means over steps; ranks hold the experts contiguously:\n{}",
            self.layer_table()
        )?;
        write!(f, "\nOver time, means over layers:\n{}", self.time_table())
    }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(ASCII_MARKDOWN)
        .set_header(header.iter().copied());
    table.column_iter_mut().for_each(|column| {
        column.set_cell_alignment(CellAlignment::Right);
    });
    table
}

impl Inspection {
    fn new(
        header: &TraceHeader,
        pairs: u64,
        per_layer: Vec<LayerFigures>,
        over_time: Vec<TimeFigures>,
    ) -> Self {
        Self {
            steps: header.steps,
            layers: header.layers,
            ranks: header.ranks,
            experts: header.experts,
            top_k: header.top_k,
            tokens_per_rank: header.tokens_per_rank,
            first_step: header.number(0),
            recorded: header.recorded.len(),
            scored: header.scored,
            pairs,
            metadata: header.metadata.clone(),
            per_layer,
            over_time,
        }
    }

    fn layer_table(&self) -> Table {
        let mut table = table(&[
            "layer",
            "expert max/mean (worst)",
            "rank max/mean (worst)",
            "top 1",
            "top 10 %",
            "top 25 %",
            "gini",
            "cv",
            "drift",
            "idle",
        ]);
        for (layer, figures) in self.per_layer.iter().enumerate() {
            let percent = |share: f64| format!("{:.1} %", 100.0 * share);
            let worst = |mean: f64, worst: f64| format!("{mean:.2} ({worst:.2})");
            table.add_row([
                layer.to_string(),
                worst(
                    figures.expert_max_over_mean,
                    figures.expert_max_over_mean_worst,
                ),
                worst(figures.rank_max_over_mean, figures.rank_max_over_mean_worst),
                percent(figures.share_top_1),
                percent(figures.share_top_10_percent),
                percent(figures.share_top_25_percent),
                format!("{:.3}", figures.gini),
                format!("{:.2}", figures.variation),
                percent(figures.drift),
                format!("{:.1}", figures.idle_experts),
            ]);
        }
        table
    }

    /// Some parts of the run, evenly spread.
    fn time_table(&self) -> Table {
        let mut table = table(&["steps", "expert max/mean", "rank max/mean", "drift"]);
        let parts = self.over_time.len();
        let lines = parts.min(LINES);
        for line in 0..lines {
            let figures = &self.over_time[if lines > 1 {
                line * (parts - 1) / (lines - 1)
            } else {
                0
            }];
            let steps = if figures.first_step == figures.last_step {
                figures.first_step.to_string()
            } else {
                format!("{}-{}", figures.first_step, figures.last_step)
            };
            table.add_row([
                steps,
                format!("{:.2}", figures.expert_max_over_mean),
                format!("{:.2}", figures.rank_max_over_mean),
                format!("{:.1} %", 100.0 * figures.drift),
            ]);
        }
        table
    }
}
