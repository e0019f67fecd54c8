//! A world of ranks that are threads of the test.

use std::ops::Range;
use std::sync::{Barrier, Mutex};

use lrmoe_metric::{Exchange, ExchangeError};

struct World {
    barrier: Barrier,
    mail: Vec<Mutex<Vec<u32>>>,
}

pub(crate) struct Rank<'a> {
    world: &'a World,
    rank: usize,
}

impl Rank<'_> {
    /// Hands the values of all ranks, in rank order, to `fold`.
    fn meet(&self, mine: &[u32], mut fold: impl FnMut(usize, &[u32])) -> Result<(), ExchangeError> {
        *self.world.mail[self.rank].lock().unwrap() = mine.to_vec();
        self.world.barrier.wait();
        let mut equal = true;
        for (rank, mail) in self.world.mail.iter().enumerate() {
            let mail = mail.lock().unwrap();
            equal &= mail.len() == mine.len();
            if equal {
                fold(rank, &mail);
            }
        }
        self.world.barrier.wait();
        if equal {
            Ok(())
        } else {
            Err("ranks disagree on a length".into())
        }
    }

    fn reduce(
        &self,
        values: &mut [u32],
        op: fn(u32, u32) -> Option<u32>,
    ) -> Result<(), ExchangeError> {
        let mut result = Some(vec![0; values.len()]);
        self.meet(values, |_, other| {
            let merge = |result: Vec<u32>| {
                result
                    .into_iter()
                    .zip(other)
                    .map(|(a, &b)| op(a, b))
                    .collect()
            };
            result = result.take().and_then(merge);
        })?;
        values.copy_from_slice(&result.ok_or("a sum passes u32")?);
        Ok(())
    }
}

impl Exchange for Rank<'_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.world.mail.len()
    }

    fn sum(&mut self, values: &mut [u32]) -> Result<(), ExchangeError> {
        self.reduce(values, u32::checked_add)
    }

    fn max(&mut self, values: &mut [u32]) -> Result<(), ExchangeError> {
        self.reduce(values, |a, b| Some(a.max(b)))
    }

    fn all_gather(&mut self, mine: &[u32], all: &mut [u32]) -> Result<(), ExchangeError> {
        if all.len() != mine.len() * self.ranks() {
            return Err("gather into a slice of the wrong length".into());
        }
        self.meet(mine, |rank, values| {
            all[rank * mine.len()..][..mine.len()].copy_from_slice(values)
        })
    }
}

/// Runs `body` on every rank; results in rank order.
pub(crate) fn run<T: Send>(ranks: usize, body: impl Fn(&mut Rank<'_>) -> T + Sync) -> Vec<T> {
    let mail = (0..ranks).map(|_| Mutex::default()).collect();
    let world = &World {
        barrier: Barrier::new(ranks),
        mail,
    };
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| scope.spawn(move || body(&mut Rank { world, rank })))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Tokens of each of `ranks` ranks, as evenly as possible.
pub(crate) fn even(tokens: usize, ranks: usize) -> Vec<Range<usize>> {
    (0..ranks)
        .map(|rank| rank * tokens / ranks..(rank + 1) * tokens / ranks)
        .collect()
}
