//! What must hold of one step, read or written.

use ndarray::{Array3, ArrayView3};

use super::error::{Fault, Place};
use super::header::PairRecord;

/// A fault with its place in the step.
pub(super) type Located<T> = Result<T, Box<(Place, Fault)>>;

/// Every layer's pairs can be counted in 32 bits. `counts`: `[layers, ranks, experts]`.
pub(super) fn counts(counts: ArrayView3<'_, u32>) -> Located<()> {
    for (layer, counts) in counts.outer_iter().enumerate() {
        let value = counts.iter().map(|&count| u64::from(count)).sum();
        if value > u64::from(u32::MAX) {
            let limit = u32::MAX.into();
            let what = "pairs of a layer";
            return Err(Box::new((at(layer), Fault::TooMany { what, value, limit })));
        }
    }
    Ok(())
}

/// Ids exist, no token has an expert twice, weights and scores are finite and at least 0; those of masked pairs become 0.
pub(super) fn pairs(pairs: &mut PairRecord, experts: usize) -> Located<()> {
    let PairRecord {
        expert,
        gate_weight,
        score,
    } = pairs;
    distinct(expert.view(), experts)?;
    non_negative("gate weight", expert, gate_weight)?;
    match score {
        Some(score) => non_negative("score", expert, score),
        None => Ok(()),
    }
}

/// Tells whether a token's experts exist and differ.
pub(super) struct Distinct {
    /// The token, counted from 1, that had each expert last.
    seen: Vec<u64>,
    token: u64,
}

impl Distinct {
    pub(super) fn new(experts: usize) -> Self {
        Self {
            seen: vec![0; experts],
            token: 0,
        }
    }

    /// Checks the next token; the error names the slot. -1 = masked.
    pub(super) fn check<I: Copy + Into<i64>>(&mut self, ids: &[I]) -> Result<(), (usize, Fault)> {
        self.token += 1;
        for (slot, &id) in ids.iter().enumerate() {
            let expert = id.into();
            if expert == -1 {
                continue;
            }
            let known = usize::try_from(expert).ok();
            let Some(seen) = known.and_then(|expert| self.seen.get_mut(expert)) else {
                let experts = self.seen.len();
                return Err((slot, Fault::NoSuchExpert { expert, experts }));
            };
            if std::mem::replace(seen, self.token) == self.token {
                return Err((slot, Fault::DuplicateExpert(expert as u32)));
            }
        }
        Ok(())
    }
}

fn distinct(ids: ArrayView3<'_, i32>, experts: usize) -> Located<()> {
    let mut distinct = Distinct::new(experts);
    for (layer, ids) in ids.outer_iter().enumerate() {
        for (token, ids) in ids.outer_iter().enumerate() {
            let checked = match ids.as_slice() {
                Some(ids) => distinct.check(ids),
                None => distinct.check(&ids.to_vec()),
            };
            checked.map_err(|(slot, fault)| Box::new((at_slot(layer, token, slot), fault)))?;
        }
    }
    Ok(())
}

/// A weight, norm or score that is finite and at least 0.
pub(super) fn number(what: &'static str, value: f32) -> Result<(), Fault> {
    if (0.0..=f32::MAX).contains(&value) {
        return Ok(());
    }
    let value = f64::from(value);
    Err(Fault::Number { what, value })
}

fn non_negative(what: &'static str, ids: &Array3<i32>, values: &mut Array3<f32>) -> Located<()> {
    for (((layer, token, slot), value), id) in values.indexed_iter_mut().zip(ids) {
        if *id == -1 {
            *value = 0.0;
        } else {
            number(what, *value).map_err(|fault| Box::new((at_slot(layer, token, slot), fault)))?;
        }
    }
    Ok(())
}

pub(super) fn at_slot(layer: usize, token: usize, slot: usize) -> Place {
    Place {
        token: Some(token),
        slot: Some(slot),
        ..at(layer)
    }
}

/// Pairs per `[layers, ranks, experts]` of ids that have been checked.
pub(super) fn count(ids: ArrayView3<'_, i32>, ranks: usize, experts: usize) -> Array3<u32> {
    let (layers, tokens, _) = ids.dim();
    let per_rank = tokens / ranks;
    let mut counts = Array3::zeros((layers, ranks, experts));
    for ((layer, token, _), &expert) in ids.indexed_iter().filter(|(_, id)| **id >= 0) {
        counts[[layer, token / per_rank, expert as usize]] += 1;
    }
    counts
}

/// Ids and counts of one step say the same.
pub(super) fn agree(ids: ArrayView3<'_, i32>, counts: ArrayView3<'_, u32>) -> Located<()> {
    let (_, ranks, experts) = counts.dim();
    let found = count(ids, ranks, experts);
    let mut both = found.indexed_iter().zip(counts);
    match both.find(|((_, pairs), count)| pairs != count) {
        None => Ok(()),
        Some((((layer, rank, expert), &pairs), &count)) => {
            let place = Place {
                rank: Some(rank),
                ..at(layer)
            };
            let fault = Fault::Disagree {
                expert,
                pairs,
                count,
            };
            Err(Box::new((place, fault)))
        }
    }
}

fn at(layer: usize) -> Place {
    Place {
        layer: Some(layer),
        ..Place::default()
    }
}
