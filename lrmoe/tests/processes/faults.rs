//! Ranks that are killed or stopped in a run.

use std::process::{Child, Output};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;

use crate::job::{Folder, RANKS, assert_success, process_of, signal, text};

const REPETITIONS: usize = 20;
/// Repetitions at a time.
const AT_A_TIME: usize = 4;
/// From the fault to the end: the deadline of 2 s and the last words, on a machine with more processes than cores.
const MOST: Duration = Duration::from_secs(20);

const RUN: &str = "--steps 60 --warmup 2 --eval-every 30 --checkpoint-every 3";

/// What the survivors must do.
#[derive(Clone, Copy)]
enum Survivors {
    /// Each says which rank it missed, and where.
    Tell,
    /// Nothing: `mpirun` ends them.
    AreEnded,
}

pub(crate) fn killed() -> Result<(), Failed> {
    repeat("--enable-recovery", "KILL", Survivors::Tell)
}

pub(crate) fn stopped() -> Result<(), Failed> {
    repeat("", "STOP", Survivors::Tell)
}

pub(crate) fn killed_without_recovery() -> Result<(), Failed> {
    repeat("", "KILL", Survivors::AreEnded)
}

fn repeat(settings: &str, name: &str, survivors: Survivors) -> Result<(), Failed> {
    let folder = Folder::new();
    assert_success(&folder.threads(&format!("{RUN} --out whole")));
    side_by_side(|repetition| once(&folder, repetition, settings, name, survivors))
}

/// Runs the repetitions, some at a time.
pub(crate) fn side_by_side(
    once: impl Fn(usize) -> Result<(), Failed> + Sync,
) -> Result<(), Failed> {
    for first in (0..REPETITIONS).step_by(AT_A_TIME) {
        std::thread::scope(|scope| {
            let some = first..REPETITIONS.min(first + AT_A_TIME);
            let once = &once;
            let runs: Vec<_> = some.map(|n| scope.spawn(move || once(n))).collect();
            for run in runs {
                run.join().map_err(|_| "a repetition panicked")??;
            }
            Ok::<_, Failed>(())
        })?;
    }
    Ok(())
}

fn once(
    folder: &Folder,
    repetition: usize,
    settings: &str,
    name: &str,
    survivors: Survivors,
) -> Result<(), Failed> {
    let out = format!("cut-{repetition}");
    let mut mpirun = folder.mpirun(settings, &format!("{RUN} --out {out}"));
    let job = mpirun.spawn()?;
    folder.wait_for_steps(&out, 4 + 2 * (repetition / RANKS));
    let victim = repetition % RANKS;
    signal(process_of(&job, victim), name);
    let output = end_of(job)?;
    let errors = text(&output.stderr);
    // With recovery a job in which a rank died counts as a success.
    let recovers = settings.contains("recovery");
    assert!(recovers || !output.status.success(), "{errors}");
    if let Survivors::Tell = survivors {
        assert_told(&errors, victim);
    }
    assert_resumes(folder, RUN, &out);
    Ok(())
}

/// Every other rank has said which one it missed, and where.
pub(crate) fn assert_told(errors: &str, victim: usize) {
    for rank in (0..RANKS).filter(|rank| *rank != victim) {
        let start = format!("lrmoe: rank {rank}: ");
        let told = errors.lines().find(|line| line.starts_with(&start));
        let names = told.is_some_and(|line| line.contains(&format!(": rank {victim} ")));
        assert!(names, "rank {rank} should name rank {victim}: {errors}");
    }
}

/// The checkpoint is whole, and the run goes on from it to where it would have come undisturbed.
pub(crate) fn assert_resumes(folder: &Folder, run: &str, out: &str) {
    assert_success(&folder.threads(&format!("{run} --out {out} --resume")));
    assert_eq!(folder.losses(out), folder.losses("whole"));
    assert_eq!(folder.tensors(out), folder.tensors("whole"));
}

/// Waits for the end of a job, not for ever.
pub(crate) fn end_of(mut job: Child) -> Result<Output, Failed> {
    let fault = Instant::now();
    while job.try_wait()?.is_none() {
        if fault.elapsed() > MOST {
            job.kill()?;
            let output = job.wait_with_output()?;
            return Err(format!("hangs: {}", text(&output.stderr)).into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(job.wait_with_output()?)
}
