//! `lrmoe trace`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};

use crate::error::Error;
use crate::files;
use crate::trace::synth::{self, SynthShape, Workload};
use crate::trace::{Axes, ConvertOptions, Format, TraceReader, check_output, convert, inspect};

/// Convert, look at and make routing traces.
///
/// A trace says how many pairs each source rank sent to each expert, step by step and layer by layer. It is one safetensors file, recorded by
/// `lrmoe train --record-trace`, converted from what other programs record, or made up.
#[derive(Args, Debug)]
pub(crate) struct Trace {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Convert(Convert),
    Inspect(Inspect),
    Synth(Synth),
}

impl Trace {
    pub(crate) fn run(self) -> Result<(), Error> {
        match self.command {
            Command::Convert(convert) => convert.run(),
            Command::Inspect(inspect) => inspect.run(),
            Command::Synth(synth) => synth.run(),
        }
    }
}

/// Convert recordings of other programs into a trace.
///
/// Formats, told apart by the file's name and first record:
///
/// native: LRMoE's own (.safetensors). Several files of one run are joined, such as those of a run that was resumed; where they overlap the
/// later one counts.
///
/// jsonl: one JSON object per token and layer, {"token": 0, "layer": 0, "topk_ids": [..], "topk_weights": [..]}; a first object {"type": "meta",
/// "num_experts": ..} may say the number of experts. All tokens make one step of one rank unless --tokens-per-step and --ranks say otherwise;
/// tokens that are missing at the end of the last step are masked. With weights, every pair is kept.
///
/// megatron: one JSON object per step, rank and layer, {"step", "stage", "block", "layer", "rank", "num_tokens", "topk", "top_indices"}. Layers are
/// ordered by stage, block and layer; ranks by their number within their stage. Several records of one place add up. One file or one per rank.
///
/// numpy: counts in .npy or .npz, such as SGLang's logical_count or vLLM's EPLB load: [layers, experts], [steps, layers, experts] or
/// [steps, layers, ranks, experts]; --axes for another order. Arrays of Python objects are refused.
///
/// csv: a first line that names the columns step, layer, rank, expert and count, then one line per count that is not 0.
///
/// Megatron and CSV files are sorted by step. All formats are read as a stream except numpy arrays that do not start with their steps; jsonl
/// keeps the steps that are not complete yet in memory.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  lrmoe trace convert olmoe.jsonl --tokens-per-step 512 --ranks 8 --out olmoe.safetensors
  lrmoe trace convert rank*.jsonl --experts 128 --out run.safetensors
  lrmoe trace convert counts.npz --axes layers,steps,experts --out run.safetensors
  lrmoe trace convert first.safetensors resumed.safetensors --out whole.safetensors
  lrmoe trace convert counts.safetensors --pairs pairs.safetensors --out both.safetensors")]
struct Convert {
    /// Files to convert, in order
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// The trace to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace FILE if it exists
    #[arg(long)]
    overwrite: bool,
    /// Format of the inputs: native, jsonl, megatron, numpy or csv [default: told by name and first record]
    #[arg(long, value_name = "FORMAT")]
    from: Option<Format>,
    /// Take the per-pair data over from another native trace of the same run
    #[arg(long, value_name = "FILE")]
    pairs: Option<PathBuf>,
    /// jsonl: divide the tokens of a step among N ranks, in order [default: 1]
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// jsonl: cut the tokens into steps of N, over all ranks [default: all tokens]
    #[arg(long, value_name = "N")]
    tokens_per_step: Option<usize>,
    /// jsonl, megatron, csv: experts of a layer [default: as the file says, else the largest id + 1]
    #[arg(long, value_name = "N")]
    experts: Option<usize>,
    /// numpy: the array's axes in order, out of steps, layers, ranks, experts; absent ones count 1
    #[arg(long, value_name = "LIST")]
    axes: Option<Axes>,
    /// numpy: which array of an npz file [default: the only one, counts, logical_count or expert_load]
    #[arg(long, value_name = "NAME")]
    array: Option<String>,
}

impl Convert {
    fn run(self) -> Result<(), Error> {
        check_output(&self.out, self.overwrite)?;
        let options = ConvertOptions {
            from: self.from,
            pairs: self.pairs,
            ranks: self.ranks,
            tokens_per_step: self.tokens_per_step,
            experts: self.experts,
            axes: self.axes,
            array: self.array,
        };
        let bar = bar("reading {bar:30} {bytes}/{total_bytes} {eta}");
        convert(&self.inputs, &self.out, &options, &bar)?;
        bar.finish_and_clear();
        written(&self.out)
    }
}

/// Show shape, imbalance, concentration and drift of a trace.
///
/// max/mean: load of the busiest expert (or rank, where the experts lie contiguously over as many ranks as there are sources) over the mean; 1 is
/// balanced. top 1, 10 %, 25 %: share of the pairs on the busiest expert, tenth and quarter of the experts. gini: 0 if all experts are alike,
/// towards 1 if one has everything. cv: standard deviation over mean. drift: share of the pairs that would have to change experts to
/// look like the step before. idle: experts without a pair. The trace may be larger than memory.
#[derive(Args, Debug)]
struct Inspect {
    /// The trace
    file: PathBuf,
    /// Draw the load of each expert over time as an SVG picture; steps are binned into at most 200
    #[arg(long, value_name = "OUT.svg")]
    heatmap: Option<PathBuf>,
    /// Layer of the heat map
    #[arg(long, value_name = "N", default_value_t = 0, requires = "heatmap")]
    layer: usize,
    /// Write every figure as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Replace pictures and JSON that exist
    #[arg(long)]
    overwrite: bool,
}

impl Inspect {
    fn run(self) -> Result<(), Error> {
        let mut reader = TraceReader::open(&self.file)?;
        let inputs = std::slice::from_ref(&self.file);
        super::check_outputs(inputs, [&self.json, &self.heatmap], self.overwrite)?;
        let bar = bar("step {bar:30} {pos}/{len} {eta}");
        let (inspection, heat_map) = inspect(&mut reader, self.layer, &bar)?;
        bar.finish_and_clear();
        println!("{}: {inspection}", self.file.display());
        if let Some(path) = &self.json {
            let json = serde_json::to_string_pretty(&inspection).expect("numbers and strings");
            files::write(path, json.as_bytes())?;
        }
        if let Some(path) = &self.heatmap {
            files::write(path, heat_map.to_svg().as_bytes())?;
        }
        Ok(())
    }
}

/// Make up a trace.
///
/// T tokens a rank, k experts a token, E experts, R ranks. Every rank has T * k pairs in every
/// layer and step unless the workload says otherwise; no expert gets more than T of them from one
/// rank, as the experts of a token differ. A step depends on workload, sizes, seed and its number
/// alone. Which experts are hot is drawn per layer. Except for `balanced`, tokens pick their experts
/// at random.
///
/// balanced: every expert gets the same from every rank, up to one pair.
/// hot-set: the same E/8 experts (rounded up) take half of the pairs in every step.
/// hot-rank: the experts of one rank, where they lie contiguously, take half of the pairs.
/// spread-hot: one expert of each rank, where they lie contiguously, is hot; together they take half.
/// ragged-sources: experts alike, but each rank has 0 to T tokens, drawn anew in each step.
/// zero-experts: the same quarter of the experts (rounded down) gets nothing; the others are alike.
/// zero-ranks: a quarter of the ranks (rounded up) has no tokens, drawn anew in each step; experts alike.
/// rotating-hotspot: as hot-set, the hot experts moving on by one in each step.
/// burst: experts alike, but in one of eight steps of a layer, at random, every token picks the same one.
/// zipf:A: popularity of the i-th expert is i^-A, A from 0 to 8, such as zipf:1.2.
///
/// Where a hot expert would get more than one pair from a token, it gets one from each and the others
/// take the rest.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
#[command(after_help = "Example:
  lrmoe trace synth zipf:1.2 --layers 48 --ranks 8 --experts 128 --top-k 8 --steps 100 --out zipf.safetensors")]
struct Synth {
    /// What the loads look like, see above
    workload: Workload,
    /// The trace to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace FILE if it exists
    #[arg(long)]
    overwrite: bool,
    /// Steps
    #[arg(long, value_name = "N", default_value_t = 100)]
    steps: u32,
    /// MoE layers
    #[arg(long, value_name = "N", default_value_t = 4)]
    layers: usize,
    /// Source ranks
    #[arg(long, value_name = "N", default_value_t = 8)]
    ranks: usize,
    /// Experts of a layer
    #[arg(long, value_name = "N", default_value_t = 64)]
    experts: usize,
    /// Experts per token
    #[arg(long, value_name = "N", default_value_t = 8)]
    top_k: usize,
    /// Tokens of each rank in a step
    #[arg(long, value_name = "N", default_value_t = 4096)]
    tokens_per_rank: usize,
    /// Seed
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

impl Synth {
    fn run(self) -> Result<(), Error> {
        check_output(&self.out, self.overwrite)?;
        let shape = SynthShape {
            layers: self.layers,
            ranks: self.ranks,
            experts: self.experts,
            top_k: self.top_k,
            tokens_per_rank: self.tokens_per_rank,
        };
        let bar = bar("step {bar:30} {pos}/{len} {eta}");
        synth::write(
            &self.out,
            self.workload,
            self.seed,
            self.steps,
            &shape,
            &bar,
        )?;
        bar.finish_and_clear();
        written(&self.out)
    }
}

/// One line about a trace just written.
fn written(path: &Path) -> Result<(), Error> {
    let reader = TraceReader::open(path)?;
    let header = reader.header();
    let pairs = match header.recorded.len() {
        0 => String::new(),
        steps => format!(", every pair of {steps} steps"),
    };
    println!(
        "{}: {} steps, {} layers, {} ranks, {} experts{pairs}",
        path.display(),
        header.steps,
        header.layers,
        header.ranks,
        header.experts
    );
    Ok(())
}

/// Hidden without a terminal.
fn bar(template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("a fixed template");
    ProgressBar::new(0).with_style(style)
}
