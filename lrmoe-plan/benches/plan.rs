//! Whole plans of one layer, and quotas alone, on one thread. Loads drift from step to step, and every sample is
//! another step, planned from the last placement.

use divan::{Bencher, black_box};
use lrmoe_plan::ndarray::Array2;
use lrmoe_plan::{
    ClusterSpec, Fixed, Loads, Lrmoe, MemoryModel, ModelSpec, Placement, Plan, PlanRequest,
    Profile, QuotaPolicy, QuotaRequest, Stash, Topology, plan, quotas,
};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

fn main() {
    divan::main();
}

/// A layer on nodes of 8 ranks, with slots for at least a quarter more instances than experts.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: usize,
    experts: usize,
    slots: u32,
    /// Exponent of the popularity of experts.
    zipf: f64,
    /// Rows that a rank has room for, over its balanced share of the retained ones.
    room: f64,
}

fn cases() -> impl Iterator<Item = Case> {
    let worlds = [(8, 128, 20), (64, 256, 5), (1024, 512, 2)];
    worlds.into_iter().flat_map(|(ranks, experts, slots)| {
        [0.5, 1.0, 1.2].into_iter().flat_map(move |zipf| {
            [4.0, 0.8].map(|room| Case {
                ranks,
                experts,
                slots,
                zipf,
                room,
            })
        })
    })
}

const TOKENS: usize = 4096;
const TOP_K: usize = 8;
const RETENTION: f64 = 0.5;
const STEPS: usize = 16;

struct Layer {
    case: Case,
    rng: ChaCha8Rng,
    popularity: Vec<f64>,
    topology: Topology,
    memory: MemoryModel,
    cluster: ClusterSpec,
    slots: Option<Vec<u32>>,
    budget: Vec<u64>,
    policy: Lrmoe,
}

impl Layer {
    fn new(case: &Case) -> Self {
        let weight = |i| f64::from(i).powf(-case.zipf);
        let mut popularity: Vec<f64> = (1..=case.experts as u32).map(weight).collect();
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        popularity.shuffle(&mut rng);
        let spec = ModelSpec::preset("qwen3-30b-a3b").expect("a preset");
        let memory = MemoryModel {
            shape: spec.expert(2),
            top_k: TOP_K,
            tokens: TOKENS,
            chunk_rows: 4096,
            overlap: false,
            stash: Stash::Recompute,
            keeps_outputs: false,
            fixed: 0,
        };
        let rows = (case.room * RETENTION * (TOKENS * TOP_K) as f64) as u64;
        let budget = u64::from(case.slots) * memory.shape.slot_bytes()
            + memory.chunk_rows * memory.forward_row_bytes()
            + memory.stash_bytes(0, 0)
            + memory.optimizer_bytes(case.experts, case.ranks)
            + rows * memory.retained_row_bytes();
        Self {
            case: *case,
            rng,
            popularity,
            topology: Topology::new(case.ranks, 8).expect("there are ranks"),
            memory,
            cluster: ClusterSpec::preset("8xH100").expect("a preset"),
            slots: Some(vec![case.slots; case.ranks]),
            budget: vec![budget; case.ranks],
            policy: Lrmoe::default(),
        }
    }

    /// The loads of the next step: popularity drifts by up to 5 %, source ranks differ by up to 20 %.
    fn step(&mut self) -> Loads {
        for weight in &mut self.popularity {
            *weight *= self.rng.random_range(0.95..1.05);
        }
        let sum: f64 = self.popularity.iter().sum();
        let counts = Array2::from_shape_fn((self.case.ranks, self.case.experts), |(_, expert)| {
            let noise = self.rng.random_range(0.8..1.2);
            ((TOKENS * TOP_K) as f64 * self.popularity[expert] / sum * noise) as u32
        });
        Loads::new(counts).expect("the pairs fit in u32")
    }

    /// About 30 buckets in use for every expert.
    fn profile(&mut self) -> Profile {
        let mut counts = vec![0.0; self.case.experts * Profile::BUCKETS];
        for expert in counts.chunks_mut(Profile::BUCKETS) {
            let middle = self.rng.random_range(100..110);
            for count in &mut expert[middle - 15..middle + 15] {
                *count = self.rng.random_range(0.0..1000.0);
            }
        }
        Profile::from_counts(self.case.experts, counts).expect("counts are finite")
    }

    fn plan(&self, loads: &Loads, previous: &Placement) -> Plan {
        plan(&PlanRequest {
            loads,
            previous,
            topology: &self.topology,
            memory: &self.memory,
            cluster: &self.cluster,
            budget: &self.budget,
            slots: self.slots.as_deref(),
            placement: &self.policy,
            retention: RETENTION,
            quota_policy: QuotaPolicy::Proportional,
            profile: None,
            floor: 1,
            seconds: None,
        })
        .expect("the budget is large enough")
    }

    /// Loads of some steps, each with the placement of the step before.
    fn steps(&mut self) -> Vec<(Loads, Placement)> {
        let mut last = Fixed::placement(self.case.experts, self.case.ranks).expect("experts");
        let loads = self.step();
        last = self.plan(&loads, &last).placement;
        (0..STEPS)
            .map(|_| {
                let loads = self.step();
                let next = self.plan(&loads, &last).placement;
                (loads, std::mem::replace(&mut last, next))
            })
            .collect()
    }
}

#[divan::bench(args = cases())]
fn whole(bencher: Bencher<'_, '_>, case: &Case) {
    let mut layer = Layer::new(case);
    let steps = layer.steps();
    let mut steps = steps.iter().cycle();
    bencher.bench_local(|| {
        let (loads, previous) = steps.next().expect("a cycle");
        layer.plan(black_box(loads), previous)
    });
}

/// With as many slots as fit beside the rows.
#[divan::bench(args = cases())]
fn whole_with_derived_slots(bencher: Bencher<'_, '_>, case: &Case) {
    let mut layer = Layer::new(case);
    layer.slots = None;
    let steps = layer.steps();
    let mut steps = steps.iter().cycle();
    bencher.bench_local(|| {
        let (loads, previous) = steps.next().expect("a cycle");
        layer.plan(black_box(loads), previous)
    });
}

fn quotas_alone(bencher: Bencher<'_, '_>, case: &Case, policy: QuotaPolicy, profile: bool) {
    let mut layer = Layer::new(case);
    let loads = layer.step();
    let fixed = Fixed::placement(case.experts, case.ranks).expect("there are experts");
    let planned = layer.plan(&loads, &fixed);
    let profile = profile.then(|| layer.profile());
    let request = QuotaRequest {
        loads: &loads,
        placement: &planned.placement,
        capacities: &planned.capacities,
        retention: RETENTION,
        policy,
        profile: profile.as_ref(),
        floor: 1,
    };
    bencher.bench_local(|| quotas(black_box(&request)).expect("a good request"));
}

#[divan::bench(args = cases())]
fn quotas_by_load(bencher: Bencher<'_, '_>, case: &Case) {
    quotas_alone(bencher, case, QuotaPolicy::Proportional, false);
}

#[divan::bench(args = cases())]
fn quotas_half_by_value(bencher: Bencher<'_, '_>, case: &Case) {
    quotas_alone(bencher, case, QuotaPolicy::Blend, true);
}
