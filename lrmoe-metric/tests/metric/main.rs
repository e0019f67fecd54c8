//! Behaviour of scores, keys and selection, against plain oracles.

mod bad_inputs;
#[path = "../common/mod.rs"]
mod common;
mod exchange;
mod factors;
mod local_quotas;
mod pairs;
mod rescale;
mod score;
mod select;
mod select_keys;
