//! A replay of a recorded trace.
//!
//! `LRMOE_TRACE` names its files, separated as paths are in `PATH`, or the folder that they are in; without it the trials show as ignored.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use libtest_mimic::{Arguments, Failed, Trial};
use lrmoe::replay::{Model, Report, Settings, Source, replay};
use lrmoe_metric::Method;
use lrmoe_plan::{ClusterSpec, ModelSpec, QuotaPolicy};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let files = std::env::var_os("LRMOE_TRACE");
    let absent = files.is_none();
    let files: Vec<PathBuf> = std::env::split_paths(&files.unwrap_or_default())
        .flat_map(|path| traces(&path))
        .collect();
    let trials = [
        (
            "replay_trace::saves_memory",
            saves_memory as fn(&[PathBuf]) -> Outcome,
        ),
        ("replay_trace::keeps_a_tight_budget", keeps_a_tight_budget),
    ];
    let trials = trials.map(|(name, check)| {
        let files = files.clone();
        Trial::test(name, move || check(&files)).with_ignored_flag(absent)
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

/// The file, or those in the folder.
fn traces(path: &Path) -> Vec<PathBuf> {
    let Ok(folder) = std::fs::read_dir(path) else {
        return vec![path.into()];
    };
    let files = folder.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<_> = files
        .filter(|path| {
            path.extension()
                .is_some_and(|ending| ending == "safetensors")
        })
        .collect();
    files.sort();
    files
}

type Outcome = Result<(), Failed>;

const POLICIES: &str = "fixed,fixed+chunked-forward,fixed-replicas,symi,flexmoe,lrmoe@1,lrmoe@0.5,lrmoe@0.25,lrmoe@0.5+whole,lrmoe@0.5+chunked";

/// At the sizes of Qwen3-30B-A3B with eight times the trace's tokens.
fn replayed(files: &[PathBuf], policies: &str, budget: Option<u64>) -> Result<Report, Failed> {
    let mut source = Source::open(files)?;
    let spec = ModelSpec::preset("qwen3-30b-a3b")?;
    let cluster = ClusterSpec::preset("8xA100")?;
    let contenders = policies
        .split(',')
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let settings = Settings {
        model: Model {
            name: spec.name.clone(),
            shape: spec.expert(2),
            sizes: Some([spec.layers, spec.experts, spec.top_k]),
            top_k: Some(spec.top_k),
            shared_experts: 0,
        },
        model_layers: None,
        budget: budget.unwrap_or(cluster.memory_bytes),
        cluster,
        contenders,
        retention: 0.5,
        slots: None,
        ranks: None,
        tokens_per_rank: source.header().tokens_per_rank.map(|tokens| 8 * tokens),
        steps: None,
        warmup: 0,
        history: 10,
        capacity_factor: 1.0,
        chunk_rows: 8192,
        quota_policy: QuotaPolicy::Proportional,
        floor: 1,
        method: Method::Priority,
        seed: 1,
    };
    Ok(replay(
        &mut source,
        &settings,
        &AtomicBool::new(false),
        |_, _| (),
    )?)
}

fn saves_memory(files: &[PathBuf]) -> Outcome {
    let report = replayed(files, POLICIES, None)?;
    println!("{report}");
    let [fixed, chunked, _, symi, flexmoe, all, half, quarter, ..] = &report.policies[..] else {
        return Err("not as many as asked for".into());
    };
    let bytes = |policy: &lrmoe::replay::PolicyReport| policy.memory.peak_without_stash_bytes;
    for (more, less) in [
        (fixed, chunked),
        (all, half),
        (half, quarter),
        (fixed, half),
    ] {
        let (a, b) = (bytes(more), bytes(less));
        if a <= b {
            return Err(format!("{} takes {a} bytes, {} {b}", more.name, less.name).into());
        }
    }
    let others = symi.load_max_over_mean.max(flexmoe.load_max_over_mean);
    if half.load_max_over_mean >= others {
        return Err(format!("load {} of lrmoe", half.load_max_over_mean).into());
    }
    if (half.left_out - 0.5).abs() > 0.01 || symi.dropped <= 0.0 {
        return Err(format!("left out {}, dropped {}", half.left_out, symi.dropped).into());
    }
    if let (Some(half), Some(quarter)) = (half.contribution_kept, quarter.contribution_kept)
        && !(0.5 < half && half < 1.0 && 0.25 < quarter && quarter < half)
    {
        return Err(format!("kept {half} and {quarter}: no more than by chance").into());
    }
    Ok(())
}

fn keeps_a_tight_budget(files: &[PathBuf]) -> Outcome {
    let policy = "lrmoe@1";
    let free = replayed(files, policy, None)?.policies[0].memory;
    let budget = free.needed_bytes - free.peak_bytes.backward_buffers / 2;
    let report = replayed(files, policy, Some(budget))?;
    let tight = &report.policies[0];
    if tight.memory.needed_bytes > budget || tight.left_out <= 0.0 {
        return Err(format!(
            "{} of {budget} bytes, left out {}",
            tight.memory.needed_bytes, tight.left_out
        )
        .into());
    }
    Ok(())
}
