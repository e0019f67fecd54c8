//! The program under `mpirun`, every rank a process: the same run as with threads; and what is left when a rank dies or stops, or the disk is
//! full, with threads too.

mod disk;
mod faults;
mod hosts;
mod job;
mod leaving;
mod same;

use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};

/// A trial, or why it cannot run here; `LRMOE_REQUIRE` with `mpi` makes that a failure.
fn trial(name: &str, missing: Option<&str>, test: fn() -> Result<(), Failed>) -> Trial {
    let required = std::env::var("LRMOE_REQUIRE").is_ok_and(|list| list.contains("mpi"));
    let why = missing.map_or(String::new(), |missing| format!(" ({missing})"));
    let trial = Trial::test(format!("mpi::{name}{why}"), test);
    trial.with_ignored_flag(missing.is_some() && !required)
}

fn main() -> ExitCode {
    if leaving::is_told() {
        return leaving::run();
    }
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let missing = match (cfg!(feature = "mpi"), has("mpirun")) {
        (false, _) => Some("built without feature mpi"),
        (true, false) => Some("no mpirun"),
        (true, true) => None,
    };
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let mut trials = vec![
        trial("same_as_threads", missing, same::losses_and_files),
        trial("overlap_changes_no_bit", missing, same::overlap),
        trial("resumes_what_threads_began", missing, same::resumes),
        trial("bad_options_are_told_once", missing, same::refusals),
        trial("faults::killed", missing, faults::killed),
        trial("faults::stopped", missing, faults::stopped),
        trial("faults::exited", missing, leaving::processes_exit),
        trial("faults::panicked", missing, leaving::processes_panic),
        trial(
            "faults::killed_without_recovery",
            missing,
            faults::killed_without_recovery,
        ),
    ];
    // Network namespaces are a privilege, whatever is required.
    let mut hosts = trial(
        "hosts::a_link_is_cut",
        missing.or(hosts::missing()),
        hosts::a_link_is_cut,
    );
    if hosts::missing().is_some() {
        hosts = hosts.with_ignored_flag(true);
    }
    trials.push(hosts);
    let why = disk::missing().map_or(String::new(), |missing| format!(" ({missing})"));
    let full = Trial::test(format!("threads::disk::full{why}"), disk::full);
    trials.push(full.with_ignored_flag(disk::missing().is_some()));
    trials.extend([
        Trial::test("threads::faults::returned", leaving::threads_return),
        Trial::test("threads::faults::panicked", leaving::threads_panic),
    ]);
    libtest_mimic::run(&arguments, trials).exit_code()
}
