//! Placements of one layer, on one thread: first from contiguous experts, then from the last placement while loads
//! drift.

use divan::{Bencher, black_box};
use lrmoe_plan::ndarray::Array2;
use lrmoe_plan::{
    Fixed, FixedReplicas, FlexMoe, Loads, Lrmoe, Placement, PlacementPolicy, PlacementRequest,
    Topology,
};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

fn main() {
    divan::main();
}

/// A layer of a model on nodes of 8 ranks.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: usize,
    experts: usize,
    /// Instances that each rank can hold.
    slots: u32,
    popularity: Popularity,
}

#[derive(Clone, Copy, Debug)]
enum Popularity {
    Zipf(f64),
    /// One expert in 16 gets half of all pairs.
    HotSet,
}

const POPULARITIES: [Popularity; 4] = [
    Popularity::Zipf(0.5),
    Popularity::Zipf(1.0),
    Popularity::Zipf(1.2),
    Popularity::HotSet,
];

/// Each world with each popularity: slots for a quarter more instances than experts, in the last two as many as
/// experts and four times as many.
fn cases() -> impl Iterator<Item = Case> {
    let worlds = [
        (8, 128, 20),
        (64, 256, 5),
        (1024, 512, 2),
        (8, 128, 16),
        (64, 256, 4),
        (64, 256, 16),
    ];
    worlds.into_iter().flat_map(|(ranks, experts, slots)| {
        POPULARITIES.map(|popularity| Case {
            ranks,
            experts,
            slots,
            popularity,
        })
    })
}

/// Pairs of one source rank: 4,096 tokens, 8 experts each.
const PAIRS: f64 = 32_768.0;

struct Layer {
    popularity: Vec<f64>,
    rng: ChaCha8Rng,
    ranks: usize,
    slots: Vec<u32>,
    topology: Topology,
}

impl Layer {
    fn new(case: &Case) -> Self {
        let weight = |i: usize| match case.popularity {
            Popularity::Zipf(exponent) => (i as f64 + 1.0).powf(-exponent),
            Popularity::HotSet if i < case.experts / 16 => 15.0,
            Popularity::HotSet => 1.0,
        };
        let mut popularity: Vec<f64> = (0..case.experts).map(weight).collect();
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        popularity.shuffle(&mut rng);
        Self {
            popularity,
            rng,
            ranks: case.ranks,
            slots: vec![case.slots; case.ranks],
            topology: Topology::new(case.ranks, 8).expect("there are ranks"),
        }
    }

    /// The loads of the next step: popularity drifts by up to 5 %, source ranks differ by up to 20 %.
    fn step(&mut self) -> Loads {
        for weight in &mut self.popularity {
            *weight *= self.rng.random_range(0.95..1.05);
        }
        let sum: f64 = self.popularity.iter().sum();
        let counts = Array2::from_shape_fn((self.ranks, self.popularity.len()), |(_, expert)| {
            let noise = self.rng.random_range(0.8..1.2);
            (PAIRS * self.popularity[expert] / sum * noise) as u32
        });
        Loads::new(counts).expect("the pairs fit in u32")
    }

    fn place(&self, policy: &dyn PlacementPolicy, loads: &Loads, from: &Placement) -> Placement {
        let request = PlacementRequest {
            loads,
            previous: from,
            slots: &self.slots,
            topology: &self.topology,
        };
        policy.place(&request).expect("the experts fit")
    }
}

fn from_fixed(bencher: Bencher<'_, '_>, case: &Case, policy: &dyn PlacementPolicy) {
    let mut layer = Layer::new(case);
    let loads = layer.step();
    let fixed = Fixed::placement(case.experts, case.ranks).expect("there are experts");
    bencher.bench_local(|| layer.place(policy, black_box(&loads), &fixed));
}

#[divan::bench(args = cases())]
fn lrmoe_from_fixed(bencher: Bencher<'_, '_>, case: &Case) {
    from_fixed(bencher, case, &Lrmoe::default());
}

/// Every sample is another step.
#[divan::bench(args = cases())]
fn lrmoe_drifting(bencher: Bencher<'_, '_>, case: &Case) {
    let mut layer = Layer::new(case);
    let fixed = Fixed::placement(case.experts, case.ranks).expect("there are experts");
    let policy = Lrmoe::default();
    let first = layer.step();
    let mut last = layer.place(&policy, &first, &fixed);
    let steps: Vec<(Placement, Loads)> = (0..32)
        .map(|_| {
            let loads = layer.step();
            let next = layer.place(&policy, &loads, &last);
            (std::mem::replace(&mut last, next), loads)
        })
        .collect();
    let mut step = 0;
    bencher.bench_local(|| {
        let (previous, loads) = &steps[step];
        step = (step + 1) % steps.len();
        layer.place(&policy, black_box(loads), previous)
    });
}

#[divan::bench(args = cases())]
fn fixed_replicas(bencher: Bencher<'_, '_>, case: &Case) {
    from_fixed(bencher, case, &FixedReplicas);
}

#[divan::bench(args = cases())]
fn flexmoe_from_fixed(bencher: Bencher<'_, '_>, case: &Case) {
    from_fixed(bencher, case, &FlexMoe);
}

#[divan::bench(args = cases())]
fn largest_load(bencher: Bencher<'_, '_>, case: &Case) {
    let mut layer = Layer::new(case);
    let loads = layer.step();
    let fixed = Fixed::placement(case.experts, case.ranks).expect("there are experts");
    let placement = layer.place(&Lrmoe::default(), &loads, &fixed);
    let loads = layer.step();
    bencher.bench_local(|| placement.largest_load(black_box(loads.per_expert())));
}
