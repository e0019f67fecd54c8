//! Behaviour of the expert FFN on the backend `cpu`.

mod errors;
mod invariance;
mod oracle;
mod problem;
