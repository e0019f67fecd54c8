use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaStream;

use super::device::{self, Nvidia};
use super::staged::Staged;
use crate::{Collective, Element, Error, Reduction};

/// One rank of a world of NVIDIA GPUs, over NCCL.
///
/// Buffers are the host's, so what travels is copied to staging memory on the device and back, 64 MiB
/// each way, kept from call to call. An all-to-all is grouped sends and receives of that many bytes
/// at most, in which messages without elements take no part; the others are NCCL's own collectives.
/// The device works behind the given stream, and every call waits until it is done.
///
/// What differs from the other worlds:
///
/// - **Floating-point sums are taken in an order of NCCL's choosing**, which depends on the number of
///   ranks, their links and the version; `bf16` may be rounded on the way. The same run on the same
///   machines usually repeats, but nothing promises it. Sums of `u32` are exact, and an error past
///   `u32::MAX`, as everywhere. The larger of `-0.0` and `0.0` is `0.0`.
/// - NCCL does not say whom it waits for: a rank that is late, or gone, ends in [`Error::Stalled`]
///   on the others.
/// - Whether all ranks make the same call is compared in builds with debug assertions alone. Without
///   them, calls that differ end in [`Error::Stalled`], or in values that mean nothing.
///
/// It compiles without CUDA and loads the libraries when a world is made. The plan of messages and the
/// conversions are tested between threads; **the calls of NCCL have not run on any GPU yet.**
#[derive(Debug)]
pub struct Nccl(Staged<Nvidia>);

impl Nccl {
    /// A number that names a new world: one rank asks for it and gives it to all, for instance by
    /// [`rendezvous::share`](crate::rendezvous::share) or a broadcast of another world.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] without driver or NCCL, [`Error::Nccl`] if it finds no network.
    pub fn unique_id() -> Result<[u8; device::ID_BYTES], Error> {
        device::unique_id()
    }

    /// The rank `rank` of `ranks` of the world `id`, on the device of `stream`; one rank for each
    /// device. All ranks make this call, and neither it nor any later wait lasts longer than
    /// `deadline`.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] without driver or NCCL, [`Error::NoSuchRank`], [`Error::Cuda`] and
    /// [`Error::Nccl`] with what they report, [`Error::Stalled`] if not all ranks come.
    pub fn new(
        stream: Arc<CudaStream>,
        (rank, ranks): (usize, usize),
        id: [u8; device::ID_BYTES],
        deadline: Duration,
    ) -> Result<Self, Error> {
        if rank >= ranks {
            return Err(Error::NoSuchRank { rank, ranks });
        }
        let place = (rank, ranks);
        let device = Nvidia::new(stream, place, id, deadline)?;
        Ok(Self(Staged::new(place, device, cfg!(debug_assertions))))
    }
}

impl Collective for Nccl {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn ranks(&self) -> usize {
        self.0.ranks()
    }

    fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), Error> {
        self.0.all_to_all(send, send_counts, recv, recv_counts)
    }

    fn all_reduce<T: Element>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.0.all_reduce(values, reduction)
    }

    fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<(), Error> {
        self.0.all_gather(mine, all)
    }

    fn reduce_scatter<T: Element>(
        &mut self,
        values: &[T],
        mine: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        self.0.reduce_scatter(values, mine, reduction)
    }

    fn broadcast<T: Element>(&mut self, values: &mut [T], root: usize) -> Result<(), Error> {
        self.0.broadcast(values, root)
    }

    fn barrier(&mut self) -> Result<(), Error> {
        self.0.barrier()
    }
}
