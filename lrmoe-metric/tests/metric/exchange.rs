//! What a selection exchanges, and the exchange of a single rank.

use lrmoe_metric::{Exchange, ExchangeError, Pairs, Solo, select_keys};
use ndarray::Array2;

/// Counts what is gathered.
struct Counted<'a, E> {
    exchange: &'a mut E,
    gathered: usize,
}

impl<E: Exchange> Exchange for Counted<'_, E> {
    fn rank(&self) -> usize {
        self.exchange.rank()
    }

    fn ranks(&self) -> usize {
        self.exchange.ranks()
    }

    fn sum(&mut self, values: &mut [u32]) -> Result<(), ExchangeError> {
        self.exchange.sum(values)
    }

    fn max(&mut self, values: &mut [u32]) -> Result<(), ExchangeError> {
        self.exchange.max(values)
    }

    fn all_gather(&mut self, mine: &[u32], all: &mut [u32]) -> Result<(), ExchangeError> {
        self.gathered += mine.len();
        self.exchange.all_gather(mine, all)
    }
}

/// Values that each of two ranks gathers to keep 3 of the 8 pairs of each of two experts with these keys, the same on both ranks.
fn gathered(keys: [u32; 8]) -> Vec<usize> {
    let ids = Array2::from_shape_fn((8, 1), |(pair, _)| (pair % 2) as i32);
    let gates = Array2::zeros(ids.dim());
    let ranks = crate::common::even(16, 2);
    crate::common::run(2, |exchange| {
        let first = ranks[exchange.rank()].start as u64;
        let mut counted = Counted {
            exchange,
            gathered: 0,
        };
        let pairs = Pairs::new(ids.view(), gates.view(), 2, first).unwrap();
        select_keys(&pairs, &keys, &[3, 4], &mut counted).unwrap();
        counted.gathered
    })
}

#[test]
fn ties_are_counted_only_where_they_are_cut() {
    // Every key occurs on both ranks: the third of expert 0 is cut from its twin, the fourth of expert 1 is not.
    assert_eq!(gathered([9, 8, 7, 6, 5, 4, 3, 2]), [1, 1]);
    // All of expert 1 are equal.
    assert_eq!(gathered([9, 8, 7, 8, 5, 8, 3, 8]), [2, 2]);
}

#[test]
fn one_rank_gathers_its_own() {
    assert_eq!((Solo.rank(), Solo.ranks()), (0, 1));
    let mut all = [0; 2];
    Solo.all_gather(&[3, 5], &mut all).unwrap();
    assert_eq!(all, [3, 5]);
    let error = Solo.all_gather(&[3], &mut all).unwrap_err();
    assert_eq!(error.to_string(), "gather of 1 values into 2");
}
