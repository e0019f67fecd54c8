//! Megatron's router trace: one JSON object per step, rank and layer,
//! `{"step": .., "stage": .., "block": .., "layer": .., "rank": .., "num_tokens": .., "topk": .., "top_indices": [[..], ..]}`.
//!
//! Layers are numbered anew in the order of (stage, block, layer), ranks in the order of their numbers within their stage, so that the ranks of
//! different pipeline stages fall together. Records of the same step, layer and rank (micro-batches) add up. Every file is in order of its steps,
//! which are numbered on from the first without gaps. `top_indices` may be flat.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use ndarray::Array3;
use serde::Deserialize;

use super::lines::Lines;
use super::merge::{Keyed, Merged, Records, Taken};
use super::{ConvertOptions, Source, Step, announce, first_step};
use crate::trace::check::Distinct;
use crate::trace::error::{Fault, Place, TraceError};
use crate::trace::header::TraceSettings;

#[derive(Deserialize)]
struct Record {
    step: u64,
    #[serde(default)]
    stage: u64,
    #[serde(default)]
    block: u64,
    layer: u64,
    rank: u64,
    num_tokens: usize,
    topk: usize,
    top_indices: Indices,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected top_indices as a list of numbers or of lists of numbers"
)]
enum Indices {
    Nested(Vec<Vec<i64>>),
    Flat(Vec<i64>),
}

impl Record {
    fn layer(&self) -> (u64, u64, u64) {
        (self.stage, self.block, self.layer)
    }

    /// The experts of each token; `None` if there are not `num_tokens` times `topk`.
    fn tokens(&self) -> Option<Vec<&[i64]>> {
        let tokens: Vec<&[i64]> = match &self.top_indices {
            Indices::Nested(tokens) => tokens.iter().map(Vec::as_slice).collect(),
            Indices::Flat(ids) => ids.chunks(self.topk.max(1)).collect(),
        };
        let fits =
            tokens.len() == self.num_tokens && tokens.iter().all(|ids| ids.len() == self.topk);
        fits.then_some(tokens)
    }
}

struct File(Lines);

impl Records for File {
    type Record = Record;

    fn path(&self) -> &Path {
        &self.0.path
    }

    fn next(&mut self) -> Result<Option<Keyed<Record>>, TraceError> {
        let record = self.0.next::<Record>()?;
        let line = self.0.line;
        Ok(record.map(|record| Keyed {
            key: record.step,
            line,
            record,
        }))
    }
}

fn merged(inputs: &[PathBuf], progress: &ProgressBar) -> Result<Merged<File>, TraceError> {
    Merged::new(
        inputs
            .iter()
            .map(|path| Lines::open(path, progress).map(File)),
    )
}

pub(super) struct Megatron {
    records: Merged<File>,
    layers: BTreeMap<(u64, u64, u64), usize>,
    /// Place of each rank by (stage, rank).
    ranks: BTreeMap<(u64, u64), usize>,
    distinct: Distinct,
    settings: TraceSettings,
}

impl Megatron {
    pub(super) fn open(
        inputs: &[PathBuf],
        options: &ConvertOptions,
        progress: &ProgressBar,
    ) -> Result<Self, TraceError> {
        announce(inputs, 2, progress)?;
        let survey = Survey::of(inputs, progress)?;
        let experts = options
            .experts
            .unwrap_or(survey.largest.max(0) as usize + 1);
        let mut ranks = BTreeMap::new();
        for (stage, numbers) in &survey.ranks {
            ranks.extend(numbers.iter().map(|rank| (*stage, *rank)).zip(0..));
        }
        let settings = TraceSettings {
            layers: survey.layers.len(),
            ranks: survey.ranks.values().map(BTreeSet::len).max().unwrap_or(0),
            experts,
            top_k: survey.top_k,
            tokens_per_rank: None,
            first_step: first_step(&inputs[0], survey.first)?,
            metadata: BTreeMap::new(),
        };
        super::check_sizes(&inputs[0], &settings)?;
        Ok(Self {
            records: merged(inputs, progress)?,
            layers: survey.layers.into_iter().zip(0..).collect(),
            ranks,
            distinct: Distinct::new(experts),
            settings,
        })
    }

    fn add(&mut self, taken: &Taken<Record>, counts: &mut Array3<u32>) -> Result<(), TraceError> {
        let record = &taken.keyed.record;
        let layer = self.layers.get(&record.layer());
        let rank = self.ranks.get(&(record.stage, record.rank));
        let (Some(&layer), Some(&rank)) = (layer, rank) else {
            return Err(taken.fault(record.place(), Fault::Changed));
        };
        for (token, ids) in record.tokens().unwrap_or_default().into_iter().enumerate() {
            self.distinct.check(ids).map_err(|(slot, fault)| {
                let (token, slot) = (Some(token), Some(slot));
                taken.fault(
                    Place {
                        token,
                        slot,
                        ..record.place()
                    },
                    fault,
                )
            })?;
            for &id in ids.iter().filter(|id| **id != -1) {
                let count = &mut counts[[layer, rank, id as usize]];
                *count = count.saturating_add(1);
            }
        }
        Ok(())
    }
}

impl Record {
    /// With the numbers that the record itself has.
    fn place(&self) -> Place {
        Place {
            step: Some(self.step),
            layer: Some(self.layer as usize),
            rank: Some(self.rank as usize),
            ..Place::default()
        }
    }
}

impl Source for Megatron {
    fn settings(&self) -> TraceSettings {
        self.settings.clone()
    }

    fn next(&mut self) -> Result<Option<Step>, TraceError> {
        let Some(step) = self.records.peek() else {
            return Ok(None);
        };
        let TraceSettings {
            layers,
            ranks,
            experts,
            ..
        } = self.settings;
        let mut counts = Array3::zeros((layers, ranks, experts));
        while let Some(taken) = self.records.of_step(step)? {
            self.add(&taken, &mut counts)?;
        }
        Ok(Some(Step {
            counts,
            pairs: None,
        }))
    }
}

/// What the first pass finds.
#[derive(Default)]
struct Survey {
    layers: BTreeSet<(u64, u64, u64)>,
    /// Ranks of each stage.
    ranks: BTreeMap<u64, BTreeSet<u64>>,
    largest: i64,
    /// Experts per token, if every record has the same.
    top_k: Option<usize>,
    first: Option<u64>,
}

impl Survey {
    fn of(inputs: &[PathBuf], progress: &ProgressBar) -> Result<Self, TraceError> {
        let mut survey = Self::default();
        let mut records = merged(inputs, progress)?;
        survey.first = records.peek();
        while let Some(step) = records.peek() {
            while let Some(taken) = records.of_step(step)? {
                survey.add(&taken)?;
            }
        }
        Ok(survey)
    }

    fn add(&mut self, taken: &Taken<Record>) -> Result<(), TraceError> {
        let record = &taken.keyed.record;
        let Some(tokens) = record.tokens() else {
            let fault = Fault::Field {
                name: "top_indices",
                value: match &record.top_indices {
                    Indices::Nested(tokens) => format!("a list of {} lists", tokens.len()),
                    Indices::Flat(ids) => format!("a list of {} numbers", ids.len()),
                },
                expected: format!("{} tokens of {} experts", record.num_tokens, record.topk),
            };
            return Err(taken.fault(record.place(), fault));
        };
        let largest = tokens.iter().flat_map(|ids| ids.iter()).max();
        self.largest = self.largest.max(largest.copied().unwrap_or(-1));
        let same = self.layers.is_empty() || self.top_k == Some(record.topk);
        self.top_k = same.then_some(record.topk);
        self.layers.insert(record.layer());
        self.ranks
            .entry(record.stage)
            .or_default()
            .insert(record.rank);
        Ok(())
    }
}
