//! Synthetic traces: the loads of one step from the workload, a seed and the step's number alone.
//!
//! A workload gives each expert of a layer a popularity w. A token picks expert e with probability pi_e = min(1, lambda w_e), lambda such that
//! these sum to k, by systematic sampling: with the experts laid end to end in a random order as intervals of length pi_e, one
//! uniform u picks the k experts that hold u, u + 1, .., u + k - 1. So a token's experts are distinct by construction, and expert e gets Binomial(T, pi_e)
//! of the T tokens of a rank. What falls into the intervals is drawn by conditional binomials, not token by token.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use indicatif::ProgressBar;
use lrmoe_plan::Fixed;
use ndarray::{Array3, ArrayViewMut1, ArrayViewMut2};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Binomial, Distribution};
use rayon::prelude::*;

use super::{Place, TraceError, TraceSettings, TraceWriter};

/// Share of the pairs that hot experts take, as far as no token needs one of them twice.
const HOT_SHARE: f64 = 0.5;
/// Chance of a burst in a layer's step.
const BURST: f64 = 0.125;
/// Largest exponent of `Workload::Zipf`.
pub const MOST_ZIPF: f64 = 8.0;

/// What the loads look like. T tokens a rank, k experts a token, E experts, R ranks; which experts are hot is drawn per layer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Workload {
    /// Every expert gets the same from every rank, up to one pair.
    Balanced,
    /// The same E/8 experts take half of the pairs in every step.
    HotSet,
    /// The experts of one rank, where experts lie contiguously, take half of the pairs.
    HotRank,
    /// One expert of each rank, where experts lie contiguously, is hot; together they take half of the pairs.
    SpreadHot,
    /// Experts alike; each rank has 0 to T tokens, drawn anew in each step.
    RaggedSources,
    /// The same quarter of the experts gets nothing in any step; the others are alike.
    ZeroExperts,
    /// A quarter of the ranks, at least one, has no tokens, drawn anew in each step; experts alike.
    ZeroRanks,
    /// As `HotSet`, the hot experts moving on by one in each step.
    RotatingHotspot,
    /// Experts alike, but in one of eight steps of a layer one expert is picked by every token.
    Burst,
    /// Popularity of the i-th expert is i^-a. Which expert is the i-th is drawn per layer.
    Zipf(f64),
}

/// Workloads without a parameter.
const NAMED: [(&str, Workload); 9] = [
    ("balanced", Workload::Balanced),
    ("hot-set", Workload::HotSet),
    ("hot-rank", Workload::HotRank),
    ("spread-hot", Workload::SpreadHot),
    ("ragged-sources", Workload::RaggedSources),
    ("zero-experts", Workload::ZeroExperts),
    ("zero-ranks", Workload::ZeroRanks),
    ("rotating-hotspot", Workload::RotatingHotspot),
    ("burst", Workload::Burst),
];

/// Sizes of a synthetic trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SynthShape {
    /// MoE layers.
    pub layers: usize,
    /// Source ranks.
    pub ranks: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts per token; more than there are count as all.
    pub top_k: usize,
    /// Tokens of each rank in a step; at most `u32::MAX` count.
    pub tokens_per_rank: usize,
}

/// A workload that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown workload `{0}`, must be {names} or zipf:A with A from 0 to {MOST_ZIPF}", names = NAMED.map(|(name, _)| name).join(", "))]
pub struct UnknownWorkload(String);

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Zipf(exponent) = self {
            return f.pad(&format!("zipf:{exponent}"));
        }
        let named = NAMED.iter().find(|(_, workload)| workload == self);
        f.pad(named.map_or("", |(name, _)| name))
    }
}

impl FromStr for Workload {
    type Err = UnknownWorkload;

    fn from_str(name: &str) -> Result<Self, UnknownWorkload> {
        let unknown = || UnknownWorkload(name.into());
        if let Some(exponent) = name.strip_prefix("zipf:") {
            let exponent = exponent.parse().ok();
            let exponent = exponent.filter(|a| (0.0..=MOST_ZIPF).contains(a));
            return exponent.map(Self::Zipf).ok_or_else(unknown);
        }
        let named = NAMED.iter().find(|(known, _)| *known == name);
        named.map(|(_, workload)| *workload).ok_or_else(unknown)
    }
}

/// Pairs of step `step`, `[layers, ranks, experts]`. From one rank an expert gets at most as many pairs as the rank has tokens, and all experts
/// together get `tokens * top_k`.
pub fn synth(workload: Workload, seed: u64, step: u32, shape: &SynthShape) -> Array3<u32> {
    let shape = SynthShape {
        top_k: shape.top_k.min(shape.experts),
        tokens_per_rank: shape.tokens_per_rank.min(u32::MAX as usize),
        ..*shape
    };
    let mut counts = Array3::zeros((shape.layers, shape.ranks, shape.experts));
    if counts.is_empty() {
        return counts;
    }
    let tokens = tokens(workload, &mut generator(seed, step, ALL_LAYERS), &shape);
    let layers: Vec<_> = counts.outer_iter_mut().enumerate().collect();
    layers.into_par_iter().for_each(|(layer, counts)| {
        if workload == Workload::Balanced {
            return deal(counts, step as usize + layer, &shape);
        }
        let lasting = &mut generator(seed, EVERY_STEP, layer as u32);
        let random = &mut generator(seed, step, layer as u32);
        let popularity = popularity(workload, step, lasting, random, &shape);
        sample(&popularity, &tokens, shape.top_k, random, counts);
    });
    counts
}

/// Writes `steps` steps of a workload as the trace `out`.
///
/// # Errors
/// `TraceError`: sizes of 0 or beyond the limits, a failed write.
pub fn write(
    out: &Path,
    workload: Workload,
    seed: u64,
    steps: u32,
    shape: &SynthShape,
    progress: &ProgressBar,
) -> Result<(), TraceError> {
    let facts = [
        ("workload", workload.to_string()),
        ("seed", seed.to_string()),
    ];
    let mut settings = TraceSettings {
        layers: shape.layers,
        ranks: shape.ranks,
        experts: shape.experts,
        top_k: Some(shape.top_k),
        tokens_per_rank: Some(shape.tokens_per_rank),
        first_step: 0,
        metadata: facts.map(|(key, value)| (key.to_owned(), value)).into(),
    };
    settings
        .check()
        .map_err(|fault| TraceError::invalid(out, Place::default(), fault))?;
    if matches!(workload, Workload::RaggedSources | Workload::ZeroRanks) {
        settings.tokens_per_rank = None;
    }
    let mut writer = TraceWriter::create(out, settings)?;
    progress.set_length(steps.into());
    for step in 0..steps {
        writer.push(synth(workload, seed, step, shape).view())?;
        progress.inc(1);
    }
    writer.finish()
}

/// In place of a layer's number: what all layers share.
const ALL_LAYERS: u32 = u32::MAX;
/// In place of a step's number: what all steps share. No trace has as many steps.
const EVERY_STEP: u32 = u32::MAX;

/// Every step and layer has a stream of its own.
fn generator(seed: u64, step: u32, layer: u32) -> ChaCha8Rng {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(u64::from(step) << 32 | u64::from(layer));
    random
}

/// Tokens of each rank.
fn tokens(workload: Workload, random: &mut ChaCha8Rng, shape: &SynthShape) -> Vec<u32> {
    let most = shape.tokens_per_rank as u32;
    let mut tokens = vec![most; shape.ranks];
    match workload {
        Workload::RaggedSources => tokens.fill_with(|| random.random_range(0..=most)),
        Workload::ZeroRanks => {
            tokens[..shape.ranks.div_ceil(4)].fill(0);
            tokens.shuffle(random);
        }
        _ => {}
    }
    tokens
}

/// Popularity of each expert. `lasting` gives the same in every step, `random` does not.
fn popularity(
    workload: Workload,
    step: u32,
    lasting: &mut ChaCha8Rng,
    random: &mut ChaCha8Rng,
    shape: &SynthShape,
) -> Vec<f64> {
    let experts = shape.experts;
    let mut order: Vec<usize> = (0..experts).collect();
    order.shuffle(lasting);
    let hot = experts.div_ceil(8);
    match workload {
        Workload::HotSet => heated(experts, &order[..hot]),
        Workload::RotatingHotspot => {
            order.rotate_left(step as usize % experts);
            heated(experts, &order[..hot])
        }
        Workload::HotRank | Workload::SpreadHot => {
            let placement = Fixed::placement(experts, shape.ranks).expect("ranks and experts");
            let of_rank = |rank| placement.local_experts(rank).iter().map(|e| *e as usize);
            let hosts = (0..shape.ranks).map(|rank| of_rank(rank).collect());
            let hosts: Vec<Vec<usize>> = hosts.filter(|here: &Vec<_>| !here.is_empty()).collect();
            if workload == Workload::HotRank {
                return heated(experts, &hosts[lasting.random_range(0..hosts.len())]);
            }
            let pick = |here: &Vec<usize>| here[lasting.random_range(0..here.len())];
            heated(experts, &hosts.iter().map(pick).collect::<Vec<_>>())
        }
        Workload::ZeroExperts => {
            let mut popularity = vec![1.0; experts];
            for &expert in &order[..(experts / 4).min(experts - shape.top_k)] {
                popularity[expert] = 0.0;
            }
            popularity
        }
        Workload::Burst => {
            let mut popularity = vec![1.0; experts];
            if random.random_bool(BURST) {
                popularity[random.random_range(0..experts)] = f64::MAX.sqrt();
            }
            popularity
        }
        Workload::Zipf(exponent) => {
            let mut popularity = vec![0.0; experts];
            for (place, &expert) in order.iter().enumerate() {
                popularity[expert] = (place as f64 + 1.0).powf(-exponent);
            }
            popularity
        }
        Workload::Balanced | Workload::RaggedSources | Workload::ZeroRanks => vec![1.0; experts],
    }
}

/// The hot experts take their share together, the others the rest.
fn heated(experts: usize, hot: &[usize]) -> Vec<f64> {
    let cold = experts - hot.len();
    let mut popularity = vec![(1.0 - HOT_SHARE) / cold.max(1) as f64; experts];
    for &expert in hot {
        popularity[expert] = HOT_SHARE / hot.len() as f64;
    }
    popularity
}

/// Pairs dealt out evenly, what is left over going to other experts for each rank.
fn deal(mut counts: ArrayViewMut2<'_, u32>, start: usize, shape: &SynthShape) {
    let pairs = shape.tokens_per_rank as u64 * shape.top_k as u64;
    let experts = shape.experts as u64;
    let (each, rest) = (pairs / experts, (pairs % experts) as usize);
    for (rank, mut counts) in counts.outer_iter_mut().enumerate() {
        counts.fill(each as u32);
        for extra in 0..rest {
            counts[(start + rank * rest + extra) % shape.experts] += 1;
        }
    }
}

/// Length of the interval of an expert that every token picks.
const WHOLE: u64 = 1 << 32;

/// Intervals pi_e in units of 1 / `WHOLE`, which sum to k exactly. At least k experts have a popularity above 0.
fn intervals(popularity: &[f64], top_k: usize) -> Vec<u64> {
    let mut order: Vec<usize> = (0..popularity.len()).collect();
    order.sort_by(|a, b| popularity[*b].total_cmp(&popularity[*a]));
    // What the experts from each place of the order on have together, added up from the smallest.
    let mut tail = vec![0.0; order.len() + 1];
    for (place, &expert) in order.iter().enumerate().rev() {
        tail[place] = tail[place + 1] + popularity[expert];
    }
    let positive = popularity.iter().filter(|w| **w > 0.0).count();
    let mut left = top_k as u64 * WHOLE;
    let mut intervals = vec![0; popularity.len()];
    for (place, &expert) in order.iter().enumerate() {
        // Later experts take at most WHOLE each, so this one takes what they cannot.
        let others = positive.saturating_sub(place + 1) as u64;
        let share = if tail[place] > 0.0 {
            popularity[expert] / tail[place]
        } else {
            0.0
        };
        let interval = (left as f64 * share) as u64;
        let least = left.saturating_sub(others * WHOLE);
        intervals[expert] = interval.max(least).min(WHOLE).min(left);
        left -= intervals[expert];
    }
    intervals
}

/// Counts `[ranks, experts]` of ranks with `tokens`.
fn sample(
    popularity: &[f64],
    tokens: &[u32],
    top_k: usize,
    random: &mut ChaCha8Rng,
    mut counts: ArrayViewMut2<'_, u32>,
) {
    let intervals = intervals(popularity, top_k);
    let mut order: Vec<usize> = (0..intervals.len()).collect();
    for (counts, &tokens) in counts.outer_iter_mut().zip(tokens) {
        order.shuffle(random);
        sample_rank(&intervals, &order, tokens, random, counts);
    }
}

/// Counts of one rank, its experts laid end to end in `order` around a circle of length `WHOLE` on which the tokens fall.
fn sample_rank(
    intervals: &[u64],
    order: &[usize],
    tokens: u32,
    random: &mut ChaCha8Rng,
    mut counts: ArrayViewMut1<'_, u32>,
) {
    let mut end = 0;
    let mut ends = Vec::with_capacity(order.len());
    for &expert in order {
        end += intervals[expert];
        ends.push(end);
    }
    let mut cuts: Vec<u64> = ends.iter().map(|end| end % WHOLE).collect();
    cuts.sort_unstable();
    cuts.dedup();
    // Tokens before each cut. The first is 0, where the intervals close.
    let mut before = Vec::with_capacity(cuts.len());
    let (mut fallen, mut last) = (0, 0);
    for &cut in &cuts {
        let chance = (cut - last) as f64 / (WHOLE - last) as f64;
        let more = Binomial::new(u64::from(tokens - fallen), chance).expect("a share of a circle");
        fallen += more.sample(random) as u32;
        before.push(fallen);
        last = cut;
    }
    // Laps times tokens, plus those before the cut.
    let reached = |end: u64| {
        let cut = cuts
            .binary_search(&(end % WHOLE))
            .expect("every end is a cut");
        end / WHOLE * u64::from(tokens) + u64::from(before[cut])
    };
    let mut start = 0;
    for (&expert, &end) in order.iter().zip(&ends) {
        let end = reached(end);
        counts[expert] = (end - start) as u32;
        start = end;
    }
}
