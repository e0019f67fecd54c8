//! The header of a native trace: sizes by the shapes and the metadata, which must agree.

use std::collections::BTreeMap;

use super::error::Fault;
use super::header::TraceHeader;
use super::layout::{Tensor, number, size};
use super::limits::{MOST, MOST_COUNTS, MOST_STEPS};
use super::pairs::PairTensors;

/// The header without what is recorded per pair.
pub(super) fn sizes(
    metadata: BTreeMap<String, String>,
    counts: Option<&Tensor>,
    pairs: Option<&PairTensors>,
) -> Result<TraceHeader, Fault> {
    let counted = counts.map(|counts| counts.axes(["steps", "layers", "ranks", "experts"]));
    let counted = counted.transpose()?;
    let (steps, layers) = steps_and_layers(counted, pairs)?;
    let experts = counted.map(|axes| axes[3]);
    let experts = size(&metadata, &["experts", "E"], experts, MOST)?;
    let experts = experts.ok_or(Fault::NoMetadata("experts"))?;
    let ranks = size(&metadata, &["ranks"], counted.map(|axes| axes[2]), MOST)?.unwrap_or(1);
    let top_k = pairs.map(|pairs| pairs.axes[3]);
    let top_k = size(&metadata, &["top_k", "K"], top_k, experts)?;
    let all = layers.saturating_mul(ranks).saturating_mul(experts);
    for (what, value, limit) in [
        ("experts", experts, MOST),
        ("ranks", ranks, MOST),
        ("experts per token", top_k.unwrap_or(1), experts),
        ("counts of a step", all, MOST_COUNTS as usize),
        ("steps", steps, MOST_STEPS as usize),
    ] {
        if value > limit {
            let (value, limit) = (value as u64, limit as u64);
            return Err(Fault::TooMany { what, value, limit });
        }
    }
    let tokens = pairs
        .map(|pairs| tokens_of_rank(pairs, ranks))
        .transpose()?;
    let tokens_per_rank = size(&metadata, &["tokens_per_rank"], tokens, u32::MAX as usize)?;
    let first_step = first_step(&metadata, steps)?;
    Ok(TraceHeader {
        steps,
        layers,
        ranks,
        experts,
        top_k,
        first_step,
        tokens_per_rank,
        recorded: Vec::new(),
        scored: pairs.is_some_and(PairTensors::is_scored),
        metadata,
        numbers: None,
    })
}

/// From the counts, or else from the pairs; both have the same layers.
fn steps_and_layers(
    counted: Option<[usize; 4]>,
    pairs: Option<&PairTensors>,
) -> Result<(usize, usize), Fault> {
    match (counted, pairs) {
        (None, None) => Err(Fault::NoTensor("counts")),
        (None, Some(pairs)) => Ok((pairs.axes[0], pairs.axes[1])),
        (Some([_, layers, ..]), Some(pairs)) if pairs.axes[1] != layers => Err(Fault::Shape {
            tensor: "expert",
            found: pairs.axes.to_vec(),
            expected: format!("[steps, {layers}, tokens, k]"),
        }),
        (Some([steps, layers, ..]), _) => Ok((steps, layers)),
    }
}

fn tokens_of_rank(pairs: &PairTensors, ranks: usize) -> Result<usize, Fault> {
    let tokens = pairs.axes[2];
    if tokens.is_multiple_of(ranks) {
        return Ok(tokens / ranks);
    }
    Err(Fault::Shape {
        tensor: "expert",
        found: pairs.axes.to_vec(),
        expected: format!("a multiple of {ranks} ranks along its tokens, not {tokens}"),
    })
}

fn first_step(metadata: &BTreeMap<String, String>, steps: usize) -> Result<u32, Fault> {
    let first = number(metadata, &["first_step"])?.map_or(0, |(_, step)| step);
    let last = MOST_STEPS - steps as u64;
    if first <= last {
        return Ok(first as u32);
    }
    Err(Fault::Metadata {
        key: "first_step",
        value: first.to_string(),
        expected: format!("0 to {last}"),
    })
}

/// The header with the steps that have per-pair data. Without `numbers` they are the first ones.
pub(super) fn with_recorded(
    mut header: TraceHeader,
    counted: bool,
    recorded: usize,
    numbers: Option<Vec<i32>>,
) -> Result<TraceHeader, Fault> {
    let first = if counted { header.first_step } else { 0 };
    let end = if counted {
        header.first_step + header.steps as u32
    } else {
        i32::MAX as u32
    };
    let numbers = numbers.unwrap_or_else(|| {
        (0..recorded)
            .map(|index| (header.first_step as usize + index) as i32)
            .collect()
    });
    let mut next = i64::from(first);
    for (index, &value) in numbers.iter().enumerate() {
        let value = i64::from(value);
        if !(next..i64::from(end)).contains(&value) {
            let last = end - 1;
            return Err(Fault::StepNumber {
                index,
                value,
                first,
                last,
            });
        }
        next = value + 1;
    }
    let numbers = numbers.into_iter().map(|number| number as u32);
    if counted {
        header.recorded = numbers.map(|number| number - first).collect();
    } else {
        let numbers: Vec<u32> = numbers.collect();
        header.first_step = numbers[0];
        header.numbers = Some(numbers);
        header.recorded = (0..recorded as u32).collect();
    }
    Ok(header)
}
