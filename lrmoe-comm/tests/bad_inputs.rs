//! What every public entry point does with inputs at and past the edge: the exact error, or the right result.
//!
//! Not repeated here: buffers, counts, roots and calls that do not fit on one of several ranks, sums past 32 bits and odd numbers
//! (`tests/conformance`, all worlds), and a rendezvous of bad ranks, bytes and ports (`rendezvous.rs`).

use std::time::Duration;

use lrmoe_comm::{
    Algorithm, Call, Collective, Counted, Error, Hierarchical, Reduction, Side, Solo, Threads,
};

const LONG: Duration = Duration::from_secs(60);

#[test]
fn worlds_of_extreme_sizes() {
    let world = |ranks| Threads::world(ranks, Duration::ZERO).map(|world| world.len());
    let too_many = |ranks| {
        Err(Error::TooManyRanks {
            ranks,
            most: 65_536,
        })
    };
    let cases = [
        (0, Err(Error::NoRanks)),
        (1, Ok(1)),
        (65_537, too_many(65_537)),
        (usize::MAX, too_many(usize::MAX)),
    ];
    for (ranks, expected) in cases {
        assert_eq!(world(ranks), expected, "{ranks} ranks");
    }
    let none = Err(Error::NoRanksPerNode);
    assert_eq!(Counted::new(Solo, 0).map(drop), none);
    for algorithm in [Algorithm::Direct, Algorithm::Hierarchical] {
        assert_eq!(Hierarchical::new(Solo, 0, algorithm).map(drop), none);
        let mut nodes = Hierarchical::new(Solo, usize::MAX, algorithm).unwrap();
        assert_eq!(
            nodes.barrier(),
            Ok(()),
            "a node of more ranks than there are"
        );
    }
}

/// Every collective of a rank alone, in every kind of world.
fn alone(mut comm: impl Collective) {
    let call = Call::AllToAll { element: "f32" };
    let counts = |side, found| {
        Err(Error::PeerCounts {
            rank: 0,
            collective: call,
            side,
            found,
            ranks: 1,
        })
    };
    let buffer = |collective, side, found, expected| {
        Err(Error::BufferLength {
            rank: 0,
            collective,
            side,
            found,
            expected,
        })
    };
    let differ = Err(Error::CountMismatch {
        from: 0,
        to: 0,
        sent: 1,
        expected: 2,
    });
    type Case<'a> = (
        &'a [f32],
        &'a [usize],
        usize,
        &'a [usize],
        Result<(), Error>,
    );
    let cases: [Case<'_>; 8] = [
        (&[], &[0], 0, &[0], Ok(())),
        (&[1.0], &[1], 1, &[1], Ok(())),
        (&[], &[], 0, &[0], counts(Side::Send, 0)),
        (&[], &[0], 0, &[], counts(Side::Receive, 0)),
        (&[], &[0, 0], 0, &[0], counts(Side::Send, 2)),
        (
            &[1.0],
            &[usize::MAX],
            1,
            &[1],
            buffer(call, Side::Send, 1, usize::MAX),
        ),
        (
            &[1.0],
            &[1],
            1,
            &[usize::MAX],
            buffer(call, Side::Receive, 1, usize::MAX),
        ),
        (&[1.0], &[1], 2, &[2], differ),
    ];
    for (number, (send, send_counts, recv, recv_counts, expected)) in cases.into_iter().enumerate()
    {
        let mut received = vec![0.0; recv];
        let found = comm.all_to_all(send, send_counts, &mut received, recv_counts);
        assert_eq!(found, expected, "case {number}");
    }

    let gather = |len| Call::AllGather {
        element: "u32",
        len,
    };
    let mut all = [0_u32; 2];
    assert_eq!(comm.all_gather(&[7], &mut all[..1]), Ok(()));
    assert_eq!(comm.all_gather::<u32>(&[], &mut []), Ok(()));
    assert_eq!(
        comm.all_gather(&[7], &mut all),
        buffer(gather(1), Side::Receive, 2, 1)
    );
    assert_eq!(
        comm.all_gather(&[], &mut all),
        buffer(gather(0), Side::Receive, 2, 0)
    );
    let reduction = Reduction::Sum;
    let scatter = Call::ReduceScatter {
        element: "u32",
        len: 0,
        reduction,
    };
    assert_eq!(
        comm.reduce_scatter(&[7_u32], &mut [], reduction),
        buffer(scatter, Side::Send, 1, 0)
    );
    assert_eq!(comm.reduce_scatter::<u32>(&[], &mut [], reduction), Ok(()));
    assert_eq!(comm.all_reduce::<u32>(&mut [], reduction), Ok(()));
    assert_eq!(comm.all_reduce(&mut [u32::MAX], reduction), Ok(()));
    assert_eq!(comm.broadcast::<u32>(&mut [], 0), Ok(()));
    for root in [1, usize::MAX] {
        let expected = Err(Error::Root {
            rank: 0,
            root,
            ranks: 1,
        });
        assert_eq!(comm.broadcast(&mut [1_u32], root), expected);
    }
    assert_eq!(comm.barrier(), Ok(()));
}

#[test]
fn a_rank_alone() {
    alone(Solo);
    alone(Hierarchical::new(Counted::new(Solo, 1).unwrap(), 1, Algorithm::Hierarchical).unwrap());
}

/// A world of threads stays failed after an error, so each call gets one of its own.
#[test]
fn a_failed_world_stays_failed() {
    let mut world = Threads::world(1, LONG).unwrap();
    let error = Error::Root {
        rank: 0,
        root: 1,
        ranks: 1,
    };
    assert_eq!(world[0].broadcast(&mut [1_u32], 1), Err(error));
    assert!(world[0].barrier().is_err(), "after an error");
}

/// Deadlines at both ends: with none to spare a rank that is alone names the other; the longest there is lets ranks meet.
#[test]
fn deadlines_of_0_and_of_all_time() {
    let mut world = Threads::world(2, Duration::ZERO).unwrap();
    let found = world[0].barrier().unwrap_err();
    let missed = matches!(
        found,
        Error::Deadline {
            rank: 1,
            collective: Call::Barrier,
            ..
        }
    );
    assert!(missed, "{found}");
    let world = Threads::world(2, Duration::MAX).unwrap();
    std::thread::scope(|scope| {
        for mut comm in world {
            scope.spawn(move || {
                // One is late, so that the other waits.
                std::thread::sleep(Duration::from_millis(20 * comm.rank() as u64));
                assert_eq!(comm.barrier(), Ok(()));
            });
        }
    });
}
