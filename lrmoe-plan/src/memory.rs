use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::arithmetic::{product, sum};
use crate::error::expect;
use crate::policy::enough_slots;
use crate::{Error, ExpertShape, Placement};

const F32: u64 = 4;
/// Expert id, gate weight, squared norm and score of a pair.
const PAIR_BYTES: u64 = 16;
/// Squared norm of a row in the four places where the forward pass holds the row.
const FORWARD_SCALARS: u64 = 32;
/// Gate weight and selection weight of a row in the three places where the backward pass holds the row.
const BACKWARD_SCALARS: u64 = 24;

/// What the forward pass leaves in memory for the backward pass.
///
/// | | at the pair's source | at its instance | sent backward |
/// |---|---|---|---|
/// | `recompute` | x of every token | | x and dy of retained pairs |
/// | `stash` | | x and pre-activations of all pairs | dy of retained pairs |
/// | `forward-select` | | x and pre-activations of retained pairs, which are chosen in the forward pass | dy of retained pairs |
///
/// Pre-activations are the outputs of gate (if gated) and up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Stash {
    /// Rows are sent again and pre-activations recomputed.
    #[default]
    Recompute,
    /// Everything is kept where it was computed.
    #[serde(rename = "stash")]
    Full,
    /// What the backward pass needs is kept where it was computed.
    ForwardSelect,
}

impl fmt::Display for Stash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Recompute => "recompute",
            Self::Full => "stash",
            Self::ForwardSelect => "forward-select",
        })
    }
}

impl FromStr for Stash {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "recompute" => Ok(Self::Recompute),
            "stash" => Ok(Self::Full),
            "forward-select" => Ok(Self::ForwardSelect),
            _ => Err(Error::UnknownName {
                what: "stash mode",
                name: name.to_owned(),
                expected: "recompute, stash, forward-select",
            }),
        }
    }
}

/// What a rank's memory depends on, besides where experts live and how many rows there are.
///
/// B is the bytes of an element, P the pre-activations of an expert: 2 F gated, F plain.
///
/// | term of [`Memory`] | bytes |
/// |---|---|
/// | placement, replicas | slots * 2 * 3 D F B (gated) or slots * 2 * 2 D F B (plain): weights and gradients |
/// | forward buffers | min(forward rows, chunk rows) * [`forward_row_bytes`](Self::forward_row_bytes) |
/// | backward buffers | retained rows * [`backward_row_bytes`](Self::backward_row_bytes) |
/// | stash | [`stash_bytes`](Self::stash_bytes) |
/// | optimizer | [`optimizer_bytes`](Self::optimizer_bytes) |
/// | fixed | `fixed` |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryModel {
    /// Size of an expert.
    pub shape: ExpertShape,
    /// Experts per token.
    pub top_k: usize,
    /// Tokens per rank.
    pub tokens: usize,
    /// Rows that a rank processes at a time in the forward pass; `u64::MAX` for all of them at once.
    pub chunk_rows: u64,
    /// Whether rows of other chunks are on their way while one is computed with.
    pub overlap: bool,
    /// What the forward pass leaves.
    pub stash: Stash,
    /// Whether it leaves every pair's output row too, for an exact router gradient.
    pub keeps_outputs: bool,
    /// Everything else, in bytes.
    pub fixed: u64,
}

/// Memory of one rank by what it is for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Weights and gradients of instances that are their expert's first.
    pub placement: u64,
    /// Weights and gradients of the other slots, used or not.
    pub replicas: u64,
    /// Token buffers of the forward pass.
    pub forward_buffers: u64,
    /// Token buffers of the backward pass.
    pub backward_buffers: u64,
    /// What the forward pass leaves for the backward pass.
    pub stash: u64,
    /// Shard of the optimizer state.
    pub optimizer: u64,
    /// Everything else.
    pub fixed: u64,
}

impl Memory {
    /// The parts by name.
    pub fn parts(&self) -> [(&'static str, u64); 7] {
        [
            ("placement", self.placement),
            ("replicas", self.replicas),
            ("forward buffers", self.forward_buffers),
            ("backward buffers", self.backward_buffers),
            ("stash", self.stash),
            ("optimizer", self.optimizer),
            ("fixed", self.fixed),
        ]
    }

    /// Token buffers of both passes.
    pub fn token_buffers(&self) -> u64 {
        sum(&[self.forward_buffers, self.backward_buffers])
    }

    /// Sum of all parts.
    pub fn total(&self) -> u64 {
        sum(&self.parts().map(|(_, bytes)| bytes))
    }
}

impl fmt::Display for Memory {
    /// A table of one part a line, in bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes) in self.parts() {
            writeln!(f, "{name:<16} {bytes:>20}")?;
        }
        write!(f, "{:<16} {:>20}", "total", self.total())
    }
}

impl MemoryModel {
    /// Bytes of one row in the forward pass: the row as it is sent, received, grouped by instance and put out (D each), and
    /// 8 bytes for its squared norm in each of these places.
    ///
    /// With `overlap`, also the places on their way of both passes that chunks otherwise take in turns, as they are sent and received (2 D
    /// each): of dy with `recompute`, which sends x before it, and of what goes back.
    pub fn forward_row_bytes(&self) -> u64 {
        let apart = match (self.overlap, self.stash) {
            (false, _) => 0,
            (true, Stash::Recompute) => 4,
            (true, Stash::Full | Stash::ForwardSelect) => 2,
        };
        sum(&[self.shape.row_bytes(4 + apart, 0), FORWARD_SCALARS])
    }

    /// Bytes of one retained row in the backward pass: rows as they are sent and received, x, dy and dx (D each), the input of the down
    /// projection and the gradients of the pre-activations (F + P), which take the place of recomputed pre-activations or of those that are
    /// gathered, as x then is, from the stash; and 8 bytes for gate weight and selection weight in each of three places.
    pub fn backward_row_bytes(&self) -> u64 {
        let row = self.shape.row_bytes(5, self.shape.matrices());
        sum(&[row, BACKWARD_SCALARS])
    }

    /// Bytes of what the forward pass leaves on one rank that computes `forward_rows` rows, `retained_rows` of which run backward.
    ///
    /// - Expert id, gate weight, squared norm and score of each of the rank's `tokens * top_k` pairs: 16 bytes.
    /// - `recompute`: x of each of the rank's tokens (D elements).
    /// - `stash`: x and pre-activations of each forward row (D + P).
    /// - `forward-select`: the same of each retained row.
    /// - Where outputs are kept: the output row of each of the rank's pairs (D).
    pub fn stash_bytes(&self, forward_rows: u64, retained_rows: u64) -> u64 {
        let (tokens, top_k) = (self.tokens as u64, self.top_k as u64);
        let row = self.shape.row_bytes(1, 0);
        let outputs = if self.keeps_outputs { row } else { 0 };
        let kept = match self.stash {
            Stash::Recompute => product(&[tokens, row]),
            Stash::Full | Stash::ForwardSelect => sum(&[
                product(&[forward_rows, self.stash_per_forward_row()]),
                product(&[retained_rows, self.stash_per_retained_row()]),
            ]),
        };
        sum(&[product(&[tokens, top_k, sum(&[PAIR_BYTES, outputs])]), kept])
    }

    /// Bytes that one more forward row adds to the stash.
    pub(crate) fn stash_per_forward_row(&self) -> u64 {
        match self.stash {
            Stash::Full => self.stash_row_bytes(),
            Stash::Recompute | Stash::ForwardSelect => 0,
        }
    }

    /// Bytes that one more retained row adds to the stash.
    fn stash_per_retained_row(&self) -> u64 {
        match self.stash {
            Stash::ForwardSelect => self.stash_row_bytes(),
            Stash::Recompute | Stash::Full => 0,
        }
    }

    fn stash_row_bytes(&self) -> u64 {
        self.shape.row_bytes(1, self.shape.matrices() - 1)
    }

    /// Bytes that one more retained row takes in buffers and stash.
    pub fn retained_row_bytes(&self) -> u64 {
        sum(&[self.backward_row_bytes(), self.stash_per_retained_row()])
    }

    /// Bytes of the optimizer state of one rank: master weights and two moments in f32 of all experts, divided
    /// evenly over the ranks.
    pub fn optimizer_bytes(&self, experts: usize, ranks: usize) -> u64 {
        let parameters = product(&[experts as u64, self.shape.parameters()]);
        product(&[3 * F32, parameters.div_ceil(ranks.max(1) as u64)])
    }

    /// Memory of `rank` with `slots` slots, or as many as it has instances if these are more.
    ///
    /// Forward buffers hold one chunk, or `forward_rows` if these are fewer.
    ///
    /// # Panics
    ///
    /// If `rank` does not exist.
    pub fn of_rank(
        &self,
        placement: &Placement,
        rank: usize,
        slots: u32,
        forward_rows: u64,
        retained_rows: u64,
    ) -> Memory {
        let here = placement.on_rank(rank);
        let slots = here.len().max(slots as usize) as u64;
        let firsts = here
            .filter(|&i| placement.instances_of(placement.expert_of(i))[0] as usize == i)
            .count() as u64;
        let slot = self.shape.slot_bytes();
        let chunk = forward_rows.min(self.chunk_rows);
        Memory {
            placement: product(&[firsts, slot]),
            replicas: product(&[slots - firsts, slot]),
            forward_buffers: product(&[chunk, self.forward_row_bytes()]),
            backward_buffers: product(&[retained_rows, self.backward_row_bytes()]),
            stash: self.stash_bytes(forward_rows, retained_rows),
            optimizer: self.optimizer_bytes(placement.experts(), placement.ranks()),
            fixed: self.fixed,
        }
    }

    /// The most retained rows that each rank can hold within its budget in bytes, `[ranks]`, whatever the loads: its
    /// slots are full, and all pairs of the layer, `ranks * tokens * top_k`, may run forward on it.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] if there are not as many budgets as slots, [`Error::NoRanks`],
    /// [`Error::TooFewSlots`] if the slots cannot hold every expert once, [`Error::BudgetTooSmall`] if a rank
    /// cannot hold its slots and one chunk of rows.
    pub fn capacities(
        &self,
        slots: &[u32],
        experts: usize,
        budget: &[u64],
    ) -> Result<Vec<u64>, Error> {
        expect("budgets", slots.len(), budget.len())?;
        if slots.is_empty() {
            return Err(Error::NoRanks);
        }
        enough_slots(experts, slots)?;
        let ranks = slots.len();
        let pairs = product(&[ranks as u64, self.tokens as u64, self.top_k as u64]);
        let same_everywhere = sum(&[
            self.without_rows(0, experts, ranks),
            product(&[pairs.min(self.chunk_rows), self.forward_row_bytes()]),
            product(&[pairs, self.stash_per_forward_row()]),
        ]);
        let needed = |slots: u32| {
            sum(&[
                same_everywhere,
                product(&[slots.into(), self.shape.slot_bytes()]),
            ])
        };
        let needed: Vec<u64> = slots.iter().map(|&slots| needed(slots)).collect();
        within_budget(&needed, budget)?;
        let row = self.retained_row_bytes();
        Ok(needed
            .iter()
            .zip(budget)
            .map(|(n, b)| (b - n) / row)
            .collect())
    }

    /// Bytes of a rank that computes no rows.
    pub(crate) fn without_rows(&self, slots: u32, experts: usize, ranks: usize) -> u64 {
        sum(&[
            product(&[slots.into(), self.shape.slot_bytes()]),
            self.stash_bytes(0, 0),
            self.optimizer_bytes(experts, ranks),
            self.fixed,
        ])
    }
}

/// Checks that every rank gets the bytes that it needs.
fn within_budget(needed: &[u64], budget: &[u64]) -> Result<(), Error> {
    if needed
        .iter()
        .zip(budget)
        .any(|(needed, budget)| needed > budget)
    {
        return Err(budget_too_small(needed, budget));
    }
    Ok(())
}

/// Names the rank that lacks most, the first of equals, and what would do for all ranks.
///
/// # Panics
///
/// If there are no ranks.
pub(crate) fn budget_too_small(needed: &[u64], budget: &[u64]) -> Error {
    let missing = |rank: usize| needed[rank].saturating_sub(budget[rank]);
    let rank = (0..needed.len()).rev().max_by_key(|&rank| missing(rank));
    let rank = rank.expect("a layer has ranks");
    Error::BudgetTooSmall {
        rank,
        budget: budget[rank],
        missing: missing(rank),
        smallest: needed.iter().copied().fold(0, u64::max),
    }
}
