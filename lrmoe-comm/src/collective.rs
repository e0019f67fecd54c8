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
}
