//! Exchanges while the rank computes.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lrmoe_comm::{Call, Collective, Error, Reduction, bf16};

use crate::checks::{
    check_all_gather, check_all_reduce, check_all_to_all, check_broadcast, check_reduce_scatter,
};
use crate::{LONG, Worlds, run};

/// Every collective, also without elements, with one rank that sends everything, and with messages that are lent.
pub(crate) fn every_collective(world: impl Worlds) {
    run(world, |comm| {
        let last = comm.ranks() - 1;
        let (barrier, computed) = comm.overlap(
            |comm| {
                check_all_to_all::<u32>(comm, 1, |_, _| 0);
                check_all_to_all::<f32>(comm, 2, |from, _| if from == last { 30_011 } else { 0 });
                check_all_to_all::<bf16>(comm, 3, |from, to| 3001 * (from + 2 * to));
                check_all_reduce::<f32>(comm, 4, 5000, Reduction::Sum);
                check_all_gather::<f32>(comm, 5, 513);
                check_reduce_scatter::<u32>(comm, 6, 1025, Reduction::Sum);
                check_broadcast::<f32>(comm, 7, 511, last);
                comm.barrier()
            },
            || (0..100_000u64).sum::<u64>(),
        );
        assert_eq!((barrier, computed), (Ok(()), 4_999_950_000));
        // Some ranks overlap, others do not.
        match comm.rank() % 2 {
            0 => {
                comm.overlap(|comm| check_all_gather::<f32>(comm, 8, 20_001), || ())
                    .0
            }
            _ => check_all_gather::<f32>(comm, 8, 20_001),
        }
    });
}

/// The exchange is done before the computing is.
pub(crate) fn goes_on_while_the_rank_computes(world: impl Worlds) {
    run(world, |comm| {
        let exchanged = AtomicBool::new(false);
        let start = Instant::now();
        comm.overlap(
            |comm| {
                check_all_to_all::<f32>(comm, 1, |_, _| 20_001);
                exchanged.store(true, Ordering::Release);
            },
            || {
                while !exchanged.load(Ordering::Acquire) {
                    assert!(
                        start.elapsed() < LONG,
                        "the exchange waits for the computing"
                    );
                    thread::yield_now();
                }
            },
        );
    });
}

/// What a rank gives is there until all have read it, though it panics meanwhile; the world goes on.
pub(crate) fn a_panic_harms_no_peer(world: impl Worlds) {
    let panics = world.ranks() - 1;
    run(world, |comm| {
        let is_it = comm.rank() == panics;
        let mut is_checked = false;
        let result = catch_unwind(AssertUnwindSafe(|| {
            comm.overlap(
                |comm| {
                    if !is_it {
                        thread::sleep(Duration::from_millis(20));
                    }
                    check_all_to_all::<f32>(comm, 1, |_, _| 50_021);
                    is_checked = true;
                },
                || {
                    if is_it {
                        resume_unwind(Box::new("computing"));
                    }
                },
            )
        }));
        assert!(is_checked);
        assert_eq!(result.is_err(), is_it);
        if let Err(panic) = result {
            assert_eq!(panic.downcast_ref(), Some(&"computing"));
        }
        comm.barrier().unwrap();
        // So does that of the exchange.
        let result = catch_unwind(AssertUnwindSafe(|| {
            comm.overlap(|_| resume_unwind(Box::new("exchange")), || ())
        }));
        let panic = result.map(|((), ())| ()).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"exchange"));
        comm.barrier().unwrap();
    });
}

/// An exchange that fails takes nothing from what was computed.
pub(crate) fn an_error_leaves_what_was_computed(world: impl Worlds) {
    let ranks = world.ranks();
    run(world, |comm| {
        let (error, computed) = comm.overlap(|comm| comm.broadcast(&mut [1u32], ranks), || 5);
        assert!(matches!(error, Err(Error::Root { root, .. }) if root == ranks));
        assert_eq!(computed, 5);
    });
}

/// Long enough for ranks that share a busy core to meet.
const DEADLINE: Duration = Duration::from_millis(500);

/// The deadline is that of the exchange, however long the computing takes; whoever is missing is named.
pub(crate) fn a_late_rank_is_named<W: Worlds>(world: W) {
    let late = world.ranks() - 1;
    let expected = Call::AllToAll { element: "f32" };
    world.start(DEADLINE, |mut comm: W::Comm| {
        let ones = vec![30_000; comm.ranks()];
        let send = vec![1f32; 30_000 * comm.ranks()];
        let mut received = send.clone();
        let (done, ()) = comm.overlap(
            |comm| comm.all_to_all(&send, &ones, &mut received, &ones),
            || thread::sleep(DEADLINE * 3 / 2),
        );
        done.unwrap();
        if comm.rank() == late {
            thread::sleep(2 * DEADLINE);
        }
        let (done, computed) = comm.overlap(
            |comm| comm.all_to_all(&send, &ones, &mut received, &ones),
            || 7,
        );
        let Err(Error::Deadline {
            rank, collective, ..
        }) = done
        else {
            panic!("{done:?}");
        };
        assert_eq!((rank, collective, computed), (late, expected, 7));
        // Nobody leaves before the late rank has been told.
        thread::sleep(2 * DEADLINE);
    });
}
