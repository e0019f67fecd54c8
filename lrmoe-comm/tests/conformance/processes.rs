//! Worlds of processes: `mpirun` starts this program again, once for each rank, and every rank runs
//! all tests in the same order.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use lrmoe_comm::Mpi;
use lrmoe_comm::rsmpi::environment::Universe;
use lrmoe_comm::rsmpi::topology::SimpleCommunicator;
use lrmoe_comm::rsmpi::{Threading, initialize_with_threading};

use crate::{Worlds, tests};

/// Says to a process that it is a rank.
const RANK: &str = "LRMOE_COMM_TEST_RANK";

pub(crate) fn is_rank() -> bool {
    std::env::var_os(RANK).is_some()
}

/// All tests with so many processes; ignored without `mpirun`, unless `LRMOE_REQUIRE` has `mpi`.
pub(crate) fn trial(ranks: usize) -> Trial {
    let required = std::env::var("LRMOE_REQUIRE").is_ok_and(|list| list.contains("mpi"));
    let missing = Command::new("mpirun").arg("--version").output().is_err();
    let name = match missing {
        true => format!("mpi::{ranks} (no mpirun)"),
        false => format!("mpi::{ranks}"),
    };
    Trial::test(name, move || run(ranks)).with_ignored_flag(missing && !required)
}

fn run(ranks: usize) -> Result<(), Failed> {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "-n"]);
    mpirun.arg(ranks.to_string()).arg(std::env::current_exe()?);
    let output = mpirun.env(RANK, "1").output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    Err(format!("{}\n{out}\n{err}", output.status).into())
}

#[derive(Clone, Copy)]
struct OfProcesses {
    ranks: usize,
    reads_memory: bool,
}

impl Worlds for OfProcesses {
    type Comm = Mpi;

    fn ranks(self) -> usize {
        self.ranks
    }

    fn start<R: Send>(self, deadline: Duration, body: impl Fn(Mpi) -> R + Sync) -> Vec<R> {
        let processes = SimpleCommunicator::world();
        let world = match self.reads_memory {
            true => Mpi::new(&processes, deadline),
            false => Mpi::through_messages(&processes, deadline),
        };
        vec![body(world.unwrap())]
    }
}

/// Runs all tests in this process, one rank of several. Ends it at the first one that fails.
pub(crate) fn run_tests() {
    let (universe, _) = initialize_with_threading(Threading::Multiple).expect("initialised once");
    for reads_memory in [true, false] {
        run_all(&universe, reads_memory);
    }
}

fn run_all(universe: &Universe, reads_memory: bool) {
    use lrmoe_comm::rsmpi::traits::Communicator;
    let processes = universe.world();
    let world = OfProcesses {
        ranks: processes.size() as usize,
        reads_memory,
    };
    for (name, test) in tests(world) {
        let rank = processes.rank();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(world))) {
            eprintln!("rank {rank}: {name}: {}", message(panic.as_ref()));
            std::process::exit(1);
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    let message = owned.or_else(|| panic.downcast_ref::<&str>().copied());
    message.unwrap_or("a panic without a message")
}
