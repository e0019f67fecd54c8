use std::collections::{BTreeMap, BTreeSet};

use lrmoe::trace::{ConvertOptions, Format};
use ndarray::Array3;
use serde_json::Value;

use super::{Expected, MOST, MOST_COUNTS, MOST_STEPS, Steps, check_converted, choice};

const FIELDS: [&str; 8] = [
    "step",
    "stage",
    "block",
    "layer",
    "rank",
    "num_tokens",
    "topk",
    "top_indices",
];

/// Megatron's router traces against a reader of JSON values. The first byte is the number of experts asked for, `0` for none.
pub fn trace_megatron(data: &[u8]) {
    let Some((experts, text)) = choice(data) else {
        return;
    };
    let options = ConvertOptions {
        experts: (experts > 0).then_some(experts.into()),
        ..ConvertOptions::default()
    };
    let expected = match objects(text, &FIELDS) {
        None => Expected::Unknown,
        Some(objects) => match objects.iter().map(Record::of).collect::<Option<Vec<_>>>() {
            None => Expected::Refused,
            Some(records) => match steps(&records, options.experts) {
                Some(expected) => expected,
                None => return,
            },
        },
    };
    check_converted("in.jsonl", text, Format::Megatron, &options, &expected);
}

/// The objects of all lines; none where the two readers may differ: lines that are no objects, escapes, a field twice.
pub(super) fn objects(text: &[u8], fields: &[&str]) -> Option<Vec<Value>> {
    let text = std::str::from_utf8(text).ok()?;
    let mut objects = Vec::new();
    for line in text.split('\n') {
        // JSON knows fewer kinds of white space.
        if line
            .trim_matches(|c: char| c.is_ascii_whitespace())
            .is_empty()
        {
            continue;
        }
        let twice = |field: &&str| line.matches(&format!("\"{field}\"")).count() > 1;
        if line.contains('\\') || fields.iter().any(twice) {
            return None;
        }
        let value: Value = serde_json::from_str(line).ok()?;
        value.as_object()?;
        objects.push(value);
    }
    Some(objects)
}

struct Record {
    step: u64,
    layer: (u64, u64, u64),
    rank: u64,
    top_k: u64,
    tokens: Vec<Vec<i64>>,
}

impl Record {
    fn of(object: &Value) -> Option<Self> {
        let needed = |field: &str| object.get(field)?.as_u64();
        let or_0 = |field: &str| object.get(field).map_or(Some(0), Value::as_u64);
        let numbers = |list: &Value| {
            let list = list.as_array()?.iter();
            list.map(Value::as_i64).collect::<Option<Vec<i64>>>()
        };
        let top_k = needed("topk")?;
        let indices = object.get("top_indices")?;
        let lists = indices.as_array()?.iter().map(numbers).collect();
        let lists: Option<Vec<Vec<i64>>> = lists;
        let flat = || {
            let ids = numbers(indices)?;
            let size = usize::try_from(top_k.max(1)).ok()?;
            Some(ids.chunks(size).map(<[i64]>::to_vec).collect())
        };
        let record = Self {
            step: needed("step")?,
            layer: (or_0("stage")?, or_0("block")?, needed("layer")?),
            rank: needed("rank")?,
            tokens: lists.or_else(flat)?,
            top_k,
        };
        let whole = |ids: &Vec<i64>| ids.len() as u64 == top_k;
        let complete = record.tokens.len() as u64 == needed("num_tokens")?;
        (complete && record.tokens.iter().all(whole)).then_some(record)
    }
}

/// The trace; none if it is too large to go on.
fn steps(records: &[Record], experts: Option<usize>) -> Option<Expected> {
    let refused = Some(Expected::Refused);
    let layers: BTreeSet<_> = records.iter().map(|record| record.layer).collect();
    let mut ranks: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    for record in records {
        ranks.entry(record.layer.0).or_default().insert(record.rank);
    }
    let ids = || {
        records
            .iter()
            .flat_map(|record| record.tokens.iter().flatten().copied())
    };
    let largest = ids().max().unwrap_or(0).max(0);
    let experts = experts.map_or(largest as u64 + 1, |experts| experts as u64);
    let sorted = records.windows(2).all(|two| two[0].step <= two[1].step);
    let Some(first) = records.first().filter(|_| sorted) else {
        return refused;
    };
    let same = records.iter().all(|record| record.top_k == first.top_k);
    let top_k = if same { first.top_k } else { 1 };
    if experts > MOST as u64 || !(1..=experts).contains(&top_k) || first.step >= MOST_STEPS {
        return refused;
    }
    let width = ranks.values().map(BTreeSet::len).max().unwrap_or(0);
    let dim = [layers.len(), width, experts as usize];
    if dim.iter().product::<usize>() > MOST_COUNTS {
        return None;
    }
    let mut steps = Steps {
        first: first.step,
        ..Steps::default()
    };
    for same_step in records.chunk_by(|a, b| a.step == b.step) {
        let mut counts = Array3::<u32>::zeros(dim);
        for record in same_step {
            let layer = layers.iter().position(|layer| *layer == record.layer)?;
            let own = &ranks[&record.layer.0];
            let rank = own.iter().position(|rank| *rank == record.rank)?;
            for ids in &record.tokens {
                if !distinct(ids, experts as usize) {
                    return refused;
                }
                for id in ids.iter().filter(|id| **id >= 0) {
                    counts[[layer, rank, *id as usize]] += 1;
                }
            }
        }
        steps.counts.push(counts);
    }
    Some(steps.checked())
}

/// Every id is an expert or -1, and no expert comes twice.
pub(super) fn distinct(ids: &[i64], experts: usize) -> bool {
    ids.iter().enumerate().all(|(slot, id)| {
        let exists = (-1..experts as i64).contains(id);
        exists && (*id == -1 || !ids[..slot].contains(id))
    })
}
