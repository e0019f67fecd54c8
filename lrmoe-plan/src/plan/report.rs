//! A plan as text and as JSON.

use std::fmt;

use serde::{Serialize, Serializer};

use super::{Constraint, Plan};
use crate::Placement;

/// The experts of each rank.
pub(super) fn by_rank<S: Serializer>(placement: &Placement, to: S) -> Result<S::Ok, S::Error> {
    placement.by_rank().serialize(to)
}

impl fmt::Display for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Retention => "retention",
            Self::Loads => "loads",
            Self::Memory => "memory",
            Self::Time => "time",
        })
    }
}

const MIB: f64 = (1u64 << 20) as f64;

impl fmt::Display for Plan {
    /// A table of one rank a line, then what binds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = [
            "slots",
            "forward rows",
            "retained",
            "capacity",
            "MiB",
            "budget MiB",
            "binds",
        ];
        write!(f, "{:>4}", "rank")?;
        for column in columns {
            write!(f, " {column:>12}")?;
        }
        writeln!(f)?;
        for (rank, of) in self.ranks.iter().enumerate() {
            let [used, budget] = [of.memory.total(), of.budget].map(|bytes| bytes as f64 / MIB);
            writeln!(
                f,
                "{rank:>4} {:>12} {:>12} {:>12} {:>12} {used:>12.1} {budget:>12.1} {:>12}",
                self.slots[rank],
                of.forward_rows,
                of.retained_rows,
                self.capacities[rank],
                of.binds,
            )?;
        }
        write!(
            f,
            "{} of {} pairs retained",
            self.quotas.total(),
            self.wanted
        )
    }
}
