//! The runs of a grid: what is there of them, and running the rest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use toml::Table;

use super::SweepError;
use super::curve::{Curve, read_records};
use super::finished::{FinishedRuns, Started};
use super::grid::{Grid, Group, complete};
use super::left::Left;
use crate::config::TrainConfig;
use crate::error::Error;
use crate::files;
use crate::text::Corpus;
use crate::train::{Observer, StepRecord, checkpoint_path, lock, train};

/// A grid with what its folder holds of it.
#[derive(Debug)]
pub struct Sweep {
    grid: Grid,
    out: PathBuf,
    runs: Vec<Run>,
    finished: FinishedRuns,
}

/// One run of a grid.
#[derive(Clone, Debug)]
pub struct Run {
    /// `GROUP/seed-N`, its folder under `OUT/runs`.
    pub name: String,
    /// Index of its group.
    pub group: usize,
    /// Its seed.
    pub seed: u64,
    /// What is there of it.
    pub state: State,
    config: TrainConfig,
    corpus: Arc<Corpus>,
    /// Whether what is there was started with other options and is to be replaced.
    changed: bool,
}

/// What is there of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// Nothing, or nothing to go on from.
    Missing,
    /// It can go on after so many steps, or a few less: from its checkpoint.
    Interrupted(u32),
    /// All of it.
    Finished(Curve),
}

impl Sweep {
    /// Looks at what `out` holds of the runs of `grid`. What was started with other options is refused, but with `rerun_changed` counts as missing.
    ///
    /// # Errors
    /// Texts that cannot be trained on; a folder that holds other runs or cannot be read.
    pub fn open(grid: Grid, out: &Path, rerun_changed: bool) -> Result<Self, Error> {
        let mut texts: BTreeMap<(Vec<PathBuf>, usize), Arc<Corpus>> = BTreeMap::new();
        let mut corpora = Vec::with_capacity(grid.groups.len());
        for group in &grid.groups {
            let (text, context) = (&group.config.text, group.config.model.context);
            let key = (text.clone(), context);
            if !texts.contains_key(&key) {
                let corpus = Corpus::load(text, context).map_err(|source| SweepError::Text {
                    group: group.name.clone(),
                    source: Box::new(source),
                })?;
                texts.insert(key.clone(), Arc::new(corpus));
            }
            corpora.push(texts[&key].clone());
        }
        let mut sweep = Self {
            out: out.to_owned(),
            runs: Vec::new(),
            finished: FinishedRuns::read(out)?,
            grid,
        };
        // All groups with one seed come before the next seed, so that a sweep that was cut short compares as many groups as it can.
        for &seed in &sweep.grid.seeds {
            for (index, group) in sweep.grid.groups.iter().enumerate() {
                let name = format!("{}/seed-{seed}", group.name);
                let mut run = Run {
                    config: TrainConfig {
                        seed,
                        out: sweep.out.join("runs").join(&name),
                        ..group.config.clone()
                    },
                    name,
                    group: index,
                    seed,
                    state: State::Missing,
                    corpus: corpora[index].clone(),
                    changed: false,
                };
                run.look(&group.options, &sweep.finished, rerun_changed)?;
                sweep.runs.push(run);
            }
        }
        Ok(sweep)
    }

    /// The grid.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Every run, in the order they are run.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// What is left to do.
    pub fn left(&self) -> Left {
        Left::of(&self.runs)
    }

    /// Runs what is not finished, `jobs` at once, until all is done or `stop` is set; a run that is stopped can go on later. `observer` gives each run
    /// somebody who follows it, `done` hears after each what is left. A finished run's checkpoint is removed but with `keep_checkpoints`.
    ///
    /// # Errors
    /// Another sweep in the folder; [`SweepError::Failed`] after all others if runs diverged; what else goes wrong ends the sweep at once.
    pub fn run(
        &mut self,
        jobs: usize,
        keep_checkpoints: bool,
        stop: &AtomicBool,
        observer: &(dyn Fn(&Run) -> Box<dyn Observer> + Sync),
        done: &(dyn Fn(&Run, Left) + Sync),
    ) -> Result<(), Error> {
        if jobs > 1 && self.grid.timed {
            return Err(SweepError::TimedJobs.into());
        }
        let _lock = lock(&self.out)?;
        let finished = |run: &Run| matches!(run.state, State::Finished(_));
        let waiting: Vec<usize> = (0..self.runs.len())
            .filter(|&index| !finished(&self.runs[index]))
            .collect();
        if !keep_checkpoints {
            for run in self.runs.iter().filter(|run| finished(run)) {
                remove(&checkpoint_path(&run.config.out))?;
            }
        }
        let groups = &self.grid.groups;
        keep(&self.runs, groups, &mut self.finished)?;
        let next = AtomicUsize::new(0);
        let all = Mutex::new((self.runs.clone(), &mut self.finished));
        let failed = Mutex::new(Vec::new());
        let job = || {
            while !stop.load(Ordering::Relaxed)
                && let Some(&index) = waiting.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let mut run = self.runs[index].clone();
                let options = &groups[run.group].options;
                let ran = run.go(options, keep_checkpoints, stop, observer(&run).as_mut());
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                let (runs, kept) = &mut *all;
                runs[index] = run;
                match ran.and_then(|()| keep(runs, groups, kept)) {
                    Ok(()) => done(&runs[index], Left::of(runs)),
                    Err(error) => {
                        if !matches!(error, Error::Diverged { .. }) {
                            stop.store(true, Ordering::Relaxed);
                        }
                        let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                        failed.push((runs[index].name.clone(), error));
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..jobs {
                scope.spawn(job);
            }
        });
        (self.runs, _) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        // What ended the sweep stands before runs that merely diverged.
        failed.sort_by_key(|(_, error)| matches!(error, Error::Diverged { .. }));
        let (runs, errors): (Vec<_>, Vec<_>) = failed.into_iter().unzip();
        match errors.into_iter().next() {
            None => Ok(()),
            Some(first) => {
                let first = Box::new(first);
                Err(SweepError::Failed { runs, first }.into())
            }
        }
    }
}

/// Writes down what is finished.
fn keep(runs: &[Run], groups: &[Group], finished: &mut FinishedRuns) -> Result<(), Error> {
    for run in runs {
        if let State::Finished(curve) = &run.state {
            finished.insert(&run.name, run.started(&groups[run.group].options), curve);
        }
    }
    finished.write()
}

impl Run {
    fn started_path(&self) -> PathBuf {
        self.config.out.join("run.toml")
    }

    /// Checksum of the text, so that another of the same name is noticed.
    fn text(&self) -> String {
        format!("{} bytes {:08x}", self.corpus.len(), self.corpus.checksum())
    }

    /// What it is started with. Where its text lies does not count.
    fn started(&self, options: &Table) -> Started {
        let mut options = options.clone();
        options.remove("text");
        let text = self.text();
        Started { text, options }
    }

    /// Finds out what is there of the run: in its folder or, where that is gone, among the finished.
    fn look(
        &mut self,
        options: &Table,
        finished: &FinishedRuns,
        rerun_changed: bool,
    ) -> Result<(), Error> {
        let foreign = |reason: &str| SweepError::Foreign {
            path: self.config.out.clone(),
            reason: reason.to_owned(),
        };
        let path = self.started_path();
        let (started, kept): (Started, _) = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                if self.config.out.join("steps.jsonl").exists() {
                    return Err(foreign("it has steps.jsonl, but no run.toml").into());
                }
                let Some(run) = finished.get(&self.name) else {
                    return Ok(());
                };
                (run.started.clone(), Some(&run.curve))
            }
            read => {
                let text = read.map_err(Error::io(&path))?;
                let started = toml::from_str(&text)
                    .map_err(|error| foreign(&format!("run.toml: {}", error.message())))?;
                (started, None)
            }
        };
        if let Some(keys) = self.difference(&started, options) {
            if !rerun_changed {
                let run = self.name.clone();
                return Err(SweepError::Changed { run, keys }.into());
            }
            self.changed = true;
            return Ok(());
        }
        if let Some(curve) = kept {
            self.state = State::Finished(curve.clone());
            return Ok(());
        }
        let records = read_records(&self.config.out)?;
        let done = records.last().map_or(0, |record| record.step);
        self.state = if is_end(&self.config, records.last()) {
            State::Finished(Curve::of(&records))
        } else if checkpoint_path(&self.config.out).exists() {
            State::Interrupted(done.min(self.config.steps))
        } else {
            State::Missing
        };
        Ok(())
    }

    /// Which options the run was started with differ from those it has now, if any do that count.
    fn difference(&self, started: &Started, options: &Table) -> Option<String> {
        let mut then_options = started.options.clone();
        if let Some(text) = options.get("text") {
            then_options.insert("text".to_owned(), text.clone());
        }
        let then = complete(&then_options, self.seed).ok();
        let then = then.map(|then| TrainConfig {
            out: self.config.out.clone(),
            checkpoint_every: self.config.checkpoint_every,
            deadline_seconds: self.config.deadline_seconds,
            ..then
        });
        let mut keys = Vec::new();
        if then.as_ref() != Some(&self.config) {
            let all = then_options.keys().chain(options.keys());
            let differ = |key: &&String| then_options.get(*key) != options.get(*key);
            keys.extend(all.filter(differ).map(String::as_str));
            keys.sort_unstable();
            keys.dedup();
        }
        if started.text != self.text() {
            keys.push("text (other bytes)");
        }
        let same = keys.is_empty() && then.is_some();
        (!same).then(|| match keys.is_empty() {
            true => "version of LRMoE".to_owned(),
            false => keys.join(", "),
        })
    }

    /// Trains until the run is finished or stopped.
    fn go(
        &mut self,
        options: &Table,
        keep_checkpoint: bool,
        stop: &AtomicBool,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        let (out, checkpoint) = (&self.config.out, checkpoint_path(&self.config.out));
        let resume = matches!(self.state, State::Interrupted(_));
        if !resume {
            // In this order, so that no log ever stands beside options that are not its own.
            std::fs::create_dir_all(out).map_err(Error::io(out))?;
            remove(&checkpoint)?;
            remove(&out.join("steps.jsonl"))?;
            let text = toml::to_string(&self.started(options)).expect("tables of TOML");
            files::write(&self.started_path(), text.as_bytes())?;
            self.changed = false;
        }
        let config = TrainConfig {
            resume,
            overwrite: !resume,
            ..self.config.clone()
        };
        let records = train(&config, &self.corpus, stop, observer)?;
        if is_end(&config, records.last()) {
            self.state = State::Finished(Curve::of(&records));
            if !keep_checkpoint {
                remove(&checkpoint)?;
            }
        } else {
            self.state = State::Interrupted(records.last().map_or(0, |record| record.step));
        }
        Ok(())
    }

    /// Whether it was started with other options and is to be replaced.
    pub fn is_changed(&self) -> bool {
        self.changed
    }

    /// Whether its gradients are compared with those of all pairs.
    pub(super) fn has_oracle(&self) -> bool {
        self.config.oracle_every > 0
    }

    /// Its options, complete.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }
}

fn is_end(config: &TrainConfig, last: Option<&StepRecord>) -> bool {
    last.is_some_and(|last| last.step == config.steps && last.held_out_loss.is_some())
}

fn remove(path: &Path) -> Result<(), Error> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(Error::io(path)),
    }
}
