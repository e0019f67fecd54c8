//! One JSON object per token and layer: `{"token": 0, "layer": 0, "topk_ids": [..], "topk_weights": [..]}`.
//!
//! A first object `{"type": "meta", "model": .., "num_experts": .., ..}` may say the number of experts. Tokens are numbered from 0, the same in every
//! layer; without `token` a file's records are numbered as they come, layer by layer. Layers are put in the order of their numbers.
//! The first pass finds the sizes, the second fills the steps; memory holds those that are not complete.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use ndarray::{Array3, s};
use serde::Deserialize;

use super::lines::Lines;
use super::merge::{Keyed, Merged, Records, Taken};
use super::{ConvertOptions, Source, Step, announce};
use crate::trace::check::{self, Distinct};
use crate::trace::error::{Fault, Place, TraceError};
use crate::trace::header::{PairRecord, TraceSettings};

#[derive(Deserialize)]
struct Record {
    #[serde(rename = "type")]
    kind: Option<String>,
    token: Option<u64>,
    #[serde(default)]
    layer: u64,
    topk_ids: Option<Vec<i32>>,
    // As numbers of JSON are, so that one past f32 is named by its slot.
    topk_weights: Option<Vec<f64>>,
    model: Option<String>,
    num_experts: Option<usize>,
}

/// A file's records, with the tokens numbered.
struct File {
    lines: Lines,
    /// Records so far of each layer.
    tokens: BTreeMap<u64, u64>,
}

impl Records for File {
    type Record = Record;

    fn path(&self) -> &Path {
        &self.lines.path
    }

    fn next(&mut self) -> Result<Option<Keyed<Record>>, TraceError> {
        let Some(record) = self.lines.next::<Record>()? else {
            return Ok(None);
        };
        let mut key = 0;
        if record.topk_ids.is_some() {
            let counted = self.tokens.entry(record.layer).or_default();
            key = record.token.unwrap_or(*counted);
            *counted += 1;
        } else if record.kind.as_deref() != Some("meta") {
            let fault = Fault::Field {
                name: "topk_ids",
                value: "nothing".into(),
                expected: "the token's experts".into(),
            };
            return Err(self.lines.fault(fault));
        }
        let line = self.lines.line;
        Ok(Some(Keyed { key, line, record }))
    }
}

fn merged(inputs: &[PathBuf], progress: &ProgressBar) -> Result<Merged<File>, TraceError> {
    let open = |path: &PathBuf| {
        let lines = Lines::open(path, progress)?;
        let tokens = BTreeMap::new();
        Ok(File { lines, tokens })
    };
    Merged::new(inputs.iter().map(open))
}

pub(super) struct Jsonl {
    records: Merged<File>,
    /// Of all inputs together; errors about the whole are laid to it.
    path: PathBuf,
    layout: Layout,
    distinct: Distinct,
    settings: TraceSettings,
    /// Steps begun, by number.
    open: BTreeMap<u64, Filling>,
    next: u64,
}

/// How tokens are divided into steps and ranks.
struct Layout {
    /// Place of each layer number in the trace.
    layers: BTreeMap<u64, usize>,
    top_k: usize,
    weights: bool,
    tokens: u64,
    per_step: u64,
    /// Tokens of a step with those that fill up the last rank.
    padded: usize,
}

/// A step and how many records it lacks.
struct Filling {
    pairs: PairRecord,
    missing: u64,
}

/// In place of an expert: no record yet.
const NONE: i32 = i32::MIN;

impl Jsonl {
    pub(super) fn open(
        inputs: &[PathBuf],
        options: &ConvertOptions,
        progress: &ProgressBar,
    ) -> Result<Self, TraceError> {
        announce(inputs, 2, progress)?;
        let survey = Survey::of(inputs, progress)?;
        let path = &inputs[0];
        let whole = |fault| TraceError::invalid(path, Place::default(), fault);
        let experts = options.experts.or(survey.experts);
        let experts = experts.unwrap_or(survey.largest.max(0) as usize + 1);
        let ranks = options.ranks.unwrap_or(1);
        let per_step = options
            .tokens_per_step
            .map_or(survey.tokens, |tokens| tokens as u64);
        for (what, value, limit) in [
            ("tokens per step", per_step, survey.tokens),
            ("ranks", ranks as u64, per_step),
            ("experts", experts as u64, super::MOST as u64),
            ("experts per token", survey.top_k as u64, experts as u64),
        ] {
            if !(1..=limit).contains(&value) {
                return Err(whole(Fault::Size { what, value, limit }));
            }
        }
        let per_rank = (per_step as usize).div_ceil(ranks);
        let numbers = survey.layers.keys().map(u64::to_string).collect::<Vec<_>>();
        let mut metadata = BTreeMap::from([("source_layers".to_owned(), numbers.join(","))]);
        metadata.extend(survey.model.map(|model| ("model".to_owned(), model)));
        Ok(Self {
            records: merged(inputs, progress)?,
            path: path.clone(),
            distinct: Distinct::new(experts),
            settings: TraceSettings {
                layers: survey.layers.len(),
                ranks,
                experts,
                top_k: Some(survey.top_k),
                tokens_per_rank: Some(per_rank),
                first_step: 0,
                metadata,
            },
            layout: Layout {
                layers: survey.layers.into_keys().zip(0..).collect(),
                top_k: survey.top_k,
                weights: survey.weights,
                tokens: survey.tokens,
                per_step,
                padded: ranks * per_rank,
            },
            open: BTreeMap::new(),
            next: 0,
        })
    }

    fn take(&mut self, taken: &Taken<Record>) -> Result<(), TraceError> {
        let Keyed {
            key: token, record, ..
        } = &taken.keyed;
        let Some(ids) = &record.topk_ids else {
            return Ok(());
        };
        let layout = &self.layout;
        let place = |slot| Place {
            layer: Some(record.layer as usize),
            token: Some(*token as usize),
            slot,
            ..Place::default()
        };
        let fault = |slot, fault| taken.fault(place(slot), fault);
        let checked = self.distinct.check(ids);
        checked.map_err(|(slot, wrong)| fault(Some(slot), wrong))?;
        let weights = record.topk_weights.as_deref().unwrap_or_default();
        for (slot, weight) in weights
            .iter()
            .enumerate()
            .filter(|(slot, _)| ids[*slot] != -1)
        {
            let checked = check::number("gate weight", *weight as f32);
            checked.map_err(|wrong| fault(Some(slot), wrong))?;
        }
        let step = token / layout.per_step;
        let layer = layout
            .layers
            .get(&record.layer)
            .filter(|_| *token < layout.tokens);
        let layer = *layer.ok_or_else(|| fault(None, Fault::Changed))?;
        let filling = self
            .open
            .entry(step)
            .or_insert_with(|| layout.filling(step));
        let at = s![layer, (token % layout.per_step) as usize, ..];
        let mut known = filling.pairs.expert.slice_mut(at);
        if known[0] != NONE {
            return Err(fault(None, Fault::Twice));
        }
        known
            .iter_mut()
            .zip(ids)
            .for_each(|(known, id)| *known = *id);
        let known = filling.pairs.gate_weight.slice_mut(at);
        known
            .into_iter()
            .zip(weights)
            .for_each(|(known, weight)| *known = *weight as f32);
        filling.missing -= 1;
        Ok(())
    }
}

impl Layout {
    /// A step without records; tokens beyond the end of the last step and of the last rank are masked.
    fn filling(&self, step: u64) -> Filling {
        let tokens = self.per_step.min(self.tokens - step * self.per_step);
        let dim = (self.layers.len(), self.padded, self.top_k);
        let mut expert = Array3::from_elem(dim, NONE);
        expert.slice_mut(s![.., tokens as usize.., ..]).fill(-1);
        let gate_weight = Array3::zeros(dim);
        let pairs = PairRecord {
            expert,
            gate_weight,
            score: None,
        };
        Filling {
            pairs,
            missing: tokens * dim.0 as u64,
        }
    }
}

impl Source for Jsonl {
    fn settings(&self) -> TraceSettings {
        self.settings.clone()
    }

    fn next(&mut self) -> Result<Option<Step>, TraceError> {
        if self.next * self.layout.per_step >= self.layout.tokens {
            return Ok(None);
        }
        while self
            .open
            .get(&self.next)
            .is_none_or(|filling| filling.missing > 0)
        {
            let Some(taken) = self.records.next()? else {
                let place = Place {
                    step: Some(self.next),
                    ..Place::default()
                };
                return Err(TraceError::invalid(&self.path, place, Fault::Missing));
            };
            self.take(&taken)?;
        }
        let filling = self.open.remove(&self.next).expect("just completed");
        self.next += 1;
        let TraceSettings { ranks, experts, .. } = self.settings;
        let counts = check::count(filling.pairs.expert.view(), ranks, experts);
        let pairs = self.layout.weights.then_some(filling.pairs);
        Ok(Some(Step { counts, pairs }))
    }
}

/// What the first pass finds.
#[derive(Default)]
struct Survey {
    /// Records and largest token of each layer.
    layers: BTreeMap<u64, (u64, u64)>,
    /// Tokens, the same in every layer.
    tokens: u64,
    top_k: usize,
    weights: bool,
    largest: i32,
    experts: Option<usize>,
    model: Option<String>,
}

impl Survey {
    fn of(inputs: &[PathBuf], progress: &ProgressBar) -> Result<Self, TraceError> {
        let mut survey = Self::default();
        let mut records = merged(inputs, progress)?;
        while let Some(taken) = records.next()? {
            let Keyed { key, record, .. } = &taken.keyed;
            survey.experts = survey.experts.or(record.num_experts);
            survey.model = survey.model.or_else(|| record.model.clone());
            let Some(ids) = &record.topk_ids else {
                continue;
            };
            let weights = record.topk_weights.as_ref().map(Vec::len);
            if survey.layers.is_empty() {
                survey.top_k = ids.len();
                survey.weights = weights.is_some();
            }
            let expected = survey.weights.then_some(survey.top_k);
            for (name, found, expected) in [
                ("topk_ids", Some(ids.len()), Some(survey.top_k)),
                ("topk_weights", weights, expected),
            ] {
                if found != expected {
                    let words =
                        |n: Option<usize>| n.map_or("nothing".into(), |n| format!("{n} numbers"));
                    let (value, expected) = (words(found), words(expected) + " as before");
                    let fault = Fault::Field {
                        name,
                        value,
                        expected,
                    };
                    return Err(taken.fault(Place::default(), fault));
                }
            }
            let largest = ids.iter().max().copied().unwrap_or(-1);
            survey.largest = survey.largest.max(largest);
            let (records, last) = survey.layers.entry(record.layer).or_default();
            *records += 1;
            *last = (*last).max(*key);
        }
        survey.complete(&inputs[0])
    }

    /// Every layer has a record for every token, as far as their number tells.
    fn complete(mut self, path: &Path) -> Result<Self, TraceError> {
        let last = self.layers.values().map(|(_, last)| *last).max();
        let last =
            last.ok_or_else(|| TraceError::invalid(path, Place::default(), Fault::NoSteps))?;
        for (layer, (found, _)) in &self.layers {
            if found.checked_sub(1) != Some(last) {
                let place = Place {
                    layer: Some(*layer as usize),
                    ..Place::default()
                };
                let found = *found;
                return Err(TraceError::invalid(
                    path,
                    place,
                    Fault::Tokens { found, last },
                ));
            }
        }
        self.tokens = last + 1;
        Ok(self)
    }
}
