//! Placements against the best one of all.

use crate::oracle::largest_load;
use lrmoe_plan::ndarray::Array2;
use lrmoe_plan::{
    FixedReplicas, Loads, Lrmoe, Placement, PlacementPolicy, PlacementRequest, Topology,
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Exhaustive search over the sets of ranks of each expert.
struct Exhaustive<'a> {
    loads: &'a [u32],
    slots: Vec<u32>,
    /// Pairs of the experts placed so far by their set of ranks.
    by_set: Vec<u64>,
    best: u64,
}

impl Exhaustive<'_> {
    fn optimum(loads: &[u32], slots: &[u32]) -> u64 {
        let mut search = Exhaustive {
            loads,
            slots: slots.to_vec(),
            by_set: vec![0; 1 << slots.len()],
            best: u64::MAX,
        };
        search.descend(0);
        search.best
    }

    fn descend(&mut self, expert: usize) {
        let largest = self.largest();
        if largest >= self.best {
            return;
        }
        let Some(&load) = self.loads.get(expert) else {
            self.best = largest;
            return;
        };
        for set in 1..self.by_set.len() {
            let inside = |rank: &usize| set >> rank & 1 == 1;
            let ranks: Vec<usize> = (0..self.slots.len()).filter(inside).collect();
            if ranks.iter().all(|&rank| self.slots[rank] > 0) {
                ranks.iter().for_each(|&rank| self.slots[rank] -= 1);
                self.by_set[set] += u64::from(load);
                self.descend(expert + 1);
                self.by_set[set] -= u64::from(load);
                ranks.iter().for_each(|&rank| self.slots[rank] += 1);
            }
        }
    }

    fn largest(&self) -> u64 {
        let sets = 1..self.by_set.len();
        let confined = |set: usize| -> u64 {
            let subsets = (1..=set).filter(|subset| subset & !set == 0);
            subsets.map(|subset| self.by_set[subset]).sum()
        };
        let needed = |set: usize| confined(set).div_ceil(set.count_ones().into());
        sets.map(needed).max().unwrap_or(0)
    }
}

/// A world small enough for exhaustive search, with a previous placement.
#[derive(Debug)]
struct Small {
    loads: Vec<u32>,
    slots: Vec<u32>,
    previous: Placement,
}

impl Small {
    fn random(rng: &mut ChaCha8Rng) -> Self {
        let ranks = rng.random_range(1..=4);
        let experts = rng.random_range(1..=[9, 8, 6, 5][ranks - 1]);
        let largest = [10, 100, 10_000][rng.random_range(0..3)];
        let skew = rng.random_range(0.0..3.0);
        let loads = (0..experts).map(|_| {
            let x: f64 = rng.random_range(0.0..1.0f64);
            (f64::from(largest) * x.powf(skew)) as u32
        });
        let loads = loads.collect();
        let mut slots: Vec<u32> = match rng.random_range(0..3) {
            0 => vec![(experts as u32).div_ceil(ranks as u32) + rng.random_range(0..2); ranks],
            _ => (0..ranks).map(|_| rng.random_range(0..=3)).collect(),
        };
        while slots.iter().map(|&s| s.min(experts as u32)).sum::<u32>() < experts as u32 {
            slots[rng.random_range(0..ranks)] += 1;
        }
        let mut by_rank = vec![Vec::new(); ranks];
        for expert in (0..experts as u32).chain(0..rng.random_range(0..=experts as u32)) {
            let open: Vec<usize> = (0..ranks)
                .filter(|&r| by_rank[r].len() < slots[r] as usize && !by_rank[r].contains(&expert))
                .collect();
            if !open.is_empty() {
                by_rank[open[rng.random_range(0..open.len())]].push(expert);
            }
        }
        Self {
            loads,
            slots,
            previous: Placement::new(experts, by_rank).unwrap(),
        }
    }

    /// The largest rank load under `policy`.
    fn place(&self, policy: &dyn PlacementPolicy) -> u64 {
        let loads = Array2::from_shape_vec((1, self.loads.len()), self.loads.clone()).unwrap();
        let placement = policy
            .place(&PlacementRequest {
                loads: &Loads::new(loads).unwrap(),
                previous: &self.previous,
                slots: &self.slots,
                topology: &Topology::single_node(self.slots.len()).unwrap(),
            })
            .unwrap();
        largest_load(&placement, &self.loads)
    }
}

fn check(small: &Small) {
    let ours = small.place(&Lrmoe::default());
    let optimum = Exhaustive::optimum(&small.loads, &small.slots);
    assert!(
        ours >= optimum && ours <= small.place(&FixedReplicas),
        "{small:?}"
    );
    assert!(
        100 * ours <= 105 * optimum,
        "{ours} instead of {optimum}: {small:?}"
    );
}

#[test]
fn within_a_twentieth_of_the_optimum() {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    (0..4000).for_each(|_| check(&Small::random(&mut rng)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn within_a_twentieth_of_the_optimum_anywhere(seed: u64) {
        check(&Small::random(&mut ChaCha8Rng::seed_from_u64(seed)));
    }
}
