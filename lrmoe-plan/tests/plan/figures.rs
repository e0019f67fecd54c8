//! Figures for reports: `cargo test --release -p lrmoe-plan --test plan figures -- --ignored --nocapture`.

use lrmoe_plan::{
    Fixed, FixedReplicas, Lrmoe, Placement, PlacementPolicy, PlacementRequest, Topology,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::eplb::{Layer, SHAPES, layers, loads, popularity};

/// Largest over mean rank load, averaged over the layers.
#[test]
#[ignore = "prints figures"]
fn of_replicate_and_pack() {
    for shape in &SHAPES {
        for exponent in [0.5, 1.0, 1.2] {
            let layers = layers(shape, exponent, &Lrmoe::default());
            let ratio = |largest: &dyn Fn(&Layer) -> f64| {
                let ratios = layers
                    .iter()
                    .map(|layer| largest(layer) / layer.mean as f64);
                ratios.sum::<f64>() / layers.len() as f64
            };
            println!(
                "{} experts, {} slots, {} ranks, zipf {exponent}: flat {:.4} (exact {:.4}), \
                 hierarchical {:.4} (exact {:.4}), ours {:.4}",
                shape.experts,
                shape.slots,
                shape.ranks,
                ratio(&|layer| layer.theirs[0].0),
                ratio(&|layer| layer.theirs[0].1 as f64),
                ratio(&|layer| layer.theirs[1].0),
                ratio(&|layer| layer.theirs[1].1 as f64),
                ratio(&|layer| layer.ours as f64),
            );
        }
    }
}

/// Instances that move per step, and largest over mean rank load on the loads planned for and on the next ones.
#[test]
#[ignore = "prints figures"]
fn of_drifting_loads() {
    const STEPS: usize = 20;
    for (ranks, experts, slots) in [
        (8, 128, 20),
        (8, 128, 17),
        (64, 256, 5),
        (64, 256, 6),
        (1024, 512, 2),
    ] {
        for (exponent, drift) in [
            (0.5, 0.01),
            (1.0, 0.01),
            (1.2, 0.01),
            (0.5, 0.05),
            (1.0, 0.05),
            (1.2, 0.05),
        ] {
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            let mut popularity = popularity(experts, exponent, &mut rng);
            let slots = vec![slots; ranks];
            let topology = Topology::new(ranks, 8).unwrap();
            let mut last = Fixed::placement(experts, ranks).unwrap();
            let mut packed = last.clone();
            let (mut moved, mut instances) = (0, 0);
            let mut ratios = [0.0; 3];
            for step in 0..=STEPS {
                for weight in &mut popularity {
                    *weight *= rng.random_range(1.0 - drift..1.0 + drift);
                }
                let loads = loads(ranks, &popularity, &mut rng);
                let request = PlacementRequest {
                    loads: &loads,
                    previous: &last,
                    slots: &slots,
                    topology: &topology,
                };
                let next = Lrmoe::default().place(&request).unwrap();
                if step > 0 {
                    let mean = f64::from(loads.total()) / ranks as f64;
                    for (ratio, placement) in ratios.iter_mut().zip([&next, &last, &packed]) {
                        *ratio += placement.largest_load(loads.per_expert()).unwrap() as f64 / mean;
                    }
                    moved += (0..ranks)
                        .map(|rank| added(&last, &next, rank))
                        .sum::<usize>();
                    instances += next.instances();
                }
                packed = FixedReplicas.place(&request).unwrap();
                last = next;
            }
            let per_step = |n: usize| n as f64 / STEPS as f64;
            let [ours, next, packed] = ratios.map(|ratio| ratio / STEPS as f64);
            println!(
                "{ranks} ranks, {experts} experts, {} slots, zipf {exponent}, drift {drift}: {:.1} of {:.0} instances \
                 move; largest / mean {ours:.5}, on the next loads {next:.4} (fixed-replicas anew {packed:.4})",
                slots.iter().sum::<u32>(),
                per_step(moved),
                per_step(instances),
            );
        }
    }
}

/// Experts that come to `rank`.
fn added(before: &Placement, after: &Placement, rank: usize) -> usize {
    let here = after.local_experts(rank).iter();
    here.filter(|e| !before.local_experts(rank).contains(e))
        .count()
}
