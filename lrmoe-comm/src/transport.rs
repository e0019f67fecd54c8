//! The collectives as exchanges of parts, written once for all worlds of several ranks.

use crate::check::Caller;
use crate::element::slice;
use crate::{Call, Element, Error, Reduction};

/// Up to this many elements, all-reduce has every rank reduce everything, which saves a second
/// meeting.
pub(crate) const DIRECT: usize = 1024;

/// Counts of an all-to-all: what this rank sends to each peer, and what it expects from each.
pub(crate) type Counts<'a> = [&'a [usize]; 2];

/// How the ranks of a world meet. A meeting checks that all ranks make the same call, with counts
/// that agree, and fails on all of them if not.
pub(crate) trait Transport {
    fn caller(&self) -> Caller;

    /// Gives `send[p]` to every peer p and receives `recv[p]` from it. An own entry of `recv` gets that
    /// of `send`, unless it is empty.
    fn exchange<T: Element>(
        &mut self,
        call: Call,
        counts: Option<Counts<'_>>,
        send: &[&[T]],
        recv: &mut [&mut [T]],
    ) -> Result<(), Error>;

    /// Gives `send[p]` to every peer p, the own entry excepted, and reduces what all ranks gave this
    /// one; `mine` holds its own part before and the reduction after. `Some(i)`: i is the lowest
    /// element whose sum is out of range.
    fn reduce<T: Element>(
        &mut self,
        call: Call,
        send: &[&[T]],
        reduction: Reduction,
        mine: &mut [T],
    ) -> Result<Option<usize>, Error>;

    /// Ends the collective on every rank, and the world with it. Returns the error, or that of an
    /// earlier end.
    fn fail(&mut self, error: Error) -> Error;
}

/// The own entry of an exchange, of which all ranks have seen that its lengths agree.
pub(crate) fn keep<T: Copy>(send: &[T], recv: &mut [T]) {
    if !recv.is_empty() {
        recv.copy_from_slice(send);
    }
}

pub(crate) fn all_to_all<W: Transport, T: Element>(
    world: &mut W,
    send: &[T],
    send_counts: &[usize],
    recv: &mut [T],
    recv_counts: &[usize],
) -> Result<(), Error> {
    let caller = world.caller();
    let call = caller
        .all_to_all(send, send_counts, recv, recv_counts)
        .map_err(|error| world.fail(error))?;
    let send = parts(send, send_counts);
    let mut recv = parts_mut(recv, recv_counts);
    world.exchange(call, Some([send_counts, recv_counts]), &send, &mut recv)
}

pub(crate) fn all_gather<W: Transport, T: Element>(
    world: &mut W,
    mine: &[T],
    all: &mut [T],
) -> Result<(), Error> {
    let caller = world.caller();
    let call = caller
        .all_gather(mine, all)
        .map_err(|error| world.fail(error))?;
    let mut all = parts_mut(all, &vec![mine.len(); caller.ranks]);
    world.exchange(call, None, &vec![mine; caller.ranks], &mut all)
}

pub(crate) fn broadcast<W: Transport, T: Element>(
    world: &mut W,
    values: &mut [T],
    root: usize,
) -> Result<(), Error> {
    let Caller { rank, ranks } = world.caller();
    let call = world
        .caller()
        .broadcast(values, root)
        .map_err(|error| world.fail(error))?;
    let mut recv: Vec<&mut [T]> = (0..ranks).map(|_| &mut [][..]).collect();
    if rank == root {
        return world.exchange(call, None, &vec![&*values; ranks], &mut recv);
    }
    recv[root] = values;
    world.exchange(call, None, &vec![&[][..]; ranks], &mut recv)
}

pub(crate) fn barrier<W: Transport>(world: &mut W) -> Result<(), Error> {
    let ranks = world.caller().ranks;
    let mut recv: Vec<&mut [u32]> = (0..ranks).map(|_| &mut [][..]).collect();
    world.exchange(Call::Barrier, None, &vec![&[][..]; ranks], &mut recv)
}

pub(crate) fn reduce_scatter<W: Transport, T: Element>(
    world: &mut W,
    values: &[T],
    mine: &mut [T],
    reduction: Reduction,
) -> Result<(), Error> {
    let caller = world.caller();
    let call = caller
        .reduce_scatter(values, mine, reduction)
        .map_err(|error| world.fail(error))?;
    let (start, len) = (caller.rank * mine.len(), mine.len());
    let send = parts(values, &vec![len; caller.ranks]);
    mine.copy_from_slice(send[caller.rank]);
    let overflow = world.reduce(call, &send, reduction, mine)?;
    share_overflow::<W, T>(world, call, reduction, overflow.map(|index| start + index))
}

pub(crate) fn all_reduce<W: Transport, T: Element>(
    world: &mut W,
    values: &mut [T],
    reduction: Reduction,
) -> Result<(), Error> {
    let Caller { rank, ranks } = world.caller();
    let call = world.caller().all_reduce(values, reduction);
    if values.len() <= DIRECT {
        let mut own = [T::zeroed(); DIRECT];
        let own = &mut own[..values.len()];
        own.copy_from_slice(values);
        let overflow = world.reduce(call, &vec![&*own; ranks], reduction, values)?;
        return overflow.map_or(Ok(()), |index| Err(overflows(world, call, index)));
    }
    let slices: Vec<_> = (0..ranks)
        .map(|rank| slice(values.len(), ranks, rank))
        .collect();
    let lengths: Vec<_> = slices.iter().map(ExactSizeIterator::len).collect();
    let mut rest = parts_mut(values, &lengths);
    let mine = std::mem::take(&mut rest[rank]);
    let send: Vec<_> = rest.iter().map(|part| &**part).collect();
    let overflow = world.reduce(call, &send, reduction, mine)?;
    let start = slices[rank].start;
    share_overflow::<W, T>(world, call, reduction, overflow.map(|index| start + index))?;
    world.exchange(call, None, &vec![&*mine; ranks], &mut rest)
}

/// Each rank has reduced one part: an element that is out of range ends the collective on all.
fn share_overflow<W: Transport, T: Element>(
    world: &mut W,
    call: Call,
    reduction: Reduction,
    lowest: Option<usize>,
) -> Result<(), Error> {
    if !T::BOUNDED || reduction != Reduction::Sum {
        return Ok(());
    }
    let ranks = world.caller().ranks;
    let index = lowest.map_or(u64::MAX, |index| index as u64);
    let words = [index as u32, (index >> 32) as u32];
    let mut all = vec![words; ranks];
    let mut recv: Vec<_> = all.iter_mut().map(|words| &mut words[..]).collect();
    world.exchange(call, None, &vec![&words[..]; ranks], &mut recv)?;
    let index = |&[low, high]: &[u32; 2]| u64::from(low) | u64::from(high) << 32;
    match all.iter().map(index).min() {
        Some(lowest) if lowest < u64::MAX => Err(overflows(world, call, lowest as usize)),
        _ => Ok(()),
    }
}

fn overflows(world: &mut impl Transport, collective: Call, index: usize) -> Error {
    world.fail(Error::Overflow { index, collective })
}

/// The parts of these lengths, one after the other.
fn parts<'a, T>(mut all: &'a [T], lengths: &[usize]) -> Vec<&'a [T]> {
    let part = |&len: &usize| all.split_off(..len).unwrap_or_default();
    lengths.iter().map(part).collect()
}

fn parts_mut<'a, T>(mut all: &'a mut [T], lengths: &[usize]) -> Vec<&'a mut [T]> {
    let part = |&len: &usize| all.split_off_mut(..len).unwrap_or_default();
    lengths.iter().map(part).collect()
}

/// The methods of `Collective` for a [`Transport`].
macro_rules! collective_over_transport {
    ($world:ty) => {
        impl crate::Collective for $world {
            fn rank(&self) -> usize {
                self.caller().rank
            }

            fn ranks(&self) -> usize {
                self.caller().ranks
            }

            fn all_to_all<T: crate::Element>(
                &mut self,
                send: &[T],
                send_counts: &[usize],
                recv: &mut [T],
                recv_counts: &[usize],
            ) -> Result<(), crate::Error> {
                crate::transport::all_to_all(self, send, send_counts, recv, recv_counts)
            }

            fn all_reduce<T: crate::Element>(
                &mut self,
                values: &mut [T],
                reduction: crate::Reduction,
            ) -> Result<(), crate::Error> {
                crate::transport::all_reduce(self, values, reduction)
            }

            fn all_gather<T: crate::Element>(
                &mut self,
                mine: &[T],
                all: &mut [T],
            ) -> Result<(), crate::Error> {
                crate::transport::all_gather(self, mine, all)
            }

            fn reduce_scatter<T: crate::Element>(
                &mut self,
                values: &[T],
                mine: &mut [T],
                reduction: crate::Reduction,
            ) -> Result<(), crate::Error> {
                crate::transport::reduce_scatter(self, values, mine, reduction)
            }

            fn broadcast<T: crate::Element>(
                &mut self,
                values: &mut [T],
                root: usize,
            ) -> Result<(), crate::Error> {
                crate::transport::broadcast(self, values, root)
            }

            fn barrier(&mut self) -> Result<(), crate::Error> {
                crate::transport::barrier(self)
            }
        }
    };
}
pub(crate) use collective_over_transport;
