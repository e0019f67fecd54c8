//! The plan carried out between threads that stand for devices, against [`Threads`].

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use half::bf16;

use super::form::Kind;
use super::plan::Way;
use super::staged::{Device, Op, Staged};
use crate::{Call, Collective, Element, Error, Reduction, Side, Threads};

/// Long enough that only messages that never meet wait for it.
const DEADLINE: Duration = Duration::from_secs(20);

/// By sender and receiver.
type Messages = HashMap<(usize, usize), VecDeque<Vec<u8>>>;

/// Messages on their way.
#[derive(Default)]
struct Links {
    messages: Mutex<Messages>,
    changed: Condvar,
}

/// A device whose memory is the host's. Of a group, it sends everything, and is done when all it
/// is to receive has come and all it has sent has been received, as NCCL may be.
struct Emulated {
    comm: Threads,
    links: Arc<Links>,
    send: Vec<u8>,
    recv: Vec<u8>,
}

impl Emulated {
    fn group(&mut self, kind: Kind, transfers: &[super::plan::Transfer]) {
        let rank = self.comm.rank();
        let size = kind.size();
        let mut messages = self.links.messages.lock().unwrap();
        for part in transfers.iter().filter(|part| part.way == Way::Send) {
            let bytes = self.send[part.at * size..][..part.elements.len() * size].to_vec();
            messages
                .entry((rank, part.peer))
                .or_default()
                .push_back(bytes);
        }
        self.links.changed.notify_all();
        let wait = |messages| {
            let (messages, timeout) = self.links.changed.wait_timeout(messages, DEADLINE).unwrap();
            assert!(!timeout.timed_out(), "rank {rank} waits for ever");
            messages
        };
        for part in transfers.iter().filter(|part| part.way == Way::Receive) {
            let message = loop {
                if let Some(message) = messages.entry((part.peer, rank)).or_default().pop_front() {
                    break message;
                }
                messages = wait(messages);
            };
            // A message of another length would be undefined.
            self.recv[part.at * size..][..part.elements.len() * size].copy_from_slice(&message);
            self.links.changed.notify_all();
        }
        for part in transfers.iter().filter(|part| part.way == Way::Send) {
            while !messages.entry((rank, part.peer)).or_default().is_empty() {
                messages = wait(messages);
            }
        }
    }

    /// What all ranks have to send.
    fn all(&mut self, bytes: usize) -> Result<Vec<Vec<u8>>, Error> {
        let mine: &[bf16] = bytemuck::cast_slice(&self.send[..bytes]);
        let mut all = vec![bf16::ZERO; self.comm.ranks() * mine.len()];
        self.comm.all_gather(mine, &mut all)?;
        let all: &[u8] = bytemuck::cast_slice(&all);
        Ok(all.chunks(bytes).map(<[u8]>::to_vec).collect())
    }

    /// Every rank's values, reduced in the order of the ranks.
    fn reduced(&mut self, kind: Kind, reduction: Reduction, len: usize) -> Result<Vec<u8>, Error> {
        let all = self.all(len * kind.size())?;
        let value = |index: usize| {
            let parts = all
                .iter()
                .map(|values| &values[index * kind.size()..][..kind.size()]);
            match (kind, reduction) {
                (Kind::U64, Reduction::Sum) => {
                    let sum: u64 = parts.map(bytemuck::pod_read_unaligned::<u64>).sum();
                    sum.to_ne_bytes().to_vec()
                }
                (Kind::F32, Reduction::Sum) => {
                    let values = parts.map(bytemuck::pod_read_unaligned::<f32>);
                    let sum = values.reduce(|sum, value| sum + value).unwrap();
                    sum.to_ne_bytes().to_vec()
                }
                (Kind::Bf16, Reduction::Sum) => {
                    let values =
                        parts.map(|part| bytemuck::pod_read_unaligned::<bf16>(part).to_f32());
                    let sum = values.reduce(|sum, value| sum + value).unwrap();
                    bf16::from_f32(sum).to_ne_bytes().to_vec()
                }
                (Kind::U32, Reduction::Max) => {
                    let largest = parts.map(bytemuck::pod_read_unaligned::<u32>).max();
                    largest.unwrap().to_ne_bytes().to_vec()
                }
                other => panic!("the device is not asked for {other:?}"),
            }
        };
        Ok((0..len).flat_map(value).collect())
    }
}

impl Device for Emulated {
    fn capacity(&self) -> usize {
        self.send.len()
    }

    fn upload(&mut self, at: usize, bytes: &[u8]) -> Result<(), Error> {
        self.send[at..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, at: usize, bytes: &mut [u8]) -> Result<(), Error> {
        bytes.copy_from_slice(&self.recv[at..][..bytes.len()]);
        Ok(())
    }

    fn run(&mut self, _: Call, kind: Kind, op: Op<'_>) -> Result<(), Error> {
        let (size, ranks) = (kind.size(), self.comm.ranks());
        let received = match op {
            Op::Group(transfers) => {
                self.group(kind, transfers);
                return Ok(());
            }
            Op::AllReduce { len, reduction } => self.reduced(kind, reduction, len)?,
            Op::AllGather { len } => self.all(len * size)?.concat(),
            Op::ReduceScatter { len, reduction } => {
                let all = self.reduced(kind, reduction, len * ranks)?;
                all[self.comm.rank() * len * size..][..len * size].to_vec()
            }
            Op::Broadcast { len, root } => self.all(len * size)?.swap_remove(root),
        };
        self.recv[..received.len()].copy_from_slice(&received);
        Ok(())
    }
}

/// What every rank of a world of devices returns.
fn run<R: Send>(
    ranks: usize,
    compares: bool,
    body: impl Fn(&mut Staged<Emulated>, &mut Threads) -> R + Sync,
) -> Vec<R> {
    // A few elements of each type fit at a time.
    let capacity = 24 * ranks;
    let links = Arc::new(Links::default());
    let worlds = Threads::world(ranks, DEADLINE).unwrap();
    let oracles = Threads::world(ranks, DEADLINE).unwrap();
    let body = &body;
    std::thread::scope(|scope| {
        let spawn = |(comm, mut oracle): (Threads, Threads)| {
            let place = (comm.rank(), ranks);
            let device = Emulated {
                comm,
                links: Arc::clone(&links),
                send: vec![0; capacity],
                recv: vec![0; capacity],
            };
            let mut staged = Staged::new(place, device, compares);
            scope.spawn(move || body(&mut staged, &mut oracle))
        };
        let threads: Vec<_> = worlds.into_iter().zip(oracles).map(spawn).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

fn hash(mut word: u32) -> u32 {
    for _ in 0..3 {
        word = (word ^ (word >> 15))
            .wrapping_mul(0x2C1B_3C6D)
            .wrapping_add(1);
    }
    word ^ (word >> 13)
}

trait Value: Element + std::fmt::Debug {
    fn from_hash(hash: u32) -> Self;
}

impl Value for u32 {
    fn from_hash(hash: u32) -> Self {
        hash >> 4
    }
}

impl Value for f32 {
    fn from_hash(hash: u32) -> Self {
        (hash as i32 as f32) * 2f32.powi((hash % 32) as i32 - 47)
    }
}

impl Value for bf16 {
    fn from_hash(hash: u32) -> Self {
        Self::from_f32(f32::from_hash(hash))
    }
}

/// Every collective with both worlds; what comes out must be the same, to the bit.
fn check<T: Value>(
    staged: &mut Staged<Emulated>,
    oracle: &mut Threads,
    seed: u32,
    len: usize,
) -> Result<(), Error> {
    let (rank, ranks) = (oracle.rank(), oracle.ranks());
    let random = |len: usize| -> Vec<T> {
        let value = |index| T::from_hash(hash(seed ^ hash(rank as u32) ^ hash(index as u32)));
        (0..len).map(value).collect()
    };
    let same = |found: &[T], expected: &[T]| {
        let bytes = |values| bytemuck::cast_slice::<T, u8>(values).to_vec();
        assert_eq!(bytes(found), bytes(expected), "{found:?}, {expected:?}");
    };
    // From nothing to several parts of each message.
    let most = (2 * staged.part_of::<T>() + 2) as u32;
    let count = |from: usize, to: usize| (hash(seed ^ (from * 8 + to) as u32) % most) as usize;
    let send_counts: Vec<_> = (0..ranks).map(|to| count(rank, to)).collect();
    let recv_counts: Vec<_> = (0..ranks).map(|from| count(from, rank)).collect();
    let send = random(send_counts.iter().sum());
    let mut received = [(); 2].map(|()| vec![T::zeroed(); recv_counts.iter().sum()]);
    staged.all_to_all(&send, &send_counts, &mut received[0], &recv_counts)?;
    oracle.all_to_all(&send, &send_counts, &mut received[1], &recv_counts)?;
    same(&received[0], &received[1]);

    let (mine, many) = (random(len), random(len * ranks));
    let mut all = [(); 2].map(|()| vec![T::zeroed(); len * ranks]);
    staged.all_gather(&mine, &mut all[0])?;
    oracle.all_gather(&mine, &mut all[1])?;
    same(&all[0], &all[1]);
    for reduction in [Reduction::Sum, Reduction::Max] {
        let mut values = [(); 2].map(|()| mine.clone());
        staged.all_reduce(&mut values[0], reduction)?;
        oracle.all_reduce(&mut values[1], reduction)?;
        same(&values[0], &values[1]);
        staged.reduce_scatter(&many, &mut values[0], reduction)?;
        oracle.reduce_scatter(&many, &mut values[1], reduction)?;
        same(&values[0], &values[1]);
    }
    let root = seed as usize % ranks;
    let mut values = [(); 2].map(|()| mine.clone());
    staged.broadcast(&mut values[0], root)?;
    oracle.broadcast(&mut values[1], root)?;
    same(&values[0], &values[1]);
    staged.barrier()
}

#[test]
fn collectives_as_of_threads() {
    for ranks in 1..=6 {
        for compares in [false, true] {
            run(ranks, compares, |staged, oracle| {
                for seed in 0..12 {
                    let len = [0, 1, 2, 3, 6, 7, 13, 40][seed as usize % 8];
                    check::<u32>(staged, oracle, seed, len).unwrap();
                    check::<f32>(staged, oracle, seed, len).unwrap();
                    check::<bf16>(staged, oracle, seed, len).unwrap();
                }
            });
        }
    }
}

#[test]
fn a_nan_is_the_largest() {
    run(3, false, |staged, _| {
        let last = staged.rank() == 2;
        let nan = if last { f32::NAN } else { f32::INFINITY };
        let negative = -1.0 - staged.rank() as f32;
        let mut values = [nan, negative, f32::NEG_INFINITY];
        staged.all_reduce(&mut values, Reduction::Max).unwrap();
        assert!(values[0].is_nan());
        assert_eq!(values[1..], [-1.0, f32::NEG_INFINITY]);
    });
}

#[test]
fn sums_out_of_range() {
    let (element, reduction, len) = ("u32", Reduction::Sum, 30);
    let overflow = |collective, index| Err(Error::Overflow { index, collective });
    for result in run(3, false, |staged, _| {
        let mut values = vec![1; len];
        values[25] = u32::MAX / 3 + 1;
        staged.all_reduce(&mut values, reduction)
    }) {
        let call = Call::AllReduce {
            element,
            len,
            reduction,
        };
        assert_eq!(result, overflow(call, 25));
    }
    for result in run(3, false, |staged, _| {
        let mut values = vec![1; 3 * len];
        values[len + 20] = u32::MAX;
        values[len + 21] = u32::MAX;
        staged.reduce_scatter(&values, &mut vec![0; len], reduction)
    }) {
        let call = Call::ReduceScatter {
            element,
            len,
            reduction,
        };
        assert_eq!(result, overflow(call, len + 20));
    }
}

#[test]
fn calls_are_compared() {
    let (element, len) = ("f32", 4);
    let found = Call::Broadcast {
        element,
        len,
        root: 1,
    };
    let expected = Call::AllReduce {
        element,
        len,
        reduction: Reduction::Max,
    };
    for result in run(3, true, |staged, _| {
        let first = match staged.rank() {
            2 => staged.broadcast(&mut [0f32; 4], 1),
            _ => staged.all_reduce(&mut [0f32; 4], Reduction::Max),
        };
        assert_eq!(staged.barrier(), first, "a failure is for good");
        first
    }) {
        let rank = 2;
        assert_eq!(
            result,
            Err(Error::Mismatch {
                rank,
                found,
                expected
            })
        );
    }

    let (from, to, sent, expected) = (1, 0, 2, 3);
    let mismatch = Error::CountMismatch {
        from,
        to,
        sent,
        expected,
    };
    for result in run(2, true, |staged, _| {
        let expected = [2, if staged.rank() == 0 { 3 } else { 2 }];
        let mut recv = vec![0u32; expected.iter().sum()];
        staged.all_to_all(&[0; 4], &[2, 2], &mut recv, &expected)
    }) {
        assert_eq!(result, Err(mismatch.clone()));
    }
}

/// It gets its own error, and the others learn that it did not take part.
#[test]
fn misuse_of_one_rank() {
    let (element, len, rank) = ("u32", 2, 1);
    let collective = Call::AllGather { element, len };
    let results = run(2, true, |staged, _| {
        staged.all_gather(&[1u32, 2], &mut vec![0; 4 - staged.rank()])
    });
    let (found, expected, side) = (3, 4, Side::Receive);
    let own = Error::BufferLength {
        rank,
        collective,
        side,
        found,
        expected,
    };
    let [Err(lost), other] = &results[..] else {
        panic!("{results:?}");
    };
    assert_eq!(*other, Err(own));
    assert!(
        matches!(*lost, Error::PeerLost { rank: 1, collective: missed, .. } if missed == collective),
        "{lost}"
    );
}

/// Without CUDA or NCCL, cudarc panics; here that is an error.
#[cfg(feature = "nccl")]
#[test]
fn missing_libraries_are_an_error() {
    match crate::Nccl::unique_id() {
        Ok(id) => assert_ne!(id, [0; 128]),
        Err(Error::NoLibrary { library }) => assert!(["CUDA driver", "NCCL"].contains(&library)),
        Err(error) => assert!(matches!(error, Error::Nccl { .. }), "{error}"),
    }
}
