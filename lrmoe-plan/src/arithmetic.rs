//! Sizes that stay at `u64::MAX` when they exceed it.

/// A product.
pub(crate) fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |a, &b| a.saturating_mul(b))
}

/// A sum.
pub(crate) fn sum(terms: &[u64]) -> u64 {
    terms.iter().fold(0, |a, &b| a.saturating_add(b))
}

/// What is left of a budget; none if more is taken, or more than can be counted.
pub(crate) fn left(budget: u64, taken: u64) -> Option<u64> {
    budget.checked_sub(taken).filter(|_| taken < u64::MAX)
}
