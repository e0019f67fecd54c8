//! Behaviour of the expert FFN on the backend `cpu`.

mod bad_inputs;
mod errors;
mod expected;
mod invariance;
mod oracle;
mod problem;
