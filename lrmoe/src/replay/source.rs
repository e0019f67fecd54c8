//! The steps to replay: several files of one run as one, ranks and tokens multiplied where asked for.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lrmoe_plan::Loads;
use ndarray::{Array2, Array3, Axis, s};

use super::ReplayError;
use crate::trace::{PairRecord, TraceHeader, TraceReader};

/// Files of one run. Steps go by their numbers in the run; a step in several files takes its counts from the first, which the others must
/// equal, and its pairs from any that recorded them.
#[derive(Debug)]
pub struct Source {
    readers: Vec<TraceReader>,
    steps: Vec<Place>,
}

/// Where one step lies.
#[derive(Clone, Debug)]
struct Place {
    number: u32,
    /// File and index in it of the counts, then of repeats of them.
    counts: Vec<(usize, usize)>,
    /// File and index into its recorded steps.
    pairs: Option<(usize, usize)>,
}

/// By how much a trace is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Multiples {
    /// How often every source rank is repeated.
    pub(super) ranks: usize,
    /// How often every token is repeated.
    pub(super) tokens: usize,
}

/// One step of all layers.
#[derive(Debug)]
pub(super) struct Step {
    /// Its number in the run.
    pub(super) number: u32,
    /// Pairs by source rank and expert, layer by layer.
    pub(super) loads: Vec<Loads>,
    /// Most tokens of a rank.
    pub(super) tokens: usize,
    /// Every pair with its score, layer by layer, where the trace has them.
    pub(super) pairs: Option<Vec<ScoredPairs>>,
}

/// The pairs of one layer: tokens of all ranks, rank by rank, the same number each.
#[derive(Debug)]
pub(super) struct ScoredPairs {
    /// `[tokens, k]`.
    pub(super) expert: Array2<i32>,
    /// `[tokens, k]`.
    pub(super) score: Array2<f32>,
}

impl Source {
    /// Opens the files and sorts out their steps.
    ///
    /// # Errors
    ///
    /// No file, one that is no trace, or files of different shapes.
    pub fn open(paths: &[PathBuf]) -> Result<Self, ReplayError> {
        let readers = paths.iter().map(TraceReader::open);
        let readers: Vec<TraceReader> = readers.collect::<Result<_, _>>()?;
        let Some((first, rest)) = readers.split_first() else {
            return Err(ReplayError::Nothing("traces"));
        };
        for other in rest {
            same_shape(first, other)?;
        }
        let mut steps = BTreeMap::new();
        for (file, reader) in readers.iter().enumerate() {
            let header = reader.header();
            for step in 0..header.steps {
                let number = header.number(step);
                let place = steps.entry(number).or_insert_with(|| Place {
                    number,
                    counts: Vec::new(),
                    pairs: None,
                });
                place.counts.push((file, step));
            }
            for (index, &step) in header.recorded.iter().enumerate() {
                let number = header.number(step as usize);
                if header.scored
                    && let Some(place) = steps.get_mut(&number)
                {
                    place.pairs.get_or_insert((file, index));
                }
            }
        }
        Ok(Self {
            readers,
            steps: steps.into_values().collect(),
        })
    }

    /// What the first file says about itself.
    pub fn header(&self) -> &TraceHeader {
        self.readers[0].header()
    }

    /// The files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.readers.iter().map(TraceReader::path)
    }

    /// Experts per token, if a file says so.
    pub(super) fn top_k(&self) -> Option<usize> {
        self.readers.iter().find_map(|reader| reader.header().top_k)
    }

    /// Tokens of each rank, if a file says so.
    pub(super) fn tokens_per_rank(&self) -> Option<usize> {
        let mut headers = self.readers.iter().map(TraceReader::header);
        headers.find_map(|header| header.tokens_per_rank)
    }

    /// Leaves the steps whose number is in the range.
    pub(super) fn keep(&mut self, range: &Range<u32>) -> Result<(), ReplayError> {
        let (first, last) = (self.number(0), self.number(self.steps.len() - 1));
        self.steps.retain(|step| range.contains(&step.number));
        if self.steps.is_empty() {
            return Err(ReplayError::OutsideTrace {
                start: range.start,
                end: range.end,
                first,
                last,
            });
        }
        Ok(())
    }

    /// Number of steps.
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    /// Number in the run of a step.
    pub(super) fn number(&self, step: usize) -> u32 {
        self.steps[step].number
    }

    /// Steps that have pairs with scores.
    pub(super) fn scored(&self) -> usize {
        self.steps
            .iter()
            .filter(|step| step.pairs.is_some())
            .count()
    }

    /// Reads a step, its pairs only where `with_pairs`.
    pub(super) fn step(
        &mut self,
        index: usize,
        top_k: usize,
        by: Multiples,
        with_pairs: bool,
    ) -> Result<Step, ReplayError> {
        let place = self.steps[index].clone();
        let counts = self.counts(&place)?;
        let loads = counts.outer_iter().map(|counts| {
            let count = |(rank, expert): (usize, usize)| {
                let count = counts[[rank % counts.nrows(), expert]];
                count
                    .checked_mul(by.tokens as u32)
                    .ok_or(ReplayError::Overflow {
                        step: place.number,
                        count,
                        times: by.tokens as u32,
                    })
            };
            let shape = (counts.nrows() * by.ranks, counts.ncols());
            let all = ndarray::indices(shape).into_iter().map(count);
            let all = all.collect::<Result<Vec<u32>, _>>()?;
            let all = Array2::from_shape_vec(shape, all).expect("one count for each index");
            Ok(Loads::new(all)?)
        });
        let loads = loads.collect::<Result<Vec<Loads>, ReplayError>>()?;
        let most = loads
            .iter()
            .flat_map(|loads| loads.counts().sum_axis(Axis(1)));
        let most = most.max().unwrap_or(0) as usize;
        let tokens = self.tokens_per_rank().unwrap_or(0) * by.tokens;
        let pairs = match place.pairs.filter(|_| with_pairs) {
            Some((file, index)) => {
                let tokens = self.readers[file].header().tokens_per_rank.unwrap_or(0);
                let record = self.readers[file].pairs(index)?;
                repeat(&record, tokens, by)
            }
            None => None,
        };
        Ok(Step {
            number: place.number,
            loads,
            tokens: tokens.max(most.div_ceil(top_k)),
            pairs,
        })
    }

    /// Counts of a step, `[layers, ranks, experts]`, the same in every file.
    fn counts(&mut self, place: &Place) -> Result<Array3<u32>, ReplayError> {
        let (file, step) = place.counts[0];
        let counts = self.readers[file].step(step)?;
        for &(other, step) in &place.counts[1..] {
            let again = self.readers[other].step(step)?;
            let mut both = counts.indexed_iter().zip(&again);
            if let Some((((layer, rank, expert), &a), &b)) = both.find(|((_, a), b)| a != b) {
                let paths = [file, other].map(|file| self.readers[file].path().to_path_buf());
                return Err(ReplayError::OtherCounts {
                    paths: Box::new(paths),
                    step: place.number,
                    layer,
                    rank,
                    expert,
                    counts: [a, b],
                });
            }
        }
        Ok(counts)
    }
}

fn same_shape(first: &TraceReader, other: &TraceReader) -> Result<(), ReplayError> {
    let (a, b) = (first.header(), other.header());
    let known = |a: Option<usize>, b: Option<usize>| a.zip(b).unwrap_or((0, 0));
    let (top_k, tokens) = (
        known(a.top_k, b.top_k),
        known(a.tokens_per_rank, b.tokens_per_rank),
    );
    for (what, (expected, found)) in [
        ("layers", (a.layers, b.layers)),
        ("ranks", (a.ranks, b.ranks)),
        ("experts", (a.experts, b.experts)),
        ("experts per token", top_k),
        ("tokens per rank", tokens),
    ] {
        if expected != found {
            return Err(ReplayError::OtherShape {
                path: other.path().into(),
                what,
                found,
                first: first.path().into(),
                expected,
            });
        }
    }
    Ok(())
}

/// Pairs of every layer with ranks and tokens repeated; `None` without scores.
fn repeat(record: &PairRecord, tokens_per_rank: usize, by: Multiples) -> Option<Vec<ScoredPairs>> {
    let score = record.score.as_ref()?;
    let (layers, tokens, _) = record.expert.dim();
    let ranks = tokens / tokens_per_rank.max(1);
    let order: Vec<usize> = (0..ranks * by.ranks)
        .flat_map(|rank| {
            let start = rank % ranks * tokens_per_rank;
            (0..by.tokens).flat_map(move |_| start..start + tokens_per_rank)
        })
        .collect();
    let pairs = (0..layers).map(|layer| ScoredPairs {
        expert: record
            .expert
            .slice(s![layer, .., ..])
            .select(Axis(0), &order),
        score: score.slice(s![layer, .., ..]).select(Axis(0), &order),
    });
    Some(pairs.collect())
}
