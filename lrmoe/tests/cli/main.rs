//! The program as a user runs it.

mod bench;
mod doctor;
mod nodes;
mod oracle;
mod record;
mod refusals;
mod retention;
mod trace;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use lrmoe::train::{MODELLED_AT, StepRecord};
use tempfile::TempDir;

/// A model small enough for tests, on text that can be learned.
const SMALL: &[&str] = &[
    "--ranks",
    "2",
    "--layers",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
    "--experts",
    "4",
    "--top-k",
    "2",
    "--hidden",
    "16",
    "--batch",
    "4",
    "--steps",
    "12",
    "--eval-every",
    "6",
    "--eval-sequences",
    "4",
    "--checkpoint-every",
    "4",
];

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(TempDir::new().expect("a folder"));
        std::fs::write(
            folder.path("text.txt"),
            "the quick brown fox jumps over the lazy dog. ".repeat(60),
        )
        .expect("a text");
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The program in this folder.
    fn program(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lrmoe"));
        command
            .current_dir(self.0.path())
            .args(arguments)
            .stdin(Stdio::null());
        command
    }

    fn command(&self, arguments: &[&str]) -> Command {
        self.program(&[&["train"], arguments].concat())
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments)
            .output()
            .expect("the program starts")
    }

    /// Trains on the folder's text with the small model; `arguments` come last.
    fn train(&self, arguments: &[&str]) -> Output {
        let text = ["--text", "text.txt"];
        self.run(&[&text, SMALL, arguments].concat())
    }

    fn records(&self, out: &str) -> Vec<StepRecord> {
        let lines = std::fs::read_to_string(self.path(out).join("steps.jsonl")).expect("a log");
        lines
            .lines()
            .map(|line| serde_json::from_str(line).expect("a record"))
            .collect()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn assert_success(output: &Output) {
    assert!(
        output.status.success(),
        "{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
}

/// What must not differ between two runs of the same thing.
fn losses(records: &[StepRecord]) -> Vec<(u32, u32, u32, Option<u32>)> {
    records
        .iter()
        .map(|r| {
            (
                r.step,
                r.loss.to_bits(),
                r.gradient_norm.to_bits(),
                r.held_out_loss.map(f32::to_bits),
            )
        })
        .collect()
}

#[test]
fn records_say_what_happened() {
    let folder = Folder::new();
    assert_success(&folder.train(&["--retention", "0.5", "--out", "run"]));
    let records = folder.records("run");
    assert_eq!(
        records.iter().map(|record| record.step).collect::<Vec<_>>(),
        (1..=12).collect::<Vec<_>>()
    );
    let pairs = 4 * 16 * 2;
    for record in &records {
        assert_eq!(record.held_out_loss.is_some(), record.step % 6 == 0);
        assert!(
            (record.retention - 0.5).abs() < 0.01,
            "{}",
            record.retention
        );
        assert_eq!(record.layers.len(), 2);
        for layer in &record.layers {
            assert_eq!(layer.load.iter().sum::<u32>(), pairs);
            assert_eq!(layer.quota.iter().sum::<u32>() as u64, layer.retained);
            assert!(layer.imbalance_before >= 1.0 && layer.imbalance_after >= 1.0);
        }
        assert!(
            record.moe_seconds > 0.0 && record.moe_seconds < record.seconds,
            "{record:?}"
        );
        assert!(record.modelled_moe_seconds > 0.0 && record.buffer_bytes > 0);
        let [qwen, glm] = MODELLED_AT.map(|name| record.modelled_moe_seconds_at[name]);
        assert!(record.modelled_moe_seconds < qwen && qwen < glm);
        assert!(record.forward_bytes > record.backward_bytes / 2 && record.backward_bytes > 0);
        let stages: f64 = record.stage_seconds.values().sum();
        assert!(
            stages >= record.moe_seconds * 0.999,
            "the slowest rank of each stage sums to no less than the slowest rank"
        );
    }
    assert!(
        records[11].loss < records[0].loss,
        "{} then {}",
        records[0].loss,
        records[11].loss
    );
}

#[test]
fn every_policy_learns() {
    let folder = Folder::new();
    for policy in [
        &["--policy", "dropless"][..],
        &["--policy", "symi"],
        &["--policy", "lrmoe"],
        &["--retention", "0"],
        &["--select", "top", "--score", "forward"],
    ] {
        assert_success(&folder.train(&[policy, &["--overwrite"]].concat()));
        let records = folder.records("out");
        assert!(records[11].loss < records[0].loss, "{policy:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run_for_any_number_of_threads() {
    let folder = Folder::new();
    assert_success(&folder.train(&["--out", "a", "--threads", "1"]));
    assert_success(&folder.train(&["--out", "b", "--threads", "3"]));
    assert_success(&folder.train(&["--out", "c", "--seed", "2"]));
    assert_eq!(losses(&folder.records("a")), losses(&folder.records("b")));
    assert_ne!(losses(&folder.records("a")), losses(&folder.records("c")));
}

#[test]
fn a_resumed_run_continues_bit_for_bit() {
    let folder = Folder::new();
    for policy in ["lrmoe", "symi", "dropless"] {
        let (whole, parts) = (format!("{policy}-whole"), format!("{policy}-parts"));
        assert_success(&folder.train(&["--policy", policy, "--out", &whole]));
        // The learning rate depends on the number of steps, so the run is cut short by its records and checkpoint, as a kill would.
        assert_success(&folder.train(&[
            "--policy",
            policy,
            "--out",
            &parts,
            "--target-loss",
            "100",
        ]));
        assert_eq!(
            folder.records(&parts).len(),
            6,
            "stopped at the first evaluation"
        );
        assert_success(&folder.train(&["--policy", policy, "--out", &parts, "--resume"]));
        assert_eq!(
            losses(&folder.records(&whole)),
            losses(&folder.records(&parts)),
            "{policy}"
        );
        let checkpoint = |out: &str| {
            std::fs::read(folder.path(out).join("checkpoint.safetensors")).expect("a checkpoint")
        };
        assert!(
            same_tensors(&checkpoint(&whole), &checkpoint(&parts)),
            "{policy}: the final checkpoints differ"
        );
    }
}

/// Metadata may be written in any order, tensors may not differ.
fn same_tensors(a: &[u8], b: &[u8]) -> bool {
    let tensors = |bytes: &[u8]| {
        let file = safetensors::SafeTensors::deserialize(bytes).expect("a checkpoint");
        let mut all: Vec<(String, Vec<u8>)> = file
            .tensors()
            .into_iter()
            .map(|(name, view)| (name, view.data().to_vec()))
            .collect();
        all.sort();
        all
    };
    tensors(a) == tensors(b)
}

#[test]
fn ctrl_c_saves_what_was_done() {
    let folder = Folder::new();
    let whole = folder.train(&[
        "--out",
        "whole",
        "--steps",
        "400",
        "--warmup",
        "2",
        "--checkpoint-every",
        "0",
    ]);
    assert_success(&whole);
    let steps = [
        "--steps",
        "400",
        "--warmup",
        "2",
        "--checkpoint-every",
        "0",
        "--out",
        "cut",
    ];
    let mut child = folder
        .command(&[&["--text", "text.txt"], SMALL, &steps].concat())
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    wait_for_lines(&folder.path("cut/steps.jsonl"), 3);
    let interrupted = Command::new("sh")
        .args(["-c", &format!("kill -INT {}", child.id())])
        .status()
        .expect("kill");
    assert!(interrupted.success());
    assert!(child.wait().expect("ends").success());
    let done = folder.records("cut").len();
    assert!((3..400).contains(&done), "{done} steps");
    assert_success(&folder.train(&[&steps[..], &["--resume"]].concat()));
    assert_eq!(
        losses(&folder.records("cut")),
        losses(&folder.records("whole"))
    );
}

fn wait_for_lines(path: &Path, lines: usize) {
    let started = Instant::now();
    while std::fs::read_to_string(path).map_or(0, |text| text.lines().count()) < lines {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "no steps in {}",
            path.display()
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn comparison(folder: &Folder) -> serde_json::Value {
    let bytes = std::fs::read(folder.path("out/compare.json")).expect("a file");
    serde_json::from_slice(&bytes).expect("json")
}

#[test]
fn a_comparison_shows_every_policy() {
    let folder = Folder::new();
    let output = folder.train(&["--compare", "dropless,symi,lrmoe@0.5,lrmoe@0"]);
    assert_success(&output);
    let json = comparison(&folder);
    let runs = json["runs"].as_array().expect("runs");
    let names: Vec<_> = runs
        .iter()
        .map(|run| run["name"].as_str().expect("a name"))
        .collect();
    assert_eq!(names, ["dropless", "symi", "lrmoe@0.5", "lrmoe@0"]);
    for (run, name) in runs.iter().zip(names) {
        assert_eq!(run["steps"], 12);
        assert!(
            run["moe_seconds"].as_f64() > Some(0.0)
                && run["modelled_moe_seconds"].as_f64() > Some(0.0)
        );
        assert!(run["peak_buffer_bytes"].as_u64() > Some(0));
        assert!(text(&output.stdout).contains(name));
        assert_eq!(folder.records(&format!("out/{name}")).len(), 12);
    }
    assert!(runs[0]["backward_bytes"].as_u64() > runs[2]["backward_bytes"].as_u64());
    assert!(runs[3]["backward_bytes"] == 0 && runs[3]["update_bytes"] == 0);
    // The same start: the first step's loss is computed before any policy has touched the weights. Drops change it for symi.
    let first = |name: &str| folder.records(&format!("out/{name}"))[0].loss.to_bits();
    assert_eq!(first("dropless"), first("lrmoe@0"));

    let output = folder.train(&[
        "--compare",
        "dropless,lrmoe",
        "--target-loss",
        "100",
        "--overwrite",
    ]);
    assert_success(&output);
    let json = comparison(&folder);
    assert_eq!(json["runs"][1]["steps"], 6, "ended at the first evaluation");
    assert_eq!(json["runs"][1]["reached"], true);

    // Resuming leaves what has reached the target as it is, counts until there, and runs what is new.
    let output = folder.train(&[
        "--compare",
        "lrmoe,symi,lrmoe@0.75",
        "--target-loss",
        "100",
        "--resume",
    ]);
    assert_success(&output);
    assert_eq!(folder.records("out/lrmoe").len(), 6);
    assert_eq!(
        folder.records("out/symi").len(),
        12,
        "of the first comparison"
    );
    assert_eq!(folder.records("out/lrmoe@0.75").len(), 6);
    for run in comparison(&folder)["runs"].as_array().expect("runs") {
        assert_eq!(run["steps"], 6);
    }
}

#[test]
fn a_configuration_file_has_the_same_keys() {
    let folder = Folder::new();
    let pairs = SMALL
        .chunks(2)
        .map(|pair| format!("{} = {}\n", pair[0].trim_start_matches("--"), pair[1]));
    let toml: String = pairs
        .chain([
            "text = [\"text.txt\"]\n".to_owned(),
            "policy = \"symi\"\n".to_owned(),
        ])
        .collect();
    std::fs::write(folder.path("run.toml"), toml).expect("a file");
    assert_success(&folder.run(&["--config", "run.toml", "--steps", "3"]));
    assert_eq!(folder.records("out").len(), 3, "the command line wins");
}

#[test]
fn a_budget_with_room_changes_nothing() {
    let folder = Folder::new();
    // Experts and buffers of this model need a few hundred KiB; what is left of 1 MiB holds every row.
    assert_success(&folder.train(&[
        "--budget-mib",
        "1",
        "--chunk-rows",
        "16",
        "--retention",
        "1",
        "--steps",
        "2",
    ]));
    assert!(
        folder
            .records("out")
            .iter()
            .all(|record| record.retention == 1.0)
    );
}

#[test]
fn help_teaches() {
    let output = Folder::new().run(&["--help"]);
    assert_success(&output);
    for word in [
        "--retention",
        "--text",
        "Examples:",
        "steps.jsonl",
        "[default: 0.5]",
    ] {
        assert!(text(&output.stdout).contains(word), "{word}");
    }
}
