//! What the program refuses: one clear line, exit code 2, nothing written.

use std::path::{Path, PathBuf};

use super::{Folder, SMALL, assert_success, text};

/// Runs that must end with exit code 2, one clear line and nothing written.
fn assert_refused(folder: &Folder, arguments: &[&str], message: &str) {
    assert_program_refused(folder, &[&["train"], arguments].concat(), message);
}

/// The same for any command.
pub(super) fn assert_program_refused(folder: &Folder, arguments: &[&str], message: &str) {
    let before = listing(folder.0.path());
    let output = folder
        .program(arguments)
        .output()
        .expect("the program starts");
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
    assert!(errors.contains(message), "{arguments:?} said: {errors}");
    assert!(
        errors.starts_with("lrmoe: ") && errors.trim_end().lines().count() == 1
            || errors.starts_with("error: "),
        "{arguments:?} said: {errors}"
    );
    assert_eq!(
        listing(folder.0.path()),
        before,
        "{arguments:?} wrote something"
    );
}

fn listing(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let walk = walkdir::WalkDir::new(folder)
        .sort_by_file_name()
        .into_iter()
        .map(|entry| entry.expect("readable").into_path());
    walk.map(|path| (path.clone(), std::fs::read(&path).unwrap_or_default()))
        .collect()
}

/// Without a card, or without what it takes, the program says so before it writes anything; where there is one, card 4000000000 is not.
#[test]
#[cfg(feature = "cuda")]
fn missing_cards_are_refused() {
    let folder = Folder::new();
    let train = ["train", "--text", "text.txt", "--device", "cuda:4000000000"];
    assert_program_refused(&folder, &train, "no device for cuda: ");
    let bench = ["bench", "--preset", "tiny", "--device", "cuda:4000000000"];
    assert_program_refused(&folder, &bench, "no device for cuda: ");
    let several = ["bench", "--preset", "tiny", "--device", "cuda:0-1"];
    assert_program_refused(&folder, &several, "on one card, not on cuda:0-1");
}

/// The card of a process that a launcher started.
#[test]
#[cfg(feature = "cuda")]
fn the_local_rank_is_the_number_of_a_card() {
    let folder = Folder::new();
    for (rank, message) in [
        ("one", "LOCAL_RANK is `one`"),
        ("4000000000", "no device for cuda: "),
    ] {
        let mut program = folder.program(&["train", "--text", "text.txt", "--device", "cuda"]);
        let output = program.env("LOCAL_RANK", rank).output();
        let output = output.expect("the program starts");
        assert_eq!(output.status.code(), Some(2));
        let said = text(&output.stderr);
        assert!(said.contains(message), "{said}");
    }
}

#[test]
fn bad_input_is_refused() {
    let folder = Folder::new();
    std::fs::write(folder.path("empty.txt"), "").expect("a file");
    std::fs::write(folder.path("short.txt"), "too short").expect("a file");
    std::fs::create_dir(folder.path("nothing")).expect("a folder");
    std::fs::write(folder.path("bad.toml"), "toop-k = 3\n").expect("a file");
    let cases: &[(&[&str], &str)] = &[
        (&[], "no text given"),
        (&["--text", "missing.txt"], "missing.txt does not exist"),
        (&["--text", "empty.txt"], "no text found"),
        (&["--text", "nothing"], "no text found"),
        (&["--text", "short.txt"], "too short"),
        (
            &["--text", "text.txt", "--top-k", "5", "--experts", "4"],
            "top-k 5",
        ),
        (&["--text", "text.txt", "--top-k", "0"], "top-k 0"),
        (
            &["--text", "text.txt", "--ranks", "3"],
            "not a multiple of 3 ranks",
        ),
        (&["--text", "text.txt", "--ranks", "0"], "ranks 0"),
        (&["--text", "text.txt", "--heads", "3"], "3 heads"),
        (
            &["--text", "text.txt", "--retention", "1.5"],
            "retention 1.5",
        ),
        (
            &["--text", "text.txt", "--retention", "nan"],
            "retention NaN",
        ),
        (&["--text", "text.txt", "--retention", "half"], "half"),
        (
            &["--text", "text.txt", "--retention-schedule", "linear:1"],
            "unknown schedule `linear:1`, must be constant, linear:FROM:TO",
        ),
        (
            &["--text", "text.txt", "--retention-schedule", "linear:1:2"],
            "unknown schedule",
        ),
        (
            &["--text", "text.txt", "--retention-schedule", "adaptive:0"],
            "unknown schedule",
        ),
        (
            &[
                "--text",
                "text.txt",
                "--retention-schedule",
                "adaptive:0.5:0",
            ],
            "unknown schedule",
        ),
        (&["--text", "text.txt", "--policy", "best"], "best"),
        (
            &["--text", "text.txt", "--slots", "1"],
            "cannot hold 16 experts",
        ),
        (
            &["--text", "text.txt", "--context", "32", "--budget-mib", "1"],
            "--budget-mib 1 is too small",
        ),
        (&["--text", "text.txt", "--cluster", "9xZ1"], "9xZ1"),
        (&["--text", "text.txt", "--config", "bad.toml"], "toop-k"),
        (
            &["--text", "text.txt", "--config", "none.toml"],
            "none.toml",
        ),
        (
            &["--text", "text.txt", "--context", "32", "--resume"],
            "no checkpoint",
        ),
        (
            &["--text", "text.txt", "--compare", "dropless,dropless"],
            "dropless",
        ),
        (
            &["--text", "text.txt", "--compare", "lrmoe@2"],
            "retention 2",
        ),
        (
            &[
                "--text",
                "text.txt",
                "--context",
                "32",
                "--width",
                "65536",
                "--heads",
                "1",
            ],
            "more than it gives",
        ),
        (
            &["--text", "text.txt", "--resume", "--overwrite"],
            "--overwrite",
        ),
        (&["--unheard-of"], "--unheard-of"),
    ];
    for (arguments, message) in cases {
        assert_refused(&folder, arguments, message);
    }
}

#[test]
fn a_bad_checkpoint_is_refused() {
    let folder = Folder::new();
    assert_success(&folder.train(&["--steps", "2"]));
    let path = folder.path("out/checkpoint.safetensors");
    let good = std::fs::read(&path).expect("a checkpoint");
    let resume = |arguments: &[&'static str]| {
        [&["--text", "text.txt"], SMALL, arguments, &["--resume"]].concat()
    };

    assert_refused(
        &folder,
        &resume(&["--experts", "8"]),
        "written with experts 4, this run has 8",
    );
    assert_refused(
        &folder,
        &resume(&["--ranks", "4"]),
        "written with ranks 2, this run has 4",
    );
    assert_refused(
        &folder,
        &resume(&["--policy", "symi"]),
        "written with policy lrmoe, this run has symi",
    );
    assert_refused(
        &folder,
        &[&["--text", "text.txt"], SMALL].concat(),
        "already holds a run",
    );
    assert_refused(
        &folder,
        &resume(&["--steps", "1"]),
        "2 steps done, more than --steps 1",
    );
    let damaged = [&good[..good.len() / 2], b"", b"not a checkpoint at all"];
    for bytes in damaged {
        std::fs::write(&path, bytes).expect("a file");
        assert_refused(&folder, &resume(&[]), "not a readable checkpoint");
    }
    // One bit anywhere: in the length, the header, the first and the last tensor.
    for position in [0, 20, good.len() / 2, good.len() - 1] {
        let mut flipped = good.clone();
        flipped[position] ^= 0x10;
        std::fs::write(&path, flipped).expect("a file");
        assert_refused(&folder, &resume(&[]), "not a readable checkpoint");
    }
    std::fs::write(&path, good).expect("a file");
    std::fs::write(folder.path("other.txt"), "another text ".repeat(208)).expect("a text");
    assert_refused(
        &folder,
        &resume(&["--text", "other.txt"]),
        "written with text 2700 bytes",
    );
}

#[test]
fn a_log_that_lacks_what_the_checkpoint_did_is_refused() {
    let folder = Folder::new();
    assert_success(&folder.train(&["--steps", "3"]));
    let path = folder.path("out/steps.jsonl");
    let log = std::fs::read_to_string(&path).expect("a log");
    let resume = [&["--text", "text.txt"], SMALL, &["--resume"]].concat();
    let lines: Vec<&str> = log.lines().collect();
    let damaged = [
        (lines[..2].join("\n"), "line 3 is not the record of step 3"),
        (
            lines.join("\n").replace("\"step\":2", "\"step\":X"),
            "line 2 is not",
        ),
        (lines[1..].join("\n"), "line 1 is not"),
    ];
    for (text, message) in damaged {
        std::fs::write(&path, text).expect("a file");
        assert_refused(&folder, &resume, message);
    }
    std::fs::remove_file(&path).expect("removed");
    assert_refused(&folder, &resume, "steps.jsonl");
    // What a kill cut short after the checkpoint is no loss.
    std::fs::write(&path, log + "{\"step\":4,\"lo").expect("a file");
    assert_success(&folder.train(&["--resume"]));
    assert_eq!(folder.records("out").len(), 12);
}

#[test]
fn a_folder_takes_one_run_at_a_time() {
    let folder = Folder::new();
    assert_success(&folder.train(&["--steps", "1"]));
    let lock = std::fs::File::open(folder.path("out/.lock")).expect("a lock");
    lock.lock().expect("locked");
    for option in ["--resume", "--overwrite"] {
        let arguments = [&["--text", "text.txt"], SMALL, &[option]].concat();
        assert_refused(&folder, &arguments, "out is in use");
    }
    drop(lock);
    assert_success(&folder.train(&["--resume"]));
    assert_refused(
        &folder,
        &[&["--text", "text.txt"], SMALL, &["--compare", "lrmoe,symi"]].concat(),
        "already holds a run",
    );
}

#[test]
fn divergence_is_named() {
    let folder = Folder::new();
    let output = folder.train(&["--learning-rate", "1e30", "--clip", "0"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("lrmoe: training diverged in step"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn the_smallest_budget_that_is_named_is_the_smallest() {
    let folder = Folder::new();
    let run = |mib: u64| {
        let budget = mib.to_string();
        let sizes = [
            "--context",
            "32",
            "--batch",
            "4",
            "--steps",
            "1",
            "--overwrite",
        ];
        folder.run(&[&["--text", "text.txt", "--budget-mib", &budget], &sizes[..]].concat())
    };
    let errors = text(&run(1).stderr);
    let number = errors
        .split("at least ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let smallest: u64 = number
        .and_then(|n| n.parse().ok())
        .expect("a number of MiB");
    assert_eq!(run(smallest - 1).status.code(), Some(2));
    assert_success(&run(smallest));
}
