//! Checks a plan against its request from first principles, with arithmetic of its own.

use crate::oracle::Confined;
use lrmoe_plan::{Constraint, Memory, Plan, PlanRequest, Stash};

/// Panics if the plan breaks a promise.
pub(crate) fn check(request: &PlanRequest<'_>, plan: &Plan) {
    check_placement(request, plan);
    check_rows(request, plan);
    for rank in 0..plan.ranks.len() {
        check_memory(request, plan, rank);
        check_capacity(request, plan, rank);
    }
}

fn check_placement(request: &PlanRequest<'_>, plan: &Plan) {
    let ranks = request.budget.len();
    assert_eq!(plan.placement.ranks(), ranks);
    assert_eq!((plan.slots.len(), plan.ranks.len()), (ranks, ranks));
    if let Some(slots) = request.slots {
        assert_eq!(plan.slots, slots);
    }
    let mut seen = vec![false; request.loads.experts()];
    for rank in 0..ranks {
        let here = plan.placement.local_experts(rank);
        assert!(here.len() <= plan.slots[rank] as usize);
        assert!(here.windows(2).all(|pair| pair[0] < pair[1]));
        for &expert in here {
            seen[expert as usize] = true;
        }
    }
    assert!(seen.into_iter().all(|seen| seen));
}

fn check_rows(request: &PlanRequest<'_>, plan: &Plan) {
    let (loads, quotas) = (request.loads.per_expert(), plan.quotas.as_slice());
    assert!(quotas.iter().zip(loads).all(|(q, n)| q <= n));
    let forward: Vec<u64> = plan.ranks.iter().map(|of| of.forward_rows).collect();
    let retained: Vec<u64> = plan.ranks.iter().map(|of| of.retained_rows).collect();
    assert_eq!(total(&forward), sum(loads));
    assert_eq!(total(&retained), sum(quotas));
    let confined = Confined::new(&plan.placement);
    assert!(confined.routable(loads, &forward));
    assert!(confined.routable(quotas, &retained));
    assert!(
        retained
            .iter()
            .zip(&plan.capacities)
            .all(|(rows, most)| rows <= most)
    );

    // As many as the retention asks for, or as can be routed.
    let wanted = (request.retention * sum(loads) as f64).round() as u64;
    assert_eq!(plan.wanted, wanted);
    let most = confined.most(loads, &plan.capacities);
    assert_eq!(sum(quotas), wanted.min(most));

    // The largest rank has as few as possible.
    let largest = retained.iter().copied().max().unwrap_or(0);
    if largest > 0 {
        let less: Vec<u64> = plan
            .capacities
            .iter()
            .map(|&c| c.min(largest - 1))
            .collect();
        assert!(!confined.routable(quotas, &less));
    }
    for (rank, of) in plan.ranks.iter().enumerate() {
        let room = of.retained_rows < plan.capacities[rank];
        match of.binds {
            Constraint::Retention => assert!(room && sum(quotas) == wanted),
            Constraint::Loads => {
                let here = plan.placement.local_experts(rank).iter();
                assert!(
                    room && here
                        .clone()
                        .all(|&e| quotas[e as usize] == loads[e as usize])
                );
            }
            Constraint::Memory | Constraint::Time => assert!(!room),
            other => panic!("{other} is unknown"),
        }
    }
}

fn check_memory(request: &PlanRequest<'_>, plan: &Plan, rank: usize) {
    let of = plan.ranks[rank];
    let expected = memory(request, plan, rank, of.retained_rows);
    assert_eq!(of.memory, expected);
    assert_eq!(of.budget, request.budget[rank]);
    assert!(bytes(&expected) <= u128::from(of.budget));
    assert_eq!(u128::from(of.memory.total()), bytes(&expected));
    assert_eq!(
        of.memory.token_buffers(),
        expected.forward_buffers + expected.backward_buffers
    );
}

/// Capacities are the largest that memory and time allow.
fn check_capacity(request: &PlanRequest<'_>, plan: &Plan, rank: usize) {
    let capacity = plan.capacities[rank];
    let holds =
        |rows: u64| bytes(&memory(request, plan, rank, rows)) <= request.budget[rank].into();
    let in_time = |rows: u64| {
        request
            .seconds
            .is_none_or(|s| seconds(request, plan, rank, rows) <= s)
    };
    assert!(holds(capacity));
    assert!(capacity == 0 || in_time(capacity));
    match plan.ranks[rank].binds {
        Constraint::Memory => assert!(!holds(capacity + 1)),
        Constraint::Time => assert!(holds(capacity + 1)),
        _ => {}
    }
    assert!(!holds(capacity + 1) || !in_time(capacity + 1));
}

/// Bytes of a rank, every term written out.
fn memory(request: &PlanRequest<'_>, plan: &Plan, rank: usize, retained: u64) -> Memory {
    let model = request.memory;
    let [d, f, b] = [model.shape.width, model.shape.hidden, model.shape.bytes].map(|n| n as u64);
    let [t, k] = [model.tokens, model.top_k].map(|n| n as u64);
    let (ranks, experts) = (plan.ranks.len() as u64, request.loads.experts() as u64);
    let forward = plan.ranks[rank].forward_rows;
    // Gate, up, down, or up, down; pre-activations of gate and up.
    let (matrices, before) = if model.shape.gated {
        (3, 2 * f)
    } else {
        (2, f)
    };
    let expert = matrices * d * f;
    let slot = expert * b + expert * b;
    let first_here =
        |e: &&u32| (0..rank).all(|lower| !plan.placement.local_experts(lower).contains(e));
    let here = plan.placement.local_experts(rank);
    let firsts = here.iter().filter(first_here).count() as u64;
    let kept = match model.stash {
        Stash::Recompute => t * d * b,
        Stash::Full => forward * (d + before) * b,
        Stash::ForwardSelect => retained * (d + before) * b,
        other => panic!("{other} is unknown"),
    };
    let outputs = if model.keeps_outputs {
        t * k * d * b
    } else {
        0
    };
    // Sent, received, x, dy, dx; h and the gradients of the pre-activations.
    let backward_row = (5 * d + f + before) * b + 3 * 8;
    // Sent, received, x, y; dy and what goes back, sent and received, while another chunk computes.
    let forward_elements = match (model.overlap, model.stash) {
        (true, Stash::Recompute) => 8,
        (true, _) => 6,
        (false, _) => 4,
    };
    Memory {
        placement: firsts * slot,
        replicas: (u64::from(plan.slots[rank]) - firsts) * slot,
        forward_buffers: forward.min(model.chunk_rows) * (forward_elements * d * b + 4 * 8),
        backward_buffers: retained * backward_row,
        stash: t * k * 16 + kept + outputs,
        // Master weights and two moments in four bytes each.
        optimizer: (experts * expert).div_ceil(ranks) * 12,
        fixed: model.fixed,
    }
}

fn bytes(memory: &Memory) -> u128 {
    let Memory {
        placement,
        replicas,
        forward_buffers,
        backward_buffers,
        stash,
        optimizer,
        fixed,
    } = *memory;
    [
        placement,
        replicas,
        forward_buffers,
        backward_buffers,
        stash,
        optimizer,
        fixed,
    ]
    .map(u128::from)
    .iter()
    .sum()
}

/// Modelled seconds of the backward GEMMs of a rank.
fn seconds(request: &PlanRequest<'_>, plan: &Plan, rank: usize, rows: u64) -> f64 {
    let shape = &request.memory.shape;
    let projection = 2.0 * (shape.width * shape.hidden) as f64;
    let (gradients, again) = if shape.gated { (6.0, 2.0) } else { (4.0, 1.0) };
    let again = if request.memory.stash == Stash::Recompute {
        again
    } else {
        0.0
    };
    let launches = plan.placement.local_experts(rank).len() as f64;
    // The product for one row is exact, so that beyond 2^50 rows too only one product is rounded.
    let flop = rows as f64 * ((gradients + again) * projection);
    flop / request.cluster.flops + launches * request.cluster.launch_seconds
}

fn sum(counts: &[u32]) -> u64 {
    counts.iter().map(|&n| u64::from(n)).sum()
}

fn total(rows: &[u64]) -> u64 {
    rows.iter().sum()
}
