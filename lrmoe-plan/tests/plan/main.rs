//! Behaviour of the plan, against plain oracles.

mod case;
mod cost;
mod eplb;
mod figures;
mod lrmoe;
mod memory;
mod optimum;
mod oracle;
mod placement;
mod policies;
mod quotas;
