//! Replays against figures worked out by hand, against training itself, and against what must always hold.

mod hand;
mod invariants;
mod program;
mod trained;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use lrmoe::replay::{Model, PolicyReport, ReplayError, Report, Settings, Source, replay};
use lrmoe::trace::{PairRecord, TraceSettings, TraceWriter};
use lrmoe_metric::Method;
use lrmoe_plan::{ClusterSpec, ExpertShape, Link, QuotaPolicy};
use ndarray::Array3;
use tempfile::TempDir;

/// One row forward takes a second on `cluster`: D 2, F 1, gated, two bytes an element.
const SHAPE: ExpertShape = ExpertShape {
    width: 2,
    hidden: 1,
    gated: true,
    bytes: 2,
};

fn cluster() -> ClusterSpec {
    let link = Link {
        latency_seconds: 0.25,
        bytes_per_second: 4.0,
    };
    ClusterSpec {
        name: "by hand".into(),
        ranks_per_node: 2,
        flops: 12.0,
        launch_seconds: 0.5,
        memory_bytes: 1 << 30,
        intra: link,
        inter: link,
    }
}

fn settings(policies: &str) -> Settings {
    let contender = |name: &str| name.parse().expect("a contender");
    Settings {
        model: Model {
            name: "by hand".into(),
            shape: SHAPE,
            sizes: None,
            top_k: Some(1),
            shared_experts: 0,
        },
        model_layers: None,
        cluster: cluster(),
        budget: 1 << 30,
        contenders: policies.split(',').map(contender).collect(),
        retention: 0.5,
        slots: None,
        ranks: None,
        tokens_per_rank: None,
        steps: None,
        warmup: 0,
        history: 1,
        capacity_factor: 1.0,
        chunk_rows: 4,
        quota_policy: QuotaPolicy::Proportional,
        floor: 0,
        method: Method::Priority,
        seed: 1,
    }
}

/// Steps of a trace: counts `[layers, ranks, experts]`, with every pair where there are any.
struct Trace {
    folder: TempDir,
    path: PathBuf,
}

impl Trace {
    fn new(top_k: usize, steps: &[(Array3<u32>, Option<PairRecord>)]) -> Self {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().join("trace.safetensors");
        write(&path, 0, top_k, steps);
        Self { folder, path }
    }

    fn counts(top_k: usize, steps: &[Array3<u32>]) -> Self {
        let steps: Vec<_> = steps.iter().map(|counts| (counts.clone(), None)).collect();
        Self::new(top_k, &steps)
    }

    fn replay(&self, settings: &Settings) -> Result<Report, ReplayError> {
        let mut source = Source::open(std::slice::from_ref(&self.path))?;
        replay(&mut source, settings, &AtomicBool::new(false), |_, _| ())
    }

    fn policies(&self, settings: &Settings) -> Vec<PolicyReport> {
        self.replay(settings).expect("a replay").policies
    }
}

fn write(path: &Path, first_step: u32, top_k: usize, steps: &[(Array3<u32>, Option<PairRecord>)]) {
    let (layers, ranks, experts) = steps[0].0.dim();
    let pairs = steps[0].0.sum() as usize / layers / ranks;
    let settings = TraceSettings {
        layers,
        ranks,
        experts,
        top_k: Some(top_k),
        tokens_per_rank: Some(pairs / top_k).filter(|tokens| *tokens > 0),
        first_step,
        ..TraceSettings::default()
    };
    let mut writer = TraceWriter::create(path, settings).expect("a trace");
    for (counts, pairs) in steps {
        writer.push(counts.view()).expect("counts");
        if let Some(pairs) = pairs {
            writer.push_pairs(pairs.clone()).expect("pairs");
        }
    }
    writer.finish().expect("written");
}
