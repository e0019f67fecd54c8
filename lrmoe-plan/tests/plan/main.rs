//! Behaviour of the plan, against plain oracles.

mod cost;
mod memory;
mod oracle;
mod placement;
mod quotas;
