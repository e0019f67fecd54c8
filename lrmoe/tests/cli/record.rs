//! Traces recorded by a run.

use std::process::{Command, Stdio};

use lrmoe::trace::{PairRecord, TraceHeader, TraceReader};
use ndarray::{Array3, Axis};

use super::refusals::assert_program_refused;
use super::{Folder, SMALL, assert_success, wait_for_lines};

struct Read {
    header: TraceHeader,
    counts: Vec<Array3<u32>>,
    pairs: Vec<PairRecord>,
}

fn read(folder: &Folder, name: &str) -> Read {
    let mut reader = TraceReader::open(folder.path(name)).expect("opens");
    let header = reader.header().clone();
    Read {
        counts: (0..header.steps)
            .map(|step| reader.step(step).expect("a step"))
            .collect(),
        pairs: (0..header.recorded.len())
            .map(|index| reader.pairs(index).expect("pairs"))
            .collect(),
        header,
    }
}

/// The trace's counts, summed over ranks, are the loads of the log from its line `from` on.
fn assert_like_log(folder: &Folder, read: &Read, out: &str, from: usize) {
    let records = folder.records(out);
    assert_eq!(read.counts.len(), records.len() - from);
    for (counts, record) in read.counts.iter().zip(&records[from..]) {
        let loads = counts.sum_axis(Axis(1));
        let loads: Vec<Vec<u32>> = loads.outer_iter().map(|loads| loads.to_vec()).collect();
        let logged: Vec<Vec<u32>> = record
            .layers
            .iter()
            .map(|layer| layer.load.clone())
            .collect();
        assert_eq!(loads, logged, "step {}", record.step);
    }
}

#[test]
fn recorded_counts_are_those_of_the_log() {
    let folder = Folder::new();
    for (policy, scored) in [("lrmoe", true), ("symi", false), ("dropless", false)] {
        let trace = format!("{policy}.safetensors");
        let record = ["--record-trace", &trace, "--record-pairs-every", "5"];
        let run = ["--policy", policy, "--out", policy];
        assert_success(&folder.train(&[&record[..], &run].concat()));
        let read = read(&folder, &trace);
        assert_like_log(&folder, &read, policy, 0);
        assert_eq!(
            (read.header.first_step, read.header.recorded),
            (0, vec![0, 5, 10])
        );
        assert_eq!(
            (
                read.header.ranks,
                read.header.top_k,
                read.header.tokens_per_rank
            ),
            (2, Some(2), Some(32))
        );
        assert_eq!(
            (read.header.scored, read.header.metadata["policy"].as_str()),
            (scored, policy)
        );
        assert!(
            read.pairs
                .iter()
                .all(|pairs| pairs.gate_weight.iter().all(|p| *p > 0.0 && *p < 1.0))
        );
    }
}

#[test]
fn recorded_scores_are_those_that_select() {
    let folder = Folder::new();
    let record = [
        "--record-trace",
        "t.safetensors",
        "--record-pairs-every",
        "1",
        "--steps",
        "2",
    ];
    assert_success(&folder.train(&[&record[..], &["--score", "gate"]].concat()));
    for pairs in read(&folder, "t.safetensors").pairs {
        let score = pairs.score.expect("scores");
        for (score, gate) in score.iter().zip(&pairs.gate_weight) {
            // The score is the root of a rounded square.
            assert!((score - gate).abs() <= 2e-7 * gate, "{score}, not {gate}");
        }
    }
    assert_success(&folder.train(&[&record[..], &["--overwrite"]].concat()));
    for pairs in read(&folder, "t.safetensors").pairs {
        let score = pairs.score.expect("scores");
        assert!(
            score.iter().all(|score| *score > 0.0),
            "p |dy| |h| of a model that learns"
        );
    }
}

#[test]
fn a_resumed_run_records_the_rest() {
    let folder = Folder::new();
    let record = |trace: &'static str| ["--record-trace", trace, "--record-pairs-every", "3"];
    assert_success(
        &folder.train(&[&record("whole.safetensors")[..], &["--out", "whole"]].concat()),
    );
    let parts = ["--out", "parts", "--target-loss", "100"];
    assert_success(&folder.train(&[&record("a.safetensors")[..], &parts].concat()));
    assert_eq!(
        read(&folder, "a.safetensors").header.steps,
        6,
        "until the target"
    );
    let rest = [
        &["--text", "text.txt"],
        SMALL,
        &["--out", "parts", "--resume"],
    ]
    .concat();
    let again = [&["train"], &rest[..], &record("a.safetensors")].concat();
    assert_program_refused(&folder, &again, "a.safetensors already exists");
    assert_success(&folder.run(&[&rest[..], &record("b.safetensors")].concat()));
    let b = read(&folder, "b.safetensors");
    assert_eq!((b.header.first_step, b.header.steps), (6, 6));
    assert_like_log(&folder, &b, "parts", 6);
    folder.trace(&[
        "convert",
        "a.safetensors",
        "b.safetensors",
        "--out",
        "joined.safetensors",
    ]);
    let (joined, whole) = (
        read(&folder, "joined.safetensors"),
        read(&folder, "whole.safetensors"),
    );
    assert_eq!(joined.counts, whole.counts);
    assert_eq!(joined.pairs, whole.pairs);
    assert_eq!(joined.header.recorded, [0, 3, 6, 9]);
}

#[test]
fn ctrl_c_ends_the_trace_well() {
    let folder = Folder::new();
    let record = [
        "--record-trace",
        "traces/t.safetensors",
        "--steps",
        "400",
        "--out",
        "cut",
    ];
    let mut child = folder
        .command(&[&["--text", "text.txt"], SMALL, &record].concat())
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    wait_for_lines(&folder.path("cut/steps.jsonl"), 3);
    let kill = format!("kill -INT {}", child.id());
    assert!(
        Command::new("sh")
            .args(["-c", &kill])
            .status()
            .expect("kill")
            .success()
    );
    assert!(child.wait().expect("ends").success());
    assert_like_log(&folder, &read(&folder, "traces/t.safetensors"), "cut", 0);
    let entries = std::fs::read_dir(folder.path("traces")).expect("a folder");
    assert_eq!(entries.count(), 1, "no temporary file is left");
}

#[test]
fn a_configuration_file_records_too() {
    let folder = Folder::new();
    let toml = "record-trace = \"t.safetensors\"\nrecord-pairs-every = 2\nsteps = 3\n";
    std::fs::write(folder.path("run.toml"), toml).expect("a file");
    let small: Vec<&str> = SMALL
        .chunks(2)
        .filter(|pair| pair[0] != "--steps")
        .flatten()
        .copied()
        .collect();
    assert_success(
        &folder.run(&[&["--text", "text.txt", "--config", "run.toml"], &small[..]].concat()),
    );
    assert_eq!(read(&folder, "t.safetensors").header.recorded, [0, 2]);
}
