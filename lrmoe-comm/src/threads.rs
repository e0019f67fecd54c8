mod world;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::check::Caller;
use crate::element::{reduce, slice};
use crate::{Call, Collective, Element, Error, Reduction};
use world::{Post, Posts, World};

/// Up to this many elements, all-reduce has every rank reduce everything, which saves a second
/// meeting.
const DIRECT: usize = 1024;

/// Ranks of a world at most: more threads than any process runs.
const MOST_RANKS: usize = 1 << 16;

/// One rank of a world whose ranks are threads of this process.
///
/// What a rank sends is copied into its mailbox, which the others read once all have come: one
/// meeting for each collective, two for an all-reduce of more than 1,024 elements (each rank then
/// reduces one slice) and for the reduce-scatter of a `u32` sum. A rank keeps two mailboxes, each
/// as large as the largest message so far; after that no memory proportional to a message is
/// allocated.
///
/// A waiting rank blocks its thread, so ranks must not be tasks of one shared pool. Dropping a rank
/// tells the others.
#[derive(Debug)]
pub struct Threads {
    world: Arc<World>,
    caller: Caller,
    /// Which of the two mailboxes the next exchange uses.
    turn: usize,
}

impl Threads {
    /// The ranks `0..ranks` of a new world, one for each thread; no wait in it lasts longer than
    /// `deadline`.
    ///
    /// # Errors
    /// [`Error::NoRanks`] if `ranks` is 0, [`Error::TooManyRanks`] if it is above 65,536.
    pub fn world(ranks: usize, deadline: Duration) -> Result<Vec<Self>, Error> {
        if ranks == 0 {
            return Err(Error::NoRanks);
        }
        if ranks > MOST_RANKS {
            let most = MOST_RANKS;
            return Err(Error::TooManyRanks { ranks, most });
        }
        let world = Arc::new(World::new(ranks, deadline));
        let of_rank = |rank| Self {
            world: Arc::clone(&world),
            caller: Caller { rank, ranks },
            turn: 0,
        };
        Ok((0..ranks).map(of_rank).collect())
    }

    /// Posts what `fill` writes, meets the other ranks and returns everyone's posts.
    fn exchange(&mut self, call: Call, fill: impl FnOnce(&mut Post)) -> Result<Posts<'_>, Error> {
        let turn = self.turn;
        self.turn = 1 - turn;
        self.world.exchange(self.caller.rank, turn, call, fill)
    }

    /// Ends the collective on every rank.
    fn fail(&self, error: Error) -> Error {
        self.world.fail(error)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.world.leave(self.caller.rank);
    }
}

impl Collective for Threads {
    fn rank(&self) -> usize {
        self.caller.rank
    }

    fn ranks(&self) -> usize {
        self.caller.ranks
    }

    fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), Error> {
        let call = self
            .caller
            .all_to_all(send, send_counts, recv, recv_counts)
            .map_err(|error| self.fail(error))?;
        let rank = self.caller.rank;
        let posts = self.exchange(call, |post| {
            post.write(send);
            post.send_counts.extend_from_slice(send_counts);
            post.recv_counts.extend_from_slice(recv_counts);
        })?;
        let mut rest = recv;
        for (post, &count) in posts.iter().zip(recv_counts) {
            let start = post.send_counts[..rank].iter().sum();
            let (part, tail) = rest.split_at_mut(count);
            post.read(start, part);
            rest = tail;
        }
        Ok(())
    }

    fn all_reduce<T: Element>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        let call = self.caller.all_reduce(values, reduction);
        let Caller { rank, ranks } = self.caller;
        let overflow = |index| Error::Overflow {
            index,
            collective: call,
        };
        let posts = self.exchange(call, |post| post.write(values))?;
        if values.len() <= DIRECT {
            let reduced = reduce_slice(&posts, 0..values.len(), reduction, values);
            drop(posts);
            return reduced.map_err(|index| self.fail(overflow(index)));
        }
        let mine = slice(values.len(), ranks, rank);
        let reduced = reduce_slice(&posts, mine.clone(), reduction, &mut values[mine.clone()]);
        drop(posts);
        let posts = self.exchange(call, |post| {
            post.write(&values[mine]);
            post.overflow = reduced.err();
        })?;
        if let Some(index) = lowest_overflow(&posts) {
            drop(posts);
            return Err(self.fail(overflow(index)));
        }
        for (source, post) in posts.iter().enumerate() {
            let len = values.len();
            post.read(0, &mut values[slice(len, ranks, source)]);
        }
        Ok(())
    }

    fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<(), Error> {
        let call = self
            .caller
            .all_gather(mine, all)
            .map_err(|error| self.fail(error))?;
        let posts = self.exchange(call, |post| post.write(mine))?;
        for (source, post) in posts.iter().enumerate() {
            post.read(0, &mut all[source * mine.len()..][..mine.len()]);
        }
        Ok(())
    }

    fn reduce_scatter<T: Element>(
        &mut self,
        values: &[T],
        mine: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        let call = self
            .caller
            .reduce_scatter(values, mine, reduction)
            .map_err(|error| self.fail(error))?;
        let start = self.caller.rank * mine.len();
        let posts = self.exchange(call, |post| post.write(values))?;
        let reduced = reduce_slice(&posts, start..start + mine.len(), reduction, mine);
        drop(posts);
        if T::BOUNDED && reduction == Reduction::Sum {
            let posts = self.exchange(call, |post| post.overflow = reduced.err())?;
            if let Some(index) = lowest_overflow(&posts) {
                drop(posts);
                return Err(self.fail(Error::Overflow {
                    index,
                    collective: call,
                }));
            }
        }
        Ok(())
    }

    fn broadcast<T: Element>(&mut self, values: &mut [T], root: usize) -> Result<(), Error> {
        let call = self
            .caller
            .broadcast(values, root)
            .map_err(|error| self.fail(error))?;
        let sends = self.caller.rank == root;
        let posts = self.exchange(call, |post| {
            if sends {
                post.write(values);
            }
        })?;
        if !sends {
            posts[root].read(0, values);
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), Error> {
        self.exchange(Call::Barrier, |_| {}).map(drop)
    }
}

/// Reduces the elements `range` of all posts into `out`; `Err` is the lowest element whose sum is
/// out of range.
fn reduce_slice<T: Element>(
    posts: &Posts<'_>,
    range: Range<usize>,
    reduction: Reduction,
    out: &mut [T],
) -> Result<(), usize> {
    let sources: Vec<&[u8]> = posts
        .iter()
        .map(|post| post.bytes::<T>(range.clone()))
        .collect();
    reduce(&sources, reduction, out).map_err(|index| range.start + index)
}

fn lowest_overflow(posts: &Posts<'_>) -> Option<usize> {
    posts.iter().filter_map(|post| post.overflow).min()
}
