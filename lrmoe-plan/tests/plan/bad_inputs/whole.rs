//! Whole plans.

use crate::request::Case;
use lrmoe_plan::ndarray::array;
use lrmoe_plan::{
    ClusterSpec, Constraint, Error, ExpertShape, Fixed, Loads, Lrmoe, MemoryModel, ModelSpec,
    Placement, PlacementPolicy, PlacementRequest, PlanRequest, Profile, QuotaPolicy, Stash,
    Topology, plan,
};

use super::{expect, mismatch, outside};

/// One rank, one plain expert of 12 parameters, one pair.
fn smallest() -> Case {
    Case {
        loads: Loads::new(array![[1]]).unwrap(),
        previous: Fixed::placement(1, 1).unwrap(),
        topology: Topology::single_node(1).unwrap(),
        memory: MemoryModel {
            shape: ExpertShape {
                width: 2,
                hidden: 3,
                gated: false,
                bytes: 4,
            },
            top_k: 1,
            tokens: 1,
            chunk_rows: u64::MAX,
            overlap: false,
            stash: Stash::Recompute,
            keeps_outputs: false,
            fixed: 0,
        },
        cluster: ClusterSpec::preset("8xA100").unwrap(),
        budget: vec![u64::MAX],
        slots: None,
        placement: Box::new(Lrmoe::default()),
        retention: 1.0,
        quota_policy: QuotaPolicy::Proportional,
        profile: None,
        floor: 0,
        seconds: None,
    }
}

fn retained(request: &PlanRequest<'_>) -> Result<u32, Error> {
    plan(request).map(|plan| plan.quotas.total())
}

/// Weights and gradients 96, pair 16, x 8, optimizer 144, a forward row 64; a retained row takes 88.
const HELD: u64 = 328;

#[test]
fn budgets() {
    let case = smallest();
    assert_eq!(case.memory.retained_row_bytes(), 88);
    let small = |budget| {
        Err(Error::BudgetTooSmall {
            rank: 0,
            budget,
            missing: HELD - budget,
            smallest: HELD,
        })
    };
    type Call<'a> = (&'a str, u64, &'a dyn Fn() -> Result<u32, Error>);
    let cases: [Call<'_>; 6] = [
        ("nothing", 0, &|| small(0)),
        ("a byte short", HELD - 1, &|| small(HELD - 1)),
        ("no row to retain", HELD, &|| Ok(0)),
        ("a byte short of a row", HELD + 87, &|| Ok(0)),
        ("a row", HELD + 88, &|| Ok(1)),
        ("no bound", u64::MAX, &|| Ok(1)),
    ];
    for (name, budget, expected) in cases {
        for slots in [None, Some(vec![1])] {
            let case = Case {
                budget: vec![budget],
                slots,
                ..smallest()
            };
            expect(name, retained(&case.request()), expected());
        }
    }
}

#[test]
fn sizes_of_nothing_and_past_u64() {
    let with = |change: fn(&mut MemoryModel), budget| {
        let mut case = smallest();
        change(&mut case.memory);
        case.budget = vec![budget];
        retained(&case.request())
    };
    let endless = || Err(Error::TooManyBytes { rank: 0 });
    let last = u64::MAX - 1;
    expect("width", with(|m| m.shape.width = usize::MAX, 7), endless());
    expect(
        "hidden",
        with(|m| m.shape.hidden = usize::MAX, last),
        endless(),
    );
    expect("bytes", with(|m| m.shape.bytes = usize::MAX, 0), endless());
    expect("tokens", with(|m| m.tokens = usize::MAX, last), endless());
    expect("top-k", with(|m| m.top_k = usize::MAX, last), endless());
    expect("fixed", with(|m| m.fixed = u64::MAX, last), endless());
    expect(
        "nothing is left",
        with(|m| m.fixed = u64::MAX, u64::MAX),
        endless(),
    );
    // 80 and 48 bytes less: no x, no weights. A row is then its squared norm, and its gate and selection weights.
    expect(
        "an expert of no size",
        with(|m| m.shape.width = 0, 16 + 32 + 24 + 2 * 12),
        Ok(1),
    );
    expect("no tokens", with(|m| m.tokens = 0, HELD - 24 + 88), Ok(1));
    expect(
        "chunks of no rows",
        with(|m| m.chunk_rows = 0, HELD - 64 + 88),
        Ok(1),
    );
    assert_eq!(
        ModelSpec::preset("tiny")
            .unwrap()
            .expert(usize::MAX)
            .slot_bytes(),
        u64::MAX
    );
}

#[test]
fn time_budgets() {
    let with = |width, seconds| {
        let mut case = smallest();
        case.memory.shape.width = width;
        case.cluster.launch_seconds = 1.0;
        case.seconds = Some(seconds);
        plan(&case.request()).map(|plan| (plan.quotas.total(), plan.ranks[0].binds))
    };
    let range = "the numbers from 0";
    expect("no time", with(2, 0.0), Ok((0, Constraint::Time)));
    expect("time to launch", with(2, 1.0), Ok((0, Constraint::Time)));
    expect(
        "all time",
        with(2, f64::MAX),
        Ok((1, Constraint::Retention)),
    );
    expect(
        "rows that cost nothing",
        with(0, 1.0),
        Ok((1, Constraint::Retention)),
    );
    expect(
        "no time for their launch",
        with(0, 0.5),
        Ok((0, Constraint::Time)),
    );
    expect(
        "negative",
        with(2, -1.0),
        outside("time budget", -1.0, range),
    );
    expect(
        "endless",
        with(2, f64::INFINITY),
        outside("time budget", f64::INFINITY, range),
    );
}

#[test]
fn parts_of_other_sizes() {
    let case = smallest();
    let good = case.request();
    let (two, other) = (
        Topology::single_node(2).unwrap(),
        Fixed::placement(2, 1).unwrap(),
    );
    let spread = Fixed::placement(1, 2).unwrap();
    let profile = Profile::new(3);
    let seen = Profile::from_counts(3, vec![1.0; 3 * Profile::BUCKETS]).unwrap();
    let cluster = ClusterSpec {
        flops: f64::NAN,
        ..case.cluster.clone()
    };
    let cases = [
        (
            "topology",
            PlanRequest {
                topology: &two,
                ..good
            },
            mismatch("source ranks", 2, 1),
        ),
        (
            "no budgets",
            PlanRequest {
                budget: &[],
                ..good
            },
            mismatch("budgets", 1, 0),
        ),
        (
            "experts",
            PlanRequest {
                previous: &other,
                ..good
            },
            mismatch("experts of the previous placement", 1, 2),
        ),
        (
            "ranks",
            PlanRequest {
                previous: &spread,
                ..good
            },
            mismatch("ranks of the previous placement", 1, 2),
        ),
        (
            "slots",
            PlanRequest {
                slots: Some(&[]),
                ..good
            },
            mismatch("slots", 1, 0),
        ),
        (
            "no slots",
            PlanRequest {
                slots: Some(&[0]),
                ..good
            },
            Err(Error::TooFewSlots {
                slots: 0,
                experts: 1,
            }),
        ),
        (
            "profile",
            PlanRequest {
                profile: Some(&profile),
                ..good
            },
            mismatch("experts of the profile", 1, 3),
        ),
        (
            "full profile",
            PlanRequest {
                profile: Some(&seen),
                ..good
            },
            mismatch("experts of the profile", 1, 3),
        ),
        (
            "retention",
            PlanRequest {
                retention: f64::NAN,
                ..good
            },
            outside("retention", f64::NAN, "0 to 1"),
        ),
        (
            "cluster",
            PlanRequest {
                cluster: &cluster,
                ..good
            },
            outside("flops", f64::NAN, "the positive numbers"),
        ),
    ];
    for (name, request, expected) in cases {
        expect(name, retained(&request), expected);
    }
}

/// A policy of a caller may place what it likes.
#[derive(Debug)]
struct Foreign(Placement);

impl PlacementPolicy for Foreign {
    fn name(&self) -> &'static str {
        "foreign"
    }
    fn place(&self, _: &PlacementRequest<'_>) -> Result<Placement, Error> {
        Ok(self.0.clone())
    }
}

#[test]
fn policies_of_callers() {
    let with = |placement: Placement, slots| {
        let case = Case {
            placement: Box::new(Foreign(placement)),
            slots: Some(vec![slots]),
            loads: Loads::new(array![[1, 1]]).unwrap(),
            previous: Fixed::placement(2, 1).unwrap(),
            ..smallest()
        };
        retained(&case.request())
    };
    expect(
        "as it should",
        with(Fixed::placement(2, 1).unwrap(), 2),
        Ok(2),
    );
    expect(
        "other ranks",
        with(Fixed::placement(2, 2).unwrap(), 2),
        mismatch("ranks of the placement", 1, 2),
    );
    expect(
        "other experts",
        with(Fixed::placement(3, 1).unwrap(), 2),
        mismatch("experts of the placement", 2, 3),
    );
}
