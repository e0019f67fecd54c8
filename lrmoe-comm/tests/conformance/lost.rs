//! A rank that leaves or is late ends in an error on every other rank, never in a hang.

use std::thread;
use std::time::{Duration, Instant};

use lrmoe_comm::{Call, Collective, Error, Reduction};

use crate::{LONG, Worlds};

type Step<C> = (Call, fn(&mut C) -> Result<(), Error>);

/// Every collective, in small and large.
fn steps<C: Collective>() -> Vec<Step<C>> {
    const SUM: Reduction = Reduction::Sum;
    let reduce = |len| Call::AllReduce {
        element: "f32",
        len,
        reduction: SUM,
    };
    vec![
        (Call::Barrier, |comm| comm.barrier()),
        (Call::AllToAll { element: "u32" }, |comm| {
            let ones = vec![1; comm.ranks()];
            let (send, mut recv) = (vec![1u32; comm.ranks()], vec![0; comm.ranks()]);
            comm.all_to_all(&send, &ones, &mut recv, &ones)
        }),
        (reduce(3), |comm| comm.all_reduce(&mut [1f32; 3], SUM)),
        (reduce(3000), |comm| comm.all_reduce(&mut [1f32; 3000], SUM)),
        (
            Call::AllGather {
                element: "f32",
                len: 20_000,
            },
            |comm| comm.all_gather(&[1f32; 20_000], &mut vec![0.0; 20_000 * comm.ranks()]),
        ),
        (
            Call::ReduceScatter {
                element: "u32",
                len: 1,
                reduction: SUM,
            },
            |comm| comm.reduce_scatter(&vec![1u32; comm.ranks()], &mut [0], SUM),
        ),
        (
            Call::ReduceScatter {
                element: "f32",
                len: 20_000,
                reduction: SUM,
            },
            |comm| {
                let values = vec![1f32; 20_000 * comm.ranks()];
                comm.reduce_scatter(&values, &mut [0.0; 20_000], SUM)
            },
        ),
        (
            Call::Broadcast {
                element: "f32",
                len: 2,
                root: 1,
            },
            |comm| comm.broadcast(&mut [1f32; 2], 1),
        ),
    ]
}

fn assert_lost(error: &Error, lost: usize, missed: Call) {
    let Error::PeerLost {
        rank,
        collective,
        waited,
    } = *error
    else {
        panic!("{error}");
    };
    assert_eq!((rank, collective), (lost, missed));
    assert!(waited < LONG, "{error}");
}

pub(crate) fn a_rank_that_leaves_is_named<W: Worlds>(world: W) {
    for (collective, step) in steps() {
        for lost in 0..world.ranks() {
            world.start(LONG, |mut comm: W::Comm| {
                comm.barrier().unwrap();
                if comm.rank() != lost {
                    assert_lost(&step(&mut comm).unwrap_err(), lost, collective);
                }
            });
        }
    }
}

/// Long enough for ranks that share a busy core to meet.
const DEADLINE: Duration = Duration::from_millis(500);

pub(crate) fn a_late_rank_is_named<W: Worlds>(world: W) {
    let late = world.ranks() - 1;
    // A barrier, one with two meetings and one whose elements are lent.
    for (expected, step) in [0, 3, 4].map(|which| steps()[which]) {
        world.start(DEADLINE, |mut comm: W::Comm| {
            comm.barrier().unwrap();
            if comm.rank() == late {
                thread::sleep(2 * DEADLINE);
            }
            let start = Instant::now();
            let error = step(&mut comm).unwrap_err();
            let took = start.elapsed();
            let Error::Deadline {
                rank,
                collective,
                waited,
            } = error
            else {
                panic!("{error}");
            };
            assert_eq!((rank, collective), (late, expected));
            assert!(waited >= DEADLINE);
            if comm.rank() == late {
                assert!(took < DEADLINE, "a failed world answers at once");
            }
            // Nobody leaves before the late rank has been told.
            thread::sleep(2 * DEADLINE);
        });
    }
}

pub(crate) fn a_failed_world_stays_failed<W: Worlds>(world: W) {
    world.start(LONG, |mut comm: W::Comm| {
        if comm.rank() == 0 {
            return;
        }
        let first = comm.barrier().unwrap_err();
        assert_lost(&first, 0, Call::Barrier);
        for (_, step) in steps() {
            assert_eq!(step(&mut comm), Err(first.clone()));
        }
    });
}

/// A rank may leave as soon as its last collective is done, though others are still on their way
/// out of it.
pub(crate) fn leaving_after_the_last_collective_harms_nobody<W: Worlds>(world: W) {
    for (_, step) in steps() {
        for _ in 0..10 {
            world.start(LONG, |mut comm: W::Comm| step(&mut comm).unwrap());
        }
    }
}

/// The deadline is that of one wait: a world outlives it by far.
pub(crate) fn a_deadline_is_for_one_wait<W: Worlds>(world: W) {
    world.start(DEADLINE, |mut comm: W::Comm| {
        for _ in 0..6 {
            thread::sleep(DEADLINE / 5);
            comm.barrier().unwrap();
        }
    });
}
