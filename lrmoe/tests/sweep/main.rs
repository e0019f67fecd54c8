//! Grids, sweeps and their reports.

mod finished;
mod grid;
mod program;
mod report;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use lrmoe::config::TrainConfig;
use lrmoe::sweep::{Grid, Sweep, SweepError};
use lrmoe::train::{Observer, StepRecord};
use tempfile::TempDir;

/// Options of runs small enough for tests; `TEXT` stands for the path of the text.
const SMALL: &str = r#"
[common]
text = "TEXT"
ranks = 2
layers = 1
width = 8
heads = 2
context = 8
experts = 4
top-k = 2
hidden = 8
batch = 4
steps = 6
eval-every = 2
eval-sequences = 2
checkpoint-every = 2
"#;

/// A folder with a text.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(TempDir::new().expect("a folder"));
        let text = "the quick brown fox jumps over the lazy dog. ".repeat(20);
        std::fs::write(folder.path("text.txt"), text).expect("a text");
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A grid file: `head`, the small model, `tables`.
    fn file(&self, head: &str, tables: &str) -> PathBuf {
        let text = self.path("text.txt");
        let common = SMALL.replace("TEXT", text.to_str().expect("a path"));
        let path = self.path("grid.toml");
        std::fs::write(&path, format!("{head}\n{common}\n{tables}")).expect("a grid");
        path
    }

    fn grid(&self, head: &str, tables: &str) -> Result<Grid, SweepError> {
        Grid::read(&self.file(head, tables), &[])
    }

    fn out(&self) -> PathBuf {
        self.path("out")
    }
}

/// Nobody who follows a run.
struct Nobody;

impl Observer for Nobody {
    fn start(&mut self, _: u32, _: u32) {}
    fn step(&mut self, _: &StepRecord) {}
}

fn run(sweep: &mut Sweep) -> Result<(), lrmoe::error::Error> {
    let stop = AtomicBool::new(false);
    sweep.run(1, false, &stop, &|_| Box::new(Nobody), &|_, _| {})
}

fn names(grid: &Grid) -> Vec<&str> {
    grid.groups
        .iter()
        .map(|group| group.name.as_str())
        .collect()
}

fn config<'a>(grid: &'a Grid, name: &str) -> &'a TrainConfig {
    let found = grid.groups.iter().find(|group| group.name == name);
    &found.expect("a group of this name").config
}

fn log(folder: &Path, run: &str) -> PathBuf {
    folder.join("runs").join(run).join("steps.jsonl")
}
