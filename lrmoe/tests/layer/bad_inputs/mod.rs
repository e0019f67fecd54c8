//! What every entry point of the layer does with inputs at and past the edge: the exact error, or the right result.
//!
//! Not repeated here: no tokens, masked pairs, one expert for all, and every token at every expert, which train through (`edges.rs`).

mod passes;
mod settings;

use std::fmt::Debug;

use lrmoe::error::Error;
use lrmoe::layer::MoeLayer;
use lrmoe::policy::Policy;

use super::bits;
use super::common::{Batch, lrmoe};

/// Compares with all values; errors of this crate hold those of others, so they have no equality.
fn expect<T: Debug>(case: &str, found: Result<T, Error>, expected: Result<T, Error>) {
    assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{case}");
}

fn batch() -> Batch {
    Batch::random(6, (8, 4), (5, 2), 3)
}

fn layer(batch: &Batch, policy: Policy) -> MoeLayer {
    MoeLayer::new(batch.config(1, policy), 0, |e| batch.parameters(e)).expect("a layer")
}
