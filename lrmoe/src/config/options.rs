use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use lrmoe_kernels::Activation;
use lrmoe_metric::{Method, Rescale, Score};
use lrmoe_plan::{QuotaPolicy, Stash};
use serde::de::{Deserialize, Deserializer, Error};

use crate::policy::{Compensation, DxWeight, RouterGradient, Scope};

use super::all_to_all::AllToAll;
use super::contender::{ContenderName, PolicyName};
use super::device::Device;
use super::schedule::RetentionSchedule;
use super::switch::Switch;

/// Options of a training run as given, on the command line or in a TOML file with the same names.
#[derive(Args, Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct TrainOptions {
    /// TOML file with any of these options under the same names (without --), such as `top-k = 2`; the command line wins.
    /// Paths in it are relative to the working directory
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub(super) config: Option<PathBuf>,
    /// Processes that are the ranks, where they are not threads.
    #[arg(skip)]
    #[serde(skip)]
    pub(super) processes: Option<usize>,
    /// Text to train on, required: files, or folders whose .txt, .md and .rs files are taken. The last tenth is held out
    #[arg(long, value_name = "FILE-or-DIR", num_args = 1..)]
    #[serde(deserialize_with = "one_or_many")]
    pub(super) text: Option<Vec<PathBuf>>,
    /// Folder of the results: steps.jsonl, checkpoint.safetensors [default: out]
    #[arg(long, value_name = "DIR")]
    pub(super) out: Option<PathBuf>,
    /// Continue from DIR/checkpoint.safetensors of --out, bit for bit. Text, seed, sizes, ranks, slots and policy must be the same;
    /// what else is given applies from here on
    #[arg(long, conflicts_with = "overwrite")]
    pub(super) resume: bool,
    /// Replace the results of an earlier run in --out, as soon as this one starts
    #[arg(long)]
    pub(super) overwrite: bool,
    /// Write how every step routed its pairs as a trace, for `lrmoe trace` and `lrmoe replay`. With --resume it starts at the step the
    /// run goes on from; `lrmoe trace convert` joins the parts
    #[arg(long, value_name = "FILE")]
    pub(super) record_trace: Option<PathBuf>,
    /// Steps between those of which the trace has every pair: expert, gate weight and, where the policy computes it, score. 0 = none
    /// [default: 0]
    #[arg(long, value_name = "STEPS")]
    pub(super) record_pairs_every: Option<u32>,
    /// Steps between those whose gradients are compared with those of all pairs, by an exact backward pass beside the step's own, which
    /// goes on as without it: cosine, relative error and share kept per layer and expert in steps.jsonl, a table at the end. 0 = none
    /// [default: 0]
    #[arg(long, value_name = "STEPS")]
    pub(super) oracle_every: Option<u32>,
    /// Draws of the selection in such a step, the step's own among them: the mean over several shows what is bias and what is variance
    /// [default: 1]
    #[arg(long, value_name = "DRAWS")]
    pub(super) oracle_draws: Option<u32>,

    /// What runs backward: dropless (every pair), symi (replicas follow popularity, pairs beyond capacity are dropped in
    /// forward too) or lrmoe (all forward, selected pairs backward) [default: lrmoe]
    #[arg(long, value_name = "NAME", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) policy: Option<PolicyName>,
    /// Share of the routed pairs that runs backward, 0 to 1; 0 freezes the experts. One for all layers, or one for each, such as 0.5,0.25. For
    /// lrmoe [default: 0.5]
    #[arg(
        long,
        value_name = "SHARES",
        value_delimiter = ',',
        help_heading = "Policy"
    )]
    #[serde(deserialize_with = "shares")]
    pub(super) retention: Option<Vec<f64>>,
    /// How the retention changes over the run: constant; linear:FROM:TO (in a line over the steps, in place of --retention); warmup:STEPS (all
    /// pairs for STEPS steps, then --retention); or adaptive:VARIANCE[:STEPS], which sets it layer by layer so that selecting adds VARIANCE times
    /// the variance that the minibatch gives to the weight gradient, measured every STEPS steps [20] by three more backward passes, and starts at
    /// --retention [default: constant]
    #[arg(long, value_name = "SCHEDULE", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) retention_schedule: Option<RetentionSchedule>,
    /// What a pair is judged by: down-grad (its term in the gradient of the down projection), input-grad or gate-grad (norm of dy times that of
    /// the input, or alone), forward, out-norm or gate (known before backward: norm of the hidden row, of the output, or neither), random; or
    /// full-grad (its terms in all weight gradients; on the cpu, by running every pair backward first: for measuring the others)
    /// [default: down-grad]
    #[arg(long, value_name = "NAME", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) score: Option<Score>,
    /// How pairs are chosen by score: priority (random, unbiased weight gradients) or top (largest first, biased)
    /// [default: priority]
    #[arg(long, value_name = "NAME", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) select: Option<Method>,
    /// How the retained pairs are divided among experts: proportional (to load), value (by score), blend (half each) or
    /// neyman (to load times rms score) [default: proportional; blend with --select top]
    #[arg(long, value_name = "NAME", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) quota_policy: Option<QuotaPolicy>,
    /// Divide scores by this power, 0 to 1, of the sum of their expert's scores, so that experts with large gradients claim less. It acts
    /// through the quotas alone: with --quota-policy value, blend or neyman, and with any where --budget-mib binds [default: 0]
    #[arg(long, value_name = "POWER", help_heading = "Policy")]
    pub(super) recalibration: Option<f64>,
    /// What the weights of the pairs that --select top keeps are multiplied by, expert by expert: none, count (pairs over pairs kept) or
    /// mass (sum of scores over that of those kept) [default: none]
    #[arg(long, value_name = "NAME", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) rescale: Option<Rescale>,
    /// What pairs that are not selected are left out of: pair (everything: they do not run backward) or wgrad (weight gradients alone: all run
    /// backward, the input's and the router's gradients are exact, and little is saved) [default: pair]
    #[arg(long, value_name = "NAME", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) scope: Option<Scope>,
    /// Weight of a retained pair in the gradient of the layer's input: w for its selection weight (unbiased), or 1 (biased, with
    /// less variance) [default: w]
    #[arg(long, value_name = "WEIGHT", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) dx_weight: Option<DxWeight>,
    /// Pairs that give the router a gradient: retained (unbiased) or all (exact; keeps every pair's output until backward)
    /// [default: retained]
    #[arg(long, value_name = "PAIRS", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) router_gradient: Option<RouterGradient>,
    /// What the forward pass leaves for the backward pass: recompute (x at its source: least memory), stash (x and pre-activations of every pair at its
    /// expert: no recomputation, x is not sent twice) or forward-select (of the pairs that run backward alone, which are then chosen in the
    /// forward pass, by score forward, out-norm, gate or random) [default: recompute]
    #[arg(long, value_name = "MODE", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) stash: Option<Stash>,
    /// What stands in the weight gradients for the pairs that do not run backward: none, or moments (sums over all pairs of an expert: less
    /// variance with priority, less bias with top). For --device cpu [default: none]
    #[arg(long, value_name = "NAME", help_heading = "Policy")]
    #[serde(deserialize_with = "parsed")]
    pub(super) compensation: Option<Compensation>,
    /// Pairs that all slots take together, as a multiple of the routed pairs; lower drops more. For symi [default: 1.0]
    #[arg(long, value_name = "FACTOR", help_heading = "Policy")]
    pub(super) capacity_factor: Option<f64>,
    /// Run several policies from the same start and compare them: a list of POLICY or lrmoe@RETENTION, such as
    /// dropless,symi,lrmoe,lrmoe@0
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        help_heading = "Policy"
    )]
    #[serde(deserialize_with = "parsed_list")]
    pub(super) compare: Option<Vec<ContenderName>>,
    /// Loss on held-out text, in nats per byte, at which a run ends; looked at every --eval-every steps
    #[arg(long, value_name = "NATS", help_heading = "Policy")]
    pub(super) target_loss: Option<f32>,

    /// Where the MoE layers compute: cpu; wgpu (the fastest Vulkan, Metal or DX12 device, shared by the ranks); cuda (an NVIDIA card, shared
    /// by the ranks: the first, or number LOCAL_RANK where a launcher sets that variable), cuda:N (card N) or cuda:N-M (the ranks take these
    /// cards in turn). `lrmoe doctor` lists them. Selections are the same for the same scores, losses within rounding [default: cpu]
    #[arg(long, value_name = "NAME", help_heading = "Ranks and memory")]
    #[serde(deserialize_with = "parsed")]
    pub(super) device: Option<Device>,
    /// Ranks, each a thread with its share of batch and experts; with --world mpi as many as processes
    /// [default: 4, or the number of processes]
    #[arg(long, value_name = "N", help_heading = "Ranks and memory")]
    pub(super) ranks: Option<usize>,
    /// Ranks that share a node; pairs that cross nodes are avoided first [default: all]
    #[arg(long, value_name = "N", help_heading = "Ranks and memory")]
    pub(super) ranks_per_node: Option<usize>,
    /// How rows travel between nodes: direct (from every rank to every other), hierarchical (within the node to the rank with the receiver's
    /// place, from there with the rest of the node's: fewer and larger messages) or auto (hierarchical where each message
    /// that this saves costs at most 64 KiB more within a node). Losses are the same to the bit [default: direct]
    #[arg(long, value_name = "NAME", help_heading = "Ranks and memory")]
    #[serde(deserialize_with = "parsed")]
    pub(super) all_to_all: Option<AllToAll>,
    /// Threads that all ranks compute on [default: one per core]
    #[arg(long, value_name = "N", help_heading = "Ranks and memory")]
    pub(super) threads: Option<usize>,
    /// Expert instances that a rank can hold; more than experts / ranks leaves room for replicas [default: a quarter more]
    #[arg(long, value_name = "N", help_heading = "Ranks and memory")]
    pub(super) slots: Option<u32>,
    /// Rows that a rank takes through its experts at once: bounds its buffers [default: 4096]
    #[arg(long, value_name = "ROWS", help_heading = "Ranks and memory")]
    pub(super) chunk_rows: Option<u64>,
    /// on: rows of the next chunk come, and those of the last go back, while one is computed with; takes memory for rows on their way
    /// a second time, and spare cores or a network to be of use. Losses are the same to the bit [default: off]
    #[arg(long, value_name = "on-or-off", help_heading = "Ranks and memory")]
    #[serde(deserialize_with = "parsed")]
    pub(super) overlap: Option<Switch>,
    /// Memory of a rank for experts, optimizer shard and token buffers of all MoE layers, in MiB; fewer pairs run backward where
    /// it binds [default: no limit]
    #[arg(long, value_name = "MIB", help_heading = "Ranks and memory")]
    pub(super) budget_mib: Option<u64>,
    /// Cluster of the modelled times: 8xA100, 8xH100, 8xH200, local (this machine, measured first) or a TOML file
    /// [default: 8xA100]
    #[arg(long, value_name = "NAME-or-FILE", help_heading = "Ranks and memory")]
    pub(super) cluster: Option<String>,
    /// Seconds a rank waits for the others before it gives up [default: 600]
    #[arg(long, value_name = "SECONDS", help_heading = "Ranks and memory")]
    pub(super) deadline_seconds: Option<u64>,

    /// Transformer layers, each with a MoE layer [default: 2]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(super) layers: Option<usize>,
    /// Values of a token between layers [default: 128]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(super) width: Option<usize>,
    /// Attention heads; divide the width into even sizes [default: 4]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(super) heads: Option<usize>,
    /// Bytes of a sequence [default: 256]
    #[arg(long, value_name = "BYTES", help_heading = "Model")]
    pub(super) context: Option<usize>,
    /// Experts of a MoE layer [default: 16]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(super) experts: Option<usize>,
    /// Experts that each token is sent to [default: 2]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(super) top_k: Option<usize>,
    /// Values inside an expert [default: 128]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(super) hidden: Option<usize>,
    /// Activation of the experts: swiglu, geglu_tanh, geglu_erf, reglu, relu2, gelu or silu [default: swiglu]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    #[serde(deserialize_with = "parsed")]
    pub(super) activation: Option<Activation>,

    /// Training steps [default: 300]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub(super) steps: Option<u32>,
    /// Sequences per step over all ranks, a multiple of the ranks [default: 8]
    #[arg(long, value_name = "SEQUENCES", help_heading = "Training")]
    pub(super) batch: Option<usize>,
    /// Seed of parameters, batches and selection; the same seed gives the same run [default: 1]
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub(super) seed: Option<u64>,
    /// Largest learning rate of AdamW, reached after --warmup, then falling to a tenth along a cosine [default: 0.003]
    #[arg(long, value_name = "RATE", help_heading = "Training")]
    pub(super) learning_rate: Option<f32>,
    /// Steps over which the learning rate rises [default: 20, at most a fifth of the steps]
    #[arg(long, value_name = "STEPS", help_heading = "Training")]
    pub(super) warmup: Option<u32>,
    /// Decoupled weight decay of AdamW [default: 0.1]
    #[arg(long, value_name = "RATE", help_heading = "Training")]
    pub(super) weight_decay: Option<f32>,
    /// Norm that larger gradients are scaled down to; 0 never scales [default: 1.0]
    #[arg(long, value_name = "NORM", help_heading = "Training")]
    pub(super) clip: Option<f32>,
    /// Weight of each layer's balance loss; higher evens out the experts' loads [default: 0.001]
    #[arg(long, value_name = "WEIGHT", help_heading = "Training")]
    pub(super) balance_loss: Option<f64>,
    /// Steps between evaluations on held-out text; 0 = only at the end [default: 25]
    #[arg(long, value_name = "STEPS", help_heading = "Training")]
    pub(super) eval_every: Option<u32>,
    /// Held-out sequences of an evaluation [default: 16]
    #[arg(long, value_name = "SEQUENCES", help_heading = "Training")]
    pub(super) eval_sequences: Option<usize>,
    /// Steps between checkpoints; 0 = only at the end [default: 100]
    #[arg(long, value_name = "STEPS", help_heading = "Training")]
    pub(super) checkpoint_every: Option<u32>,
}

impl TrainOptions {
    /// Options from TOML text.
    ///
    /// # Errors
    ///
    /// Text that is not TOML, an unknown key, or a value of the wrong kind; the error says where.
    pub fn from_toml(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }

    /// These options for a run whose ranks are so many processes.
    #[must_use]
    pub fn of_processes(self, processes: usize) -> Self {
        Self {
            processes: Some(processes),
            ..self
        }
    }

    /// These options, and those of `other` where these say nothing.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            config: self.config.or(other.config),
            processes: self.processes.or(other.processes),
            text: self.text.or(other.text),
            out: self.out.or(other.out),
            resume: self.resume || other.resume,
            overwrite: self.overwrite || other.overwrite,
            record_trace: self.record_trace.or(other.record_trace),
            record_pairs_every: self.record_pairs_every.or(other.record_pairs_every),
            oracle_every: self.oracle_every.or(other.oracle_every),
            oracle_draws: self.oracle_draws.or(other.oracle_draws),
            policy: self.policy.or(other.policy),
            retention: self.retention.or(other.retention),
            retention_schedule: self.retention_schedule.or(other.retention_schedule),
            score: self.score.or(other.score),
            select: self.select.or(other.select),
            quota_policy: self.quota_policy.or(other.quota_policy),
            recalibration: self.recalibration.or(other.recalibration),
            rescale: self.rescale.or(other.rescale),
            scope: self.scope.or(other.scope),
            dx_weight: self.dx_weight.or(other.dx_weight),
            router_gradient: self.router_gradient.or(other.router_gradient),
            stash: self.stash.or(other.stash),
            compensation: self.compensation.or(other.compensation),
            capacity_factor: self.capacity_factor.or(other.capacity_factor),
            compare: self.compare.or(other.compare),
            target_loss: self.target_loss.or(other.target_loss),
            device: self.device.or(other.device),
            ranks: self.ranks.or(other.ranks),
            ranks_per_node: self.ranks_per_node.or(other.ranks_per_node),
            all_to_all: self.all_to_all.or(other.all_to_all),
            threads: self.threads.or(other.threads),
            slots: self.slots.or(other.slots),
            chunk_rows: self.chunk_rows.or(other.chunk_rows),
            overlap: self.overlap.or(other.overlap),
            budget_mib: self.budget_mib.or(other.budget_mib),
            cluster: self.cluster.or(other.cluster),
            deadline_seconds: self.deadline_seconds.or(other.deadline_seconds),
            layers: self.layers.or(other.layers),
            width: self.width.or(other.width),
            heads: self.heads.or(other.heads),
            context: self.context.or(other.context),
            experts: self.experts.or(other.experts),
            top_k: self.top_k.or(other.top_k),
            hidden: self.hidden.or(other.hidden),
            activation: self.activation.or(other.activation),
            steps: self.steps.or(other.steps),
            batch: self.batch.or(other.batch),
            seed: self.seed.or(other.seed),
            learning_rate: self.learning_rate.or(other.learning_rate),
            warmup: self.warmup.or(other.warmup),
            weight_decay: self.weight_decay.or(other.weight_decay),
            clip: self.clip.or(other.clip),
            balance_loss: self.balance_loss.or(other.balance_loss),
            eval_every: self.eval_every.or(other.eval_every),
            eval_sequences: self.eval_sequences.or(other.eval_sequences),
            checkpoint_every: self.checkpoint_every.or(other.checkpoint_every),
        }
    }
}

/// A value written as on the command line.
fn parsed<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(Error::custom)
}

/// One path, or a list of paths.
fn one_or_many<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<PathBuf>>, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged, expecting = "expected a path or a list of paths")]
    enum Paths {
        One(PathBuf),
        Many(Vec<PathBuf>),
    }
    Ok(Some(match Paths::deserialize(deserializer)? {
        Paths::One(path) => vec![path],
        Paths::Many(paths) => paths,
    }))
}

/// A share, a list of them, or such a list as on the command line.
fn shares<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<f64>>, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged, expecting = "expected a share or a list of shares")]
    enum Shares {
        One(f64),
        Many(Vec<f64>),
        Text(String),
    }
    let parse = |text: &str| text.trim().parse::<f64>().map_err(D::Error::custom);
    Ok(Some(match Shares::deserialize(deserializer)? {
        Shares::One(share) => vec![share],
        Shares::Many(shares) => shares,
        Shares::Text(text) => text.split(',').map(parse).collect::<Result<Vec<_>, _>>()?,
    }))
}

/// A list of values written as on the command line.
fn parsed_list<'de, T, D>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    let texts = Vec::<String>::deserialize(deserializer)?;
    let values = texts
        .iter()
        .map(|text| text.parse())
        .collect::<Result<_, _>>();
    values.map(Some).map_err(Error::custom)
}
