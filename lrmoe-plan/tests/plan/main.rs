//! Behaviour of the plan, against plain oracles.

mod checker;
mod cost;
mod memory;
mod model;
mod oracle;
mod placement;
mod plan;
mod quotas;
