use crate::check::Caller;
use crate::element::room;
use crate::nodes::Nodes;
use crate::{Collective, Element, Error, Reduction};

/// How the ranks' messages of an all-to-all travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Each straight to its receiver.
    Direct,
    /// Within the sender's node to the rank that has the receiver's place, and from there in one
    /// message with what the rest of the node sends to that receiver.
    Hierarchical,
    /// Hierarchical where that saves messages between nodes and carries at most `most_bytes` bytes
    /// once more within nodes for each message saved; else direct.
    ///
    /// A message saved is worth the latency between nodes. So `most_bytes` is about that latency
    /// times the bandwidth within a node: 50,000 for 5 us and 10 GB/s.
    Auto {
        /// Bytes to carry once more for each message between nodes that is saved.
        most_bytes: u64,
    },
}

/// A world whose all-to-alls may go within nodes first and then across, so that fewer and larger
/// messages cross: from each rank one to every rank of the same place, rather than one to every
/// rank.
///
/// Nodes are neighbours in rank order, `ranks_per_node` each; the last may have fewer. What arrives
/// is the same, to the bit, whichever way it goes. A hierarchical all-to-all is made of all-to-alls
/// of the world in which most counts are 0: it pays where an empty message costs nothing, as in NCCL.
/// Threads and processes of MPI meet in every collective, each with every other, whatever goes
/// between them; there it shows what would travel, and saves little.
///
/// Before it, all counts of all ranks are exchanged, over nodes likewise: `8 * ranks^2` bytes to
/// each rank. From them every rank takes the same decision, and arguments that do not fit go
/// straight to the world, which reports them as it would without nodes. [`Algorithm::Direct`]
/// exchanges no counts; neither does any algorithm with a single node or one rank in each.
///
/// All other collectives, and so the order of all sums, are those of the world. Every rank must
/// give the same nodes and the same algorithm.
#[derive(Debug)]
pub struct Hierarchical<C> {
    world: C,
    nodes: Nodes,
    algorithm: Algorithm,
    /// Counts of all ranks, as [`Counts`] reads them.
    counts: Vec<u32>,
    staging: Staging,
}

impl<C: Collective> Hierarchical<C> {
    /// The ranks of `world` in nodes of `ranks_per_node`.
    ///
    /// # Errors
    /// [`Error::NoRanksPerNode`] if `ranks_per_node` is 0.
    pub fn new(world: C, ranks_per_node: usize, algorithm: Algorithm) -> Result<Self, Error> {
        Ok(Self {
            nodes: Nodes::new(world.ranks(), ranks_per_node)?,
            world,
            algorithm,
            counts: vec![],
            staging: Staging::default(),
        })
    }

    /// The world within.
    pub fn world(&self) -> &C {
        &self.world
    }

    /// The world within, for instance to read and reset what it counts.
    pub fn world_mut(&mut self) -> &mut C {
        &mut self.world
    }
}

/// Counts of all ranks: for each, whether its arguments fit, what it sends, what it expects.
struct Counts<'a> {
    ranks: usize,
    /// `[ranks, 1 + 2 * ranks]`
    words: &'a [u32],
}

impl<'a> Counts<'a> {
    /// Tells all ranks the counts of this one, `None` if they do not fit its buffers. The words
    /// travel as elements of the caller's type, so that the world compares the right calls.
    fn gather<C: Collective, T: Element>(
        world: &mut C,
        nodes: Nodes,
        staging: &mut Staging,
        mine: Option<[&[usize]; 2]>,
        words: &'a mut Vec<u32>,
    ) -> Result<Self, Error> {
        let ranks = nodes.ranks();
        let mut header = vec![0; Self::words(ranks)];
        if let Some(counts) = mine {
            header[0] = 1;
            for (word, &count) in header[1..].iter_mut().zip(counts.into_iter().flatten()) {
                *word = u32::try_from(count).unwrap_or(u32::MAX);
            }
        }
        words.resize(ranks * header.len(), 0);
        let header: &[T] = bytemuck::cast_slice(&header);
        let (send, count) = (header.repeat(ranks), |_, _| header.len());
        let recv = bytemuck::cast_slice_mut(words);
        two_hops(world, nodes, staging, &send, count, recv)?;
        Ok(Self { ranks, words })
    }

    /// Words of one rank.
    fn words(ranks: usize) -> usize {
        1 + 2 * ranks
    }

    fn of(&self, rank: usize) -> &[u32] {
        let words = Self::words(self.ranks);
        &self.words[rank * words..][..words]
    }

    fn sent(&self, from: usize, to: usize) -> usize {
        self.of(from)[1 + to] as usize
    }

    fn expected(&self, from: usize, to: usize) -> usize {
        self.of(to)[1 + self.ranks + from] as usize
    }

    /// Whether the exchange can go over nodes: its arguments fit, and all counts could be told.
    fn are_sound(&self) -> bool {
        let told = |&word: &u32| word < u32::MAX;
        self.words.iter().all(told)
            && (0..self.ranks).all(|from| {
                let agree = |to| self.sent(from, to) == self.expected(from, to);
                self.of(from)[0] == 1 && (0..self.ranks).all(agree)
            })
    }

    /// Elements that cross nodes, and the messages that are saved if those of a node to a receiver
    /// are joined.
    fn across(&self, nodes: Nodes) -> (u64, u64) {
        let (mut elements, mut saved) = (0, 0);
        for to in 0..self.ranks {
            for node in (0..nodes.len()).filter(|&node| node != nodes.of(to)) {
                let sent = nodes.members(node).map(|from| self.sent(from, to) as u64);
                elements += sent.clone().sum::<u64>();
                saved += (sent.filter(|&len| len > 0).count() as u64).saturating_sub(1);
            }
        }
        (elements, saved)
    }
}

/// Memory of what is on its way: what goes out in a hop, and what the first hop has brought. Kept,
/// and as large as the largest exchange so far. Words, so that every element type is aligned.
#[derive(Debug, Default)]
struct Staging {
    outgoing: Vec<u32>,
    relayed: Vec<u32>,
}

/// An all-to-all of `count(from, to)` elements, which all ranks know of all ranks. `send` and
/// `recv` are laid out as in [`Collective::all_to_all`].
fn two_hops<C: Collective, T: Element>(
    world: &mut C,
    nodes: Nodes,
    staging: &mut Staging,
    send: &[T],
    count: impl Fn(usize, usize) -> usize,
    recv: &mut [T],
) -> Result<(), Error> {
    let (me, ranks) = (world.rank(), nodes.ranks());
    let node = nodes.of(me);
    let members = nodes.members(node);
    let total = |from: usize| {
        nodes
            .destinations(me)
            .map(|to| count(from, to))
            .sum::<usize>()
    };

    // Within the node: by relay, then by destination.
    let starts = starts((0..ranks).map(|to| count(me, to)));
    let outgoing = room(&mut staging.outgoing, send.len());
    let (mut sent, mut received) = (vec![0; ranks], vec![0; ranks]);
    let mut next = 0;
    for relay in members.clone() {
        for to in nodes.destinations(relay) {
            let part = &send[starts[to]..][..count(me, to)];
            outgoing[next..][..part.len()].copy_from_slice(part);
            next += part.len();
            sent[relay] += part.len();
        }
        received[relay] = total(relay);
    }
    let relayed = room(&mut staging.relayed, received.iter().sum());
    world.all_to_all(outgoing, &sent, relayed, &received)?;

    // Across nodes: by destination, then by source; so what arrives is in the order of the sources.
    let outgoing = room(&mut staging.outgoing, relayed.len());
    let mut parts: Vec<&[T]> = Vec::with_capacity(members.len());
    let mut rest = &*relayed;
    for from in members {
        let (part, tail) = rest.split_at(received[from]);
        parts.push(part);
        rest = tail;
    }
    sent.fill(0);
    received.fill(0);
    let mut next = 0;
    for to in nodes.destinations(me) {
        for (from, part) in nodes.members(node).zip(&mut parts) {
            let (head, tail) = part.split_at(count(from, to));
            outgoing[next..][..head.len()].copy_from_slice(head);
            next += head.len();
            sent[to] += head.len();
            *part = tail;
        }
    }
    for node in 0..nodes.len() {
        received[nodes.relay(node, me)] = nodes.members(node).map(|from| count(from, me)).sum();
    }
    world.all_to_all(outgoing, &sent, recv, &received)
}

/// Where each of several parts starts.
fn starts(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let next = |start: &mut usize, len| Some(std::mem::replace(start, *start + len));
    lengths.scan(0, next).collect()
}

impl<C: Collective> Collective for Hierarchical<C> {
    fn rank(&self) -> usize {
        self.world.rank()
    }

    fn ranks(&self) -> usize {
        self.world.ranks()
    }

    fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), Error> {
        if self.algorithm != Algorithm::Direct && !self.nodes.are_trivial() {
            let (rank, ranks) = (self.rank(), self.ranks());
            let (nodes, world, staging) = (self.nodes, &mut self.world, &mut self.staging);
            let fits = Caller { rank, ranks }.all_to_all(send, send_counts, recv, recv_counts);
            let mine = fits.is_ok().then_some([send_counts, recv_counts]);
            let counts = Counts::gather::<_, T>(world, nodes, staging, mine, &mut self.counts)?;
            let joins = match self.algorithm {
                Algorithm::Auto { most_bytes } => {
                    let (elements, saved) = counts.across(nodes);
                    let bytes = elements.saturating_mul(size_of::<T>() as u64);
                    saved > 0 && bytes <= most_bytes.saturating_mul(saved)
                }
                _ => true,
            };
            if joins && counts.are_sound() {
                let count = |from, to| counts.sent(from, to);
                return two_hops(world, nodes, staging, send, count, recv);
            }
        }
        self.world.all_to_all(send, send_counts, recv, recv_counts)
    }

    fn all_reduce<T: Element>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.world.all_reduce(values, reduction)
    }

    fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<(), Error> {
        self.world.all_gather(mine, all)
    }

    fn reduce_scatter<T: Element>(
        &mut self,
        values: &[T],
        mine: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.world.reduce_scatter(values, mine, reduction)
    }

    fn broadcast<T: Element>(&mut self, values: &mut [T], root: usize) -> Result<(), Error> {
        self.world.broadcast(values, root)
    }

    fn barrier(&mut self) -> Result<(), Error> {
        self.world.barrier()
    }
}
