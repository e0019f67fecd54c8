//! `lrmoe replay`.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use lrmoe_metric::Method;
use lrmoe_plan::QuotaPolicy;

use super::model::ModelArguments;
use crate::config::cluster;
use crate::error::Error;
use crate::files;
use crate::replay::{Contender, Report, Settings, Source, page, replay};

/// Say what placement policies would have cost on recorded routing: memory, traffic, time.
///
/// Where experts would have lived, what would have been dropped or left out of backward, and what that takes on the cluster,
/// is worked out step by step from the routing of the trace. Nothing is trained; times are modelled.
#[derive(Args, Debug)]
#[command(
    after_help = "POLICY is fixed (contiguous experts, no replicas), fixed-replicas (placed once, by the first steps), symi (replicas follow \
popularity, pairs beyond capacity are dropped), flexmoe (replicas grow, shrink and migrate) or lrmoe (all pairs forward, a share RETENTION \
backward). MEMORY is whole (all rows of a pass at once, activations kept: conventional training; the default of all but lrmoe), chunked-forward \
(forward in chunks, recomputed: what lrmoe train does; the default of lrmoe) or chunked (backward in chunks too).

Examples:
  lrmoe trace synth zipf:1.2 --out zipf.safetensors --experts 128 --top-k 8 --ranks 8 --tokens-per-rank 4096
  lrmoe replay zipf.safetensors --preset qwen3-30b-a3b --cluster 8xA100 --html replay.html
  lrmoe replay run.safetensors --preset glm-4.5-air --ranks 64 --budget-gib 40 --policies fixed,lrmoe@0.25 --json replay.json"
)]
pub(crate) struct Replay {
    /// Traces of one run: counts of every pair, and where known each pair with its score (lrmoe trace)
    #[arg(value_name = "TRACE", required = true)]
    traces: Vec<PathBuf>,
    /// What to compare: a list of POLICY[@RETENTION][+MEMORY]
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "fixed,fixed-replicas,symi,flexmoe,lrmoe@0.5,lrmoe@0.25"
    )]
    policies: Vec<Contender>,
    #[command(flatten)]
    model: ModelArguments,
    /// 8xA100, 8xH100, 8xH200, local (this machine, measured first) or a TOML file
    #[arg(long, value_name = "NAME-or-FILE", default_value = "8xA100")]
    cluster: String,
    /// Memory of a rank for the MoE layers: lrmoe plans within it, others are marked where they exceed it [default: the cluster's]
    #[arg(long, value_name = "GIB")]
    budget_gib: Option<f64>,
    /// Instances that a rank has room for in each layer, for policies with replicas [default: a quarter more than the experts need]
    #[arg(long, value_name = "N")]
    slots: Option<u32>,
    /// Replay on N ranks, a multiple of the trace's: every source rank is repeated
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Replay with N tokens on each rank, a multiple of the trace's: every token is repeated
    #[arg(long, value_name = "N")]
    tokens_per_rank: Option<usize>,
    /// Scale memory, bytes and time of the trace's layers to N [default: the trace's layers]
    #[arg(long, value_name = "N")]
    model_layers: Option<usize>,
    /// Steps to replay, by their numbers: A up to but not including B
    #[arg(long, value_name = "A..B", value_parser = steps)]
    steps: Option<Range<u32>>,
    /// Share of the pairs that lrmoe runs backward where its name says nothing
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    retention: f64,
    /// Pairs that all slots take together under symi, as a multiple of the routed pairs
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    capacity_factor: f64,
    /// Rows of a chunk, where passes run in chunks: enough to keep a GPU busy, few beside a step's rows
    #[arg(long, value_name = "ROWS", default_value_t = 8192)]
    chunk_rows: u64,
    /// How lrmoe divides what it retains among experts: proportional, value, blend or neyman
    #[arg(long, value_name = "NAME", default_value_t)]
    quota_policy: QuotaPolicy,
    /// Pairs that every expert keeps if it has them
    #[arg(long, value_name = "N", default_value_t = 1)]
    floor: u32,
    /// How lrmoe selects pairs by their scores: priority or top
    #[arg(long, value_name = "NAME", default_value_t = Method::Priority)]
    select: Method,
    /// Seed of the selection
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// First steps that move the placements on but count in no figure: before the first, all experts count alike
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: usize,
    /// First steps whose loads fixed-replicas places by
    #[arg(long, value_name = "N", default_value_t = 10)]
    history: usize,
    /// Write all figures to FILE
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with plots to FILE; it needs nothing else
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Replace outputs that exist
    #[arg(long)]
    overwrite: bool,
}

impl Replay {
    pub(crate) fn run(self) -> Result<(), Error> {
        super::check_outputs(&self.traces, [&self.json, &self.html], self.overwrite)?;
        let mut source = Source::open(&self.traces)?;
        let model = self.model.model()?;
        let ranks = self.ranks.unwrap_or(source.header().ranks);
        let cluster = cluster(&self.cluster, ranks)?;
        let settings = Settings {
            model,
            model_layers: self.model_layers,
            budget: self
                .budget_gib
                .map_or(Ok(cluster.memory_bytes), super::model::budget)?,
            cluster,
            contenders: self.policies,
            retention: self.retention,
            slots: self.slots,
            ranks: self.ranks,
            tokens_per_rank: self.tokens_per_rank,
            steps: self.steps,
            warmup: self.warmup,
            history: self.history,
            capacity_factor: self.capacity_factor,
            chunk_rows: self.chunk_rows,
            quota_policy: self.quota_policy,
            floor: self.floor,
            method: self.select,
            seed: self.seed,
        };
        let bar = ProgressBar::new(0).with_style(
            ProgressStyle::with_template("replay {bar:24} {pos}/{len} steps {elapsed}<{eta}")
                .expect("a fixed template"),
        );
        let report = replay(&mut source, &settings, &stop_on_signal(), |done, steps| {
            bar.set_length(steps as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        let report = report?;
        println!("{report}");
        if let Some(path) = &self.json {
            files::write(path, &json(&report))?;
        }
        if let Some(path) = &self.html {
            files::write(path, page(&report)?.as_bytes())?;
        }
        Ok(())
    }
}

fn json(report: &Report) -> Vec<u8> {
    let mut json = serde_json::to_vec_pretty(report).expect("a report has only string keys");
    json.push(b'\n');
    json
}

/// `A..B`.
fn steps(text: &str) -> Result<Range<u32>, String> {
    let range = text.split_once("..").and_then(|(start, end)| {
        let (start, end) = (start.parse().ok()?, end.parse().ok()?);
        (start < end).then_some(start..end)
    });
    range.ok_or_else(|| "must be A..B with A below B".to_owned())
}

/// A flag that the first Ctrl-C (or SIGTERM) sets; the second ends the program at once.
fn stop_on_signal() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let handler = move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        tracing::warn!(%error, "Ctrl-C ends the replay at once");
    }
    stop
}
