//! The file of finished runs, with which a sweep goes on without their folders.

use std::fs;

use lrmoe::sweep::{Grid, Report, Sweep};

use super::{Folder, run};

const TABLES: &str = r#"
[[grid]]
policy = "dropless"
control = "ceiling"

[[grid]]
retention = 0.0
control = "floor"
name = "frozen"
oracle-every = 3
"#;

fn open(folder: &Folder, grid: Grid) -> Sweep {
    Sweep::open(grid, &folder.out(), false).expect("a sweep")
}

/// A folder with every run finished and nothing left but the file; the report of the runs.
fn kept() -> (Folder, String) {
    let folder = Folder::new();
    let mut sweep = open(
        &folder,
        folder.grid("seeds = [1, 2]", TABLES).expect("a grid"),
    );
    run(&mut sweep).expect("all runs");
    let report = Report::of(&sweep).to_string();
    fs::remove_dir_all(folder.out().join("runs")).expect("runs");
    (folder, report)
}

#[test]
fn finished_runs_need_no_folder() {
    let (folder, report) = kept();
    let mut sweep = open(
        &folder,
        folder.grid("seeds = [1, 2]", TABLES).expect("a grid"),
    );
    assert_eq!(sweep.left().finished, 4);
    assert_eq!(Report::of(&sweep).to_string(), report);
    run(&mut sweep).expect("nothing to run");
    assert!(!folder.out().join("runs").exists());

    // What is new is run, what the grid has no more stays in the file.
    let grid = folder.grid("seeds = [2, 3]", TABLES).expect("a grid");
    run(&mut open(&folder, grid)).expect("new runs");
    let lines = fs::read_to_string(folder.out().join("finished.jsonl")).expect("a file");
    assert_eq!(lines.lines().count(), 6);
    assert!(!folder.out().join("runs/dropless/seed-2").exists());
    assert!(folder.out().join("runs/dropless/seed-3").exists());
}

#[test]
fn figures_are_kept_to_the_last_digit() {
    let (folder, _) = kept();
    let path = folder.out().join("finished.jsonl");
    let lines = fs::read_to_string(&path).expect("a file");
    // Read the fast way, the loss would be 1.701546366168602.
    let (before, loss) = lines.split_once(r#""loss":"#).expect("a loss");
    let (_, after) = loss.split_once(',').expect("more than a loss");
    let lines = format!(r#"{before}"loss":1.7015463661686019,{after}"#);
    fs::write(&path, &lines).expect("a file");
    let grid = folder.grid("seeds = [3]", TABLES).expect("a grid");
    run(&mut open(&folder, grid)).expect("new runs");
    let written = fs::read_to_string(&path).expect("a file");
    assert_eq!(written.lines().count(), 6);
    for line in lines.lines() {
        assert!(written.lines().any(|kept| kept == line), "{line}");
    }
}

#[test]
fn the_text_may_lie_elsewhere_but_must_be_the_same() {
    let (folder, report) = kept();
    let file = folder.file("seeds = [1, 2]", TABLES);
    let text = fs::read(folder.path("text.txt")).expect("a text");
    fs::create_dir(folder.path("elsewhere")).expect("a folder");
    let moved = folder.path("elsewhere/text.txt");
    fs::write(&moved, &text).expect("a text");
    let grid = || Grid::read(&file, std::slice::from_ref(&moved)).expect("a grid");
    assert_eq!(Report::of(&open(&folder, grid())).to_string(), report);

    fs::write(&moved, [&text[..], b"more"].concat()).expect("a text");
    let error = Sweep::open(grid(), &folder.out(), false).expect_err("another text");
    let error = error.to_string();
    assert!(
        error.contains("dropless/seed-1 was started with another text (other bytes)"),
        "{error}"
    );
}

#[test]
fn a_changed_run_replaces_its_line() {
    let (folder, _) = kept();
    let changed = TABLES.replace("oracle-every = 3", "oracle-every = 2");
    let grid = || folder.grid("seeds = [1, 2]", &changed).expect("a grid");
    let error = Sweep::open(grid(), &folder.out(), false).expect_err("changed");
    let error = error.to_string();
    assert!(
        error.contains("frozen/seed-1 was started with another oracle-every"),
        "{error}"
    );
    let mut sweep = Sweep::open(grid(), &folder.out(), true).expect("a sweep");
    assert_eq!(sweep.left().finished, 2);
    run(&mut sweep).expect("all runs");
    fs::remove_dir_all(folder.out().join("runs")).expect("runs");
    assert_eq!(open(&folder, grid()).left().finished, 4);
}

#[test]
fn a_line_that_is_no_run_is_refused() {
    let (folder, _) = kept();
    let path = folder.out().join("finished.jsonl");
    let lines = fs::read_to_string(&path).expect("a file");
    fs::write(&path, lines.clone() + "{}\n").expect("a file");
    let grid = folder.grid("seeds = [1]", TABLES).expect("a grid");
    let error = Sweep::open(grid, &folder.out(), false).expect_err("no run");
    let error = error.to_string();
    assert!(
        error.contains("finished.jsonl, line 5 is no finished run: missing field `run`"),
        "{error}"
    );
}
