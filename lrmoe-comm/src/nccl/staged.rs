//! Collectives over buffers of the host, piece by piece through staging memory of a device.

use std::time::Instant;

use super::form::{self, Kind};
use super::meeting;
use super::plan::{self, Transfer, Way, pieces};
use crate::check::Caller;
use crate::{Call, Collective, Element, Error, Reduction};

/// What a device does with its staging memory: values from the part for sending become values in
/// the part for receiving, as the collectives of the same names have it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op<'a> {
    Group(&'a [Transfer]),
    AllReduce { len: usize, reduction: Reduction },
    AllGather { len: usize },
    ReduceScatter { len: usize, reduction: Reduction },
    Broadcast { len: usize, root: usize },
}

/// A device with staging memory for sending and for receiving, and links to the other ranks'.
pub(crate) trait Device: Send {
    /// Bytes of either part of the staging memory, a multiple of 8 for each rank.
    fn capacity(&self) -> usize;

    /// Writes to the part for sending, from byte `at` on.
    fn upload(&mut self, at: usize, bytes: &[u8]) -> Result<(), Error>;

    /// Reads the part for receiving, from byte `at` on.
    fn download(&mut self, at: usize, bytes: &mut [u8]) -> Result<(), Error>;

    /// Returns once all is done; `collective` is for errors.
    fn run(&mut self, collective: Call, kind: Kind, op: Op<'_>) -> Result<(), Error>;
}

/// One rank of a world of devices.
#[derive(Debug)]
pub(crate) struct Staged<D> {
    caller: Caller,
    device: D,
    /// Whether ranks compare their calls first.
    compares: bool,
    failure: Option<Error>,
}

impl<D: Device> Staged<D> {
    pub(crate) fn new((rank, ranks): (usize, usize), device: D, compares: bool) -> Self {
        Self {
            caller: Caller { rank, ranks },
            device,
            compares,
            failure: None,
        }
    }

    /// Values that fit the staging memory `parts` times.
    fn most(&self, kind: Kind, parts: usize) -> usize {
        (self.device.capacity() / parts / kind.size()).max(1)
    }

    /// A collective, once all ranks are seen to make the same call. A failure is for good.
    fn collective<R>(
        &mut self,
        call: Result<Call, Error>,
        counts: Option<[&[usize]; 2]>,
        body: impl FnOnce(&mut Self, Call) -> Result<R, Error>,
    ) -> Result<R, Error> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let result = self
            .compare(&call, counts)
            .and(call)
            .and_then(|call| body(self, call));
        result.inspect_err(|error| self.failure = Some(error.clone()))
    }

    fn compare(
        &mut self,
        call: &Result<Call, Error>,
        counts: Option<[&[usize]; 2]>,
    ) -> Result<(), Error> {
        if !self.compares {
            return Ok(());
        }
        let (ranks, start) = (self.caller.ranks, Instant::now());
        let call = call.as_ref().ok().copied();
        let mine = meeting::encode(ranks, call.map(|call| (call, counts)));
        let mut all = vec![0; ranks * mine.len()];
        self.gather(call.unwrap_or(Call::Barrier), &mine, &mut all)?;
        call.map_or(Ok(()), |call| {
            meeting::agree(ranks, &all, call, start.elapsed())
        })
    }

    fn gather<T: Element>(&mut self, call: Call, mine: &[T], all: &mut [T]) -> Result<(), Error> {
        let (kind, ranks) = (Kind::of::<T>(), self.caller.ranks);
        for piece in pieces(mine.len(), self.most(kind, ranks)) {
            let len = piece.len();
            self.device
                .upload(0, bytemuck::cast_slice(&mine[piece.clone()]))?;
            self.device.run(call, kind, Op::AllGather { len })?;
            for (rank, all) in all.chunks_exact_mut(mine.len()).enumerate() {
                let part = bytemuck::cast_slice_mut(&mut all[piece.clone()]);
                self.device.download(rank * len * kind.size(), part)?;
            }
        }
        Ok(())
    }

    /// Elements of one message in one group.
    #[cfg(test)]
    pub(crate) fn part_of<T: Element>(&self) -> usize {
        self.most(Kind::of::<T>(), self.caller.ranks)
    }
}

impl<D: Device> Collective for Staged<D> {
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
        let call = self.caller.all_to_all(send, send_counts, recv, recv_counts);
        self.collective(call, Some([send_counts, recv_counts]), |world, call| {
            let (Caller { rank, ranks }, kind) = (world.caller, Kind::of::<T>());
            let start = |counts: &[usize]| counts[..rank].iter().sum::<usize>();
            let own = &send[start(send_counts)..][..send_counts[rank]];
            recv[start(recv_counts)..][..own.len()].copy_from_slice(own);
            let most = world.most(kind, ranks);
            for group in plan::all_to_all(rank, send_counts, recv_counts, most) {
                let (sends, receives): (Vec<_>, Vec<_>) =
                    group.iter().partition(|part| part.way == Way::Send);
                for part in sends {
                    let bytes = bytemuck::cast_slice(&send[part.elements.clone()]);
                    world.device.upload(part.at * kind.size(), bytes)?;
                }
                world.device.run(call, kind, Op::Group(&group))?;
                for part in receives {
                    let bytes = bytemuck::cast_slice_mut(&mut recv[part.elements.clone()]);
                    world.device.download(part.at * kind.size(), bytes)?;
                }
            }
            Ok(())
        })
    }

    fn all_reduce<T: Element>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        let call = Ok(self.caller.all_reduce(values, reduction));
        self.collective(call, None, |world, call| {
            let kind = form::reduced_as::<T>(reduction);
            for piece in pieces(values.len(), world.most(kind, 1)) {
                let (len, start) = (piece.len(), piece.start);
                let piece = &mut values[piece];
                let mut bytes = form::write(piece, reduction);
                world.device.upload(0, &bytes)?;
                world
                    .device
                    .run(call, kind, Op::AllReduce { len, reduction })?;
                world.device.download(0, &mut bytes)?;
                form::read(&bytes, reduction, piece).map_err(|index| Error::Overflow {
                    index: start + index,
                    collective: call,
                })?;
            }
            Ok(())
        })
    }

    fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<(), Error> {
        let call = self.caller.all_gather(mine, all);
        self.collective(call, None, |world, call| world.gather(call, mine, all))
    }

    fn reduce_scatter<T: Element>(
        &mut self,
        values: &[T],
        mine: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        let call = self.caller.reduce_scatter(values, mine, reduction);
        self.collective(call, None, |world, call| {
            let (Caller { rank, ranks }, kind) = (world.caller, form::reduced_as::<T>(reduction));
            let (total, mut lowest) = (mine.len(), u64::MAX);
            for piece in pieces(total, world.most(kind, ranks)) {
                let (len, start) = (piece.len(), piece.start);
                for (rank, values) in values.chunks_exact(total).enumerate() {
                    let bytes = form::write(&values[piece.clone()], reduction);
                    world.device.upload(rank * bytes.len(), &bytes)?;
                }
                let op = Op::ReduceScatter { len, reduction };
                world.device.run(call, kind, op)?;
                let mut bytes = vec![0; len * kind.size()];
                world.device.download(0, &mut bytes)?;
                if let Err(index) = form::read(&bytes, reduction, &mut mine[piece]) {
                    lowest = lowest.min((rank * total + start + index) as u64);
                }
            }
            if T::BOUNDED && reduction == Reduction::Sum {
                // The others must know of a sum that only this rank has.
                let words = [lowest as u32, (lowest >> 32) as u32];
                let mut all = vec![0; 2 * ranks];
                world.gather(call, &words, &mut all)?;
                let indices = all
                    .chunks_exact(2)
                    .map(|words| u64::from(words[0]) | u64::from(words[1]) << 32);
                if let Some(index) = indices.min().filter(|index| *index < u64::MAX) {
                    return Err(Error::Overflow {
                        index: index as usize,
                        collective: call,
                    });
                }
            }
            Ok(())
        })
    }

    fn broadcast<T: Element>(&mut self, values: &mut [T], root: usize) -> Result<(), Error> {
        let call = self.caller.broadcast(values, root);
        self.collective(call, None, |world, call| {
            let kind = Kind::of::<T>();
            for piece in pieces(values.len(), world.most(kind, 1)) {
                let len = piece.len();
                let bytes = bytemuck::cast_slice_mut(&mut values[piece]);
                if world.caller.rank == root {
                    world.device.upload(0, bytes)?;
                }
                world.device.run(call, kind, Op::Broadcast { len, root })?;
                world.device.download(0, bytes)?;
            }
            Ok(())
        })
    }

    fn barrier(&mut self) -> Result<(), Error> {
        self.collective(Ok(Call::Barrier), None, |world, call| {
            let ranks = world.caller.ranks;
            world.gather(call, &[0u32], &mut vec![0; ranks])
        })
    }
}
