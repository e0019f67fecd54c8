//! The checks that one rank can make alone, shared by all worlds.

use crate::{Call, Element, Error, Reduction, Side};

/// The rank that calls, and how many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl Caller {
    pub(crate) fn all_to_all<T: Element>(
        self,
        send: &[T],
        send_counts: &[usize],
        recv: &[T],
        recv_counts: &[usize],
    ) -> Result<Call, Error> {
        let call = Call::AllToAll { element: T::NAME };
        let sides = [
            (Side::Send, send_counts, send.len()),
            (Side::Receive, recv_counts, recv.len()),
        ];
        for (side, counts, len) in sides {
            if counts.len() != self.ranks {
                return Err(Error::PeerCounts {
                    rank: self.rank,
                    collective: call,
                    side,
                    found: counts.len(),
                    ranks: self.ranks,
                });
            }
            let expected = counts
                .iter()
                .fold(0usize, |sum, &count| sum.saturating_add(count));
            self.buffer(call, side, len, expected)?;
        }
        Ok(call)
    }

    pub(crate) fn all_reduce<T: Element>(self, values: &[T], reduction: Reduction) -> Call {
        Call::AllReduce {
            element: T::NAME,
            len: values.len(),
            reduction,
        }
    }

    pub(crate) fn all_gather<T: Element>(self, mine: &[T], all: &[T]) -> Result<Call, Error> {
        let call = Call::AllGather {
            element: T::NAME,
            len: mine.len(),
        };
        self.buffer(
            call,
            Side::Receive,
            all.len(),
            mine.len().saturating_mul(self.ranks),
        )?;
        Ok(call)
    }

    pub(crate) fn reduce_scatter<T: Element>(
        self,
        values: &[T],
        mine: &[T],
        reduction: Reduction,
    ) -> Result<Call, Error> {
        let call = Call::ReduceScatter {
            element: T::NAME,
            len: mine.len(),
            reduction,
        };
        self.buffer(
            call,
            Side::Send,
            values.len(),
            mine.len().saturating_mul(self.ranks),
        )?;
        Ok(call)
    }

    pub(crate) fn broadcast<T: Element>(self, values: &[T], root: usize) -> Result<Call, Error> {
        if root >= self.ranks {
            return Err(Error::Root {
                rank: self.rank,
                root,
                ranks: self.ranks,
            });
        }
        Ok(Call::Broadcast {
            element: T::NAME,
            len: values.len(),
            root,
        })
    }

    fn buffer(
        self,
        collective: Call,
        side: Side,
        found: usize,
        expected: usize,
    ) -> Result<(), Error> {
        if found == expected {
            return Ok(());
        }
        Err(Error::BufferLength {
            rank: self.rank,
            collective,
            side,
            found,
            expected,
        })
    }
}

/// Checks that what every rank sends is what its peers expect; `send` and `recv` give the counts of
/// a rank.
pub(crate) fn counts_agree<'a>(
    ranks: usize,
    send: impl Fn(usize) -> &'a [usize],
    recv: impl Fn(usize) -> &'a [usize],
) -> Result<(), Error> {
    for from in 0..ranks {
        for to in 0..ranks {
            let (sent, expected) = (send(from)[to], recv(to)[from]);
            if sent != expected {
                return Err(Error::CountMismatch {
                    from,
                    to,
                    sent,
                    expected,
                });
            }
        }
    }
    Ok(())
}
