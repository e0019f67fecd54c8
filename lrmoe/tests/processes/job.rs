//! Runs of the program with threads and with processes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use lrmoe::train::StepRecord;
use tempfile::TempDir;

pub(crate) const RANKS: usize = 4;

/// A model small enough for tests.
const SMALL: &str = "train --text text.txt --layers 2 --width 16 --heads 2 --context 16 --experts 8 --top-k 2 --hidden 16 --batch 4 \
    --threads 1 --deadline-seconds 2 --eval-sequences 4";

pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        let folder = Self(TempDir::new().expect("a folder"));
        let text = "the quick brown fox jumps over the lazy dog. ".repeat(60);
        std::fs::write(folder.path("text.txt"), text).expect("a text");
        folder
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The program with the small model, its ranks threads.
    pub(crate) fn threads(&self, options: &str) -> Output {
        let mut program = self.thread_program(options);
        self.quiet(&mut program).output().expect("starts")
    }

    /// What starts it.
    pub(crate) fn thread_program(&self, options: &str) -> Command {
        let mut program = Command::new(env!("CARGO_BIN_EXE_lrmoe"));
        program
            .args(SMALL.split_whitespace())
            .args(["--ranks", "4"]);
        program.args(options.split_whitespace());
        program
    }

    /// The same under `mpirun`, which takes `settings`.
    pub(crate) fn mpirun(&self, settings: &str, options: &str) -> Command {
        let program = Path::new(env!("CARGO_BIN_EXE_lrmoe"));
        self.under_mpirun(settings, program, options)
    }

    fn under_mpirun(&self, settings: &str, program: &Path, options: &str) -> Command {
        let mut mpirun = Command::new("mpirun");
        mpirun.args([
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            &RANKS.to_string(),
        ]);
        mpirun.args(settings.split_whitespace());
        mpirun.arg(program);
        mpirun
            .args(SMALL.split_whitespace())
            .args(options.split_whitespace());
        self.quiet(&mut mpirun);
        mpirun
    }

    /// This test program as the ranks of the small model, which are threads.
    pub(crate) fn own_threads(&self, options: &str) -> Command {
        let mut program = Command::new(std::env::current_exe().expect("a program"));
        program
            .args(SMALL.split_whitespace())
            .args(["--ranks", "4"]);
        program.args(options.split_whitespace());
        self.quiet(&mut program);
        program
    }

    /// The same with a process for each rank, of which the others outlive one.
    pub(crate) fn own_processes(&self, options: &str) -> Command {
        let program = std::env::current_exe().expect("a program");
        self.under_mpirun("--enable-recovery", &program, options)
    }

    pub(crate) fn quiet<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .current_dir(self.0.path())
            .env("CANDLE_NUM_THREADS", "1");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
    }

    pub(crate) fn records(&self, out: &str) -> Vec<StepRecord> {
        let lines = std::fs::read_to_string(self.path(out).join("steps.jsonl")).expect("a log");
        let record = |line| serde_json::from_str(line).expect("a record");
        lines.lines().map(record).collect()
    }

    /// What must not differ between two runs of the same thing.
    pub(crate) fn losses(&self, out: &str) -> Vec<(u32, u32, u32, Option<u32>)> {
        let bits = |r: StepRecord| {
            let held_out = r.held_out_loss.map(f32::to_bits);
            (
                r.step,
                r.loss.to_bits(),
                r.gradient_norm.to_bits(),
                held_out,
            )
        };
        self.records(out).into_iter().map(bits).collect()
    }

    /// The tensors of a run's checkpoint, by name.
    pub(crate) fn tensors(&self, out: &str) -> Vec<(String, Vec<u8>)> {
        let bytes = std::fs::read(self.path(out).join("checkpoint.safetensors"));
        let bytes = bytes.expect("a checkpoint");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("a checkpoint");
        let owned = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
            (name, view.data().to_vec())
        };
        let mut tensors: Vec<_> = file.tensors().into_iter().map(owned).collect();
        tensors.sort();
        tensors
    }

    /// Waits until the log of a run has so many lines.
    pub(crate) fn wait_for_steps(&self, out: &str, steps: usize) {
        let path = self.path(out).join("steps.jsonl");
        let started = Instant::now();
        while std::fs::read_to_string(&path).map_or(0, |text| text.lines().count()) < steps {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "no steps in {out}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn assert_success(output: &Output) {
    assert!(
        output.status.success(),
        "{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
}

/// The process that is `rank` of the job that `mpirun` runs.
pub(crate) fn process_of(mpirun: &Child, rank: usize) -> u32 {
    let children = format!("/proc/{0}/task/{0}/children", mpirun.id());
    let children = std::fs::read_to_string(children).expect("mpirun runs");
    let is_rank = |process: &&str| {
        let environment = Path::new("/proc").join(process).join("environ");
        let environment = std::fs::read(environment).unwrap_or_default();
        let name = format!("OMPI_COMM_WORLD_RANK={rank}");
        environment
            .split(|byte| *byte == 0)
            .any(|entry| entry == name.as_bytes())
    };
    let process = children.split_whitespace().find(is_rank);
    process
        .expect("a process for each rank")
        .parse()
        .expect("a number")
}

/// Sends a signal, such as `KILL`.
pub(crate) fn signal(process: u32, name: &str) {
    let kill = Command::new("sh")
        .args(["-c", &format!("kill -{name} {process}")])
        .status();
    assert!(kill.expect("sh").success());
}
