//! `lrmoe bench`.

use std::process::Output;

use serde_json::Value;

use super::refusals::assert_program_refused;
use super::{Folder, assert_success, text};

/// A layer that takes milliseconds.
const TINY: &str = "bench --preset tiny --experts 4 --width 16 --hidden 8 --tokens 64 --steps 1";

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn run(folder: &Folder, options: &str) -> Output {
    let line = format!("{TINY} {options}");
    folder
        .program(&words(&line))
        .output()
        .expect("the program starts")
}

fn median(timing: &Value) -> f64 {
    timing["median"].as_f64().expect("a number")
}

#[test]
fn figures_are_whole_and_add_up() {
    let folder = Folder::new();
    let output = run(
        &folder,
        "--retention 0.5,0.25 --zipf 1 --threads 2 --json out.json",
    );
    assert_success(&output);
    let json = std::fs::read(folder.path("out.json")).expect("a file");
    let report: Value = serde_json::from_slice(&json).expect("JSON");
    for (name, value) in [
        ("model", "tiny, changed".into()),
        ("experts", 4.into()),
        ("top_k", 2.into()),
        ("width", 16.into()),
        ("hidden", 8.into()),
        ("activation", "swiglu".into()),
        ("dtype", "f32".into()),
        ("device", "cpu".into()),
        ("tokens", 64.into()),
        ("zipf", Value::from(1.0)),
        ("score", "down-grad".into()),
        ("threads", 2.into()),
        ("steps", 1.into()),
    ] {
        assert_eq!(report[name], value, "{name}");
    }
    assert_eq!(report["cores"].as_array().map(Vec::len), Some(1));
    let contenders = report["contenders"].as_array().expect("a list");
    let expected = [("lrmoe@0.25", 32), ("lrmoe@0.5", 64), ("dropless", 128)];
    assert_eq!(contenders.len(), expected.len());
    for (contender, (name, rows)) in contenders.iter().zip(expected) {
        assert_eq!(contender["name"], name);
        assert_eq!(contender["forward"]["rows"], 128);
        assert_eq!(contender["backward"]["rows"], rows);
        for pass in ["forward", "backward"] {
            let pass = &contender[pass];
            let stages = pass["stages"].as_object().expect("stages by name");
            let (sum, total) = (
                stages.values().map(median).sum::<f64>(),
                median(&pass["seconds"]),
            );
            assert!(
                (sum - total).abs() < 1e-9,
                "one step: {sum} s in stages, {total} s in all"
            );
            let other = median(&stages["other"]);
            assert!(other >= 0.0, "{other} s in no stage");
            assert!(pass["gflops"].as_f64() > Some(0.0));
            assert!(pass["load_max_over_mean"].as_f64() >= Some(1.0));
        }
        let stages = contender["backward"]["stages"].as_object().expect("stages");
        for stage in ["score", "select"] {
            assert_eq!(
                stages.contains_key(stage),
                name != "dropless",
                "{stage} of {name}"
            );
        }
        assert!(contender["selection_over_dropless"].as_f64() > Some(0.0));
        assert!(contender["buffer_bytes"].as_u64() > Some(0));
    }
    assert_eq!(contenders[2]["backward_over_dropless"]["median"], 1.0);
    let table = text(&output.stdout);
    for word in ["lrmoe@0.25", "compact", "busiest expert", "cores or more"] {
        assert!(table.contains(word), "{word} in {table}");
    }
}

/// Of the median step: a single one may be interrupted anywhere.
#[test]
fn stages_cover_most_of_a_pass() {
    let line = TINY.replace("--steps 1", "--steps 9 --retention 0.5,0.25 --json -");
    let output = Folder::new().program(&words(&line)).output();
    let output = output.expect("the program starts");
    assert_success(&output);
    let report: Value = serde_json::from_slice(&output.stdout).expect("nothing but JSON");
    for contender in report["contenders"].as_array().expect("a list") {
        for pass in ["forward", "backward"] {
            let pass = &contender[pass];
            let (other, total) = (median(&pass["stages"]["other"]), median(&pass["seconds"]));
            assert!(other < 0.5 * total, "{other} of {total} s in no stage");
        }
    }
}

#[test]
fn figures_alone_are_printed_on_request() {
    let output = run(&Folder::new(), "--json - --score forward --retention 1");
    assert_success(&output);
    let report: Value = serde_json::from_slice(&output.stdout).expect("nothing but JSON");
    assert_eq!(report["score"], "forward");
    assert_eq!(report["contenders"][0]["backward"]["rows"], 128);
}

#[test]
fn bf16_is_timed_like_f32() {
    let output = run(&Folder::new(), "--json - --dtype bf16");
    assert_success(&output);
    let report: Value = serde_json::from_slice(&output.stdout).expect("nothing but JSON");
    assert_eq!(report["dtype"], "bf16");
    assert_eq!(report["contenders"][0]["backward"]["rows"], 64);
    assert_eq!(report["contenders"][1]["backward"]["rows"], 128);
}

#[test]
fn what_cannot_be_timed_is_refused() {
    let folder = Folder::new();
    std::fs::write(folder.path("taken.json"), "{}").expect("a file");
    for (options, message) in [
        ("--tokens 0", "tokens 0 is out of range"),
        ("--steps 0", "steps 0 is out of range"),
        ("--top-k 5", "top-k 5 is out of range, must be 1 to 4"),
        ("--width 0", "width 0 is out of range"),
        ("--threads 0", "threads 0 is out of range"),
        ("--chunk-rows 0", "chunk-rows 0 is out of range"),
        ("--zipf nan", "zipf NaN is out of range"),
        ("--zipf -1", "zipf -1 is out of range"),
        ("--retention 1.5", "retention 1.5 is out of range"),
        ("--retention 0.5,0.5", "retention 0.5 is given twice"),
        ("--retention half", "half"),
        ("--preset best", "best"),
        ("--score best", "best"),
        ("--dtype f16", "f16"),
        (
            "--dtype bf16 --device wgpu",
            "the layer does not run in bf16 on wgpu, only on cpu and cuda",
        ),
        ("--json taken.json", "taken.json"),
        ("--json no/out.json", "no: "),
        (
            "--width 1000000 --hidden 1000000 --experts 64",
            "GiB are available: lower --experts",
        ),
    ] {
        let line = format!("{TINY} {options}");
        assert_program_refused(&folder, &words(&line), message);
    }
}

#[test]
fn help_teaches() {
    let output = Folder::new()
        .program(&["bench", "--help"])
        .output()
        .expect("the program starts");
    assert_success(&output);
    for word in [
        "--retention",
        "Examples:",
        "How to read it",
        "[default: qwen3-30b-a3b]",
    ] {
        assert!(text(&output.stdout).contains(word), "{word}");
    }
}
