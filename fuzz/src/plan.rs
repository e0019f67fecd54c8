use arbitrary::Arbitrary;
use lrmoe_plan::ndarray::Array2;
use lrmoe_plan::{
    ClusterSpec, Error, ExpertShape, Fixed, FixedReplicas, FlexMoe, Loads, Lrmoe, MemoryModel,
    PlacementPolicy, PlanRequest, Profile, QuotaPolicy, Stash, Symi, Topology,
};

use crate::checker::check;
use crate::{hosts, input};

#[derive(Arbitrary, Debug)]
struct Input {
    ranks: u8,
    experts: u8,
    per_node: u8,
    counts: Vec<u16>,
    /// Counts are shifted by so many bits, up to where they do not fit in 32.
    shift: u8,
    hosts: Vec<u8>,
    memory: MemoryInput,
    budgets: Vec<Budget>,
    slots: Option<Vec<u8>>,
    placement: u8,
    retention: Share,
    quota_policy: u8,
    profile: Option<Vec<(u8, u8, f32)>>,
    floor: u32,
    seconds: Option<f64>,
    /// In place of a cluster on which time binds: the power of ten of its rate and its launch time in 10 ms.
    rates: Option<(Rate, Rate)>,
}

#[derive(Arbitrary, Debug)]
struct MemoryInput {
    width: u8,
    hidden: u8,
    gated: bool,
    bytes: bool,
    top_k: u8,
    tokens: u16,
    chunk_rows: Option<u16>,
    stash: u8,
    overlap: bool,
    keeps_outputs: bool,
    fixed: u64,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Budget {
    Bytes(u64),
    /// In 64ths of what half of the experts and of the rows take.
    Share(u8),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Rate {
    Power(u8),
    Any(f64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Share {
    Of255(u8),
    Any(f64),
}

/// Plans of one layer, from any loads, budgets and topology under every policy: the checker of the crate's own tests, which knows nothing of how a
/// plan is made, says whether memory, capacities, quotas, placement and rows are as promised; every refusal has its reason in
/// the input; and the smallest budget that an error names works, while a byte less does not.
pub fn plan(data: &[u8]) {
    let Some(input) = input::of::<Input>(data) else {
        return;
    };
    let (ranks, experts) = (
        usize::from(input.ranks % 4) + 1,
        usize::from(input.experts % 8) + 1,
    );
    let Some(loads) = loads(&input, ranks, experts) else {
        return;
    };
    let Some(profile) = profile(&input, experts) else {
        return;
    };
    let memory = memory(&input.memory);
    let share = rough_bytes(&memory, &loads) / 64;
    let budget: Vec<u64> = input::cycled(&input.budgets, Budget::Share(96))
        .take(ranks)
        .map(|budget| match budget {
            Budget::Bytes(bytes) => bytes,
            Budget::Share(parts) => share.saturating_mul(parts.into()),
        })
        .collect();
    let slots: Option<Vec<u32>> = input
        .slots
        .as_ref()
        .map(|slots| slots.iter().map(|&n| n.into()).collect());
    let policy: Box<dyn PlacementPolicy> = match input.placement % 5 {
        0 => Box::new(Fixed),
        1 => Box::new(FixedReplicas),
        2 => Box::new(Symi),
        3 => Box::new(FlexMoe),
        _ => Box::new(Lrmoe::default()),
    };
    let per_node = usize::from(input.per_node) % ranks + 1;
    let request = PlanRequest {
        loads: &loads,
        previous: &hosts::placement(experts, ranks, &input.hosts),
        topology: &Topology::new(ranks, per_node).expect("neither is 0"),
        memory: &memory,
        cluster: &cluster(input.rates),
        budget: &budget,
        slots: slots.as_deref(),
        placement: policy.as_ref(),
        retention: match input.retention {
            Share::Of255(share) => f64::from(share) / 255.0,
            Share::Any(share) => share,
        },
        quota_policy: [
            QuotaPolicy::Proportional,
            QuotaPolicy::Blend,
            QuotaPolicy::Value,
            QuotaPolicy::Neyman,
        ][usize::from(input.quota_policy % 4)],
        profile: profile.as_ref(),
        floor: input.floor,
        seconds: input.seconds,
    };
    match lrmoe_plan::plan(&request) {
        Ok(found) => {
            assert_eq!(faults(&request), Vec::<&str>::new());
            check(&request, &found);
            assert_eq!(
                lrmoe_plan::plan(&request).expect("as before"),
                found,
                "planned twice"
            );
        }
        Err(error) => check_refusal(&request, &error),
    }
}

/// Counts within 32 bits, or a refusal that says how many there are.
fn loads(input: &Input, ranks: usize, experts: usize) -> Option<Loads> {
    let shift = input.shift % 18;
    let counts: Vec<u32> = input::cycled(&input.counts, 3)
        .take(ranks * experts)
        .map(|count| u32::from(count) << shift)
        .collect();
    let sum: u64 = counts.iter().map(|&count| u64::from(count)).sum();
    let counts = Array2::from_shape_vec((ranks, experts), counts).expect("as many as fit");
    match Loads::new(counts) {
        Ok(loads) => {
            assert_eq!(u64::from(loads.total()), sum);
            Some(loads)
        }
        Err(Error::TooManyPairs { pairs }) => {
            assert!(pairs == sum && sum > u32::MAX.into());
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// A profile, or `None` where one is refused, which its counts must deserve.
fn profile(input: &Input, experts: usize) -> Option<Option<Profile>> {
    let Some(scores) = &input.profile else {
        return Some(None);
    };
    let mut counts = vec![0.0; experts * Profile::BUCKETS];
    for &(expert, bucket, count) in scores {
        counts[usize::from(expert) % experts * Profile::BUCKETS + usize::from(bucket)] = count;
    }
    let valid = counts
        .iter()
        .all(|count| *count >= 0.0 && count.is_finite());
    let profile = Profile::from_counts(experts, counts);
    assert_eq!(profile.is_ok(), valid);
    profile.ok().map(Some)
}

fn memory(input: &MemoryInput) -> MemoryModel {
    MemoryModel {
        shape: ExpertShape {
            width: usize::from(input.width % 64) + 1,
            hidden: usize::from(input.hidden % 64) + 1,
            gated: input.gated,
            bytes: if input.bytes { 4 } else { 2 },
        },
        top_k: usize::from(input.top_k % 8) + 1,
        tokens: input.tokens.into(),
        chunk_rows: input
            .chunk_rows
            .map_or(u64::MAX, |rows| u64::from(rows) + 1),
        overlap: input.overlap,
        stash: [Stash::Recompute, Stash::Full, Stash::ForwardSelect][usize::from(input.stash % 3)],
        keeps_outputs: input.keeps_outputs,
        fixed: input.fixed,
    }
}

/// On the standard one, time binds at these sizes.
fn cluster(rates: Option<(Rate, Rate)>) -> ClusterSpec {
    let preset = ClusterSpec::preset("8xA100").expect("a preset");
    let (flops, launch_seconds) = match rates {
        None => (1e6, 1e-4),
        Some((flops, launch)) => (
            match flops {
                Rate::Power(power) => 10f64.powi((power % 10).into()),
                Rate::Any(flops) => flops,
            },
            match launch {
                Rate::Power(hundredths) => f64::from(hundredths) / 100.0,
                Rate::Any(seconds) => seconds,
            },
        ),
    };
    ClusterSpec {
        flops,
        launch_seconds,
        ..preset
    }
}

/// What a rank needs if it holds half of the experts and half of the rows.
fn rough_bytes(memory: &MemoryModel, loads: &Loads) -> u64 {
    let rows = u64::from(loads.total()).div_ceil(2);
    let parts = [
        loads.experts().div_ceil(2) as u64 * memory.shape.slot_bytes(),
        rows.min(memory.chunk_rows) * memory.forward_row_bytes(),
        rows * memory.backward_row_bytes(),
        memory.stash_bytes(rows, rows),
        memory.optimizer_bytes(loads.experts(), loads.ranks()),
        memory.fixed,
    ];
    parts.into_iter().fold(0, u64::saturating_add)
}

/// What is wrong with a request, whatever its budgets and slots.
fn faults(request: &PlanRequest<'_>) -> Vec<&'static str> {
    let cluster = request.cluster;
    let ranks = request.topology.ranks();
    let mut faults = Vec::new();
    let mut note = |wrong: bool, what| {
        if wrong {
            faults.push(what);
        }
    };
    let slots = request.slots.map_or(ranks, <[u32]>::len);
    note(slots != ranks, "slots");
    note(!(0.0..=1.0).contains(&request.retention), "retention");
    let (flops, launch) = (cluster.flops, cluster.launch_seconds);
    note(!(flops > 0.0 && flops.is_finite()), "flops");
    note(!(launch >= 0.0 && launch.is_finite()), "launch time");
    let seconds = request.seconds.unwrap_or(0.0);
    note(!(seconds >= 0.0 && seconds.is_finite()), "time budget");
    faults
}

fn check_refusal(request: &PlanRequest<'_>, error: &Error) {
    let slots = request.slots.unwrap_or_default();
    match *error {
        Error::Mismatch {
            what,
            expected,
            got,
        } => {
            assert!(faults(request).contains(&what), "{error}");
            assert_eq!((expected, got), (request.topology.ranks(), slots.len()));
        }
        Error::OutOfRange { what, value, .. } => {
            assert!(faults(request).contains(&what), "{error}");
            let given = match what {
                "retention" => request.retention,
                "flops" => request.cluster.flops,
                "launch time" => request.cluster.launch_seconds,
                _ => request.seconds.expect("it is out of its range"),
            };
            assert_eq!(value.to_bits(), given.to_bits());
        }
        Error::TooFewSlots {
            slots: sum,
            experts,
        } => {
            assert_eq!(slots.iter().map(|&n| u64::from(n)).sum::<u64>(), sum);
            assert!(experts == request.loads.experts() && sum < experts as u64);
        }
        Error::RankSlots {
            rank,
            slots: here,
            needed,
        } => assert!(slots[rank] == here && needed > here as usize, "{error}"),
        Error::BudgetTooSmall {
            rank,
            budget,
            missing,
            smallest,
        } => {
            assert_eq!(budget, request.budget[rank]);
            let reached = u128::from(budget) + u128::from(missing);
            assert!(missing > 0 && reached <= smallest.into(), "{error}");
            check_smallest(request, smallest);
        }
        Error::TooManyBytes { rank } => {
            assert!(rank < request.budget.len());
            assert!(most_bytes(request) >= u64::MAX.into(), "{error}");
        }
        _ => panic!("{error}"),
    }
}

/// What no rank needs more than: all experts, all slots, all rows at once.
fn most_bytes(request: &PlanRequest<'_>) -> u128 {
    let (memory, loads) = (request.memory, request.loads);
    let rows = u64::from(loads.total());
    let slots = request.slots.unwrap_or_default().iter().copied().max();
    let slots = u64::from(slots.unwrap_or(0)).max(loads.experts() as u64);
    let products = [
        (slots, memory.shape.slot_bytes()),
        (rows, memory.forward_row_bytes()),
        (1, memory.stash_bytes(rows, 0)),
        (1, memory.optimizer_bytes(loads.experts(), loads.ranks())),
        (1, memory.fixed),
    ];
    products
        .iter()
        .map(|&(a, b)| u128::from(a) * u128::from(b))
        .sum()
}

/// The same budget everywhere works from `smallest` bytes on.
fn check_smallest(request: &PlanRequest<'_>, smallest: u64) {
    let with = |bytes: u64, check_it: bool| {
        let budget = vec![bytes; request.budget.len()];
        let request = PlanRequest {
            budget: &budget,
            ..*request
        };
        let plan = lrmoe_plan::plan(&request);
        if let (Ok(plan), true) = (&plan, check_it) {
            check(&request, plan);
        }
        plan
    };
    with(smallest, true).expect("the smallest budget works");
    match with(smallest - 1, false) {
        Err(Error::BudgetTooSmall {
            missing,
            smallest: again,
            ..
        }) => assert_eq!((missing, again), (1, smallest)),
        other => panic!("{other:?} on a byte less than the smallest budget"),
    }
}
