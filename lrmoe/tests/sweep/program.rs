//! `lrmoe sweep` as a user runs it.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::{Folder, log};

impl Folder {
    fn program(&self, out: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lrmoe"));
        command
            .current_dir(self.0.path())
            .args(["sweep", "grid.toml", "--out", out])
            .args(arguments)
            .stdin(Stdio::null());
        command
    }

    fn sweep(&self, arguments: &[&str]) -> Output {
        self.program("out", arguments)
            .output()
            .expect("the program starts")
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const TABLES: &str = r#"
[[grid]]
policy = "dropless"
control = "ceiling"

[[grid]]
retention = [0.0]
control = "floor"

[[grid]]
retention = 0.5
"#;

#[test]
fn runs_are_listed_run_and_reported() {
    let folder = Folder::new();
    folder.file("seeds = [1, 2]", TABLES);
    let listed = folder.sweep(&["--dry-run"]);
    let words = text(&listed.stdout);
    assert!(listed.status.success() && !folder.out().exists(), "{words}");
    assert!(
        words.contains("dropless/seed-1  6 steps, to run\n"),
        "{words}"
    );
    assert!(
        words.ends_with("0 of 6 runs are finished, 36 steps left\n"),
        "{words}"
    );

    let swept = folder.sweep(&["--threads", "1"]);
    let (report, errors) = (text(&swept.stdout), text(&swept.stderr));
    assert!(swept.status.success(), "{errors}");
    assert!(errors.contains("6 of 6 runs are finished"), "{errors}");
    assert!(report.contains("| lrmoe@0.5 "), "{report}");
    assert_eq!(
        std::fs::read_to_string(folder.out().join("report.md")).expect("a report") + "\n",
        report
    );
    let json = std::fs::read(folder.out().join("report.json")).expect("a report");
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(json["groups"][2]["name"], "lrmoe@0.5");
    assert_eq!(json["groups"][0]["control"], "ceiling");
    assert!(folder.out().join("report.html").exists());

    let listed = folder.sweep(&["--dry-run"]);
    assert!(text(&listed.stdout).ends_with("6 of 6 runs are finished\n"));
    assert_eq!(text(&folder.sweep(&["--report-only"]).stdout), report);
}

#[test]
fn nonsense_is_refused() {
    let folder = Folder::new();
    let refused = |arguments: &[&str], message: &str| {
        let output = folder.sweep(arguments);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(message), "{errors}");
        assert!(!folder.out().exists());
    };
    refused(&[], "cannot read grid.toml");
    folder.file("seeds = [1]", "[[grid]]\nretention = 3");
    refused(
        &[],
        "lrmoe: lrmoe@3: retention 3 is out of range, must be 0 to 1\n",
    );
    folder.file("seeds = [1]", TABLES);
    refused(&["--jobs", "0"], "0 is not in 1..=1024");
    refused(&["--dry-run", "--report-only"], "cannot be used with");
    refused(&["--jobs", "2"], "set `timed = false` in the grid");
    std::fs::remove_file(folder.path("text.txt")).expect("a text");
    refused(&[], "dropless: text ");
    refused(
        &["--text", "none.txt"],
        "dropless: text none.txt does not exist",
    );
}

#[test]
fn a_killed_sweep_goes_on() {
    let folder = Folder::new();
    folder.file(
        "seeds = [1]",
        "[[grid]]\nretention = [0.5, 0.25]\nsteps = 40",
    );
    let reference = folder
        .program("whole", &[])
        .output()
        .expect("the program starts");
    assert!(reference.status.success(), "{}", text(&reference.stderr));

    let mut killed = folder
        .program("out", &[])
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    let first = log(&folder.out(), "lrmoe@0.5/seed-1");
    let start = Instant::now();
    let lines = || std::fs::read_to_string(&first).map_or(0, |log| log.lines().count());
    while lines() < 5 && killed.try_wait().expect("a status").is_none() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "no step was done"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    killed.kill().expect("killed");
    killed.wait().expect("a status");

    let resumed = folder.sweep(&[]);
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    for run in ["lrmoe@0.5/seed-1", "lrmoe@0.25/seed-1"] {
        let losses = |out: &str| -> Vec<serde_json::Value> {
            let text = std::fs::read_to_string(log(&folder.path(out), run)).expect("a log");
            let lines = text
                .lines()
                .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a record"));
            lines.map(|record| record["loss"].clone()).collect()
        };
        assert_eq!(losses("out"), losses("whole"));
    }
}
