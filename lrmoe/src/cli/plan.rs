//! `lrmoe plan`.

use std::path::{Path, PathBuf};

use clap::Args;
use lrmoe_plan::{Fixed, MemoryModel, Placement, PlanRequest, QuotaPolicy, Stash, Topology, plan};

use super::model::{ModelArguments, budget};
use crate::config::cluster;
use crate::error::Error;
use crate::files;
use crate::replay::{PolicyName, ReplayError, read_loads};

/// Plan one MoE layer for one load matrix: slots, placement, quotas, what each rank holds and what binds.
///
/// Budget and time are for this layer alone.
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  lrmoe plan loads.csv --preset qwen3-30b-a3b --budget-gib 1.5
  lrmoe plan loads.npy --preset glm-4.5-air --policy symi --slots 20 --json plan.json
  lrmoe plan - --preset tiny --cluster local --previous plan.json < loads.csv")]
pub(crate) struct Plan {
    /// Pairs of each source rank and expert, [ranks, experts]: CSV (a rank a line, no header), .npy or .npz; - for CSV on standard input
    loads: PathBuf,
    #[command(flatten)]
    model: ModelArguments,
    /// 8xA100, 8xH100, 8xH200, local (this machine, measured first) or a TOML file
    #[arg(long, value_name = "NAME-or-FILE", default_value = "8xA100")]
    cluster: String,
    /// Memory of a rank for this layer [default: the cluster's]
    #[arg(long, value_name = "GIB")]
    budget_gib: Option<f64>,
    /// Instances that a rank has room for [default: as many as the budget allows beside the rows]
    #[arg(long, value_name = "N")]
    slots: Option<u32>,
    /// Share of the pairs that runs backward
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    retention: f64,
    /// Who places the experts: fixed, fixed-replicas, symi, flexmoe or lrmoe
    #[arg(long, value_name = "NAME", default_value = "lrmoe")]
    policy: PolicyName,
    /// Plan of the step before, as --json wrote it: where the experts are now [default: contiguous]
    #[arg(long, value_name = "FILE")]
    previous: Option<PathBuf>,
    /// Rows that a rank takes forward at once
    #[arg(long, value_name = "ROWS", default_value_t = 8192)]
    chunk_rows: u64,
    /// What the forward pass leaves: recompute (x per token), stash (activations of every pair) or forward-select (of the retained)
    #[arg(long, value_name = "MODE", default_value_t)]
    stash: Stash,
    /// How the retained pairs are divided among experts: proportional, value, blend or neyman
    #[arg(long, value_name = "NAME", default_value_t)]
    quota_policy: QuotaPolicy,
    /// Pairs that every expert keeps if it has them
    #[arg(long, value_name = "N", default_value_t = 1)]
    floor: u32,
    /// Milliseconds that the backward GEMMs may take on a rank [default: no limit]
    #[arg(long, value_name = "MS")]
    backward_ms: Option<f64>,
    /// Write the plan to FILE
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Replace FILE if it exists
    #[arg(long)]
    overwrite: bool,
}

impl Plan {
    pub(crate) fn run(self) -> Result<(), Error> {
        let inputs = std::slice::from_ref(&self.loads);
        super::check_outputs(inputs, [&self.json], self.overwrite)?;
        let loads = read_loads(&self.loads)?;
        let model = self.model.model()?;
        let top_k = model.top_k.ok_or(ReplayError::UnknownTopK)?;
        let cluster = cluster(&self.cluster, loads.ranks())?;
        let bytes = self.budget_gib.map_or(Ok(cluster.memory_bytes), budget)?;
        let previous = match &self.previous {
            Some(path) => previous(path, loads.experts())?,
            None => Fixed::placement(loads.experts(), loads.ranks())?,
        };
        let of_rank = |counts: ndarray::ArrayView1<'_, u32>| counts.sum() as usize;
        let most = loads.counts().outer_iter().map(of_rank).max().unwrap_or(0);
        let slots = self.slots.map(|slots| vec![slots; loads.ranks()]);
        let plan = plan(&PlanRequest {
            loads: &loads,
            previous: &previous,
            topology: &Topology::new(loads.ranks(), cluster.ranks_per_node)?,
            memory: &MemoryModel {
                shape: model.shape,
                top_k,
                tokens: most.div_ceil(top_k.max(1)),
                chunk_rows: self.chunk_rows,
                overlap: false,
                stash: self.stash,
                keeps_outputs: false,
                fixed: 0,
            },
            cluster: &cluster,
            budget: &vec![bytes; loads.ranks()],
            slots: slots.as_deref(),
            placement: self.policy.placing().as_ref(),
            retention: self.retention,
            quota_policy: self.quota_policy,
            profile: None,
            floor: self.floor,
            seconds: self.backward_ms.map(|ms| ms * 1e-3),
        })?;
        println!("{plan}");
        if let Some(path) = &self.json {
            let mut json = serde_json::to_vec_pretty(&plan).expect("a plan has only string keys");
            json.push(b'\n');
            files::write(path, &json)?;
        }
        Ok(())
    }
}

/// What is read of an earlier plan.
#[derive(serde::Deserialize)]
struct Previous {
    placement: Vec<Vec<u32>>,
}

fn previous(path: &Path, experts: usize) -> Result<Placement, Error> {
    let file = || path.to_path_buf();
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
        path: file(),
        source,
    })?;
    let previous: Previous = serde_json::from_str(&text).map_err(|source| ReplayError::Json {
        path: file(),
        source,
    })?;
    let placement = Placement::new(experts, previous.placement);
    let placement = placement.map_err(|source| ReplayError::Previous {
        path: file(),
        source,
    })?;
    Ok(placement)
}
