//! Routing tables from counts, and the sending order of one rank, on one thread.

use divan::{Bencher, black_box};
use lrmoe_route::{Array2, Placement, Topology, route};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

fn main() {
    divan::main();
}

/// A layer of a model on a cluster of nodes of 8 ranks.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: usize,
    experts: usize,
    /// Instances on each rank.
    slots: usize,
    /// Exponent of the popularity of experts; 0 = all alike.
    zipf: f64,
}

const fn case(ranks: usize, experts: usize, slots: usize, zipf: f64) -> Case {
    Case {
        ranks,
        experts,
        slots,
        zipf,
    }
}

const CASES: [Case; 13] = [
    case(8, 128, 16, 1.0),
    case(8, 128, 20, 0.0),
    case(8, 128, 20, 1.0),
    case(8, 128, 32, 1.0),
    case(64, 256, 5, 0.0),
    case(64, 256, 5, 1.0),
    case(64, 256, 6, 0.0),
    case(64, 256, 6, 1.0),
    case(64, 256, 8, 0.0),
    case(64, 256, 8, 1.0),
    case(64, 256, 16, 0.0),
    case(64, 256, 16, 1.0),
    case(64, 256, 256, 1.0),
];

/// Pairs of one source rank: 8,192 tokens, 8 experts each.
const PAIRS: f64 = 65_536.0;

struct Layer {
    counts: Array2<u32>,
    placement: Placement,
    topology: Topology,
}

impl Case {
    /// Counts that each expert and each source rank lets deviate from Zipf's law, and a placement planned without
    /// knowing these deviations.
    fn layer(&self) -> Layer {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let mut popularity: Vec<f64> = (1..=self.experts)
            .map(|i| (i as f64).powf(-self.zipf))
            .collect();
        popularity.shuffle(&mut rng);
        let placement = self.placement(&popularity, &mut rng);
        for value in &mut popularity {
            *value *= rng.random_range(0.7..1.3);
        }
        let sum: f64 = popularity.iter().sum();
        let counts = Array2::from_shape_fn((self.ranks, self.experts), |(_, expert)| {
            (PAIRS * popularity[expert] / sum * rng.random_range(0.5..1.5)) as u32
        });
        let topology = Topology::new(self.ranks, 8).expect("there are ranks");
        Layer {
            counts,
            placement,
            topology,
        }
    }

    /// Spare slots go to the experts with the largest load per instance, instances to the emptiest ranks.
    fn placement(&self, load: &[f64], rng: &mut ChaCha8Rng) -> Placement {
        let mut replicas = vec![1; self.experts];
        for _ in self.experts..self.ranks * self.slots {
            let open = (0..self.experts).filter(|&expert| replicas[expert] < self.ranks);
            let share = |expert: usize| load[expert] / replicas[expert] as f64;
            let Some(expert) = open.max_by(|&a, &b| share(a).total_cmp(&share(b))) else {
                break;
            };
            replicas[expert] += 1;
        }
        let mut by_rank = vec![Vec::new(); self.ranks];
        let mut order: Vec<usize> = (0..self.experts).collect();
        order.sort_by_key(|&expert| std::cmp::Reverse(replicas[expert]));
        for expert in order {
            let mut ranks: Vec<usize> = (0..self.ranks).collect();
            ranks.shuffle(rng);
            ranks.sort_by_key(|&rank| by_rank[rank].len());
            for &rank in &ranks[..replicas[expert]] {
                by_rank[rank].push(expert as u32);
            }
        }
        Placement::new(self.experts, by_rank).expect("every expert is placed")
    }
}

#[divan::bench(args = CASES)]
fn table(bencher: Bencher<'_, '_>, case: &Case) {
    let layer = case.layer();
    let counts = layer.counts.view();
    bencher.bench_local(|| {
        route(black_box(counts), &layer.placement, &layer.topology, None).expect("unlimited room")
    });
}

#[divan::bench(args = [case(8, 128, 20, 1.0), case(64, 256, 6, 1.0)])]
fn deal(bencher: Bencher<'_, '_>, case: &Case) {
    let layer = case.layer();
    let table = route(layer.counts.view(), &layer.placement, &layer.topology, None)
        .expect("unlimited room");
    let row = layer.counts.row(0);
    let ids = row
        .iter()
        .zip(0..)
        .flat_map(|(&n, expert)| std::iter::repeat_n(expert, n as usize));
    let mut expert_ids: Vec<i32> = ids.collect();
    expert_ids.shuffle(&mut ChaCha8Rng::seed_from_u64(1));
    let pairs: Vec<u32> = (0..expert_ids.len() as u32).collect();
    bencher.bench_local(|| {
        table
            .deal(0, &expert_ids, black_box(&pairs))
            .expect("the pairs counted")
    });
}
