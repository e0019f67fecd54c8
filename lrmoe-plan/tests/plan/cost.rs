//! The cost model against seconds counted by hand.

use lrmoe_plan::ndarray::{Array2, array};
use lrmoe_plan::{ClusterSpec, Error, ExpertShape, Link, Stash, StepWork, modelled_seconds, toml};

const TOML: &str = r#"
name = "toy"
ranks_per_node = 2
flops = 1000.0
launch_seconds = 0.5
memory_bytes = 1024
intra = { latency_seconds = 1.0, bytes_per_second = 100.0 }
inter = { latency_seconds = 2.0, bytes_per_second = 10.0 }
"#;

fn work() -> StepWork {
    StepWork {
        stash: Stash::Recompute,
        instances: vec![1, 2, 1],
        forward_rows: vec![100, 10, 0],
        backward_rows: vec![0, 50, 20],
        exchanges: vec![
            // Inside a node at most 300 bytes (received by rank 0), between nodes 70 (received by rank 2).
            array![[999, 200, 30], [300, 0, 40], [0, 5, 0]],
            Array2::zeros((3, 3)),
        ],
        delivery: array![[0, 0, 0], [50, 0, 0], [0, 0, 9]],
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * b
}

#[test]
fn seconds_by_hand() {
    let cluster = ClusterSpec::from_toml(TOML).unwrap();
    let mut shape = ExpertShape {
        width: 2,
        hidden: 5,
        gated: true,
        bytes: 4,
    };
    let seconds = modelled_seconds(&cluster, &shape, &work()).unwrap();
    assert!(close(seconds.forward, 100.0 * 6.0 * 10.0 / 1000.0 + 0.5));
    assert!(close(seconds.backward, 50.0 * 16.0 * 10.0 / 1000.0 + 1.0));
    assert!(close(seconds.exchange, 2.0 + 70.0 / 10.0));
    assert!(close(seconds.delivery, 1.0 + 50.0 / 100.0));
    assert!(close(seconds.total(), 6.5 + 9.0 + 9.0 + 1.5));
    // What a rank sends counts as what it receives does.
    let mut back = work();
    for bytes in &mut back.exchanges {
        bytes.swap_axes(0, 1);
    }
    let turned = modelled_seconds(&cluster, &shape, &back).unwrap();
    assert_eq!(turned.exchange, seconds.exchange);
    // Pre-activations that are kept need not be computed again.
    for stash in [Stash::Full, Stash::ForwardSelect] {
        let kept = modelled_seconds(&cluster, &shape, &StepWork { stash, ..work() }).unwrap();
        assert!(close(kept.backward, 50.0 * 12.0 * 10.0 / 1000.0 + 1.0));
    }
    shape.gated = false;
    let seconds = modelled_seconds(&cluster, &shape, &work()).unwrap();
    assert!(close(seconds.forward, 100.0 * 4.0 * 10.0 / 1000.0 + 0.5));
    assert!(close(seconds.backward, 50.0 * 10.0 * 10.0 / 1000.0 + 1.0));
}

#[test]
fn mismatched_work_is_refused() {
    let cluster = ClusterSpec::from_toml(TOML).unwrap();
    let shape = ExpertShape {
        width: 2,
        hidden: 5,
        gated: true,
        bytes: 4,
    };
    let refused = |work: &StepWork| {
        let result = modelled_seconds(&cluster, &shape, work);
        matches!(result, Err(Error::Mismatch { expected: 3, .. }))
    };
    assert!(refused(&StepWork {
        forward_rows: vec![1],
        ..work()
    }));
    assert!(refused(&StepWork {
        backward_rows: vec![1],
        ..work()
    }));
    assert!(refused(&StepWork {
        exchanges: vec![Array2::zeros((3, 2))],
        ..work()
    }));
    assert!(refused(&StepWork {
        delivery: Array2::zeros((2, 3)),
        ..work()
    }));
}

#[test]
fn clusters_read_and_written() {
    for (spec, name) in ClusterSpec::presets().iter().zip(ClusterSpec::PRESETS) {
        assert_eq!(&ClusterSpec::preset(name).unwrap(), spec);
        let text = toml::to_string(spec).unwrap();
        assert_eq!(&ClusterSpec::from_toml(&text).unwrap(), spec);
    }
    // Half of the bf16 peak and four fifths of the links' rates.
    let rates = |name| {
        let spec = ClusterSpec::preset(name).unwrap();
        let links =
            [spec.intra, spec.inter].map(|link| (link.latency_seconds, link.bytes_per_second));
        (spec.flops, spec.memory_bytes, spec.launch_seconds, links)
    };
    assert_eq!(
        rates("8xA100"),
        (
            156e12,
            80_000_000_000,
            5e-6,
            [(10e-6, 240e9), (20e-6, 1.25e9)]
        )
    );
    let hopper = |memory_bytes| (494e12, memory_bytes, 5e-6, [(10e-6, 360e9), (20e-6, 40e9)]);
    assert_eq!(rates("8xH100"), hopper(80_000_000_000));
    assert_eq!(rates("8xH200"), hopper(141_000_000_000));
    let error = ClusterSpec::preset("9xA100").unwrap_err();
    assert_eq!(
        error.to_string(),
        "unknown cluster `9xA100`, expected one of 8xA100, 8xH100, 8xH200"
    );
    let intra = Link {
        latency_seconds: 1.0,
        bytes_per_second: 100.0,
    };
    assert_eq!(ClusterSpec::from_toml(TOML).unwrap().intra, intra);
}

#[test]
fn bad_clusters() {
    let with = |from: &str, to: &str| ClusterSpec::from_toml(&TOML.replace(from, to));
    assert!(matches!(with("flops", "flop"), Err(Error::ClusterToml(_))));
    assert!(matches!(
        with("= 1000.0", "= \"fast\""),
        Err(Error::ClusterToml(_))
    ));
    assert!(matches!(with("= 2\n", "= 0\n"), Err(Error::NoRanksPerNode)));
    for number in ["0.0", "-1.0", "nan", "inf"] {
        let result = with("1000.0", number);
        assert!(matches!(
            result,
            Err(Error::OutOfRange { what: "flops", .. })
        ));
    }
    let result = with("0.5", "-0.5");
    assert!(matches!(
        result,
        Err(Error::OutOfRange {
            what: "launch time",
            ..
        })
    ));
}
