//! Arguments that do not fit end in the same error on every rank.

use lrmoe_comm::{Call, Collective, Error, Reduction, Side, bf16};

use crate::{Worlds, run};

/// An integer sum that just fits, and ones that do not: an error on every rank, whoever sums the
/// element.
pub(crate) fn overflow(world: impl Worlds) {
    for len in [1, 1024, 1025, 3000] {
        run(world, |comm| {
            let share = u32::MAX / comm.ranks() as u32;
            let mut values = vec![share; len];
            comm.all_reduce(&mut values, Reduction::Sum).unwrap();
            assert_eq!(values, vec![share * comm.ranks() as u32; len]);
        });
        for index in [0, len / 2, len - 1] {
            let too_much = |ranks, len| {
                let mut values = vec![0; len];
                values[index] = u32::MAX / ranks as u32 + 1;
                values
            };
            let reduction = Reduction::Sum;
            for result in run(world, |comm| {
                let mut values = too_much(comm.ranks(), len);
                comm.all_reduce(&mut values, reduction)
            }) {
                let collective = Call::AllReduce {
                    element: "u32",
                    len,
                    reduction,
                };
                assert_eq!(result, Err(Error::Overflow { index, collective }));
            }
            for result in run(world, |comm| {
                let values = too_much(comm.ranks(), len * comm.ranks());
                comm.reduce_scatter(&values, &mut vec![0; len], reduction)
            }) {
                let collective = Call::ReduceScatter {
                    element: "u32",
                    len,
                    reduction,
                };
                assert_eq!(result, Err(Error::Overflow { index, collective }));
            }
        }
    }
}

/// Every rank of a new world gets this error; `body` is told whether its rank is the last one.
fn expect_everywhere<W: Worlds>(
    world: W,
    expected: Error,
    body: impl Fn(&mut W::Comm, bool) -> Result<(), Error> + Sync,
) {
    let results = run(world, |comm| {
        let last = comm.rank() + 1 == comm.ranks();
        body(comm, last)
    });
    assert_eq!(results, vec![Err(expected); results.len()]);
}

/// The last rank gives arguments that do not fit each other.
pub(crate) fn misuse_of_all_to_all(world: impl Worlds) {
    let ranks = world.ranks();
    let rank = ranks - 1;
    let collective = Call::AllToAll { element: "f32" };
    let buffer = |side, found| Error::BufferLength {
        rank,
        collective,
        side,
        found,
        expected: ranks,
    };
    let ones = vec![1; ranks];
    for side in [Side::Send, Side::Receive] {
        let found = ranks + 1;
        expect_everywhere(world, buffer(side, found), |comm, last| {
            let len = |of| if last && side == of { found } else { ranks };
            let (send, mut recv) = (vec![0f32; len(Side::Send)], vec![0.0; len(Side::Receive)]);
            comm.all_to_all(&send, &ones, &mut recv, &ones)
        });
        let too_many = vec![1; found];
        let counts = Error::PeerCounts {
            rank,
            collective,
            side,
            found,
            ranks,
        };
        expect_everywhere(world, counts, |comm, last| {
            let counts = |of| if last && side == of { &too_many } else { &ones };
            let (send_counts, recv_counts) = (counts(Side::Send), counts(Side::Receive));
            let (send, mut recv) = (vec![0f32; ranks], vec![0.0; ranks]);
            comm.all_to_all(&send, send_counts, &mut recv, recv_counts)
        });
    }
}

/// The last rank gives arguments that do not fit each other or the world.
pub(crate) fn misuse_of_others(world: impl Worlds) {
    let ranks = world.ranks();
    let rank = ranks - 1;
    let buffer = |collective, side| Error::BufferLength {
        rank,
        collective,
        side,
        found: 2 * ranks - 1,
        expected: 2 * ranks,
    };
    let long = |last| 2 * ranks - usize::from(last);

    let (element, len) = ("u32", 2);
    let gather = buffer(Call::AllGather { element, len }, Side::Receive);
    expect_everywhere(world, gather, |comm, last| {
        comm.all_gather(&[1u32, 2], &mut vec![0; long(last)])
    });

    let (element, reduction) = ("bf16", Reduction::Max);
    let scatter = Call::ReduceScatter {
        element,
        len,
        reduction,
    };
    expect_everywhere(world, buffer(scatter, Side::Send), |comm, last| {
        comm.reduce_scatter(
            &vec![bf16::ONE; long(last)],
            &mut [bf16::ZERO; 2],
            reduction,
        )
    });

    let root = ranks;
    expect_everywhere(world, Error::Root { rank, root, ranks }, |comm, last| {
        comm.broadcast(&mut [1u32], if last { root } else { 0 })
    });
}

/// The two ends of a message disagree about its length.
pub(crate) fn counts_differ(world: impl Worlds) {
    let ranks = world.ranks();
    let error = Error::CountMismatch {
        from: ranks - 1,
        to: 0,
        sent: 2,
        expected: 3,
    };
    expect_everywhere(world, error, |comm, _| {
        let twos = vec![2; ranks];
        let mut expected = twos.clone();
        expected[ranks - 1] += usize::from(comm.rank() == 0);
        let mut recv = vec![0; expected.iter().sum()];
        comm.all_to_all(&vec![1u32; 2 * ranks], &twos, &mut recv, &expected)
    });
}

/// One of several calls that do not go together.
fn make_call(comm: &mut impl Collective, which: usize) -> Result<(), Error> {
    use Reduction::{Max, Sum};
    let (mut four, mut all) = ([0f32; 4], vec![0f32; 4 * comm.ranks()]);
    match which {
        0 => comm.barrier(),
        1 => comm.all_reduce(&mut [0u32; 4], Sum),
        2 => comm.all_reduce(&mut four, Sum),
        3 => comm.all_reduce(&mut four, Max),
        4 => comm.all_reduce(&mut [0f32; 2000], Sum),
        5 => comm.broadcast(&mut four, 0),
        6 => comm.broadcast(&mut four, 1),
        7 => comm.all_gather(&four, &mut all),
        8 => comm.reduce_scatter(&all, &mut four, Sum),
        _ => {
            let counts = vec![4; comm.ranks()];
            comm.all_to_all(&all.clone(), &counts, &mut all, &counts)
        }
    }
}

/// How an error names that call.
fn name_call(which: usize) -> Call {
    use Reduction::{Max, Sum};
    let (element, len) = ("f32", 4);
    let reduce = |element, len, reduction| Call::AllReduce {
        element,
        len,
        reduction,
    };
    match which {
        0 => Call::Barrier,
        1 => reduce("u32", 4, Sum),
        2 => reduce("f32", 4, Sum),
        3 => reduce("f32", 4, Max),
        4 => reduce("f32", 2000, Sum),
        5 | 6 => Call::Broadcast {
            element,
            len,
            root: which - 5,
        },
        7 => Call::AllGather { element, len },
        8 => Call::ReduceScatter {
            element,
            len,
            reduction: Sum,
        },
        _ => Call::AllToAll { element },
    }
}

/// The last rank makes another call than the others: every rank gets the error that says so, and
/// again on later calls.
pub(crate) fn calls_differ(world: impl Worlds) {
    for (most, one) in (0..10).flat_map(|most| (0..10).map(move |one| (most, one))) {
        let expected = match most == one {
            true => Ok(()),
            false => Err(Error::Mismatch {
                rank: world.ranks() - 1,
                found: name_call(one),
                expected: name_call(most),
            }),
        };
        run(world, |comm| {
            let odd = comm.rank() == comm.ranks() - 1;
            assert_eq!(make_call(comm, if odd { one } else { most }), expected);
            if most != one {
                assert_eq!(comm.barrier(), expected);
            }
        });
    }
}
