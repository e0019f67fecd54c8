//! Whole plans by hand: what binds, errors, predicted seconds, report.

use crate::checker::check;
use crate::request::{Case, cluster};
use lrmoe_plan::ndarray::{Array2, array};
use lrmoe_plan::{
    ClusterSpec, Constraint, Error, ExpertShape, Fixed, Link, Loads, Lrmoe, MemoryModel, Plan,
    PlanRequest, QuotaPolicy, Stash, Symi, Topology, plan,
};

/// Two ranks, three experts, expert 0 hot.
fn example() -> Case {
    Case {
        loads: Loads::new(array![[60, 10, 10], [50, 20, 10]]).unwrap(),
        previous: Fixed::placement(3, 2).unwrap(),
        topology: Topology::single_node(2).unwrap(),
        memory: MemoryModel {
            shape: ExpertShape {
                width: 16,
                hidden: 32,
                gated: true,
                bytes: 4,
            },
            top_k: 2,
            tokens: 40,
            chunk_rows: 64,
            overlap: false,
            stash: Stash::Recompute,
            keeps_outputs: false,
            fixed: 0,
        },
        cluster: ClusterSpec::preset("8xA100").unwrap(),
        budget: vec![200_000; 2],
        slots: None,
        placement: Box::new(Lrmoe::default()),
        retention: 0.5,
        quota_policy: QuotaPolicy::Proportional,
        profile: None,
        floor: 0,
        seconds: None,
    }
}

fn binding(plan: &Plan) -> Vec<Constraint> {
    plan.ranks.iter().map(|of| of.binds).collect()
}

#[test]
fn what_binds() {
    let mut case = example();
    let found = plan(&case.request()).unwrap();
    assert_eq!(binding(&found), [Constraint::Retention; 2]);
    assert_eq!(found.quotas.as_slice(), [55, 15, 10]);

    // Ten rows less than they use.
    let ten = 10 * case.memory.retained_row_bytes();
    case.slots = Some(found.slots.clone());
    case.budget = found
        .ranks
        .iter()
        .map(|of| of.memory.total() - ten)
        .collect();
    let found = plan(&case.request()).unwrap();
    assert_eq!(binding(&found), [Constraint::Memory; 2]);
    assert_eq!(found.quotas.total(), 60);

    // The other rank holds no expert that has more pairs.
    case.slots = Some(vec![1, 2]);
    case.budget = vec![case.budget[0], u64::MAX];
    case.placement = Box::new(Fixed);
    case.retention = 1.0;
    let found = plan(&case.request()).unwrap();
    assert_eq!(binding(&found), [Constraint::Memory, Constraint::Loads]);

    case.budget.fill(u64::MAX);
    case.seconds = Some(1e-4);
    case.cluster = cluster();
    let found = plan(&case.request()).unwrap();
    assert_eq!(binding(&found), [Constraint::Time; 2]);
    assert_eq!(found.quotas.total(), 0);
}

#[test]
fn plenty_gives_every_expert_to_every_rank() {
    let mut case = example();
    case.budget.fill(u64::MAX);
    case.placement = Box::new(Symi);
    let found = plan(&case.request()).unwrap();
    check(&case.request(), &found);
    assert!(found.slots.iter().all(|&slots| slots <= 3));
    assert_eq!(found.quotas.total(), 80);
}

#[test]
fn bad_requests() {
    let case = example();
    let good = case.request();
    let refused = |request: PlanRequest<'_>| plan(&request).unwrap_err().to_string();
    assert_eq!(
        refused(PlanRequest {
            budget: &[1],
            ..good
        }),
        "budgets: expected 2, got 1"
    );
    assert_eq!(
        refused(PlanRequest {
            slots: Some(&[1]),
            ..good
        }),
        "slots: expected 2, got 1"
    );
    assert_eq!(
        refused(PlanRequest {
            slots: Some(&[1, 1]),
            ..good
        }),
        "2 slots cannot hold 3 experts"
    );
    assert_eq!(
        refused(PlanRequest {
            retention: 1.5,
            ..good
        }),
        "retention 1.5 is outside 0 to 1"
    );
    for seconds in [-1.0, f64::NAN, f64::INFINITY] {
        let request = PlanRequest {
            seconds: Some(seconds),
            ..good
        };
        assert!(matches!(
            plan(&request),
            Err(Error::OutOfRange {
                what: "time budget",
                ..
            })
        ));
    }
    let topology = Topology::single_node(3).unwrap();
    assert_eq!(
        refused(PlanRequest {
            topology: &topology,
            ..good
        }),
        "source ranks: expected 3, got 2"
    );
    let text = refused(PlanRequest {
        budget: &[0, 0],
        ..good
    });
    assert!(
        text.starts_with("budget of 0 bytes on rank 0 is "),
        "{text}"
    );
}

/// Rows of one rank received from another, if they come from all ranks in proportion to what these route.
#[test]
fn predicted_seconds_by_hand() {
    let mut case = example();
    case.topology = Topology::new(2, 1).unwrap();
    case.budget.fill(u64::MAX);
    case.slots = Some(vec![1, 2]);
    case.placement = Box::new(Fixed);
    case.cluster = ClusterSpec {
        flops: 1e6,
        launch_seconds: 0.1,
        inter: Link {
            latency_seconds: 2.0,
            bytes_per_second: 1000.0,
        },
        ..case.cluster
    };
    let found = plan(&case.request()).unwrap();
    let rows: Vec<_> = found
        .ranks
        .iter()
        .map(|r| (r.forward_rows, r.retained_rows))
        .collect();
    assert_eq!(rows, [(110, 55), (50, 25)]);
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b;
    assert!(close(
        found.seconds.forward,
        0.1 + 110.0 * 6.0 * 16.0 * 32.0 / 1e6
    ));
    assert!(close(
        found.seconds.backward,
        0.1 + 55.0 * 16.0 * 16.0 * 32.0 / 1e6
    ));
    // Both ranks route half of all pairs: half of what rank 0 receives crosses.
    let row = 16.0 * 4.0;
    let crossing = |rows: f64, bytes: f64| 2.0 + rows / 2.0 * bytes / 1000.0;
    let exchange = 2.0 * crossing(110.0, row) + crossing(55.0, 2.0 * row) + crossing(55.0, row);
    // Rank 1 has two instances; half of each belongs to the other rank's shard.
    let weights = 2.0 + 2.0 / 2.0 * (3.0 * 16.0 * 32.0 * 4.0) / 1000.0;
    assert!(close(found.seconds.exchange, exchange + weights));
    assert!(close(found.seconds.delivery, weights));

    case.memory.stash = Stash::ForwardSelect;
    let kept = plan(&case.request()).unwrap();
    let saved = crossing(55.0, 2.0 * row) - crossing(55.0, row);
    assert!(close(found.seconds.exchange - kept.seconds.exchange, saved));
    case.retention = 0.0;
    let frozen = plan(&case.request()).unwrap();
    assert_eq!(frozen.seconds.delivery, 0.0);
    assert!(close(frozen.seconds.exchange, 2.0 * crossing(110.0, row)));
}

#[test]
fn plans_explain_themselves() {
    let mut case = example();
    case.budget = vec![70_000, 100_000];
    case.retention = 0.9;
    let found = plan(&case.request()).unwrap();
    let text = found.to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 6, "{text}");
    let cells: Vec<&str> = lines[2].split_whitespace().collect();
    let of = found.ranks[1];
    assert_eq!(cells[..6], ["1", "2", "2", "50", "40", "40"]);
    let mib = |bytes: u64| format!("{:.2}", bytes as f64 / 1048576.0);
    assert_eq!(cells[6], mib(of.memory.placement + of.memory.replicas));
    assert_eq!(cells[9], mib(of.memory.total()));
    assert_eq!(cells[11], "memory");
    assert_eq!(
        lines[3..5],
        [
            "50 of 160 pairs run backward (31.2 %), 94 fewer than the retention asks for.",
            "Memory is full on ranks 0, 1: one more row there needs 728 bytes of budget.",
        ]
    );
    let seconds = found.seconds;
    let [all, forward, backward, exchange, delivery] = [
        seconds.total(),
        seconds.forward,
        seconds.backward,
        seconds.exchange,
        seconds.delivery,
    ]
    .map(|seconds| format!("{:.3}", 1000.0 * seconds));
    let modelled = format!(
        "Modelled: {all} ms = GEMMs forward {forward} + backward {backward}, exchange {exchange}, delivery {delivery}."
    );
    assert_eq!(lines[5], modelled);

    let retention = 0.1;
    let found = plan(&PlanRequest {
        retention,
        ..case.request()
    })
    .unwrap();
    let text = found.to_string();
    assert!(
        text.contains("16 of 160 pairs run backward (10.0 %), as many as the retention asks for.")
    );
    assert!(
        text.contains(
            "Room for 12 more rows on ranks 0, 1: a higher retention would use the room."
        )
    );

    let json = serde_json::to_value(&found).unwrap();
    assert_eq!(json["quotas"], serde_json::json!([11, 3, 2]));
    assert_eq!(json["placement"], serde_json::json!([[0], [0, 1, 2]]));
    assert_eq!(json["ranks"][0]["binds"], "retention");
    assert_eq!(
        json["ranks"][1]["memory"]["optimizer"],
        3 * 4 * 3 * 3 * 16 * 32 / 2
    );
}

#[test]
fn many_ranks_are_shortened() {
    let case = Case {
        loads: Loads::new(Array2::from_elem((40, 4), 10)).unwrap(),
        previous: Fixed::placement(4, 40).unwrap(),
        topology: Topology::new(40, 8).unwrap(),
        budget: vec![1 << 20; 40],
        ..example()
    };
    let text = plan(&case.request()).unwrap().to_string();
    assert!(
        text.contains("and 8 ranks with more memory to spare"),
        "{text}"
    );
    assert!(
        text.contains("on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 32 more:"),
        "{text}"
    );
}

#[test]
fn ranks_with_least_to_spare_are_shown() {
    let mut case = Case {
        loads: Loads::new(Array2::from_shape_fn((40, 40), |(rank, e)| {
            if rank == 0 { 10 + e as u32 } else { 0 }
        }))
        .unwrap(),
        previous: Fixed::placement(40, 40).unwrap(),
        topology: Topology::new(40, 8).unwrap(),
        budget: vec![1 << 20; 40],
        placement: Box::new(Fixed),
        ..example()
    };
    let totals = |case: &Case| -> Vec<u64> {
        let found = plan(&case.request()).unwrap();
        found.ranks.iter().map(|of| of.memory.total()).collect()
    };
    // Close to what the last one takes, and less than twice what the first does.
    let last = totals(&case)[39];
    case.budget.fill(last + 100);
    let of = totals(&case);
    assert!(of.is_sorted() && of[0] < of[8] && of[0] > case.budget[0] / 2);
    let text = plan(&case.request()).unwrap().to_string();
    let shown: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(shown[1..3], ["8", "9"], "{text}");
    assert_eq!(shown[32..34], ["39", "and"], "{text}");
}

#[test]
fn slots_are_added_where_they_fit() {
    let mut case = example();
    case.topology = Topology::single_node(3).unwrap();
    case.loads = Loads::new(Array2::from_elem((3, 9), 1)).unwrap();
    case.previous = Fixed::placement(9, 3).unwrap();
    case.placement = Box::new(Symi);
    let slot = case.memory.shape.slot_bytes();
    let three = case.memory.of_rank(&case.previous, 0, 3, 0, 0).total();
    let bare = three - 3 * slot;
    // No slot, and five or, beside a third of the rows, four.
    let rows = slot / 2 - 600;
    case.budget = vec![bare + rows, bare + 5 * slot + rows, bare + 5 * slot + rows];
    assert_eq!(plan(&case.request()).unwrap().slots, [0, 5, 4]);
    case.budget[2] += 1;
    assert_eq!(plan(&case.request()).unwrap().slots, [0, 4, 5]);
}

#[test]
fn no_rank_is_asked_for_more_than_it_needs() {
    let mut case = example();
    case.loads = Loads::new(array![[900, 1], [900, 1]]).unwrap();
    case.previous = Fixed::placement(2, 2).unwrap();
    case.placement = Box::new(Fixed);
    case.budget = vec![1 << 30, 0];
    let Err(Error::BudgetTooSmall {
        rank: 1, missing, ..
    }) = plan(&case.request())
    else {
        panic!("rank 1 has nothing")
    };
    case.budget[1] = missing;
    plan(&case.request()).unwrap();
    case.budget[1] -= 1;
    let error = plan(&case.request()).unwrap_err();
    assert!(matches!(
        error,
        Error::BudgetTooSmall {
            rank: 1,
            missing: 1,
            ..
        }
    ));
}
