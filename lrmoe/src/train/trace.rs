//! The routing trace of a run, step by step.

use std::collections::BTreeMap;

use lrmoe_comm::Collective;
use lrmoe_metric::Scores;
use lrmoe_plan::Loads;
use ndarray::{Array2, Array3, Axis, s};

use crate::config::TrainConfig;
use crate::error::Error;
use crate::files::folder_of;
use crate::policy::Policy;
use crate::trace::{PairRecord, TraceSettings, TraceWriter, check_output};

/// Tokens of each rank in a step.
fn tokens_per_rank(config: &TrainConfig) -> usize {
    config.batch / config.ranks * config.model.context
}

/// How one step routed its pairs.
pub(super) struct StepTrace {
    counts: Array3<u32>,
    pairs: Option<PairRecord>,
}

/// What one rank knows of its pairs in a layer, `[tokens, top_k]`.
pub(super) struct RankPairs<'a> {
    pub(super) expert_ids: &'a Array2<i32>,
    pub(super) gate_weights: &'a Array2<f32>,
    pub(super) scores: Option<&'a Scores>,
}

impl StepTrace {
    pub(super) fn new(config: &TrainConfig) -> Self {
        let dim = (config.model.layers, config.ranks, config.model.experts);
        Self {
            counts: Array3::zeros(dim),
            pairs: None,
        }
    }

    pub(super) fn set_counts(&mut self, layer: usize, loads: &Loads) {
        let mut counts = self.counts.index_axis_mut(Axis(0), layer);
        counts.assign(&loads.counts());
    }

    /// Brings a layer's pairs to rank 0. Every rank calls it, with as many tokens.
    pub(super) fn gather_pairs<C: Collective>(
        &mut self,
        comm: &mut C,
        layer: usize,
        mine: &RankPairs<'_>,
    ) -> Result<(), Error> {
        let words = mine.to_words();
        let mut send = vec![0; comm.ranks()];
        send[0] = words.len();
        let receive = vec![if comm.rank() == 0 { words.len() } else { 0 }; comm.ranks()];
        let mut all = vec![0; receive.iter().sum()];
        comm.all_to_all(&words, &send, &mut all, &receive)?;
        let (tokens, top_k) = mine.expert_ids.dim();
        let dim = (self.counts.len_of(Axis(0)), comm.ranks() * tokens, top_k);
        let pairs = self.pairs.get_or_insert_with(|| PairRecord {
            expert: Array3::zeros(dim),
            gate_weight: Array3::zeros(dim),
            score: mine.scores.map(|_| Array3::zeros(dim)),
        });
        for (rank, words) in all.chunks_exact(words.len().max(1)).enumerate() {
            let here = s![layer, rank * tokens..(rank + 1) * tokens, ..];
            let mut parts = words.chunks_exact(tokens * top_k);
            let mut next = || parts.next().into_iter().flatten().copied();
            let ids = pairs.expert.slice_mut(here);
            ids.into_iter()
                .zip(next())
                .for_each(|(id, word)| *id = word as i32);
            let numbers = [Some(&mut pairs.gate_weight), pairs.score.as_mut()];
            for numbers in numbers.into_iter().flatten() {
                let numbers = numbers.slice_mut(here).into_iter();
                numbers
                    .zip(next())
                    .for_each(|(number, word)| *number = f32::from_bits(word));
            }
        }
        Ok(())
    }
}

impl RankPairs<'_> {
    /// Ids, weights and scores one after the other, as bits.
    fn to_words(&self) -> Vec<u32> {
        let ids = self.expert_ids.iter().map(|id| *id as u32);
        let weights = self.gate_weights.iter().map(|weight| weight.to_bits());
        let scores = self.scores.into_iter().flat_map(|scores| {
            // The root of the squared score, back at its true size; past f32 it is the largest finite number.
            let scale = f64::from(scores.exponent()).exp2();
            let score = move |squared: &f32| (f64::from(*squared).sqrt() * scale) as f32;
            scores
                .squared()
                .iter()
                .map(move |squared| score(squared).min(f32::MAX).to_bits())
        });
        ids.chain(weights).chain(scores).collect()
    }
}

/// The trace that a run writes, if it is to write one.
#[derive(Debug)]
pub(super) struct TraceLog {
    writer: Option<TraceWriter>,
}

impl TraceLog {
    /// A trace that starts after `done` steps. A file that exists is only replaced with `--overwrite`.
    pub(super) fn create(config: &TrainConfig, done: u32) -> Result<Self, Error> {
        let Some(path) = &config.record_trace else {
            return Ok(Self { writer: None });
        };
        let folder = folder_of(path);
        std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
        check_output(path, config.overwrite)?;
        let writer = TraceWriter::create(path, settings(config, done))?;
        Ok(Self {
            writer: Some(writer),
        })
    }

    pub(super) fn append(&mut self, step: Option<StepTrace>) -> Result<(), Error> {
        if let (Some(writer), Some(step)) = (&mut self.writer, step) {
            writer.push(step.counts.view())?;
            if let Some(pairs) = step.pairs {
                writer.push_pairs(pairs)?;
            }
        }
        Ok(())
    }

    /// Gives the trace its name; without steps there is none.
    pub(super) fn finish(self) -> Result<(), Error> {
        match self.writer {
            Some(writer) if writer.steps() > 0 => Ok(writer.finish()?),
            _ => Ok(()),
        }
    }
}

fn settings(config: &TrainConfig, done: u32) -> TraceSettings {
    let model = &config.model;
    let mut facts = BTreeMap::from([
        ("source", "lrmoe train".to_owned()),
        ("policy", config.policy.name().to_owned()),
        ("D", model.width.to_string()),
        ("F", model.hidden.to_string()),
        ("activation", config.activation.to_string()),
        ("context", model.context.to_string()),
        ("batch", config.batch.to_string()),
        ("seed", config.seed.to_string()),
    ]);
    if let Policy::Lrmoe(selecting) = &config.policy {
        facts.insert("score", selecting.score.to_string());
        facts.insert("retention", selecting.retention.to_string());
    }
    TraceSettings {
        layers: model.layers,
        ranks: config.ranks,
        experts: model.experts,
        top_k: Some(model.top_k),
        tokens_per_rank: Some(tokens_per_rank(config)),
        first_step: done,
        metadata: facts
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect(),
    }
}
