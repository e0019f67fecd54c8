//! What travels over which links, counted by hand.

use std::time::Duration;

use lrmoe_comm::{
    Algorithm, Collective, Counted, Error, Hierarchical, LinkTraffic, Reduction, Sent, Threads,
    Traffic, bf16,
};

type Nodes = Hierarchical<Counted<Threads>>;

/// What every rank of a world in nodes returns.
fn run<R: Send>(
    ranks: usize,
    per_node: usize,
    algorithm: Algorithm,
    body: impl Fn(&mut Nodes) -> R + Sync,
) -> Vec<R> {
    let body = &body;
    std::thread::scope(|scope| {
        let spawn = |comm| {
            let counted = Counted::new(comm, per_node).unwrap();
            let mut comm = Hierarchical::new(counted, per_node, algorithm).unwrap();
            scope.spawn(move || body(&mut comm))
        };
        let world = Threads::world(ranks, Duration::from_secs(60)).unwrap();
        let ranks: Vec<_> = world.into_iter().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn sent(bytes: u64, messages: u64) -> Sent {
    Sent { bytes, messages }
}

/// Every rank sends `len` numbers to every rank; what rank 0 sent for it.
fn even_all_to_all(algorithm: Algorithm, len: usize) -> LinkTraffic {
    let sent = run(4, 2, algorithm, |comm| {
        let (rank, counts) = (comm.rank() as f32, [len; 4]);
        let mut recv = vec![f32::NAN; 4 * len];
        comm.all_to_all(&vec![rank; 4 * len], &counts, &mut recv, &counts)
            .unwrap();
        let from = (0..4).flat_map(|from| vec![from as f32; len]);
        assert!(recv.iter().copied().eq(from));
        comm.world_mut().take_traffic()
    });
    assert!(sent.iter().all(|traffic| *traffic == sent[0]));
    assert_eq!(sent[0].total(), sent[0].all_to_all);
    sent[0].all_to_all
}

/// Of 4 ranks in 2 nodes, each has itself, a neighbour and 2 far ranks.
#[test]
fn straight_messages() {
    let expected = LinkTraffic {
        own: sent(400, 1),
        intra: sent(400, 1),
        inter: sent(800, 2),
    };
    assert_eq!(even_all_to_all(Algorithm::Direct, 100), expected);
}

/// In the first hop 2 of 4 messages go to the neighbour and 2 stay; in the second 2 stay and 2 go
/// to the far rank of the same place. So do the counts, of 9 words to each rank.
#[test]
fn joined_messages() {
    let joined = 2 * (400 + 36);
    let expected = LinkTraffic {
        own: sent(2 * joined, 4),
        intra: sent(joined, 2),
        inter: sent(joined, 2),
    };
    assert_eq!(even_all_to_all(Algorithm::Hierarchical, 100), expected);
}

/// 8 ranks in nodes of 4: without nodes a rank sends 4 messages across; over nodes one, and one of
/// counts before it. The bytes of the messages are the same.
#[test]
fn fewer_messages_cross() {
    let far = |algorithm| {
        let traffic = run(8, 4, algorithm, |comm| {
            let counts = [10; 8];
            comm.all_to_all(&[1u32; 80], &counts, &mut [0; 80], &counts)
                .unwrap();
            comm.world().traffic().all_to_all.inter
        });
        traffic[5]
    };
    assert_eq!(far(Algorithm::Direct), sent(4 * 40, 4));
    let words = 4 * 4 * (1 + 2 * 8);
    assert_eq!(far(Algorithm::Hierarchical), sent(4 * 40 + words, 2));
}

/// Two messages of 400 bytes from each rank to the other node become one of 800.
#[test]
fn bytes_for_each_message_saved_decide() {
    let auto = |most_bytes| even_all_to_all(Algorithm::Auto { most_bytes }, 100);
    let counts = LinkTraffic {
        own: sent(2 * 72, 2),
        intra: sent(72, 1),
        inter: sent(72, 1),
    };
    assert_eq!(auto(800), even_all_to_all(Algorithm::Hierarchical, 100));
    assert_eq!(auto(799), even_all_to_all(Algorithm::Direct, 100) + counts);
}

/// Ranks 2 and 3 send 12 and 4 numbers to rank 0: 64 bytes to carry once more, one message saved.
/// The ranks that send nothing decide likewise.
#[test]
fn all_ranks_take_one_decision() {
    for most_bytes in [0, 63, 64, 1000] {
        let messages = run(4, 2, Algorithm::Auto { most_bytes }, |comm| {
            let rank = comm.rank();
            let len = [0, 0, 12, 4][rank];
            let (send, all) = (vec![rank as u32; len], [0, 0, 12, 4]);
            let recv_counts = if rank == 0 { all } else { [0; 4] };
            let mut recv = vec![0; recv_counts.iter().sum()];
            comm.all_to_all(&send, &[len, 0, 0, 0], &mut recv, &recv_counts)
                .unwrap();
            let from = (0..4).flat_map(|from| vec![from as u32; recv_counts[from]]);
            assert!(recv.iter().copied().eq(from));
            comm.world().traffic().all_to_all.inter.messages
        });
        let rows = if most_bytes < 64 { 2 } else { 1 };
        assert_eq!(messages.iter().sum::<u64>(), 4 + rows, "{most_bytes}");
    }
}

/// Nothing is saved where each receiver has one sender in a node.
#[test]
fn nothing_to_save_goes_straight() {
    let most_bytes = u64::MAX;
    let traffic = run(4, 2, Algorithm::Auto { most_bytes }, |comm| {
        let (rank, mut counts) = (comm.rank(), [0; 4]);
        counts[3 - rank] = 1;
        comm.all_to_all(&[1u32], &counts, &mut [0], &counts)
            .unwrap();
        comm.world().traffic().all_to_all
    });
    // The counts in their two hops, and one message more.
    assert!(traffic.iter().all(|links| links.inter == sent(72 + 4, 2)));
    assert!(traffic.iter().all(|links| links.intra == sent(72, 1)));
}

#[test]
fn other_collectives() {
    let traffic = run(4, 2, Algorithm::Hierarchical, |comm| {
        comm.barrier().unwrap();
        comm.all_reduce(&mut [1f32; 10], Reduction::Sum).unwrap();
        comm.all_gather(&[bf16::ONE; 3], &mut [bf16::ZERO; 12])
            .unwrap();
        comm.reduce_scatter(&[1u32; 8], &mut [0; 2], Reduction::Max)
            .unwrap();
        comm.broadcast(&mut [1f32; 5], 2).unwrap();
        *comm.world().traffic()
    });
    let links = |own, intra, inter| LinkTraffic { own, intra, inter };
    let even = |bytes| links(sent(bytes, 1), sent(bytes, 1), sent(2 * bytes, 2));
    // Slices of 3, 3, 3 and 1 of the 10 numbers: out, then the own one to all.
    let reduced = [
        links(sent(24, 2), sent(24, 2), sent(12 + 4 + 24, 4)),
        links(sent(24, 2), sent(24, 2), sent(12 + 4 + 24, 4)),
        links(sent(24, 2), sent(4 + 12, 2), sent(24 + 24, 4)),
        links(sent(8, 2), sent(12 + 4, 2), sent(24 + 8, 4)),
    ];
    for (rank, traffic) in traffic.into_iter().enumerate() {
        let expected = Traffic {
            all_to_all: LinkTraffic::default(),
            all_reduce: reduced[rank],
            all_gather: even(6),
            reduce_scatter: even(8),
            broadcast: if rank == 2 {
                even(20)
            } else {
                LinkTraffic::default()
            },
        };
        assert_eq!(traffic, expected, "rank {rank}");
    }
}

#[test]
fn failed_collectives_are_not_counted() {
    run(2, 1, Algorithm::Direct, |comm| {
        let len = 3 + comm.rank();
        comm.all_reduce(&mut vec![1u32; len], Reduction::Sum)
            .unwrap_err();
        assert_eq!(*comm.world().traffic(), Traffic::default());
    });
}

/// A rank that goes between the hops is named by all others.
#[test]
fn a_lost_rank_is_named() {
    let lost = run(6, 2, Algorithm::Hierarchical, |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 4 {
            return None;
        }
        let counts = [1; 6];
        Some(comm.all_to_all(&[0u32; 6], &counts, &mut [0; 6], &counts))
    });
    for (rank, result) in lost.into_iter().enumerate() {
        match result {
            None => assert_eq!(rank, 4),
            Some(result) => {
                let error = result.unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 4, .. }), "{error}");
            }
        }
    }
}

#[test]
fn nodes_have_ranks() {
    let mut world = Threads::world(1, Duration::from_secs(1)).unwrap();
    let comm = world.pop().unwrap();
    assert_eq!(Counted::new(comm, 0).unwrap_err(), Error::NoRanksPerNode);
}
