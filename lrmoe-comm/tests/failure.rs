//! A rank that leaves, panics or is late ends in an error on every other rank, never in a hang.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use lrmoe_comm::{Call, Collective, Error, Reduction, Threads};

/// Long enough that a test which waits for it would be seen to hang.
const LONG: Duration = Duration::from_secs(600);

/// Numbers that are more than a rank copies for the others.
const LENT: usize = 10_000;

type Step = fn(&mut Threads) -> Result<(), Error>;

/// Every collective, in small and large; the all-gather lends what it sends.
const STEPS: [(Call, Step); 8] = [
    (Call::Barrier, |comm| comm.barrier()),
    (Call::AllToAll { element: "u32" }, |comm| {
        let ones = vec![1; comm.ranks()];
        comm.all_to_all(
            &vec![1u32; comm.ranks()],
            &ones,
            &mut vec![0; comm.ranks()],
            &ones,
        )
    }),
    (
        Call::AllReduce {
            element: "f32",
            len: 3,
            reduction: Reduction::Sum,
        },
        |comm| comm.all_reduce(&mut [1f32; 3], Reduction::Sum),
    ),
    (
        Call::AllReduce {
            element: "f32",
            len: 3000,
            reduction: Reduction::Sum,
        },
        |comm| comm.all_reduce(&mut [1f32; 3000], Reduction::Sum),
    ),
    (
        Call::AllGather {
            element: "f32",
            len: 1,
        },
        |comm| comm.all_gather(&[1f32], &mut vec![0.0; comm.ranks()]),
    ),
    (
        Call::AllGather {
            element: "f32",
            len: LENT,
        },
        |comm| {
            let all = comm.ranks() * LENT;
            comm.all_gather(&[1f32; LENT], &mut vec![0.0; all])
        },
    ),
    (
        Call::ReduceScatter {
            element: "u32",
            len: 1,
            reduction: Reduction::Sum,
        },
        |comm| comm.reduce_scatter(&vec![1u32; comm.ranks()], &mut [0], Reduction::Sum),
    ),
    (
        Call::Broadcast {
            element: "f32",
            len: 2,
            root: 1,
        },
        |comm| comm.broadcast(&mut [1f32; 2], 1),
    ),
];

/// What every rank of a new world returns; `None` for one that panics.
fn run<R: Send>(
    ranks: usize,
    deadline: Duration,
    body: impl Fn(Threads) -> R + Sync,
) -> Vec<Option<R>> {
    let body = &body;
    thread::scope(|scope| {
        let spawn = |comm| scope.spawn(move || body(comm));
        let ranks: Vec<_> = Threads::world(ranks, deadline)
            .unwrap()
            .into_iter()
            .map(spawn)
            .collect();
        ranks.into_iter().map(|rank| rank.join().ok()).collect()
    })
}

#[test]
fn a_rank_that_leaves_is_named() {
    for (collective, step) in STEPS {
        for ranks in 2..=5 {
            for lost in 0..ranks {
                let results = run(ranks, LONG, |mut comm| {
                    comm.barrier()?;
                    if comm.rank() == lost {
                        return Ok(());
                    }
                    step(&mut comm)
                });
                for (rank, result) in results.into_iter().enumerate() {
                    let expected = if rank == lost {
                        Ok(())
                    } else {
                        Err(Error::PeerLost {
                            rank: lost,
                            collective,
                        })
                    };
                    assert_eq!(result, Some(expected));
                }
            }
        }
    }
}

/// The panic comes while the others wait, or just before.
#[test]
fn a_rank_that_panics_is_named() {
    for (collective, step) in STEPS {
        let results = run(4, LONG, |mut comm| {
            comm.barrier()?;
            if comm.rank() == 2 {
                thread::sleep(Duration::from_millis(20));
                // Unwinds without the noise of the panic hook.
                std::panic::resume_unwind(Box::new(()));
            }
            step(&mut comm)
        });
        let lost = Some(Err(Error::PeerLost {
            rank: 2,
            collective,
        }));
        assert_eq!(results, [lost.clone(), lost.clone(), None, lost]);
    }
}

#[test]
fn a_late_rank_is_named() {
    let deadline = Duration::from_millis(500);
    for (expected, step) in STEPS {
        let (together, given_up) = (Barrier::new(4), Barrier::new(4));
        let results = run(4, deadline, |mut comm| {
            together.wait();
            let late = comm.rank() == 1;
            if late {
                given_up.wait();
            }
            let start = Instant::now();
            let result = step(&mut comm);
            if late {
                assert!(start.elapsed() < deadline, "a failed world answers at once");
            } else {
                given_up.wait();
            }
            (result, comm)
        });
        for result in results {
            let Some((
                Err(Error::Deadline {
                    rank,
                    collective,
                    waited,
                }),
                _,
            )) = result
            else {
                panic!("{result:?}");
            };
            assert_eq!((rank, collective), (1, expected));
            assert!(waited >= deadline);
        }
    }
}

#[test]
fn a_failed_world_stays_failed() {
    let results = run(3, LONG, |mut comm| {
        if comm.rank() == 0 {
            return;
        }
        let first = comm.barrier().unwrap_err();
        assert_eq!(
            first,
            Error::PeerLost {
                rank: 0,
                collective: Call::Barrier
            }
        );
        for (_, step) in STEPS.iter().chain(&STEPS) {
            assert_eq!(step(&mut comm), Err(first.clone()));
        }
    });
    assert_eq!(results, [Some(()); 3]);
}

/// A rank may leave as soon as its last collective is done, though others are still on their way
/// out of it.
#[test]
fn leaving_after_the_last_collective_harms_nobody() {
    for (_, step) in STEPS {
        for _ in 0..100 {
            let results = run(4, LONG, |mut comm| step(&mut comm));
            assert_eq!(
                results,
                [Some(Ok(())), Some(Ok(())), Some(Ok(())), Some(Ok(()))]
            );
        }
    }
}

/// The deadline is that of one wait: a world outlives it by far.
#[test]
fn a_deadline_is_for_one_wait() {
    let results = run(2, Duration::from_millis(500), |mut comm| {
        for _ in 0..15 {
            thread::sleep(Duration::from_millis(50));
            comm.barrier()?;
        }
        Ok::<_, Error>(())
    });
    assert_eq!(results, [Some(Ok(())), Some(Ok(()))]);
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
            },
            "rank 1 left the world before or during all-to-all of bf16",
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
