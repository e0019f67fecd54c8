//! What only worlds of threads can show, and the words of errors.

use std::thread;
use std::time::Duration;

use lrmoe_comm::{Call, Collective, Error, Reduction, Threads};

/// Long enough that a test which waits for it would be seen to hang.
const LONG: Duration = Duration::from_secs(600);

/// The panic comes while the others wait.
#[test]
fn a_rank_that_panics_is_named() {
    let results: Vec<_> = thread::scope(|scope| {
        let spawn = |mut comm: Threads| {
            scope.spawn(move || {
                comm.barrier()?;
                if comm.rank() == 2 {
                    thread::sleep(Duration::from_millis(20));
                    // Unwinds without the noise of the panic hook.
                    std::panic::resume_unwind(Box::new(()));
                }
                comm.barrier()
            })
        };
        let world = Threads::world(4, LONG).unwrap();
        let ranks: Vec<_> = world.into_iter().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().ok()).collect()
    });
    assert!(results[2].is_none());
    for result in [&results[0], &results[1], &results[3]] {
        let Some(Err(Error::PeerLost {
            rank,
            collective,
            waited,
        })) = result
        else {
            panic!("{result:?}");
        };
        assert_eq!((*rank, *collective), (2, Call::Barrier));
        assert!(*waited < LONG);
    }
}

#[test]
fn a_world_has_ranks() {
    assert_eq!(Threads::world(0, LONG).unwrap_err(), Error::NoRanks);
    let error = Threads::world(usize::MAX, LONG).unwrap_err();
    assert!(matches!(error, Error::TooManyRanks { .. }), "{error}");
}

#[test]
fn errors_state_the_values() {
    let reduce = |len| Call::AllReduce {
        element: "f32",
        len,
        reduction: Reduction::Sum,
    };
    let waited = Duration::from_millis(1500);
    for (error, message) in [
        (
            Error::Deadline {
                rank: 3,
                collective: reduce(12),
                waited,
            },
            "rank 3 did not come to all-reduce (sum) of 12 f32 within 1.500 s",
        ),
        (
            Error::PeerLost {
                rank: 1,
                collective: Call::AllToAll { element: "bf16" },
                waited,
            },
            "rank 1 left the world before or during all-to-all of bf16, noticed after 1.500 s",
        ),
        (
            Error::Mismatch {
                rank: 2,
                found: Call::Barrier,
                expected: reduce(7),
            },
            "rank 2 called barrier where rank 0 called all-reduce (sum) of 7 f32",
        ),
    ] {
        assert_eq!(error.to_string(), message);
    }
}
