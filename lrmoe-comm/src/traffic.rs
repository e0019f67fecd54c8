use std::ops::{Add, AddAssign};

use crate::element::slice;
use crate::nodes::Nodes;
use crate::{Collective, Element, Error, Reduction};

/// What was sent over one class of links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Bytes of elements.
    pub bytes: u64,
    /// Messages that are not empty.
    pub messages: u64,
}

impl AddAssign for Sent {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.messages += other.messages;
    }
}

/// What a rank sent, by how far it went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkTraffic {
    /// To itself, within its memory.
    pub own: Sent,
    /// To other ranks of its node.
    pub intra: Sent,
    /// To other nodes.
    pub inter: Sent,
}

impl AddAssign for LinkTraffic {
    fn add_assign(&mut self, other: Self) {
        self.own += other.own;
        self.intra += other.intra;
        self.inter += other.inter;
    }
}

impl Add for LinkTraffic {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

/// What a rank sent in each kind of collective.
///
/// An all-to-all counts what it is told to send. Of the others it is what must reach each peer
/// where the ranks exchange slices: the own elements in an all-gather and, from the root, in a
/// broadcast; the peer's part in a reduce-scatter; in an all-reduce the peer's slice, and then the
/// own reduced slice. Barriers count nothing. Short all-reduces of [`Threads`](crate::Threads)
/// move more, and collectives that combine values on the way move less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// [`Collective::all_to_all`]
    pub all_to_all: LinkTraffic,
    /// [`Collective::all_reduce`]
    pub all_reduce: LinkTraffic,
    /// [`Collective::all_gather`]
    pub all_gather: LinkTraffic,
    /// [`Collective::reduce_scatter`]
    pub reduce_scatter: LinkTraffic,
    /// [`Collective::broadcast`]
    pub broadcast: LinkTraffic,
}

impl Traffic {
    /// All collectives together.
    pub fn total(&self) -> LinkTraffic {
        self.all_to_all + self.all_reduce + self.all_gather + self.reduce_scatter + self.broadcast
    }
}

/// A world that counts what this rank sends, by collective and class of link.
///
/// Within a [`Hierarchical`](crate::Hierarchical) world it counts both hops and the counts that go
/// ahead of them; around one, what was asked for. Collectives that fail are not counted.
#[derive(Debug)]
pub struct Counted<C> {
    world: C,
    nodes: Nodes,
    traffic: Traffic,
}

impl<C: Collective> Counted<C> {
    /// Counts what goes through `world`, whose nodes are neighbours in rank order,
    /// `ranks_per_node` each.
    ///
    /// # Errors
    /// [`Error::NoRanksPerNode`] if `ranks_per_node` is 0.
    pub fn new(world: C, ranks_per_node: usize) -> Result<Self, Error> {
        Ok(Self {
            nodes: Nodes::new(world.ranks(), ranks_per_node)?,
            world,
            traffic: Traffic::default(),
        })
    }

    /// What was sent since the start, or since it was last taken.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// What was sent so far; counting starts anew.
    pub fn take_traffic(&mut self) -> Traffic {
        std::mem::take(&mut self.traffic)
    }

    /// Makes `traffic` what was sent so far, for instance to leave out what was sent since it was read.
    pub fn set_traffic(&mut self, traffic: Traffic) {
        self.traffic = traffic;
    }

    /// A message of `len(p)` elements to every peer p.
    fn messages<T: Element>(&self, len: impl Fn(usize) -> usize) -> LinkTraffic {
        let rank = self.world.rank();
        let node = self.nodes.of(rank);
        let mut sent = LinkTraffic::default();
        for (peer, len) in (0..self.nodes.ranks()).map(|peer| (peer, len(peer))) {
            let class = match peer {
                _ if peer == rank => &mut sent.own,
                _ if self.nodes.of(peer) == node => &mut sent.intra,
                _ => &mut sent.inter,
            };
            *class += Sent {
                bytes: (len * size_of::<T>()) as u64,
                messages: u64::from(len > 0),
            };
        }
        sent
    }
}

impl<C: Collective> Collective for Counted<C> {
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
        self.world
            .all_to_all(send, send_counts, recv, recv_counts)?;
        self.traffic.all_to_all += self.messages::<T>(|peer| send_counts[peer]);
        Ok(())
    }

    fn all_reduce<T: Element>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.world.all_reduce(values, reduction)?;
        let slice = |rank| slice(values.len(), self.ranks(), rank).len();
        let mine = slice(self.rank());
        self.traffic.all_reduce += self.messages::<T>(slice) + self.messages::<T>(|_| mine);
        Ok(())
    }

    fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<(), Error> {
        self.world.all_gather(mine, all)?;
        self.traffic.all_gather += self.messages::<T>(|_| mine.len());
        Ok(())
    }

    fn reduce_scatter<T: Element>(
        &mut self,
        values: &[T],
        mine: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.world.reduce_scatter(values, mine, reduction)?;
        self.traffic.reduce_scatter += self.messages::<T>(|_| mine.len());
        Ok(())
    }

    fn broadcast<T: Element>(&mut self, values: &mut [T], root: usize) -> Result<(), Error> {
        self.world.broadcast(values, root)?;
        if self.rank() == root {
            self.traffic.broadcast += self.messages::<T>(|_| values.len());
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), Error> {
        self.world.barrier()
    }
}
