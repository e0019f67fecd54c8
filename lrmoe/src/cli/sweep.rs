//! `lrmoe sweep`.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use clap::Args;
use indicatif::MultiProgress;

use super::train::stop_on_signal;
use crate::error::Error;
use crate::files;
use crate::progress::Progress;
use crate::sweep::{Grid, Left, Report, Run, State, Sweep as Runs, page};

/// Train every combination of options that a grid lists, with every seed, and compare what they reach.
///
/// Each run is one of `lrmoe train`, in OUT/runs/GROUP/seed-N. Ctrl-C ends the sweep after the current steps; the same command goes on: finished
/// runs are kept, interrupted ones go on from their checkpoints. The report is printed and written to OUT/report.md, report.json and
/// report.html, which needs nothing else. OUT/finished.jsonl has a line for every finished run: copied into another folder, it stands for those runs.
#[derive(Args, Debug)]
#[command(after_help = "GRID is a TOML file:

  seeds = [1, 2, 3]
  timed = true              # false where other programs share the machine: measured seconds are left out
  targets = [2.3, 2.2]      # held-out losses to reach [default: those of the ceiling at 1/2, 2/3 and 5/6 of its steps]

  [common]                  # options of `lrmoe train`, without --
  text = \"book.txt\"
  steps = 1000

  [[grid]]
  policy = \"dropless\"
  control = \"ceiling\"       # results are given as shares of the gap between floor and ceiling

  [[grid]]
  retention = 0.0
  control = \"floor\"

  [[grid]]
  title = \"Scores\"
  retention = [0.5, 0.25]   # every combination of the values is a group of runs
  score = [\"down-grad\", \"forward\"]
  name = \"{score}-{retention}\" # [default: what the table changes, lrmoe@0.5+score=forward]

Examples:
  lrmoe sweep grid.toml --out sweep --dry-run    list the runs
  lrmoe sweep grid.toml --out sweep              run what is missing, then report
  lrmoe sweep grid.toml --out sweep --report-only")]
pub(crate) struct Sweep {
    /// The grid
    #[arg(value_name = "GRID")]
    grid: PathBuf,
    /// Text of all runs, in place of the grid's: files, or folders whose .txt, .md and .rs files are taken
    #[arg(long, value_name = "FILE-or-DIR", num_args = 1..)]
    text: Vec<PathBuf>,
    /// Folder of runs and report
    #[arg(long, value_name = "DIR", default_value = "sweep")]
    out: PathBuf,
    /// Runs at once; above 1 the grid must say `timed = false`
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: u16,
    /// Threads that all runs compute on [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// List the runs and what is there of them; run nothing
    #[arg(long, conflicts_with = "report_only")]
    dry_run: bool,
    /// Write the report of the runs that are finished; run nothing
    #[arg(long)]
    report_only: bool,
    /// Replace runs that were started with other options than the grid has now
    #[arg(long)]
    rerun_changed: bool,
    /// Keep the checkpoints of finished runs
    #[arg(long)]
    keep_checkpoints: bool,
}

impl Sweep {
    pub(crate) fn run(self) -> Result<(), Error> {
        let grid = Grid::read(&self.grid, &self.text)?;
        let mut runs = Runs::open(grid, &self.out, self.rerun_changed)?;
        if self.dry_run {
            list(&runs);
            return Ok(());
        }
        let mut ran = Ok(());
        if !self.report_only {
            if let Some(threads) = self.threads {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads.into())
                    .build_global()
                    .expect("nothing has used the pool before");
            }
            ran = self.train(&mut runs);
        }
        // What is finished is worth reporting, however the sweep ended.
        if runs.left().finished > 0 {
            let report = Report::of(&runs);
            println!("{report}");
            write(&self.out, &report)?;
        } else if ran.is_ok() {
            println!("no run is finished, so there is nothing to report");
        }
        ran
    }

    fn train(&self, runs: &mut Runs) -> Result<(), Error> {
        let (bars, stop) = (MultiProgress::new(), stop_on_signal());
        let jobs = usize::from(self.jobs);
        let observer = |run: &Run| Box::new(Progress::among(&bars, &run.name)) as Box<_>;
        let done = |run: &Run, left: Left| {
            if matches!(run.state, State::Finished(_)) {
                bars.suspend(|| eprintln!("{}: {}", run.name, said(left, jobs)));
            }
        };
        runs.run(jobs, self.keep_checkpoints, &stop, &observer, &done)?;
        if stop.load(Ordering::Relaxed) {
            eprintln!(
                "interrupted, {}; the same command goes on",
                said(runs.left(), jobs)
            );
        }
        Ok(())
    }
}

fn list(runs: &Runs) {
    for run in runs.runs() {
        let state = match run.state {
            State::Finished(_) => "finished".to_owned(),
            State::Interrupted(step) => format!("interrupted after step {step}"),
            State::Missing if run.is_changed() => "changed, to run again".to_owned(),
            State::Missing => "to run".to_owned(),
        };
        println!("{}  {} steps, {state}", run.name, run.config().steps);
    }
    println!("{}", said(runs.left(), 1));
}

/// How far a sweep has come.
fn said(left: Left, jobs: usize) -> String {
    let done = format!("{} of {} runs are finished", left.finished, left.runs);
    let minutes = |seconds: f64| match seconds / jobs as f64 / 60.0 {
        minutes if minutes < 1.0 => "less than a minute".to_owned(),
        minutes if minutes < 120.0 => format!("about {minutes:.0} min"),
        minutes => format!("about {:.1} h", minutes / 60.0),
    };
    match left.seconds {
        _ if left.finished == left.runs => done,
        Some(seconds) => format!("{done}, {} left", minutes(seconds)),
        None => format!("{done}, {} steps left", left.steps),
    }
}

fn write(out: &Path, report: &Report) -> Result<(), Error> {
    let mut json = serde_json::to_vec_pretty(report).expect("a report has only string keys");
    json.push(b'\n');
    files::write(&out.join("report.json"), &json)?;
    files::write(&out.join("report.md"), report.to_string().as_bytes())?;
    files::write(&out.join("report.html"), page(report)?.as_bytes())?;
    Ok(())
}
