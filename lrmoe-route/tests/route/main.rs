//! Behaviour of the crate.

mod case;
mod kept;
mod oracle;
mod shrink;
mod table;
