//! A run whose ranks are the processes of an MPI job.

use crate::config::TrainOptions;
use crate::error::Error;

/// Trains as one rank of the job. After a failure the process ends here: what is left of the job cannot leave MPI in order.
#[cfg(feature = "mpi")]
pub(super) fn train(options: TrainOptions) -> Result<(), Error> {
    use lrmoe_comm::rsmpi::Threading;
    use lrmoe_comm::rsmpi::initialize_with_threading;
    use lrmoe_comm::rsmpi::traits::Communicator;

    let (universe, _) = initialize_with_threading(Threading::Multiple).ok_or(Error::NoMpi)?;
    let job = universe.world();
    let error = match run(&job, options) {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    match &error {
        // That rank says why.
        Error::Elsewhere { .. } => {}
        lost if lost.is_consequence() => {
            // At once, so that the lines of several ranks do not mix.
            let cause = std::error::Error::source(lost);
            let cause = cause.map_or(String::new(), |cause| format!(": {cause}"));
            let line = format!("lrmoe: rank {}: {lost}{cause}\n", job.rank());
            let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
            // The others have been told; let them say so before the job ends.
            std::thread::sleep(GRACE);
            job.abort(i32::from(error.exit_code()));
        }
        _ => eprintln!("lrmoe: {error}"),
    }
    let code = i32::from(error.exit_code());
    // Leaving MPI waits for all others, of which some may be gone.
    std::thread::spawn(move || {
        std::thread::sleep(20 * GRACE);
        std::process::exit(code);
    });
    drop(universe);
    std::process::exit(code)
}

/// Time for the other ranks to print their errors.
#[cfg(feature = "mpi")]
const GRACE: std::time::Duration = std::time::Duration::from_millis(500);

#[cfg(feature = "mpi")]
fn run(
    job: &lrmoe_comm::rsmpi::topology::SimpleCommunicator,
    options: TrainOptions,
) -> Result<(), Error> {
    use std::time::Duration;

    use crate::progress::Progress;
    use crate::train::{Observer, settle, train_rank};
    use lrmoe_comm::rsmpi::traits::Communicator;
    use lrmoe_comm::{Collective, Mpi};

    use super::train::{prepare, print_end, stop_on_signal};

    // The options say how long to wait; until all agree on them, this is long.
    let mut start = Mpi::new(job, Duration::from_secs(600))?;
    let prepared = prepare(options.of_processes(job.size() as usize));
    let (config, corpus) = settle(&mut start, prepared)?;
    let world = Mpi::new(job, Duration::from_secs(config.deadline_seconds))?;
    let mut observer: Box<dyn Observer> = match start.rank() {
        0 => Box::new(Progress::new(config.policy.name())),
        _ => Box::new(Unseen),
    };
    let stop = stop_on_signal();
    let records = train_rank(world, &config, &corpus, &stop, observer.as_mut())?;
    print_end(&config, &records);
    Ok(())
}

/// The progress of a rank that does not show it.
#[cfg(feature = "mpi")]
struct Unseen;

#[cfg(feature = "mpi")]
impl crate::train::Observer for Unseen {
    fn start(&mut self, _: u32, _: u32) {}
    fn step(&mut self, _: &crate::train::StepRecord) {}
}

/// This program has no MPI.
#[cfg(not(feature = "mpi"))]
pub(super) fn train(_: TrainOptions) -> Result<(), Error> {
    Err(Error::NoMpi)
}
