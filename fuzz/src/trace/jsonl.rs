use std::collections::BTreeMap;

use lrmoe::trace::{ConvertOptions, Format, PairRecord};
use ndarray::Array3;
use serde_json::Value;

use super::megatron::{distinct, objects};
use super::{Expected, MOST, MOST_COUNTS, Steps, check_converted, choice};

const FIELDS: [&str; 7] = [
    "type",
    "token",
    "layer",
    "topk_ids",
    "topk_weights",
    "model",
    "num_experts",
];

/// Traces of JSON lines, a token and layer in each, against a reader of JSON values. The first byte chooses ranks, tokens per step and experts, `0` none
/// of them.
pub fn trace_jsonl(data: &[u8]) {
    let Some((choice, text)) = choice(data) else {
        return;
    };
    let part = |shift: u8| Some(usize::from(choice >> shift & 3)).filter(|n| *n > 0);
    let options = ConvertOptions {
        ranks: part(0),
        tokens_per_step: part(2),
        experts: part(4).map(|n| 2 * n),
        ..ConvertOptions::default()
    };
    let expected = match objects(text, &FIELDS) {
        None => Expected::Unknown,
        Some(objects) => match Records::of(&objects) {
            None => Expected::Refused,
            Some(records) => match records.steps(&options) {
                Some(expected) => expected,
                None => return,
            },
        },
    };
    check_converted("in.jsonl", text, Format::Jsonl, &options, &expected);
}

#[derive(Default)]
struct Records {
    experts: Option<u64>,
    /// Layer, token, experts, gate weights.
    tokens: Vec<(u64, u64, Vec<i64>, Option<Vec<f32>>)>,
}

/// A field that may be absent or null.
fn optional<'a, T>(
    object: &'a Value,
    field: &str,
    read: impl Fn(&'a Value) -> Option<T>,
) -> Option<Option<T>> {
    match object.get(field) {
        None | Some(Value::Null) => Some(None),
        Some(value) => read(value).map(Some),
    }
}

fn list<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    value.as_array()?.iter().map(read).collect()
}

fn id(value: &Value) -> Option<i64> {
    let id = value.as_i64()?;
    i32::try_from(id).ok().map(i64::from)
}

fn weight(value: &Value) -> Option<f32> {
    value.as_f64().map(|n| n as f32)
}

impl Records {
    fn of(objects: &[Value]) -> Option<Self> {
        let mut records = Self::default();
        let mut counted: BTreeMap<u64, u64> = BTreeMap::new();
        for object in objects {
            let kind = optional(object, "type", Value::as_str)?;
            let token = optional(object, "token", Value::as_u64)?;
            let layer = object.get("layer").map_or(Some(0), Value::as_u64)?;
            let ids = optional(object, "topk_ids", |value| list(value, id))?;
            let weights = optional(object, "topk_weights", |value| list(value, weight))?;
            optional(object, "model", Value::as_str)?;
            let experts = optional(object, "num_experts", Value::as_u64)?;
            records.experts = records.experts.or(experts);
            match ids {
                Some(ids) => {
                    let before = counted.entry(layer).or_default();
                    let token = token.unwrap_or(*before);
                    *before += 1;
                    records.tokens.push((layer, token, ids, weights));
                }
                None if kind == Some("meta") => {}
                None => return None,
            }
        }
        Some(records)
    }

    /// The trace; none if it is too large to go on.
    fn steps(&self, options: &ConvertOptions) -> Option<Expected> {
        let refused = Some(Expected::Refused);
        let mut cells: BTreeMap<u64, BTreeMap<u64, usize>> = BTreeMap::new();
        for (at, (layer, token, ..)) in self.tokens.iter().enumerate() {
            if cells
                .entry(*layer)
                .or_default()
                .insert(*token, at)
                .is_some()
            {
                return refused;
            }
        }
        let Some((_, _, ids, weights)) = self.tokens.first() else {
            return refused;
        };
        let (top_k, weighted) = (ids.len(), weights.is_some());
        let tokens = cells.values().map(BTreeMap::len).max().unwrap_or(0);
        let complete = |layer: &BTreeMap<u64, usize>| layer.keys().copied().eq(0..tokens as u64);
        let largest = self.tokens.iter().flat_map(|(_, _, ids, _)| ids).max();
        let largest = largest.copied().unwrap_or(0).max(0) as u64;
        let experts = options.experts.map(|n| n as u64).or(self.experts);
        let experts = experts.unwrap_or(largest + 1);
        let per_step = options.tokens_per_step.unwrap_or(tokens);
        let ranks = options.ranks.unwrap_or(1);
        if !cells.values().all(complete)
            || !(1..=tokens).contains(&per_step)
            || !(1..=per_step).contains(&ranks)
            || !(1..=MOST as u64).contains(&experts)
            || !(1..=experts).contains(&(top_k as u64))
        {
            return refused;
        }
        let experts = experts as usize;
        for (_, _, ids, weights) in &self.tokens {
            let fits = weights.as_ref().map(Vec::len) == weighted.then_some(top_k);
            if ids.len() != top_k || !fits || !distinct(ids, experts) {
                return refused;
            }
            let mut weights = ids.iter().zip(weights.iter().flatten());
            let fine =
                |(id, weight): (&i64, &f32)| *id == -1 || *weight >= 0.0 && weight.is_finite();
            if !weights.all(fine) {
                return refused;
            }
        }
        if cells.len() * ranks * experts > MOST_COUNTS {
            return None;
        }
        let per_rank = per_step.div_ceil(ranks);
        let mut steps = Steps::default();
        for first in (0..tokens).step_by(per_step) {
            let dim = (cells.len(), ranks * per_rank, top_k);
            let mut pairs = PairRecord {
                expert: Array3::from_elem(dim, -1),
                gate_weight: Array3::zeros(dim),
                score: None,
            };
            let mut counts = Array3::<u32>::zeros((cells.len(), ranks, experts));
            for (layer, places) in cells.values().enumerate() {
                for token in first..tokens.min(first + per_step) {
                    let (_, _, ids, weights) = &self.tokens[places[&(token as u64)]];
                    for (slot, &id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
                        let at = [layer, token - first, slot];
                        pairs.expert[at] = id as i32;
                        pairs.gate_weight[at] = weights.as_ref().map_or(0.0, |w| w[slot]);
                        counts[[layer, (token - first) / per_rank, id as usize]] += 1;
                    }
                }
            }
            steps.counts.push(counts);
            steps.pairs.extend(weighted.then_some(pairs));
        }
        Some(steps.checked())
    }
}
