use crate::check::{Caller, counts_agree};
use crate::{Collective, Element, Error, Reduction};

/// A world of one rank: checks its arguments and copies. It keeps no state, so an error does not
/// outlast its call.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

const CALLER: Caller = Caller { rank: 0, ranks: 1 };

impl Collective for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        1
    }

    fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), Error> {
        CALLER.all_to_all(send, send_counts, recv, recv_counts)?;
        counts_agree(1, |_| send_counts, |_| recv_counts)?;
        recv.copy_from_slice(send);
        Ok(())
    }

    fn all_reduce<T: Element>(&mut self, _: &mut [T], _: Reduction) -> Result<(), Error> {
        Ok(())
    }

    fn all_gather<T: Element>(&mut self, mine: &[T], all: &mut [T]) -> Result<(), Error> {
        CALLER.all_gather(mine, all)?;
        all.copy_from_slice(mine);
        Ok(())
    }

    fn reduce_scatter<T: Element>(
        &mut self,
        values: &[T],
        mine: &mut [T],
        reduction: Reduction,
    ) -> Result<(), Error> {
        CALLER.reduce_scatter(values, mine, reduction)?;
        mine.copy_from_slice(values);
        Ok(())
    }

    fn broadcast<T: Element>(&mut self, values: &mut [T], root: usize) -> Result<(), Error> {
        CALLER.broadcast(values, root).map(drop)
    }

    fn barrier(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Without a thread: nothing has to be waited for.
    fn overlap<X: Send, R>(
        &mut self,
        exchange: impl FnOnce(&mut Self) -> X + Send,
        compute: impl FnOnce() -> R,
    ) -> (X, R) {
        (exchange(self), compute())
    }
}
