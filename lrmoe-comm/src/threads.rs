mod lent;
mod world;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::check::Caller;
use crate::element::{reduce, room, slice};
use crate::{Call, Collective, Element, Error, Reduction};
use world::{Post, Posts, World};

/// Up to this many elements, all-reduce has every rank reduce everything, which saves a second
/// meeting.
const DIRECT: usize = 1024;

/// Ranks of a world at most: more threads than any process runs.
const MOST_RANKS: usize = 1 << 16;

/// One rank of a world whose ranks are threads of this process.
///
/// There is one meeting for each collective, two for an all-reduce of more than 1,024 elements
/// (each rank then reduces one slice) and for the reduce-scatter of a `u32` sum. What a rank sends,
/// the others read once all have come: from its mailbox if that is less than 32 KiB, else from the
/// sender's own buffer, for which the sender waits until all have read. So large messages are
/// copied once, and no memory proportional to a message is allocated; an all-reduce keeps a buffer
/// for one rank's slice.
///
/// A waiting rank blocks its thread, so ranks must not be tasks of one shared pool. Dropping a rank
/// tells the others.
#[derive(Debug)]
pub struct Threads {
    world: Arc<World>,
    caller: Caller,
    /// Which of the two mailboxes the next exchange uses.
    turn: usize,
    /// The slice that this rank reduces in an all-reduce.
    reduced: Vec<u32>,
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
            reduced: vec![],
        };
        Ok((0..ranks).map(of_rank).collect())
    }

    /// Posts `send` and what `fill` writes, meets the other ranks and lets `read` see all posts.
    fn exchange<T: Element, R>(
        &mut self,
        call: Call,
        send: &[T],
        fill: impl FnOnce(&mut Post),
        read: impl FnOnce(&Posts<'_>) -> R,
    ) -> Result<R, Error> {
        let place = (self.caller.rank, self.turn);
        self.turn = 1 - self.turn;
        self.world.exchange(place, call, send, fill, read)
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
        let fill = |post: &mut Post| {
            post.send_counts.extend_from_slice(send_counts);
            post.recv_counts.extend_from_slice(recv_counts);
        };
        self.exchange(call, send, fill, |posts| {
            let mut rest = recv;
            for (post, &count) in posts.iter().zip(recv_counts) {
                let start = post.send_counts[..rank].iter().sum();
                let (part, tail) = rest.split_at_mut(count);
                post.read(start, part);
                rest = tail;
            }
        })
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
        let part = match values.len() {
            len @ 0..=DIRECT => 0..len,
            len => slice(len, ranks, rank),
        };
        // The others may be reading this rank's values, so what they become is written elsewhere.
        let mut words = std::mem::take(&mut self.reduced);
        let mine = room(&mut words, part.len());
        let reduced = self.exchange(
            call,
            values,
            |_| {},
            |posts| reduce_slice(posts, part.clone(), reduction, mine),
        )?;
        if values.len() <= DIRECT {
            values.copy_from_slice(mine);
            self.reduced = words;
            return reduced.map_err(|index| self.fail(overflow(index)));
        }
        let lowest = self.exchange(
            call,
            mine,
            |post| post.overflow = reduced.err(),
            |posts| {
                let lowest = lowest_overflow(posts);
                if lowest.is_none() {
                    let len = values.len();
                    for (source, post) in posts.iter().enumerate() {
                        post.read(0, &mut values[slice(len, ranks, source)]);
                    }
                }
                lowest
            },
        )?;
        self.reduced = words;
        lowest.map_or(Ok(()), |index| Err(self.fail(overflow(index))))
    }

    fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<(), Error> {
        let call = self
            .caller
            .all_gather(mine, all)
            .map_err(|error| self.fail(error))?;
        self.exchange(
            call,
            mine,
            |_| {},
            |posts| {
                for (source, post) in posts.iter().enumerate() {
                    post.read(0, &mut all[source * mine.len()..][..mine.len()]);
                }
            },
        )
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
        let reduced = self.exchange(
            call,
            values,
            |_| {},
            |posts| reduce_slice(posts, start..start + mine.len(), reduction, mine),
        )?;
        if !T::BOUNDED || reduction != Reduction::Sum {
            return Ok(());
        }
        let fill = |post: &mut Post| post.overflow = reduced.err();
        match self.exchange::<T, _>(call, &[], fill, lowest_overflow)? {
            None => Ok(()),
            Some(index) => Err(self.fail(Error::Overflow {
                index,
                collective: call,
            })),
        }
    }

    fn broadcast<T: Element>(&mut self, values: &mut [T], root: usize) -> Result<(), Error> {
        let call = self
            .caller
            .broadcast(values, root)
            .map_err(|error| self.fail(error))?;
        if self.caller.rank == root {
            return self.exchange(call, values, |_| {}, |_| {});
        }
        self.exchange::<T, _>(call, &[], |_| {}, |posts| posts[root].read(0, values))
    }

    fn barrier(&mut self) -> Result<(), Error> {
        self.exchange::<u32, _>(Call::Barrier, &[], |_| {}, |_| {})
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
