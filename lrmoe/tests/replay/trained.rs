//! A replay of a recorded run gives the run's own bytes and modelled seconds: both count the same, on ways of their own.

use std::process::Command;

use lrmoe::replay::{Model, Settings, Source, replay};
use lrmoe::train::StepRecord;
use lrmoe_plan::{ClusterSpec, ExpertShape};
use tempfile::TempDir;

use super::settings;

fn check(policy: &str, contender: &str, tolerance: f64) {
    let folder = TempDir::new().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    std::fs::write(
        path("text.txt"),
        "the quick brown fox jumps over the lazy dog. ".repeat(60),
    )
    .expect("a text");
    let words = "train --text text.txt --ranks 4 --ranks-per-node 4 --layers 2 --width 16 --heads 2 --context 16 --experts 8 --top-k 2 --hidden 16 \
        --batch 8 --steps 5 --eval-every 0 --eval-sequences 1 --record-trace trace.safetensors --record-pairs-every 1 --policy";
    let output = Command::new(env!("CARGO_BIN_EXE_lrmoe"))
        .current_dir(folder.path())
        .args(words.split_whitespace())
        .arg(policy)
        .output()
        .expect("the program starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let log = std::fs::read_to_string(path("out/steps.jsonl")).expect("a log");
    let records: Vec<StepRecord> = log
        .lines()
        .map(|line| serde_json::from_str(line).expect("a record"))
        .collect();

    let asked = Settings {
        model: Model {
            name: "trained".into(),
            shape: ExpertShape {
                width: 16,
                hidden: 16,
                gated: true,
                bytes: 4,
            },
            sizes: None,
            top_k: None,
            shared_experts: 0,
        },
        cluster: ClusterSpec::preset("8xA100").expect("a preset"),
        chunk_rows: 4096,
        floor: 1,
        ..settings(contender)
    };
    let mut source = Source::open(&[path("trace.safetensors")]).expect("a trace");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let report = replay(&mut source, &asked, &stop, |_, _| ()).expect("a replay");
    let replayed = &report.policies[0];
    let mean =
        |of: fn(&StepRecord) -> f64| records.iter().map(of).sum::<f64>() / records.len() as f64;
    for (what, trained, replayed) in [
        (
            "forward",
            mean(|r| r.forward_bytes as f64),
            replayed.forward_bytes as f64,
        ),
        (
            "backward",
            mean(|r| r.backward_bytes as f64),
            replayed.backward_bytes as f64,
        ),
        (
            "update",
            mean(|r| r.update_bytes as f64),
            replayed.update_bytes as f64,
        ),
        (
            "seconds",
            mean(|r| r.modelled_moe_seconds),
            replayed.modelled_step_seconds,
        ),
        (
            "retention",
            mean(|r| r.retention),
            1.0 - replayed.dropped - replayed.left_out,
        ),
    ] {
        let off = (replayed - trained).abs() / trained;
        assert!(
            off <= tolerance,
            "{what}: trained {trained}, replayed {replayed}"
        );
    }
}

/// Means are whole bytes in a replay.
const ROUNDING: f64 = 1e-5;

#[test]
fn symi() {
    check("symi", "symi+chunked-forward", ROUNDING);
}

#[test]
fn lrmoe() {
    // The trace has scores, the run has their squares: a pair may change places with one next to it.
    check("lrmoe", "lrmoe@0.5", 0.01);
}
