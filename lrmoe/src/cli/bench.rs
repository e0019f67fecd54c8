//! `lrmoe bench`.

use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use lrmoe::bench::{Report, Settings, bench, pool};
use lrmoe::config::{Device, Dtype};
use lrmoe::error::Error;
use lrmoe::trace::write_file;
use lrmoe_kernels::{Activation, FfnShape};
use lrmoe_metric::Score;
use lrmoe_plan::{ModelSpec, Stash};

/// Time one MoE layer on this machine: dropless training against LRMoE.
///
/// Forward and backward passes of one layer on one rank, in turns: every pair backward (dropless), then the shares of --retention, with all
/// that selecting them takes. Printed are milliseconds of every stage, ratios to dropless, rows, GFLOP/s and the memory of a step.
/// No optimizer runs, and nothing is exchanged with other ranks.
#[derive(Args)]
#[command(args_override_self = true)]
#[command(after_help = "Examples:
  lrmoe bench                                              Qwen3-30B-A3B's layer, 4096 tokens, half of the pairs backward (8 GiB)
  lrmoe bench --dtype bf16                                 the same with 2-byte weights and rows (6 GiB)
  lrmoe bench --preset olmoe-1b-7b --retention 0.5,0.25 --zipf 1
  lrmoe bench --score forward --stash recompute,stash,forward-select --retention 0.25
  lrmoe bench --experts 16 --width 512 --hidden 256 --tokens 1024 --json -

How to read it: `backward of dropless` at retention 0.5 says what half of the backward work saves of its time. 0.5 would be all of it;
what is above is the selection and what does not shrink with the rows. Each step has a canary beside it that counts the cores the
threads had: on shared machines two threads at times have one, such rounds are repeated, and the last line says so.")]
pub(crate) struct Bench {
    /// Model whose layer is timed: qwen3-30b-a3b, glm-4.5-air, olmoe-1b-7b, mixtral-8x7b or tiny
    #[arg(long, value_name = "NAME", default_value = "qwen3-30b-a3b")]
    preset: String,
    /// Experts of the layer [default: the preset's]
    #[arg(long, value_name = "N")]
    experts: Option<usize>,
    /// Experts per token [default: the preset's]
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Model width D [default: the preset's]
    #[arg(long, value_name = "N")]
    width: Option<usize>,
    /// Hidden width F of an expert [default: the preset's]
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,
    /// Activation of the experts: swiglu, geglu_tanh, geglu_erf, reglu, relu2, gelu or silu
    #[arg(long, value_name = "NAME", default_value = "swiglu")]
    activation: Activation,
    /// Tokens of a step
    #[arg(long, value_name = "N", default_value_t = 4096)]
    tokens: usize,
    /// How uneven the experts' loads are: popularity of the i-th expert is i^-S, 0 makes them alike
    #[arg(
        long,
        value_name = "S",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    zipf: f64,
    /// Shares of the pairs that run backward, each timed against dropless
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "0.5"
    )]
    retention: Vec<f64>,
    /// What pairs are judged by, as in `lrmoe train`: down-grad, input-grad, gate-grad, forward, out-norm, gate, random or full-grad
    #[arg(long, value_name = "NAME", default_value_t = Score::DownGrad)]
    score: Score,
    /// What the forward pass leaves for the backward pass, each timed: recompute, stash or forward-select (with score forward, out-norm, gate or random).
    /// Ratios are to dropless in the first of them
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "recompute"
    )]
    stash: Vec<Stash>,
    /// Type of weights and rows; sums and weight gradients are f32 with both. bf16 runs on cpu and cuda
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    dtype: Dtype,
    /// Where the layer computes: cpu, wgpu (Vulkan, Metal or DX12), cuda or cuda:N (an NVIDIA card)
    #[arg(long, value_name = "NAME", default_value_t)]
    device: Device,
    /// Threads that compute [default: one per core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Rows that the layer takes at once
    #[arg(long, value_name = "ROWS", default_value_t = 4096)]
    chunk_rows: u64,
    /// Steps of each policy that count
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: usize,
    /// Steps of each before them that do not, after one that shows its memory
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: usize,
    /// Seed of weights, input and selection
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write all figures to FILE; - prints them instead of the tables
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Replace FILE if it exists
    #[arg(long)]
    overwrite: bool,
}

impl Bench {
    pub(crate) fn run(self) -> Result<(), Error> {
        let file = self.json.clone().filter(|path| path.as_os_str() != "-");
        super::check_outputs(&[], [&file], self.overwrite)?;
        let settings = self.settings()?;
        settings.check()?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let pool = pool(self.threads.unwrap_or(cores))?;
        let bar = ProgressBar::new(0).with_style(
            ProgressStyle::with_template("bench {bar:24} {pos}/{len} rounds {elapsed}<{eta} {msg}")
                .expect("a fixed template"),
        );
        let report = pool.install(|| {
            bench(&settings, |what, done, all| {
                bar.set_length(all as u64);
                bar.set_position(done as u64);
                bar.set_message(what.to_owned());
            })
        });
        bar.finish_and_clear();
        let report = report?;
        match (&self.json, &file) {
            (Some(_), None) => print!("{}", json(&report)),
            _ => println!("{report}"),
        }
        if let Some(path) = &file {
            write_file(path, json(&report).as_bytes())?;
        }
        Ok(())
    }

    fn settings(&self) -> Result<Settings, Error> {
        let spec = ModelSpec::preset(&self.preset)?;
        let size = |given: Option<usize>, of: usize| given.unwrap_or(of);
        let changed = [self.experts, self.top_k, self.width, self.hidden]
            .iter()
            .any(Option::is_some);
        Ok(Settings {
            model: spec.name + if changed { ", changed" } else { "" },
            shape: FfnShape {
                width: size(self.width, spec.width),
                hidden: size(self.hidden, spec.hidden),
                activation: self.activation,
            },
            dtype: self.dtype,
            device: super::of_process(self.device)?,
            experts: size(self.experts, spec.experts),
            top_k: size(self.top_k, spec.top_k),
            tokens: self.tokens,
            zipf: self.zipf,
            retentions: self.retention.clone(),
            score: self.score,
            stashes: self.stash.clone(),
            chunk_rows: self.chunk_rows,
            steps: self.steps,
            warmup: self.warmup,
            seed: self.seed,
        })
    }
}

fn json(report: &Report) -> String {
    serde_json::to_string_pretty(report).expect("a report has only string keys") + "\n"
}
