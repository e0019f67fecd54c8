//! Against greedy replicate + pack as balancers of inference servers do it.

use lrmoe_plan::ndarray::Array2;
use lrmoe_plan::{Fixed, Loads, Lrmoe, Placement, PlacementPolicy, PlacementRequest, Topology};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

/// A model on a cluster; every rank has as many slots.
pub(crate) struct Shape {
    pub(crate) layers: u64,
    pub(crate) experts: usize,
    pub(crate) slots: usize,
    pub(crate) ranks: usize,
    pub(crate) nodes: usize,
}

pub(crate) const SHAPES: [Shape; 2] = [
    Shape {
        layers: 48,
        experts: 128,
        slots: 160,
        ranks: 8,
        nodes: 1,
    },
    Shape {
        layers: 58,
        experts: 256,
        slots: 288,
        ranks: 32,
        nodes: 4,
    },
];

/// Pairs of one source rank.
const PAIRS: f64 = 32_768.0;

pub(crate) fn popularity(experts: usize, exponent: f64, rng: &mut ChaCha8Rng) -> Vec<f64> {
    let mut weights: Vec<f64> = (1..=experts).map(|i| (i as f64).powf(-exponent)).collect();
    weights.shuffle(rng);
    weights
}

/// Counts of all source ranks, which differ from the popularity and among themselves by up to a fifth.
pub(crate) fn loads(ranks: usize, popularity: &[f64], rng: &mut ChaCha8Rng) -> Loads {
    let sum: f64 = popularity.iter().sum();
    let counts = Array2::from_shape_fn((ranks, popularity.len()), |(_, e)| {
        (PAIRS * popularity[e] / sum * rng.random_range(0.8..1.2)) as u32
    });
    Loads::new(counts).unwrap()
}

/// Items by falling weight, each to the pack with the least weight among those that are not full; packs are
/// filled with equally many items.
fn balanced_packing(weights: &[f64], packs: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let mut packed = vec![Vec::new(); packs];
    let mut sums = vec![0.0; packs];
    for item in order {
        let pack = (0..packs)
            .filter(|&p| packed[p].len() < weights.len() / packs)
            .min_by(|&a, &b| f64::total_cmp(&sums[a], &sums[b]))
            .unwrap();
        packed[pack].push(item);
        sums[pack] += weights[item];
    }
    packed
}

/// One replica of each of `experts`, then one by one to the largest load per replica; as (expert, share).
fn replicated(load: &[f64], experts: &[usize], slots: usize) -> Vec<(usize, f64)> {
    let mut replicas = vec![1; experts.len()];
    for _ in experts.len()..slots {
        let share = |i: usize| load[experts[i]] / f64::from(replicas[i]);
        let hottest = (0..experts.len()).max_by(|&a, &b| share(a).total_cmp(&share(b)));
        replicas[hottest.unwrap()] += 1;
    }
    let mut instances = Vec::new();
    for (&expert, &r) in experts.iter().zip(&replicas) {
        instances.extend((0..r).map(|_| (expert, load[expert] / f64::from(r))));
    }
    instances
}

/// (Expert, share) of each rank: groups of experts to nodes, replicas inside each node, instances to ranks. One
/// group and node is the variant without hierarchy.
fn replicate_and_pack(
    load: &[f64],
    slots: usize,
    ranks: usize,
    nodes: usize,
    groups: usize,
) -> Vec<Vec<(usize, f64)>> {
    let size = load.len() / groups;
    let group_loads: Vec<f64> = load.chunks(size).map(|group| group.iter().sum()).collect();
    let mut by_rank = Vec::new();
    for groups in balanced_packing(&group_loads, nodes) {
        let experts = groups.iter().flat_map(|g| g * size..(g + 1) * size);
        let instances = replicated(load, &experts.collect::<Vec<_>>(), slots / nodes);
        let shares: Vec<f64> = instances.iter().map(|&(_, share)| share).collect();
        for pack in balanced_packing(&shares, ranks / nodes) {
            by_rank.push(pack.into_iter().map(|i| instances[i]).collect());
        }
    }
    by_rank
}

/// The largest rank load, first with equal shares and then as a router that knows all loads can make it.
fn largest_loads(by_rank: &[Vec<(usize, f64)>], per_expert: &[u32]) -> (f64, u64) {
    let equal = by_rank
        .iter()
        .map(|here| here.iter().map(|&(_, share)| share).sum::<f64>());
    let experts = by_rank.iter().map(|here| {
        let mut experts: Vec<u32> = here.iter().map(|&(e, _)| e as u32).collect();
        experts.sort_unstable();
        experts.dedup();
        experts
    });
    let placement = Placement::new(per_expert.len(), experts.collect()).unwrap();
    (
        equal.fold(0.0, f64::max),
        placement.largest_load(per_expert).unwrap(),
    )
}

/// What is compared on one layer.
pub(crate) struct Layer {
    pub(crate) mean: u64,
    /// Largest rank loads of replicate + pack, without and with hierarchy.
    pub(crate) theirs: Vec<(f64, u64)>,
    /// Largest rank load of the policy.
    pub(crate) ours: u64,
}

/// All layers of a model, each with popular experts of its own.
pub(crate) fn layers(shape: &Shape, exponent: f64, policy: &dyn PlacementPolicy) -> Vec<Layer> {
    let &Shape {
        layers,
        experts,
        slots,
        ranks,
        nodes,
    } = shape;
    let layer = |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let popularity = popularity(experts, exponent, &mut rng);
        let loads = loads(ranks, &popularity, &mut rng);
        let per_expert = loads.per_expert();
        let load: Vec<f64> = per_expert.iter().map(|&n| n.into()).collect();
        let variants = [(1, 1), (nodes, 2 * nodes)];
        let theirs = variants.map(|(nodes, groups)| {
            let by_rank = replicate_and_pack(&load, slots, ranks, nodes, groups);
            largest_loads(&by_rank, per_expert)
        });
        let placement = policy.place(&PlacementRequest {
            loads: &loads,
            previous: &Fixed::placement(experts, ranks).unwrap(),
            slots: &vec![(slots / ranks) as u32; ranks],
            topology: &Topology::new(ranks, ranks / nodes).unwrap(),
        });
        Layer {
            mean: u64::from(loads.total()).div_ceil(ranks as u64),
            theirs: theirs.into(),
            ours: placement.unwrap().largest_load(per_expert).unwrap(),
        }
    };
    (0..layers).map(layer).collect()
}

#[test]
fn no_worse_than_replicate_and_pack_on_any_layer() {
    for shape in &SHAPES {
        for exponent in [0.5, 1.0, 1.2] {
            for layer in layers(shape, exponent, &Lrmoe::default()) {
                assert_eq!(layer.ours, layer.mean);
                for (equal, exact) in layer.theirs {
                    assert!(layer.ours as f64 <= equal.ceil() && layer.ours <= exact);
                }
            }
        }
    }
}
