//! Traces as a user makes, converts and looks at them.

use super::refusals::assert_program_refused;
use super::{Folder, SMALL, assert_success, text};

impl Folder {
    pub(super) fn trace(&self, arguments: &[&str]) -> String {
        let output = self.program(&[&["trace"], arguments].concat()).output();
        let output = output.expect("the program starts");
        assert_success(&output);
        text(&output.stdout)
    }
}

#[test]
fn traces_are_made_converted_and_looked_at() {
    let folder = Folder::new();
    let sizes = [
        "--layers",
        "3",
        "--ranks",
        "4",
        "--experts",
        "16",
        "--top-k",
        "2",
        "--tokens-per-rank",
        "64",
        "--steps",
        "20",
    ];
    let make = |out: &str, seed: &str| {
        folder.trace(
            &[
                &["synth", "zipf:1.2", "--out", out, "--seed", seed],
                &sizes[..],
            ]
            .concat(),
        )
    };
    let said = make("a.safetensors", "1");
    assert_eq!(
        said,
        "a.safetensors: 20 steps, 3 layers, 4 ranks, 16 experts\n"
    );
    make("b.safetensors", "1");
    make("c.safetensors", "2");
    let bytes = |name: &str| std::fs::read(folder.path(name)).expect("a file");
    assert_eq!(bytes("a.safetensors"), bytes("b.safetensors"));
    assert_ne!(bytes("a.safetensors"), bytes("c.safetensors"));

    let look = [
        "inspect",
        "a.safetensors",
        "--heatmap",
        "heat.svg",
        "--layer",
        "2",
        "--json",
        "figures.json",
    ];
    let said = folder.trace(&look);
    for words in [
        "20 steps from 0, 3 layers, 4 ranks, 16 experts, top-k 2",
        "workload: zipf:1.2",
        "| layer |",
        "top 10 %",
    ] {
        assert!(said.contains(words), "{words} is not in {said}");
    }
    assert!(text(&bytes("heat.svg")).starts_with("<svg"));
    let figures: serde_json::Value = serde_json::from_slice(&bytes("figures.json")).expect("json");
    assert_eq!(figures["pairs"], 3 * 4 * 128 * 20);
    assert!(figures["per_layer"][2]["gini"].as_f64() > Some(0.3));

    let csv: String = (0..3)
        .map(|step| format!("{step},0,0,{step},7\n"))
        .collect();
    std::fs::write(
        folder.path("counts.csv"),
        format!("step,layer,rank,expert,count\n{csv}"),
    )
    .expect("a file");
    let said = folder.trace(&["convert", "counts.csv", "--out", "d.safetensors"]);
    assert_eq!(
        said,
        "d.safetensors: 3 steps, 1 layers, 1 ranks, 3 experts\n"
    );
    assert_success(
        &folder
            .program(&[
                "trace",
                "convert",
                "counts.csv",
                "--out",
                "d.safetensors",
                "--overwrite",
            ])
            .output()
            .expect("starts"),
    );
}

#[test]
fn bad_traces_and_options_are_refused() {
    let folder = Folder::new();
    folder.trace(&[
        "synth",
        "balanced",
        "--out",
        "good.safetensors",
        "--steps",
        "2",
        "--layers",
        "1",
    ]);
    let good = std::fs::read(folder.path("good.safetensors")).expect("a file");
    std::fs::write(folder.path("cut.safetensors"), &good[..good.len() - 1]).expect("a file");
    std::fs::write(
        folder.path("bad.csv"),
        "step,layer,rank,expert,count\n0,0,0,0,-1\n",
    )
    .expect("a file");
    std::fs::write(
        folder.path("bad.jsonl"),
        "{\"token\":0,\"topk_ids\":[1,1]}\n",
    )
    .expect("a file");
    std::fs::write(folder.path("text"), "text").expect("a file");
    let train = [&["train", "--text", "text.txt"], SMALL].concat();
    let record = [&train[..], &["--record-trace", "good.safetensors"]].concat();
    let cases: &[(&[&str], &str)] = &[
        (
            &["trace", "inspect", "cut.safetensors"],
            "cut.safetensors: its header describes",
        ),
        (
            &["trace", "inspect", "none.safetensors"],
            "none.safetensors: ",
        ),
        (
            &[
                "trace",
                "inspect",
                "good.safetensors",
                "--heatmap",
                "h.svg",
                "--layer",
                "9",
            ],
            "layer 9 is beyond the 1",
        ),
        (
            &[
                "trace",
                "inspect",
                "good.safetensors",
                "--json",
                "none/j.json",
            ],
            "none",
        ),
        (
            &["trace", "convert", "bad.csv", "--out", "o.safetensors"],
            "bad.csv: line 2: count is `-1`",
        ),
        (
            &["trace", "convert", "bad.jsonl", "--out", "o.safetensors"],
            "bad.jsonl: line 1, layer 0, token 0, slot 1: expert 1 appears twice",
        ),
        (
            &[
                "trace",
                "convert",
                "cut.safetensors",
                "--out",
                "o.safetensors",
            ],
            "cut.safetensors: its header",
        ),
        (
            &["trace", "convert", "text", "--out", "o.safetensors"],
            "text: its format is unknown",
        ),
        (
            &[
                "trace",
                "convert",
                "good.safetensors",
                "--out",
                "cut.safetensors",
            ],
            "cut.safetensors already exists; replace it with --overwrite",
        ),
        (
            &[
                "trace",
                "convert",
                "good.safetensors",
                "--out",
                "none/o.safetensors",
            ],
            "none",
        ),
        (&["trace", "convert", "--out", "o.safetensors"], "required"),
        (
            &["trace", "synth", "lukewarm", "--out", "o.safetensors"],
            "unknown workload `lukewarm`, must be balanced, ",
        ),
        (
            &[
                "trace",
                "synth",
                "balanced",
                "--out",
                "o.safetensors",
                "--steps",
                "0",
            ],
            "it has no steps",
        ),
        (
            &[
                "trace",
                "synth",
                "balanced",
                "--out",
                "o.safetensors",
                "--top-k",
                "65",
            ],
            "65 experts per token must be at least 1 and at most 64",
        ),
        (
            &[
                "trace",
                "synth",
                "balanced",
                "--out",
                "o.safetensors",
                "--ranks",
                "0",
            ],
            "0 ranks must be at least 1",
        ),
        (&record, "good.safetensors already exists"),
        (
            &[&record[..], &["--compare", "lrmoe,symi"]].concat(),
            "record-trace takes one run, not a comparison",
        ),
        (
            &[&train[..], &["--record-pairs-every", "2"]].concat(),
            "record-pairs-every needs record-trace",
        ),
    ];
    for (arguments, message) in cases {
        assert_program_refused(&folder, arguments, message);
    }
}

#[test]
fn trace_help_teaches() {
    let folder = Folder::new();
    for (command, words) in [
        (
            "convert",
            &[
                "megatron",
                "--tokens-per-step",
                "Examples:",
                "sorted by step",
            ][..],
        ),
        ("inspect", &["gini", "--heatmap", "drift"]),
        (
            "synth",
            &["hot-rank", "zipf:A", "--tokens-per-rank", "[default: 4096]"],
        ),
    ] {
        let help = folder.trace(&[command, "--help"]);
        for word in words {
            assert!(
                help.contains(word),
                "{word} is not in the help of {command}"
            );
        }
    }
}
