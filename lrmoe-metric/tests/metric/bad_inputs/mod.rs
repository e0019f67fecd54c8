//! What every public entry point does with inputs at and past the edge: the exact error, or the right result.
//!
//! Not repeated here: shapes, layouts and ids of pairs (`pairs.rs`), missing norms and NaN factors (`score.rs`), a sum of loads past 32 bits, an
//! error on one of several ranks, and more than 65,536 pairs on an expert (`select_keys.rs`).

mod norms;
mod pairs;
mod profiles;
mod selection;

use std::fmt::Debug;

use lrmoe_metric::{Error, MASKED, Pairs, SquaredNorm};
use ndarray::{Array2, array};

/// Compares with all values; errors of this crate hold those of others, so they have no equality.
fn expect<T: Debug>(case: &str, found: Result<T, Error>, expected: Result<T, Error>) {
    assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{case}");
}

fn length<T>(what: &'static str, found: usize, expected: usize) -> Result<T, Error> {
    Err(Error::Length {
        what,
        found,
        expected,
    })
}

fn norm(significand: f32, scale: u32) -> SquaredNorm {
    SquaredNorm { significand, scale }
}

/// Two tokens of two slots, the last masked, global ids from 100 on.
fn with_pairs<T>(run: impl FnOnce(&Pairs<'_>) -> T) -> T {
    let (ids, gates) = (array![[0, 1], [1, MASKED]], Array2::ones((2, 2)));
    run(&Pairs::new(ids.view(), gates.view(), 2, 100).unwrap())
}
