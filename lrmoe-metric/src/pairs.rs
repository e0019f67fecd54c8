use ndarray::ArrayView2;
use rayon::prelude::*;

use crate::Error;

/// Expert id of a masked pair (padding token, or dropped by the router): never scored, counted or selected.
pub const MASKED: i32 = -1;

/// Pairs that one parallel task takes; places among them fit in u16.
pub(crate) const CHUNK: usize = 1 << 14;

/// The routed pairs of one rank, checked once.
///
/// Pair `(token t, slot j)` has the local id `t * top_k + j` (a `u32`) and the global id `first_pair + local id` (a `u64`).
#[derive(Clone, Copy, Debug)]
pub struct Pairs<'a> {
    expert_ids: &'a [i32],
    gate_weights: &'a [f32],
    top_k: usize,
    experts: usize,
    first_pair: u64,
}

impl<'a> Pairs<'a> {
    /// Checks and takes the pairs of a rank.
    ///
    /// `expert_ids` and `gate_weights` are `[tokens, top_k]`; ids are [`MASKED`] or in `0..experts`, no expert twice in a token.
    /// `first_pair` is the number of pairs, masked ones included, on all lower ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`], [`Error::Shape`], [`Error::NoSlots`], [`Error::TooManyPairs`], [`Error::TooManyExperts`], [`Error::PairIds`],
    /// [`Error::ExpertId`], [`Error::RepeatedExpert`]; of several bad tokens the first is named.
    pub fn new(
        expert_ids: ArrayView2<'a, i32>,
        gate_weights: ArrayView2<'a, f32>,
        experts: usize,
        first_pair: u64,
    ) -> Result<Self, Error> {
        let (tokens, top_k) = expert_ids.dim();
        let (weight_tokens, weight_slots) = gate_weights.dim();
        if (tokens, top_k) != (weight_tokens, weight_slots) {
            return Err(Error::Shape {
                tokens,
                top_k,
                weight_tokens,
                weight_slots,
            });
        }
        check_ids(tokens, top_k, experts, first_pair)?;
        let expert_ids = expert_ids
            .to_slice()
            .ok_or(Error::Layout { what: "expert ids" })?;
        let gate_weights = gate_weights.to_slice().ok_or(Error::Layout {
            what: "gate weights",
        })?;
        check_experts(expert_ids, top_k, experts)?;
        Ok(Self {
            expert_ids,
            gate_weights,
            top_k,
            experts,
            first_pair,
        })
    }

    /// Tokens of the rank.
    pub fn tokens(&self) -> usize {
        self.expert_ids.len() / self.top_k
    }

    /// Slots per token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Pairs of the rank, masked ones included: `tokens * top_k`.
    pub fn len(&self) -> usize {
        self.expert_ids.len()
    }

    /// Whether the rank has no pairs.
    pub fn is_empty(&self) -> bool {
        self.expert_ids.is_empty()
    }

    /// Global id of the rank's first pair.
    pub fn first_pair(&self) -> u64 {
        self.first_pair
    }

    /// Expert of each pair, `[tokens * top_k]`.
    pub fn expert_ids(&self) -> &'a [i32] {
        self.expert_ids
    }

    /// Gate weight p of each pair, `[tokens * top_k]`; that of a masked pair means nothing.
    pub fn gate_weights(&self) -> &'a [f32] {
        self.gate_weights
    }

    /// Unmasked pairs of each expert, `[experts]`.
    pub fn loads(&self) -> Vec<u32> {
        let mut loads = vec![0; self.experts];
        for &id in self.expert_ids {
            if let Some(load) = loads.get_mut(slot(id)) {
                *load += 1;
            }
        }
        loads
    }

    /// Expert of a pair, or nothing if it is masked.
    pub(crate) fn expert(&self, pair: usize) -> Option<usize> {
        usize::try_from(self.expert_ids[pair]).ok()
    }

    /// Global id of a local pair.
    pub(crate) fn global(&self, pair: usize) -> u64 {
        self.first_pair + pair as u64
    }
}

/// Index of a checked id in a table of experts, past the end of every table if masked.
pub(crate) fn slot(id: i32) -> usize {
    id as u32 as usize
}

/// Checks that expert ids fit in 31 bits, local pair ids in 32 and global ones in 64.
fn check_ids(tokens: usize, top_k: usize, experts: usize, first_pair: u64) -> Result<(), Error> {
    if top_k == 0 {
        return Err(Error::NoSlots);
    }
    if experts > 1 << 31 {
        return Err(Error::TooManyExperts { experts });
    }
    let pairs = tokens
        .checked_mul(top_k)
        .filter(|&pairs| u32::try_from(pairs).is_ok())
        .ok_or(Error::TooManyPairs { tokens, top_k })?;
    match first_pair.checked_add(pairs as u64) {
        Some(_) => Ok(()),
        None => Err(Error::PairIds { first_pair, pairs }),
    }
}

/// Checks the range of the ids, and that a token names no expert twice.
fn check_experts(expert_ids: &[i32], top_k: usize, experts: usize) -> Result<(), Error> {
    let tokens = (CHUNK / top_k).max(1);
    let check = |last_token: &mut Vec<usize>, (chunk, ids): (usize, &[i32])| {
        for (row, ids) in ids.chunks_exact(top_k).enumerate() {
            let token = chunk * tokens + row;
            for (slot, &id) in ids.iter().enumerate().filter(|&(_, &id)| id != MASKED) {
                let expert = id as u32 as usize;
                let Some(last) = last_token.get_mut(expert) else {
                    return Some(Error::ExpertId {
                        token,
                        slot,
                        id,
                        experts,
                    });
                };
                if std::mem::replace(last, token) == token {
                    return Some(Error::RepeatedExpert { token, expert });
                }
            }
        }
        None
    };
    let error = expert_ids
        .par_chunks(tokens * top_k)
        .enumerate()
        .map_init(|| vec![usize::MAX; experts], check)
        .find_map_first(|error| error);
    error.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_fit_up_to_the_limit() {
        let most = u32::MAX as usize;
        let first = u64::MAX - most as u64;
        assert!(check_ids(most, 1, 1 << 31, 0).is_ok());
        assert!(check_ids(most / 5, 5, 8, first).is_ok());
        assert!(check_ids(1, most, 8, first).is_ok());
        for (tokens, top_k) in [
            (most + 1, 1),
            (1, most + 1),
            (1 << 16, 1 << 16),
            (usize::MAX, 2),
        ] {
            assert!(matches!(
                check_ids(tokens, top_k, 8, 0),
                Err(Error::TooManyPairs { .. })
            ));
        }
        for (tokens, top_k, first) in [(2, 3, u64::MAX - 5), (most, 1, first + 1), (1, 1, u64::MAX)]
        {
            assert!(matches!(
                check_ids(tokens, top_k, 8, first),
                Err(Error::PairIds { .. })
            ));
        }
        for experts in [(1 << 31) + 1, usize::MAX] {
            assert!(matches!(
                check_ids(1, 1, experts, 0),
                Err(Error::TooManyExperts { .. })
            ));
        }
        assert!(matches!(check_ids(0, 0, 0, 0), Err(Error::NoSlots)));
    }
}
