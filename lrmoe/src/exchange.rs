//! Selection over any communicator.

use lrmoe_comm::{Collective, Reduction};
use lrmoe_metric::{Exchange, ExchangeError};

/// Gives selection the collectives it asks for, over a communicator that is only borrowed.
#[derive(Debug)]
pub struct Over<'a, C>(pub &'a mut C);

impl<C: Collective> Exchange for Over<'_, C> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn ranks(&self) -> usize {
        self.0.ranks()
    }

    fn sum(&mut self, values: &mut [u32]) -> Result<(), ExchangeError> {
        Ok(self.0.all_reduce(values, Reduction::Sum)?)
    }

    fn max(&mut self, values: &mut [u32]) -> Result<(), ExchangeError> {
        Ok(self.0.all_reduce(values, Reduction::Max)?)
    }

    fn all_gather(&mut self, mine: &[u32], all: &mut [u32]) -> Result<(), ExchangeError> {
        Ok(self.0.all_gather(mine, all)?)
    }
}
