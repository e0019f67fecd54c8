use std::panic::resume_unwind;
use std::thread;

use crate::{Element, Error, Reduction};

/// One rank of a world; the [crate docs](crate) state what all implementations promise.
///
/// # Errors
/// Every method fails as [`Error`] says: arguments that do not fit this rank or the other ranks, a
/// peer that left or is late, a world that failed before.
pub trait Collective: Send {
    /// This rank, in `0..ranks()`.
    fn rank(&self) -> usize;

    /// Number of ranks in the world.
    fn ranks(&self) -> usize;

    /// Sends `send_counts[p]` elements to every peer p and receives `recv_counts[p]` from it.
    ///
    /// `send` holds what goes to peer 0, then peer 1 and so on, the own rank included; `recv` is
    /// laid out likewise. `send_counts[p]` must be what rank p passes as `recv_counts[r]` for this
    /// rank r.
    fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), Error>;

    /// Replaces `values` by the elementwise reduction over all ranks; the same length on every
    /// rank.
    fn all_reduce<T: Element>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error>;

    /// Writes every rank's `mine`, in rank order, to `all` (`ranks * mine.len()` elements); the
    /// same length on every rank.
    fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<(), Error>;

    /// Reduces `values` (`ranks * mine.len()` elements) over all ranks and writes this rank's part
    /// to `mine`.
    fn reduce_scatter<T: Element>(
        &mut self,
        values: &[T],
        mine: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error>;

    /// Replaces `values` by those of rank `root`; the same length on every rank.
    fn broadcast<T: Element>(&mut self, values: &mut [T], root: usize) -> Result<(), Error>;

    /// Returns once every rank has called it.
    fn barrier(&mut self) -> Result<(), Error>;

    /// Runs `exchange`, which may call any collectives, on a thread of its own while `compute` runs on
    /// this one. Returns what both return, once both are done.
    ///
    /// The other ranks make the same calls in the same order, within `overlap` or without. If either
    /// panics, the panic goes on here once the other is done: so the buffers of an exchange stay
    /// borrowed for as long as a peer may read them, and what a rank gave before it panicked still
    /// arrives. A thread takes tens of microseconds to start, and a core to be of use.
    ///
    /// ```
    /// use lrmoe_comm::{Collective, Solo};
    ///
    /// let (send, mut received) = ([1.5f32, 2.5], [0.0; 2]);
    /// let (exchanged, sum) = Solo.overlap(
    ///     |comm| comm.all_to_all(&send, &[2], &mut received, &[2]),
    ///     || send.iter().sum::<f32>(),
    /// );
    /// exchanged?;
    /// assert_eq!((received, sum), (send, 4.0));
    /// # Ok::<_, lrmoe_comm::Error>(())
    /// ```
    ///
    /// What is under way cannot be changed or looked at:
    ///
    /// ```compile_fail
    /// # use lrmoe_comm::{Collective, Solo};
    /// let (mut send, mut received) = ([1.5f32, 2.5], [0.0; 2]);
    /// let (exchanged, ()) = Solo.overlap(
    ///     |comm| comm.all_to_all(&send, &[2], &mut received, &[2]),
    ///     || send[0] = 0.0,
    /// );
    /// ```
    ///
    /// # Panics
    /// If the system has no thread to give.
    fn overlap<X: Send, R>(
        &mut self,
        exchange: impl FnOnce(&mut Self) -> X + Send,
        compute: impl FnOnce() -> R,
    ) -> (X, R)
    where
        Self: Sized,
    {
        thread::scope(|scope| {
            let exchange = scope.spawn(|| exchange(self));
            let computed = compute();
            match exchange.join() {
                Ok(exchanged) => (exchanged, computed),
                Err(panic) => resume_unwind(panic),
            }
        })
    }
}
