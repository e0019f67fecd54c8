//! `lrmoe replay` and `lrmoe plan` as a user runs them.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

struct Folder(TempDir);

impl Folder {
    /// With a small trace.
    fn new() -> Self {
        let folder = Self(TempDir::new().expect("a folder"));
        let words = "trace synth zipf:1.2 --out zipf.safetensors --steps 4 --layers 2 --ranks 2 --experts 8 --top-k 2 --tokens-per-rank 32";
        let output = folder.run(&words.split_whitespace().collect::<Vec<_>>());
        assert!(output.status.success(), "{}", text(&output.stderr));
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lrmoe"));
        command
            .current_dir(self.0.path())
            .args(arguments)
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments)
            .output()
            .expect("the program starts")
    }

    fn json(&self, name: &str) -> Value {
        let text = std::fs::read_to_string(self.path(name)).expect("a file");
        serde_json::from_str(&text).expect("JSON")
    }

    fn refuses(&self, arguments: &[&str], message: &str) {
        let before = std::fs::read_dir(self.0.path()).expect("a folder").count();
        let output = self.run(arguments);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
        assert!(errors.contains(message), "{arguments:?} said: {errors}");
        assert!(
            errors.starts_with("lrmoe: ") && errors.trim_end().lines().count() == 1
                || errors.starts_with("error: "),
            "{arguments:?} said: {errors}"
        );
        let after = std::fs::read_dir(self.0.path()).expect("a folder").count();
        assert_eq!(before, after, "{arguments:?} wrote something");
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn figures_have_their_names() {
    let folder = Folder::new();
    let words = "replay zipf.safetensors --preset tiny --policies fixed,symi,lrmoe@0.5,lrmoe@0.5+chunked --json out.json --html out.html";
    let output = folder.run(&words.split_whitespace().collect::<Vec<_>>());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for words in [
        "the trace has 8 experts, tiny has 16",
        "| lrmoe@0.5+chunked |",
        "planning us/layer, measured",
    ] {
        assert!(table.contains(words), "{table}");
    }

    let report = folder.json("out.json");
    assert_eq!(report["header"]["steps"], 4);
    let policies = report["policies"].as_array().expect("policies");
    let names: Vec<_> = policies
        .iter()
        .map(|policy| policy["name"].as_str())
        .collect();
    assert_eq!(
        names,
        [
            Some("fixed"),
            Some("symi"),
            Some("lrmoe@0.5"),
            Some("lrmoe@0.5+chunked")
        ]
    );
    for policy in policies {
        for bytes in ["peak_bytes", "mean_bytes"] {
            for part in ["placement", "replicas", "token_buffers", "stash", "total"] {
                assert!(policy["memory"][bytes][part].is_u64(), "{bytes} {part}");
            }
        }
        for figure in ["load_max_over_mean", "modelled_step_seconds"] {
            assert!(
                policy[figure].as_f64().is_some_and(|figure| figure > 0.0),
                "{figure}"
            );
        }
        assert!(
            policy["backward_bytes"]
                .as_u64()
                .is_some_and(|bytes| bytes > 0)
        );
        assert!(policy["contribution_kept"].is_null());
    }
}

#[test]
fn the_page_needs_nothing_else() {
    let folder = Folder::new();
    std::fs::rename(
        folder.path("zipf.safetensors"),
        folder.path("a<b>.safetensors"),
    )
    .expect("renamed");
    let words = "replay a<b>.safetensors --preset tiny --html out.html";
    let output = folder.run(&words.split_whitespace().collect::<Vec<_>>());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = std::fs::read_to_string(folder.path("out.html")).expect("a page");
    for foreign in [
        "http", "src=", "href=", "<script", "<link", "@import", "url(",
    ] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    assert_eq!(page.matches("<svg").count(), 5);
    assert_eq!(page.matches("</svg>").count(), 5);
    assert!(page.contains("a&lt;b&gt;.safetensors") && !page.contains("a<b>"));
    assert!(!page.contains("{{") && !page.contains("NaN") && !page.contains("inf"));
}

#[test]
fn bad_replays_are_refused() {
    let folder = Folder::new();
    std::fs::write(folder.path("bad.safetensors"), "nothing").expect("a file");
    std::fs::write(folder.path("bad.toml"), "name = 1").expect("a file");
    let cases = [
        ("replay", "<TRACE>"),
        ("replay zipf.safetensors", "--preset"),
        ("replay none.safetensors --preset tiny", "none.safetensors"),
        ("replay bad.safetensors --preset tiny", "bad.safetensors"),
        (
            "replay zipf.safetensors --preset huge",
            "unknown model `huge`",
        ),
        (
            "replay zipf.safetensors --preset tiny --cluster 9xZ1",
            "9xZ1",
        ),
        (
            "replay zipf.safetensors --preset tiny --cluster bad.toml",
            "bad.toml",
        ),
        (
            "replay zipf.safetensors --preset tiny --policies best",
            "unknown policy `best`",
        ),
        (
            "replay zipf.safetensors --preset tiny --policies symi@0.5",
            "only lrmoe has a retention",
        ),
        (
            "replay zipf.safetensors --preset tiny --policies symi+most",
            "unknown buffering `most`",
        ),
        (
            "replay zipf.safetensors --preset tiny --policies symi,symi",
            "symi is compared with itself",
        ),
        (
            "replay zipf.safetensors --preset tiny --retention 2",
            "retention 2",
        ),
        (
            "replay zipf.safetensors --preset tiny --capacity-factor 0",
            "capacity-factor 0",
        ),
        (
            "replay zipf.safetensors --preset tiny --chunk-rows 0",
            "chunk-rows 0",
        ),
        (
            "replay zipf.safetensors --preset tiny --ranks 3",
            "3 ranks are not a multiple of the trace's 2",
        ),
        (
            "replay zipf.safetensors --preset tiny --tokens-per-rank 48",
            "48 tokens per rank are not a multiple of the trace's 32",
        ),
        (
            "replay zipf.safetensors --preset tiny --steps 7..9",
            "steps 7..9 hold none of the trace's, which are 0 to 3",
        ),
        (
            "replay zipf.safetensors --preset tiny --steps 3..1",
            "A below B",
        ),
        (
            "replay zipf.safetensors --preset tiny --warmup 4",
            "all 4 steps would be warm-up",
        ),
        (
            "replay zipf.safetensors --preset tiny --budget-gib 0",
            "budget-gib 0",
        ),
        (
            "replay zipf.safetensors --preset tiny --budget-gib 0.001",
            "the smallest that works there is",
        ),
        (
            "replay zipf.safetensors --preset tiny --slots 1",
            "cannot hold 8 experts",
        ),
    ];
    for (words, message) in cases {
        let words = words.to_owned() + " --json out.json --html out.html";
        folder.refuses(&words.split_whitespace().collect::<Vec<_>>(), message);
    }
}

#[test]
fn outputs_are_checked_before_anything_is_done() {
    let folder = Folder::new();
    std::fs::write(folder.path("mine.json"), "mine").expect("a file");
    std::fs::write(folder.path("loads.csv"), "1,2\n3,4\n").expect("a file");
    std::fs::create_dir(folder.path("folder")).expect("a folder");
    let before = std::fs::read(folder.path("zipf.safetensors")).expect("the trace");
    let replay = "replay zipf.safetensors --preset tiny";
    let plan = "plan loads.csv --preset tiny";
    let cases = [
        (replay, "--json mine.json", "already exists"),
        (replay, "--html folder --overwrite", "not a regular file"),
        (replay, "--json none/out.json", "none: No such file"),
        (replay, "--json a --html a", "read or written here already"),
        (replay, "--ranks 8192", "ranks 8192 is out of range"),
        (plan, "--json mine.json", "already exists"),
        (
            plan,
            "--json loads.csv --overwrite",
            "read or written here already",
        ),
        (
            "trace inspect zipf.safetensors",
            "--json mine.json",
            "already exists",
        ),
        (
            "trace inspect zipf.safetensors",
            "--heatmap zipf.safetensors --overwrite",
            "read or written here already",
        ),
        (
            replay,
            "--json ./zipf.safetensors --overwrite",
            "read or written here already",
        ),
    ];
    for (command, options, message) in cases {
        let words = command.split_whitespace().chain(options.split_whitespace());
        folder.refuses(&words.collect::<Vec<_>>(), message);
    }
    let after = std::fs::read(folder.path("zipf.safetensors")).expect("the trace");
    assert!(before == after, "the trace has changed");
    assert_eq!(
        std::fs::read_to_string(folder.path("mine.json")).expect("a file"),
        "mine"
    );
    let words = format!("{replay} --json mine.json --overwrite");
    let output = folder.run(&words.split_whitespace().collect::<Vec<_>>());
    assert!(output.status.success(), "{}", text(&output.stderr));
    folder.json("mine.json");
}

#[test]
fn a_plan_explains_itself() {
    let folder = Folder::new();
    std::fs::write(folder.path("loads.csv"), "60, 10, 10\n50, 20, 10\n").expect("a file");
    let words = "plan loads.csv --width 16 --hidden 32 --top-k 2 --slots 2 --json plan.json";
    let output = folder.run(&words.split_whitespace().collect::<Vec<_>>());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("80 of 160 pairs run backward"),
        "{}",
        text(&output.stdout)
    );
    let plan = folder.json("plan.json");
    assert_eq!(plan["quotas"], serde_json::json!([55, 15, 10]));
    assert_eq!(plan["placement"].as_array().map(Vec::len), Some(2));

    // The same from standard input, going on from the plan before.
    let words =
        "plan - --width 16 --hidden 32 --top-k 2 --slots 2 --previous plan.json --json again.json";
    let mut child = folder
        .command(&words.split_whitespace().collect::<Vec<_>>())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the program starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin
        .write_all(b"# ranks by experts\n60,10,10\n50,20,10\n")
        .expect("taken");
    drop(stdin);
    assert!(child.wait().expect("ends").success());
    assert_eq!(folder.json("again.json")["placement"], plan["placement"]);
}

/// A 2 by 3 matrix of i64 as numpy writes it.
fn npy() -> Vec<u8> {
    let header = "{'descr': '<i8', 'fortran_order': False, 'shape': (2, 3), }";
    let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    bytes.extend(format!("{header:<117}\n").bytes());
    for count in [60_i64, 10, 10, 50, 20, 10] {
        bytes.extend(count.to_le_bytes());
    }
    bytes
}

#[test]
fn loads_come_from_numpy_too() {
    let folder = Folder::new();
    std::fs::write(folder.path("loads.npy"), npy()).expect("a file");
    let words = "plan loads.npy --width 16 --hidden 32 --top-k 2 --slots 2 --json plan.json";
    let output = folder.run(&words.split_whitespace().collect::<Vec<_>>());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(
        folder.json("plan.json")["quotas"],
        serde_json::json!([55, 15, 10])
    );
}

#[test]
fn bad_plans_are_refused() {
    let folder = Folder::new();
    for (name, contents) in [
        ("good.csv", "6,1\n5,2\n"),
        ("ragged.csv", "6,1\n5\n"),
        ("words.csv", "expert,count\n1,2\n"),
        ("negative.csv", "6,1\n5,-2\n"),
        ("huge.csv", "4294967295,1\n5,2\n"),
        ("empty.csv", ""),
        ("bad.npy", "nothing"),
        ("bad.json", "{\"placement\": 3}"),
        ("other.json", "{\"placement\": [[0, 1], [7]]}"),
    ] {
        std::fs::write(folder.path(name), contents).expect("a file");
    }
    let cases = [
        ("plan none.csv", "none.csv"),
        ("plan ragged.csv", "ragged.csv"),
        ("plan words.csv", "words.csv: line 1, column 1: `expert`"),
        ("plan negative.csv", "negative.csv: line 2, column 2: `-2`"),
        ("plan huge.csv", "huge.csv: 4294967303 pairs"),
        ("plan empty.csv", "empty.csv: there are no ranks"),
        ("plan bad.npy", "bad.npy"),
        ("plan good.csv --previous bad.json", "bad.json"),
        (
            "plan good.csv --previous other.json",
            "other.json: expert 7",
        ),
        (
            "plan good.csv --budget-gib 0.0000001",
            "the smallest that works",
        ),
        ("plan good.csv --retention 2", "retention 2"),
        ("plan good.csv --policy best", "unknown policy `best`"),
        ("plan good.csv --slots 0", "0 slots cannot hold 2 experts"),
    ];
    for (words, message) in cases {
        let words = words.to_owned() + " --preset tiny --json out.json";
        folder.refuses(&words.split_whitespace().collect::<Vec<_>>(), message);
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_replay_writes_nothing() {
    let folder = Folder::new();
    let words = "trace synth zipf:1.2 --out long.safetensors --steps 2000 --layers 4 --ranks 8 --experts 64 --top-k 4 --tokens-per-rank 64";
    assert!(
        folder
            .run(&words.split_whitespace().collect::<Vec<_>>())
            .status
            .success()
    );
    let words = "replay long.safetensors --preset tiny --json out.json --html out.html";
    let mut child = folder
        .command(&words.split_whitespace().collect::<Vec<_>>())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    std::thread::sleep(std::time::Duration::from_millis(500));
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &id])
            .status()
            .expect("kill runs")
            .success()
    );
    let mut errors = child.stderr.take().expect("a pipe");
    let code = child.wait().expect("ends").code();
    let mut message = String::new();
    std::io::Read::read_to_string(&mut errors, &mut message).expect("text");
    assert_eq!(code, Some(130), "{message}");
    assert!(message.contains("nothing was written"), "{message}");
    assert!(!folder.path("out.json").exists() && !folder.path("out.html").exists());
}
