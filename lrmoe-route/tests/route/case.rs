use lrmoe_route::{Array2, Placement, Topology};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

/// Inputs of a routing request.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) counts: Array2<u32>,
    pub(crate) placement: Placement,
    pub(crate) topology: Topology,
    pub(crate) capacities: Option<Vec<u64>>,
}

/// Upper limits of a random case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) ranks: usize,
    pub(crate) experts: usize,
    /// Largest number of pairs of the layer.
    pub(crate) pairs: u32,
}

impl Case {
    pub(crate) fn random(seed: u64, limits: Limits) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let ranks = rng.random_range(1..=limits.ranks);
        let experts = rng.random_range(1..=limits.experts);
        let ranks_per_node = rng.random_range(1..=ranks);
        let mut counts = Array2::zeros((ranks, experts));
        // Few sources and experts at times, so that there are ranks and experts without pairs.
        let (sources, wanted) = (rng.random_range(1..=ranks), rng.random_range(1..=experts));
        for _ in 0..rng.random_range(0..=limits.pairs) {
            counts[[rng.random_range(0..sources), rng.random_range(0..wanted)]] += 1;
        }
        let mut by_rank = vec![Vec::new(); ranks];
        let most = rng.random_range(1..=ranks);
        let mut order: Vec<usize> = (0..ranks).collect();
        for expert in 0..experts as u32 {
            order.shuffle(&mut rng);
            for &rank in &order[..rng.random_range(1..=most)] {
                by_rank[rank].push(expert);
            }
        }
        let capacities = rng.random_bool(0.5).then(|| {
            let mean = counts.sum() / ranks as u32;
            (0..ranks)
                .map(|_| rng.random_range(0..=2 * mean + 2).into())
                .collect()
        });
        Self {
            counts,
            placement: Placement::new(experts, by_rank).unwrap(),
            topology: Topology::new(ranks, ranks_per_node).unwrap(),
            capacities,
        }
    }

    /// Ranks with an instance of `expert`.
    pub(crate) fn hosts(&self, expert: usize) -> Vec<usize> {
        let instances = self.placement.instances_of(expert).iter();
        instances
            .map(|&i| self.placement.rank_of(i as usize))
            .collect()
    }
}
