//! Thousands of steps, with all that can change from one to the next.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering::Relaxed;

use libtest_mimic::Failed;
use lrmoe::adamw::AdamW;
use lrmoe::layer::{LayerConfig, LayerState, MoeLayer};
use lrmoe::policy::{Compensation, DxWeight, Policy, RouterGradient, Scope, Selecting};
use lrmoe_comm::{Collective, Threads};
use lrmoe_metric::{Method, Rescale, Score};
use lrmoe_plan::{QuotaPolicy, Stash};
use ndarray::s;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::HELD;
use super::common::{Batch, on_ranks, split};

const STEPS: u32 = 2000;
/// Steps in one world, after which the number of ranks and the placement change.
const IN_A_WORLD: u32 = 5;
/// Steps after which memory is to be flat.
const WARM: u32 = 500;
/// What threads and tables that grow by doubling may still take; a step that kept one row of its own would pass it.
const MORE_HELD: usize = 64 << 10;
/// The system's allocator keeps what it was given back, in pieces.
const MORE_RESIDENT: usize = 16 << 20;

const SIZES: (usize, usize) = (8, 12);
const EXPERTS: usize = 6;
const TOP_K: usize = 2;

/// Two thousand steps with random policies, retention, stash modes, chunks and rank counts, experts moved by force; twice, with the same bits
/// and in flat memory.
pub(super) fn repeats_to_the_bit_in_flat_memory() -> Result<(), Failed> {
    let hashes = [run()?, run()?];
    match hashes[0] == hashes[1] {
        true => Ok(()),
        false => Err(format!("hashes of two runs: {hashes:x?}").into()),
    }
}

/// A hash of all that the steps gave.
fn run() -> Result<u64, Failed> {
    let mut hasher = DefaultHasher::new();
    let mut state = None;
    let mut flat = None;
    for number in 0..STEPS / IN_A_WORLD {
        let (hash, next) = world(number, state);
        hash.hash(&mut hasher);
        state = Some(next);
        let done = (number + 1) * IN_A_WORLD;
        if done < WARM {
            continue;
        }
        let now = (HELD.load(Relaxed), resident());
        let (held, in_memory) = *flat.get_or_insert(now);
        if now.0 > held + MORE_HELD || now.1 > in_memory + MORE_RESIDENT {
            let then = (held, in_memory);
            return Err(format!(
                "bytes held and resident: {then:?} after {WARM} steps, {now:?} after {done}"
            )
            .into());
        }
    }
    Ok(hasher.finish())
}

/// Bytes in memory, where the system says.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    kib.unwrap_or(0) << 10
}

/// What one step is given.
struct Step {
    batch: Batch,
    policy: Policy,
    stash: Stash,
}

fn world(number: u32, state: Option<LayerState>) -> (u64, LayerState) {
    let mut random = ChaCha8Rng::seed_from_u64(number.into());
    let ranks = random.random_range(1..=4);
    let first = Batch::random(0, SIZES, (EXPERTS, TOP_K), 1);
    let config = LayerConfig {
        chunk_rows: *[1, 7, u64::MAX].choose(&mut random).expect("three"),
        overlap: random.random_bool(0.5),
        ..first.config(ranks, Policy::Dropless)
    };
    let state = state.map(|state| LayerState {
        placement: placement(&config.slots, &mut random),
        // Those of the policy that the world starts with.
        replicas: Vec::new(),
        ..state
    });
    let steps: Vec<Step> = (0..IN_A_WORLD).map(|_| step(&mut random)).collect();
    let results = on_ranks(ranks, |comm| {
        let of = |expert| first.parameters(expert);
        let mut layer = MoeLayer::new(config.clone(), comm.rank(), of).expect("a layer");
        if let Some(state) = &state {
            layer.restore(state).expect("restored");
        }
        let mut hasher = DefaultHasher::new();
        for (step, number) in steps.iter().zip(number * IN_A_WORLD + 1..) {
            go(&mut layer, comm, (step, number), &mut hasher);
        }
        (hasher.finish(), layer.export(comm).expect("exported"))
    });
    let mut hasher = DefaultHasher::new();
    results.iter().for_each(|(hash, _)| hash.hash(&mut hasher));
    let state = results
        .into_iter()
        .find_map(|(_, state)| state)
        .expect("rank 0");
    hash_numbers(&state.parameters, &mut hasher);
    hash_numbers(&state.moments.first, &mut hasher);
    hash_numbers(&state.moments.second, &mut hasher);
    hash_numbers(&state.profile, &mut hasher);
    (state.placement.as_slice(), &state.replicas).hash(&mut hasher);
    (hasher.finish(), state)
}

/// Every expert somewhere, and some of them on several ranks.
fn placement(slots: &[u32], random: &mut ChaCha8Rng) -> Vec<Vec<u32>> {
    let mut by_rank = vec![Vec::new(); slots.len()];
    let experts = 0..EXPERTS as u32;
    let extra: Vec<u32> = experts
        .clone()
        .filter(|_| random.random_bool(0.5))
        .collect();
    for expert in experts.chain(extra) {
        let has_room = |rank: &usize| {
            by_rank[*rank].len() < slots[*rank] as usize && !by_rank[*rank].contains(&expert)
        };
        let open: Vec<usize> = (0..slots.len()).filter(has_room).collect();
        if let Some(&rank) = open.choose(random) {
            by_rank[rank].push(expert);
        }
    }
    by_rank
}

fn step(random: &mut ChaCha8Rng) -> Step {
    let mut batch = Batch::random(
        random.random_range(0..40),
        SIZES,
        (EXPERTS, TOP_K),
        random.random(),
    );
    for id in &mut batch.expert_ids {
        if random.random_bool(0.1) {
            *id = -1;
        }
    }
    let policy = policy(random);
    let mut stash = *[Stash::Recompute, Stash::Full, Stash::ForwardSelect]
        .choose(random)
        .expect("three");
    if let Policy::Lrmoe(selecting) = &policy {
        // A choice in the forward pass cannot wait for dy.
        if stash == Stash::ForwardSelect
            && selecting.scope == Scope::Pair
            && selecting.score.needs_dy()
        {
            stash = Stash::Full;
        }
    }
    Step {
        batch,
        policy,
        stash,
    }
}

fn policy(random: &mut ChaCha8Rng) -> Policy {
    match random.random_range(0..8) {
        0 => return Policy::Dropless,
        1 => {
            let capacity_factor = random.random_range(0.0..2.0);
            return Policy::Symi { capacity_factor };
        }
        _ => {}
    }
    loop {
        let either = random.random_bool(0.5);
        let selecting = Selecting {
            retention: *[0.0, 1.0, random.random_range(0.0..=1.0)]
                .choose(random)
                .expect("three"),
            score: *Score::ALL.choose(random).expect("scores"),
            method: *[Method::Priority, Method::Top].choose(random).expect("two"),
            quotas: *[
                QuotaPolicy::Proportional,
                QuotaPolicy::Blend,
                QuotaPolicy::Value,
                QuotaPolicy::Neyman,
            ]
            .choose(random)
            .expect("four"),
            recalibration: *[0.0, 0.5, 1.0].choose(random).expect("three"),
            rescale: *[Rescale::None, Rescale::Count, Rescale::Mass]
                .choose(random)
                .expect("three"),
            scope: if random.random_bool(0.2) {
                Scope::Wgrad
            } else {
                Scope::Pair
            },
            floor: random.random_range(0..3),
            dx_weight: if either {
                DxWeight::One
            } else {
                DxWeight::Selection
            },
            router_gradient: *[RouterGradient::Retained, RouterGradient::All]
                .choose(random)
                .expect("two"),
            compensation: if random.random_bool(0.2) {
                Compensation::Moments
            } else {
                Compensation::None
            },
        };
        // Not all settings go together.
        if selecting.check().is_ok() {
            return Policy::Lrmoe(selecting);
        }
    }
}

fn go(
    layer: &mut MoeLayer,
    comm: &mut Threads,
    (step, number): (&Step, u32),
    hasher: &mut DefaultHasher,
) {
    // In this order, so that no policy meets a mode that is not its own.
    layer.set_stash(Stash::Recompute).expect("of every policy");
    layer.set_policy(step.policy.clone()).expect("a policy");
    layer.set_stash(step.stash).expect("a mode of this policy");
    let batch = &step.batch;
    let ranks = layer.config().topology.ranks();
    let rows = s![split(batch.tokens(), ranks)[comm.rank()].clone(), ..];
    let (x, dy) = (batch.x.slice(rows), batch.dy.slice(rows));
    let (ids, p) = (batch.expert_ids.slice(rows), batch.gate_weights.slice(rows));
    let y = layer
        .forward(comm, x, ids, p, Some(number))
        .expect("forward");
    let (dx, dp) = layer.backward(comm, dy).expect("backward");
    layer.reduce_gradients(comm).expect("reduction");
    let adamw = AdamW::default();
    layer
        .update(comm, &adamw, number, 1e-3, 1.0)
        .expect("update");
    for values in [&y, &dx, &dp] {
        assert!(
            values.iter().all(|value| value.is_finite()),
            "step {number}"
        );
        hash_numbers(values, hasher);
    }
    hash_numbers(layer.shard_gradient(), hasher);
    let selection = layer.selection().expect("a selection");
    selection.pairs.hash(hasher);
    hash_numbers(&selection.weights, hasher);
    let stats = layer.stats();
    (&stats.loads, &stats.quotas, stats.dropped).hash(hasher);
}

fn hash_numbers<'a>(values: impl IntoIterator<Item = &'a f32>, hasher: &mut DefaultHasher) {
    values
        .into_iter()
        .for_each(|value| value.to_bits().hash(hasher));
}
