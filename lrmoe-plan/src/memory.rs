use std::fmt;

use crate::error::expect;
use crate::policy::enough_slots;
use crate::{Error, Placement};

const F32: u64 = 4;

/// Size of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Model width D.
    pub width: usize,
    /// Hidden width F.
    pub hidden: usize,
    /// Whether there is a gate projection besides up and down.
    pub gated: bool,
    /// Bytes of one element of weights, gradients and rows.
    pub bytes: usize,
}

impl ExpertShape {
    /// Weights of one expert: gate (if gated), up and down, D * F each.
    pub fn parameters(&self) -> u64 {
        product(&[self.matrices(), self.width as u64, self.hidden as u64])
    }

    /// Projections of one expert: 3 gated, 2 plain.
    pub fn matrices(&self) -> u64 {
        if self.gated { 3 } else { 2 }
    }

    /// Bytes of one expert's weights.
    pub fn weight_bytes(&self) -> u64 {
        product(&[self.parameters(), self.bytes as u64])
    }

    /// Bytes of one expert's weight gradients, held in the type of the weights.
    pub fn gradient_bytes(&self) -> u64 {
        self.weight_bytes()
    }

    /// Bytes of one slot: weights and gradients.
    pub fn slot_bytes(&self) -> u64 {
        sum(&[self.weight_bytes(), self.gradient_bytes()])
    }

    /// Bytes of one row in the forward pass: the row as it is sent, received, grouped by instance and put out (D each), and
    /// 32 bytes for its squared norm in the same four places.
    pub fn forward_row_bytes(&self) -> u64 {
        self.row_bytes(4, 0, 32)
    }

    /// Bytes of one retained row in the backward pass: rows as they are sent and received, x, dy and dx (D each), the input of the
    /// down projection and the gradients of the pre-activations (F each), and 24 bytes for its gate weight and weight.
    pub fn backward_row_bytes(&self) -> u64 {
        self.row_bytes(5, self.matrices(), 24)
    }

    fn row_bytes(&self, widths: u64, hiddens: u64, extra: u64) -> u64 {
        let elements = sum(&[
            product(&[widths, self.width as u64]),
            product(&[hiddens, self.hidden as u64]),
        ]);
        sum(&[product(&[elements, self.bytes as u64]), extra])
    }
}

/// What the forward pass leaves in memory for the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stash {
    /// x at the source, once per token, and the squared norm of the down projection's input per pair.
    #[default]
    Recompute,
}

/// What a rank's memory depends on, besides where experts live and how many rows there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryModel {
    /// Size of an expert.
    pub shape: ExpertShape,
    /// Experts per token.
    pub top_k: usize,
    /// Tokens per rank.
    pub tokens: usize,
    /// Rows that a rank processes at a time in the forward pass.
    pub chunk_rows: u64,
    /// What the forward pass leaves.
    pub stash: Stash,
    /// Whether it leaves every pair's output row too, for an exact router gradient.
    pub keeps_outputs: bool,
    /// Everything else, in bytes.
    pub fixed: u64,
}

/// Memory of one rank by what it is for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// Bytes of what the forward pass of one rank leaves: D elements per token; expert id, gate weight and squared norm per pair; D elements more per pair
    /// where outputs are kept.
    pub fn stash_bytes(&self) -> u64 {
        let (tokens, top_k) = (self.tokens as u64, self.top_k as u64);
        let row = product(&[self.shape.width as u64, self.shape.bytes as u64]);
        let outputs = if self.keeps_outputs {
            product(&[tokens, top_k, row])
        } else {
            0
        };
        match self.stash {
            Stash::Recompute => sum(&[
                product(&[tokens, row]),
                product(&[tokens, top_k, 16]),
                outputs,
            ]),
        }
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
        let shape = &self.shape;
        Memory {
            placement: product(&[firsts, shape.slot_bytes()]),
            replicas: product(&[slots - firsts, shape.slot_bytes()]),
            forward_buffers: product(&[
                forward_rows.min(self.chunk_rows),
                shape.forward_row_bytes(),
            ]),
            backward_buffers: product(&[retained_rows, shape.backward_row_bytes()]),
            stash: self.stash_bytes(),
            optimizer: self.optimizer_bytes(placement.experts(), placement.ranks()),
            fixed: self.fixed,
        }
    }

    /// The most retained rows that each rank can hold within its budget in bytes, `[ranks]`, when its slots are
    /// full and the forward pass runs in whole chunks.
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
        let same_everywhere = sum(&[
            product(&[self.chunk_rows, self.shape.forward_row_bytes()]),
            self.stash_bytes(),
            self.optimizer_bytes(experts, slots.len()),
            self.fixed,
        ]);
        let capacity = |(rank, (&slots, &budget)): (usize, (&u32, &u64))| {
            let held = product(&[slots.into(), self.shape.slot_bytes()]);
            let smallest = sum(&[held, same_everywhere]);
            match budget.checked_sub(smallest) {
                Some(left) => Ok(left / self.shape.backward_row_bytes()),
                None => Err(Error::BudgetTooSmall {
                    rank,
                    budget,
                    missing: smallest - budget,
                    smallest,
                }),
            }
        };
        slots.iter().zip(budget).enumerate().map(capacity).collect()
    }
}

/// A product that stays at `u64::MAX` when it exceeds it.
fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |a, &b| a.saturating_mul(b))
}

/// A sum that stays at `u64::MAX` when it exceeds it.
fn sum(terms: &[u64]) -> u64 {
    terms.iter().fold(0, |a, &b| a.saturating_add(b))
}
