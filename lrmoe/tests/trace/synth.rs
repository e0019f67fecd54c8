//! Workloads are what they say.

use lrmoe::trace::synth::{SynthShape, Workload, synth};
use ndarray::{Array3, Axis};
use proptest::prelude::*;

const NAMES: [&str; 12] = [
    "balanced",
    "hot-set",
    "hot-rank",
    "spread-hot",
    "ragged-sources",
    "zero-experts",
    "zero-ranks",
    "rotating-hotspot",
    "burst",
    "zipf:0",
    "zipf:1.2",
    "zipf:8",
];

fn workload(name: &str) -> Workload {
    name.parse().expect("a workload")
}

const SHAPE: SynthShape = SynthShape {
    layers: 3,
    ranks: 8,
    experts: 32,
    top_k: 4,
    tokens_per_rank: 500,
};

/// Pairs per expert of a layer.
fn loads(counts: &Array3<u32>, layer: usize) -> Vec<u32> {
    counts.index_axis(Axis(0), layer).sum_axis(Axis(0)).to_vec()
}

/// Pairs that each rank sends in a layer.
fn sent(counts: &Array3<u32>, layer: usize) -> Vec<u32> {
    counts.index_axis(Axis(0), layer).sum_axis(Axis(1)).to_vec()
}

/// Indices of values above the mean of the smallest and the largest.
fn hot(loads: &[u32]) -> Vec<usize> {
    let middle = (loads.iter().max().expect("some") + loads.iter().min().expect("some")) / 2;
    (0..loads.len())
        .filter(|expert| loads[*expert] > middle)
        .collect()
}

proptest! {
    #[test]
    fn every_rank_sends_what_its_tokens_make(
        name in prop::sample::select(&NAMES),
        seed: u64,
        step in 0_u32..1_000_000,
        layers in 1_usize..3,
        ranks in 1_usize..6,
        experts in 1_usize..20,
        k in any::<prop::sample::Index>(),
        tokens_per_rank in 0_usize..50,
    ) {
        let top_k = k.index(experts) + 1;
        let shape = SynthShape { layers, ranks, experts, top_k, tokens_per_rank };
        let counts = synth(workload(name), seed, step, &shape);
        prop_assert_eq!(counts.dim(), (layers, ranks, experts));
        prop_assert_eq!(&counts, &synth(workload(name), seed, step, &shape), "the same again");
        for layer in 0..layers {
            prop_assert_eq!(sent(&counts, layer), sent(&counts, 0), "tokens do not depend on the layer");
            for (rank, pairs) in sent(&counts, layer).into_iter().enumerate() {
                let tokens = pairs as usize / top_k;
                prop_assert_eq!(tokens * top_k, pairs as usize);
                let ragged = ["ragged-sources", "zero-ranks"].contains(&name);
                prop_assert!(tokens == tokens_per_rank || (ragged && tokens < tokens_per_rank));
                let row = counts.index_axis(Axis(0), layer);
                let most = row.row(rank).iter().max().copied().unwrap_or(0);
                prop_assert!(most as usize <= tokens, "{} pairs of {} tokens", most, tokens);
            }
        }
    }
}

#[test]
fn names_come_back() {
    for name in NAMES {
        assert_eq!(workload(name).to_string(), name);
    }
    for name in ["zipf", "zipf:", "zipf:-1", "zipf:nan", "zipf:9", "hot", ""] {
        let error = name.parse::<Workload>().expect_err(name).to_string();
        assert!(
            error.starts_with(&format!(
                "unknown workload `{name}`, must be balanced, hot-set, "
            )),
            "{error}"
        );
    }
}

#[test]
fn seeds_and_steps_differ() {
    let zipf = workload("zipf:1");
    let first = synth(zipf, 1, 0, &SHAPE);
    assert_ne!(first, synth(zipf, 1, 1, &SHAPE));
    assert_ne!(first, synth(zipf, 2, 0, &SHAPE));
}

#[test]
fn balanced_is_balanced() {
    let shape = SynthShape {
        experts: 30,
        ..SHAPE
    };
    let counts = synth(Workload::Balanced, 1, 3, &shape);
    assert!(
        counts.iter().all(|count| [66, 67].contains(count)),
        "2,000 pairs over 30 experts"
    );
}

#[test]
fn hot_experts_take_half() {
    for name in ["hot-set", "rotating-hotspot"] {
        let loads = loads(&synth(workload(name), 1, 0, &SHAPE), 1);
        let hot = hot(&loads);
        assert_eq!(hot.len(), 4, "an eighth of 32");
        let share = hot.iter().map(|e| f64::from(loads[*e])).sum::<f64>() / 16_000.0;
        // Each of 16,000 pairs is hot with probability 1/2: four standard deviations are 0.016.
        assert!((share - 0.5).abs() < 0.016, "{name}: {share}");
    }
    let hot_set = |step| hot(&loads(&synth(Workload::HotSet, 1, step, &SHAPE), 0));
    assert_eq!(hot_set(0), hot_set(9));
    let rotating = |step| {
        hot(&loads(
            &synth(Workload::RotatingHotspot, 1, step, &SHAPE),
            0,
        ))
    };
    let stay = rotating(0)
        .into_iter()
        .filter(|e| rotating(1).contains(e))
        .count();
    assert_eq!(stay, 3, "one of four leaves");
    assert_eq!(rotating(2), rotating(34), "a round of 32 experts");
}

#[test]
fn hot_rank_is_one_rank_and_spread_hot_is_all() {
    for layer in 0..3 {
        let rank = hot(&loads(&synth(Workload::HotRank, 5, 0, &SHAPE), layer));
        assert_eq!(rank.len(), 4, "32 experts on 8 ranks");
        assert!(
            rank[0].is_multiple_of(4) && rank[3] == rank[0] + 3,
            "{rank:?}"
        );
        let spread = hot(&loads(&synth(Workload::SpreadHot, 5, 0, &SHAPE), layer));
        let ranks: Vec<usize> = spread.iter().map(|expert| expert / 4).collect();
        assert_eq!(ranks, (0..8).collect::<Vec<_>>());
    }
}

#[test]
fn a_quarter_is_empty() {
    let idle = |step| -> Vec<usize> {
        let loads = loads(&synth(Workload::ZeroExperts, 1, step, &SHAPE), 2);
        (0..32).filter(|expert| loads[*expert] == 0).collect()
    };
    assert_eq!(idle(0).len(), 8);
    assert_eq!(idle(0), idle(7));
    let silent = |step| -> Vec<usize> {
        let sent = sent(&synth(Workload::ZeroRanks, 1, step, &SHAPE), 0);
        (0..8).filter(|rank| sent[*rank] == 0).collect()
    };
    assert!((0..20).all(|step| silent(step).len() == 2));
    assert!((1..20).any(|step| silent(step) != silent(0)));
}

#[test]
fn ragged_sources_cover_the_range() {
    let tokens: Vec<u32> = (0..50)
        .flat_map(|step| sent(&synth(Workload::RaggedSources, 1, step, &SHAPE), 0))
        .map(|pairs| pairs / 4)
        .collect();
    let mean = tokens.iter().sum::<u32>() as f64 / 400.0;
    // 400 numbers that are uniform on 0 to 500: four standard errors are 29.
    assert!((mean - 250.0).abs() < 29.0, "{mean}");
    assert!(tokens.iter().any(|t| *t < 25) && tokens.iter().any(|t| *t > 475));
}

#[test]
fn bursts_come_and_go() {
    let bursts = (0..400)
        .filter(|step| loads(&synth(Workload::Burst, 1, *step, &SHAPE), 0).contains(&4000))
        .count();
    // 400 chances of 1/8: four standard deviations are 26.
    assert!(bursts.abs_diff(50) < 26, "{bursts}");
}

#[test]
fn zipf_follows_its_law() {
    let shape = SynthShape {
        layers: 1,
        ranks: 64,
        experts: 64,
        top_k: 1,
        tokens_per_rank: 10_000,
    };
    let mut loads = loads(&synth(Workload::Zipf(1.0), 3, 0, &shape), 0);
    loads.sort_unstable_by(|a, b| b.cmp(a));
    let harmonic: f64 = (1..=64).map(|place| 1.0 / f64::from(place)).sum();
    for (load, place) in loads.iter().zip(1..) {
        let expected = 640_000.0 / (f64::from(place) * harmonic);
        // Counts deviate by about the root of what is expected; the smallest, sorted, by more.
        let difference = (f64::from(*load) - expected).abs();
        assert!(
            difference < 5.0 * expected.sqrt(),
            "place {place}: {load}, not {expected}"
        );
    }
}

#[test]
fn a_popular_expert_takes_one_pair_of_each_token() {
    let shape = SynthShape {
        layers: 1,
        ranks: 2,
        experts: 8,
        top_k: 4,
        tokens_per_rank: 100,
    };
    let loads = loads(&synth(Workload::Zipf(8.0), 1, 0, &shape), 0);
    let full = loads.iter().filter(|load| **load == 200).count();
    assert!(full >= 3, "{loads:?}");
    assert_eq!(loads.iter().sum::<u32>(), 800);
}
