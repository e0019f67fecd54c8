//! Behaviour of the crate.

mod case;
mod oracle;
mod shrink;
mod table;
