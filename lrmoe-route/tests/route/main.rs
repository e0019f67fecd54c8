//! Behaviour of the crate.

mod bad_inputs;
mod case;
mod kept;
mod oracle;
mod shrink;
mod table;
