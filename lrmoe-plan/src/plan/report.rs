//! A plan as text and as JSON.

use std::fmt;

use serde::Serializer;

use super::{Constraint, Plan};
use crate::Placement;

/// Lines of the table at most.
const LINES: usize = 32;
/// Ranks named in a sentence at most.
const NAMES: usize = 8;
const MIB: f64 = (1u64 << 20) as f64;

/// The experts of each rank.
pub(super) fn by_rank<S: Serializer>(placement: &Placement, to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq((0..placement.ranks()).map(|rank| placement.local_experts(rank)))
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

impl fmt::Display for Plan {
    /// A table with a line per rank, or the ranks with the least memory to spare if there are many; then what binds and what would
    /// change it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_table(f)?;
        self.write_summary(f)
    }
}

impl Plan {
    fn write_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>4} {:>7} {:>5} {:>9} {:>9} {:>9} {:>11} {:>11} {:>11} {:>11} {:>11}  binds",
            "rank",
            "experts",
            "slots",
            "forward",
            "retained",
            "capacity",
            "slots MiB",
            "buffers MiB",
            "stash MiB",
            "total MiB",
            "budget MiB",
        )?;
        let mut shown: Vec<usize> = (0..self.ranks.len()).collect();
        let spare = |&rank: &usize| self.ranks[rank].budget - self.ranks[rank].memory.total();
        shown.sort_by_key(spare);
        shown.truncate(LINES);
        shown.sort_unstable();
        for &rank in &shown {
            let of = &self.ranks[rank];
            let (experts, slots) = (self.placement.on_rank(rank).len(), self.slots[rank]);
            let (forward, retained) = (of.forward_rows, of.retained_rows);
            let capacity = self.capacities[rank];
            write!(
                f,
                "{rank:>4} {experts:>7} {slots:>5} {forward:>9} {retained:>9} {capacity:>9}"
            )?;
            let weights = of.memory.placement + of.memory.replicas;
            let parts = [weights, of.memory.token_buffers(), of.memory.stash];
            for bytes in parts.into_iter().chain([of.memory.total(), of.budget]) {
                write!(f, " {:>11.2}", bytes as f64 / MIB)?;
            }
            writeln!(f, "  {}", of.binds)?;
        }
        match self.ranks.len() - shown.len() {
            0 => Ok(()),
            more => writeln!(f, "and {more} ranks with more memory to spare"),
        }
    }

    fn write_summary(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: u64 = self.ranks.iter().map(|of| of.forward_rows).sum();
        let retained = u64::from(self.quotas.total());
        let share = 100.0 * retained as f64 / pairs.max(1) as f64;
        write!(
            f,
            "{retained} of {pairs} pairs run backward ({share:.1} %), "
        )?;
        match self.wanted - retained {
            0 => writeln!(f, "as many as the retention asks for.")?,
            short => writeln!(f, "{short} fewer than the retention asks for.")?,
        }
        let row = self.retained_row_bytes;
        let memory = format!("one more row there needs {row} bytes of budget");
        for (by, what) in [
            (Constraint::Memory, memory.as_str()),
            (Constraint::Time, "more rows need a longer time budget"),
            (
                Constraint::Loads,
                "all pairs of the experts there are retained; other experts' instances would use the room",
            ),
            (
                Constraint::Retention,
                "a higher retention would use the room",
            ),
        ] {
            self.write_constraint(f, by, what)?;
        }
        let [all, forward, backward, exchange, delivery] = [
            self.seconds.total(),
            self.seconds.forward,
            self.seconds.backward,
            self.seconds.exchange,
            self.seconds.delivery,
        ]
        .map(|seconds| 1e3 * seconds);
        write!(
            f,
            "Modelled: {all:.3} ms = GEMMs forward {forward:.3} + backward {backward:.3}, exchange {exchange:.3}, delivery {delivery:.3}."
        )
    }

    /// A line on the ranks that a constraint binds, if there are any.
    fn write_constraint(
        &self,
        f: &mut fmt::Formatter<'_>,
        by: Constraint,
        what: &str,
    ) -> fmt::Result {
        let bound = (0..self.ranks.len()).filter(|&rank| self.ranks[rank].binds == by);
        let bound = Ranks(bound.collect());
        if bound.0.is_empty() {
            return Ok(());
        }
        match by {
            Constraint::Memory => write!(f, "Memory is full on {bound}")?,
            Constraint::Time => write!(f, "Time is up on {bound}")?,
            Constraint::Loads | Constraint::Retention => {
                let room = |&rank: &usize| self.capacities[rank] - self.ranks[rank].retained_rows;
                let room = bound.0.iter().map(room).fold(0, u64::saturating_add);
                write!(f, "Room for {room} more rows on {bound}")?;
            }
        }
        writeln!(f, ": {what}.")
    }
}

/// Ranks in a sentence.
struct Ranks(Vec<usize>);

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank" } else { "ranks" })?;
        for (i, rank) in self.0.iter().take(NAMES).enumerate() {
            write!(f, "{}{rank}", if i == 0 { " " } else { ", " })?;
        }
        match self.0.len().saturating_sub(NAMES) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
