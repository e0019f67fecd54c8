//! What must hold of one step, read or written.

use ndarray::{Array3, ArrayView3, Axis};

use super::error::{Fault, Place};
use super::header::PairRecord;

/// A fault with its place in the step.
pub(super) type Located<T> = Result<T, (Place, Fault)>;

/// Every layer's pairs can be counted in 32 bits. `counts`: `[layers, ranks, experts]`.
pub(super) fn counts(counts: ArrayView3<'_, u32>) -> Located<()> {
    for (layer, counts) in counts.outer_iter().enumerate() {
        let value = counts.iter().map(|&count| u64::from(count)).sum();
        if value > u64::from(u32::MAX) {
            let limit = u32::MAX.into();
            let what = "pairs of a layer";
            return Err((at(layer), Fault::TooMany { what, value, limit }));
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

fn distinct(ids: ArrayView3<'_, i32>, experts: usize) -> Located<()> {
    // The token, counted over all layers from 1, that had the expert last.
    let mut seen = vec![0_usize; experts];
    let tokens = ids.len_of(Axis(1));
    for (layer, ids) in ids.outer_iter().enumerate() {
        for (token, ids) in ids.outer_iter().enumerate() {
            let place = |slot| Place {
                token: Some(token),
                slot: Some(slot),
                ..at(layer)
            };
            for (slot, &expert) in ids.iter().enumerate().filter(|(_, id)| **id != -1) {
                let known = usize::try_from(expert).ok();
                let Some(seen) = known.and_then(|expert| seen.get_mut(expert)) else {
                    let expert = expert.into();
                    return Err((place(slot), Fault::NoSuchExpert { expert, experts }));
                };
                let id = layer * tokens + token + 1;
                if std::mem::replace(seen, id) == id {
                    return Err((place(slot), Fault::DuplicateExpert(expert as u32)));
                }
            }
        }
    }
    Ok(())
}

fn non_negative(what: &'static str, ids: &Array3<i32>, values: &mut Array3<f32>) -> Located<()> {
    for (((layer, token, slot), value), id) in values.indexed_iter_mut().zip(ids) {
        if *id == -1 {
            *value = 0.0;
        } else if !(0.0..=f32::MAX).contains(value) {
            let place = Place {
                token: Some(token),
                slot: Some(slot),
                ..at(layer)
            };
            let value = f64::from(*value);
            return Err((place, Fault::Number { what, value }));
        }
    }
    Ok(())
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
            Err((place, fault))
        }
    }
}

fn at(layer: usize) -> Place {
    Place {
        layer: Some(layer),
        ..Place::default()
    }
}
