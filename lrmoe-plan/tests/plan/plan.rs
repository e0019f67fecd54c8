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
    assert_eq!(
        cells[9],
        format!("{:.2}", of.memory.total() as f64 / 1048576.0)
    );
    assert_eq!(cells[11], "memory");
    assert_eq!(
        lines[3..5],
        [
            "50 of 160 pairs run backward (31.2 %), 94 fewer than the retention asks for.",
            "Memory is full on ranks 0, 1: one more row there needs 728 bytes of budget.",
        ]
    );
    assert!(lines[5].starts_with("Modelled: "));

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
