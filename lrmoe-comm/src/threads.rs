mod meetings;
#[cfg(all(loom, test))]
mod model;
mod post;
mod sync;
mod world;

use std::sync::Arc;
use std::time::Duration;

use crate::check::Caller;
use crate::element::reduce;
use crate::transport::{Counts, Transport, collective_over_transport, keep};
use crate::{Call, Element, Error, Reduction};
use world::{Posts, World};

/// Ranks of a world at most: more threads than any process runs.
const MOST_RANKS: usize = 1 << 16;

/// One rank of a world whose ranks are threads of this process.
///
/// The ranks meet and then take what they need from each other: small parts from mailboxes into
/// which their senders have copied them, parts of more than 16 KiB together straight from the
/// sender's buffer, which the sender gets back once all have taken theirs. A rank keeps two
/// mailboxes, as large as the largest small message so far; no other memory proportional to a
/// message is allocated.
///
/// A waiting rank blocks its thread, so ranks must not be tasks of one shared pool. Dropping a rank
/// tells the others.
#[derive(Debug)]
pub struct Threads {
    world: Arc<World>,
    caller: Caller,
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
        };
        Ok((0..ranks).map(of_rank).collect())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.world.leave(self.caller.rank);
    }
}

impl Transport for Threads {
    fn caller(&self) -> Caller {
        self.caller
    }

    fn exchange<T: Element>(
        &mut self,
        call: Call,
        counts: Option<Counts<'_>>,
        send: &[&[T]],
        recv: &mut [&mut [T]],
    ) -> Result<(), Error> {
        let Caller { rank, ranks } = self.caller;
        let own = std::mem::take(&mut recv[rank]);
        let take = |posts: &Posts<'_>| {
            // Each rank starts with its neighbour, so that not all read from the same one.
            for peer in (rank + 1..ranks).chain(0..rank) {
                bytemuck::cast_slice_mut(recv[peer]).copy_from_slice(posts.part(peer, rank));
            }
        };
        // SAFETY: there is one `Threads` for each rank, and it is borrowed until this returns.
        unsafe {
            self.world
                .exchange(rank, call, counts, send, take, || keep(send[rank], own))
        }
    }

    fn reduce<T: Element>(
        &mut self,
        call: Call,
        send: &[&[T]],
        reduction: Reduction,
        mine: &mut [T],
    ) -> Result<Option<usize>, Error> {
        let Caller { rank, ranks } = self.caller;
        let sum = |posts: &Posts<'_>| {
            let sources: Vec<&[u8]> = (0..ranks).map(|peer| posts.part(peer, rank)).collect();
            reduce(&sources, rank, reduction, mine).err()
        };
        // SAFETY: as above.
        unsafe { self.world.exchange(rank, call, None, send, sum, || ()) }
    }

    fn fail(&mut self, error: Error) -> Error {
        self.world.fail(self.caller.rank, error)
    }
}

collective_over_transport!(Threads);
