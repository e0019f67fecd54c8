//! What the stages of a pass share.

use lrmoe_comm::Collective;
use lrmoe_kernels::{Element, Memory};

use super::stats::{Clock, Seconds, Stage};
use crate::error::Error;

/// A pass under way: where it computes, with whom it exchanges, how long its stages take.
pub(super) struct Pass<'a, B, C> {
    pub(super) backend: &'a B,
    pub(super) comm: &'a mut C,
    clock: Clock,
    seconds: &'a mut Seconds,
}

impl<'a, B, C: Collective> Pass<'a, B, C> {
    pub(super) fn new(
        backend: &'a B,
        comm: &'a mut C,
        clock: Clock,
        seconds: &'a mut Seconds,
    ) -> Self {
        Self {
            backend,
            comm,
            clock,
            seconds,
        }
    }

    /// Gives the time since the last reading to a stage.
    pub(super) fn lap(&mut self, stage: Stage) {
        self.clock.lap(self.seconds, stage);
    }

    /// Runs `exchange`, if there is one, on a thread of its own while `compute` runs on this one. What `compute` takes counts for `stage`; what
    /// the exchange takes longer counts as exchange.
    pub(super) fn overlap(
        &mut self,
        exchange: Option<impl FnOnce(&mut C) -> Result<(), lrmoe_comm::Error> + Send>,
        compute: impl FnOnce() -> Result<(), Error>,
        stage: Stage,
    ) -> Result<(), Error> {
        let Self {
            comm,
            clock,
            seconds,
            ..
        } = self;
        let compute = || {
            let computed = compute();
            clock.lap(seconds, stage);
            computed
        };
        let Some(exchange) = exchange else {
            return compute();
        };
        let (exchanged, computed) = comm.overlap(exchange, compute);
        clock.lap(seconds, Stage::Exchange);
        exchanged?;
        computed
    }

    /// Whether there is no other rank to exchange rows with.
    pub(super) fn is_alone(&self) -> bool {
        self.comm.ranks() == 1
    }
}

/// The elements of a buffer on the host: borrowed where they are there already, else read to `copy`.
pub(super) fn on_host<'a, B: Memory, T: Element>(
    backend: &B,
    buffer: &'a B::Buffer<T>,
    copy: &'a mut Vec<T>,
) -> Result<&'a [T], Error> {
    match B::host(buffer) {
        Some(values) => Ok(values),
        None => {
            copy.resize(B::len(buffer), T::default());
            backend.read(buffer, copy)?;
            Ok(copy)
        }
    }
}

/// Makes a buffer hold `len` elements that the host writes: in place where it can, else by way of `copy`.
pub(super) fn from_host<B: Memory, T: Element>(
    backend: &B,
    buffer: &mut B::Buffer<T>,
    len: usize,
    copy: &mut Vec<T>,
    write: impl FnOnce(&mut [T]) -> Result<(), Error>,
) -> Result<(), Error> {
    backend.resize(buffer, len)?;
    match B::host_mut(buffer) {
        Some(values) => write(values),
        None => {
            copy.resize(len, T::default());
            write(copy)?;
            Ok(backend.write(copy, buffer)?)
        }
    }
}
