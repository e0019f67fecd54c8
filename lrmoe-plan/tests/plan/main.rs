//! Behaviour of the plan, against plain oracles.

mod bad_inputs;
mod brute;
mod case;
mod checker;
mod cost;
mod eplb;
mod figures;
mod lrmoe;
mod memory;
mod model;
mod optimum;
mod oracle;
mod pinned;
mod placement;
mod plan;
mod policies;
mod promises;
mod quotas;
mod request;
