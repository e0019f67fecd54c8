//! One batch over any number of ranks, and a layer stepped over it.
#![allow(dead_code, reason = "each test program uses a part")]

use std::time::Duration;

use lrmoe::adamw::AdamW;
use lrmoe::layer::{Backend, ExpertParameters, LayerConfig, LayerElement, LayerStats, MoeLayer};
use lrmoe::policy::{Policy, Selecting};
use lrmoe_comm::{Collective, Threads};
use lrmoe_kernels::{Activation, Cpu, FfnShape};
use lrmoe_metric::Selection;
use lrmoe_plan::{Stash, Topology};
use ndarray::{Array2, Array3, Axis, concatenate, s};
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// Inputs of one layer over all ranks, and its experts.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) x: Array2<f32>,
    pub(crate) dy: Array2<f32>,
    pub(crate) expert_ids: Array2<i32>,
    pub(crate) gate_weights: Array2<f32>,
    /// `[experts, hidden, width]`, none where not gated.
    pub(crate) gate: Option<Array3<f32>>,
    pub(crate) up: Array3<f32>,
    pub(crate) down: Array3<f32>,
    pub(crate) activation: Activation,
}

pub(crate) fn normal(shape: (usize, usize), rng: &mut ChaCha8Rng) -> Array2<f32> {
    Array2::from_shape_simple_fn(shape, || StandardNormal.sample(rng))
}

impl Batch {
    /// A random SwiGLU layer: every token takes `top_k` different experts, the first experts more often.
    pub(crate) fn random(
        tokens: usize,
        (width, hidden): (usize, usize),
        (experts, top_k): (usize, usize),
        seed: u64,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut cube = |a: usize, b: usize, c: usize| {
            let scale = (c as f32).sqrt().recip();
            (normal((a * b, c), &mut rng) * scale)
                .into_shape_with_order((a, b, c))
                .expect("the same size")
        };
        let (gate, up, down) = (
            Some(cube(experts, hidden, width)),
            cube(experts, hidden, width),
            cube(experts, width, hidden),
        );
        let mut expert_ids = Array2::zeros((tokens, top_k));
        for mut row in expert_ids.rows_mut() {
            // Half of the tokens choose among the first half of the experts, where there are enough of them.
            let among = if rand::RngExt::random_bool(&mut rng, 0.5) {
                experts.div_ceil(2).max(top_k)
            } else {
                experts
            };
            row.iter_mut()
                .zip(sample(&mut rng, among, top_k))
                .for_each(|(id, expert)| *id = expert as i32);
        }
        Self {
            x: normal((tokens, width), &mut rng),
            dy: normal((tokens, width), &mut rng),
            gate_weights: normal((tokens, top_k), &mut rng).mapv(|v| 0.05 + v.abs() / 3.0),
            expert_ids,
            gate,
            up,
            down,
            activation: Activation::SwiGlu,
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.x.nrows()
    }

    pub(crate) fn experts(&self) -> usize {
        self.up.dim().0
    }

    pub(crate) fn config(&self, ranks: usize, policy: Policy) -> LayerConfig {
        let (experts, hidden, width) = self.up.dim();
        LayerConfig {
            layer: 3,
            seed: 7,
            shape: FfnShape {
                width,
                hidden,
                activation: self.activation,
            },
            experts,
            top_k: self.expert_ids.ncols(),
            topology: Topology::new(ranks, ranks.div_ceil(2)).expect("ranks on two nodes"),
            slots: vec![(experts.div_ceil(ranks) + 1).min(experts) as u32; ranks],
            chunk_rows: 13,
            overlap: false,
            capacities: None,
            policy,
            stash: Stash::Recompute,
            profile_decay: 0.9,
        }
    }

    pub(crate) fn parameters(&self, expert: usize) -> ExpertParameters {
        let of = |m: &Array3<f32>| m.index_axis(Axis(0), expert).iter().copied().collect();
        ExpertParameters {
            gate: self.gate.as_ref().map(of),
            up: of(&self.up),
            down: of(&self.down),
        }
    }
}

pub(crate) fn lrmoe(retention: f64) -> Policy {
    Policy::Lrmoe(Selecting {
        retention,
        ..Selecting::default()
    })
}

/// Runs `f` on every rank of a world of threads and returns the results in rank order.
pub(crate) fn on_ranks<T: Send>(ranks: usize, f: impl Fn(&mut Threads) -> T + Sync) -> Vec<T> {
    let world = Threads::world(ranks, Duration::from_secs(60)).expect("a world");
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = world
            .into_iter()
            .map(|mut comm| scope.spawn(move || f(&mut comm)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no rank panics"))
            .collect()
    })
}

/// What all ranks together made of a step.
#[derive(Clone, Debug)]
pub(crate) struct Stepped {
    pub(crate) y: Array2<f32>,
    pub(crate) dx: Array2<f32>,
    pub(crate) dp: Array2<f32>,
    /// Global pair ids and weights that were retained.
    pub(crate) retained: Vec<(u32, u32)>,
    /// Gradient of all experts: gate, up, down; within each, expert by expert.
    pub(crate) gradient: Vec<f32>,
    pub(crate) stats: Vec<LayerStats>,
}

/// Token ranges of the ranks; uneven where the tokens do not divide.
pub(crate) fn split(tokens: usize, ranks: usize) -> Vec<std::ops::Range<usize>> {
    (0..ranks)
        .map(|rank| tokens * rank / ranks..tokens * (rank + 1) / ranks)
        .collect()
}

/// One step, the tokens divided evenly.
pub(crate) fn step(batch: &Batch, config: &LayerConfig) -> Stepped {
    let shares = split(batch.tokens(), config.topology.ranks());
    steps(batch, config, &shares, 1).pop().expect("one step")
}

/// `count` steps on the same batch, each with an optimizer update at learning rate 1e-2.
pub(crate) fn steps(
    batch: &Batch,
    config: &LayerConfig,
    shares: &[std::ops::Range<usize>],
    count: u32,
) -> Vec<Stepped> {
    steps_on(&Cpu, batch, config, shares, count)
}

/// The same on any backend, which the ranks share.
pub(crate) fn steps_on<B: Backend + Clone + Sync>(
    backend: &B,
    batch: &Batch,
    config: &LayerConfig,
    shares: &[std::ops::Range<usize>],
    count: u32,
) -> Vec<Stepped> {
    steps_in::<B, f32>(backend, batch, config, shares, count)
}

/// The same with rows and working weights in another type.
pub(crate) fn steps_in<B: Backend<T> + Clone + Sync, T: LayerElement>(
    backend: &B,
    batch: &Batch,
    config: &LayerConfig,
    shares: &[std::ops::Range<usize>],
    count: u32,
) -> Vec<Stepped> {
    let per_rank = on_ranks(config.topology.ranks(), |comm| {
        let of = |expert| batch.parameters(expert);
        let layer = MoeLayer::<B, T>::on(backend.clone(), config.clone(), comm.rank(), of);
        let mut layer = layer.expect("a layer");
        let share = shares[comm.rank()].clone();
        (1..=count)
            .map(|number| rank_step(batch, &mut layer, comm, share.clone(), number))
            .collect::<Vec<_>>()
    });
    (0..count as usize)
        .map(|number| {
            gather(
                per_rank.iter().map(|rank| &rank[number]),
                shares,
                batch.expert_ids.ncols(),
            )
        })
        .collect()
}

/// A rank's part of a step.
#[derive(Debug)]
pub(crate) struct RankStep {
    y: Array2<f32>,
    dx: Array2<f32>,
    dp: Array2<f32>,
    selection: Selection,
    gradient: Vec<f32>,
    pub(crate) stats: LayerStats,
}

pub(crate) fn rank_step<B: Backend<T>, T: LayerElement, C: Collective>(
    batch: &Batch,
    layer: &mut MoeLayer<B, T>,
    comm: &mut C,
    share: std::ops::Range<usize>,
    number: u32,
) -> RankStep {
    let rows = s![share, ..];
    let [x, dy] = [&batch.x, &batch.dy].map(|all| all.slice(rows).mapv(T::from_f32));
    let (ids, p) = (batch.expert_ids.slice(rows), batch.gate_weights.slice(rows));
    let y = layer
        .forward(comm, x.view(), ids, p, Some(number))
        .expect("forward");
    let (dx, dp) = layer.backward(comm, dy.view()).expect("backward");
    let [y, dx] = [y, dx].map(|rows| rows.mapv(T::to_f32));
    let selection = layer.selection().expect("a selection").clone();
    layer.reduce_gradients(comm).expect("reduction");
    let gradient = layer.shard_gradient().to_vec();
    layer
        .update(
            comm,
            &AdamW {
                epsilon: 1e-3,
                ..AdamW::default()
            },
            number,
            1e-2,
            1.0,
        )
        .expect("update");
    RankStep {
        y,
        dx,
        dp,
        selection,
        gradient,
        stats: layer.stats().clone(),
    }
}

fn gather<'a>(
    ranks: impl Iterator<Item = &'a RankStep>,
    shares: &[std::ops::Range<usize>],
    top_k: usize,
) -> Stepped {
    let ranks: Vec<&RankStep> = ranks.collect();
    let rows = |of: fn(&RankStep) -> &Array2<f32>| {
        concatenate(
            Axis(0),
            &ranks.iter().map(|rank| of(rank).view()).collect::<Vec<_>>(),
        )
        .expect("one width")
    };
    let retained = ranks.iter().zip(shares).flat_map(|(rank, share)| {
        let first = (share.start * top_k) as u32;
        rank.selection
            .pairs
            .iter()
            .zip(&rank.selection.weights)
            .map(move |(pair, weight)| (first + pair, weight.to_bits()))
    });
    Stepped {
        y: rows(|rank| &rank.y),
        dx: rows(|rank| &rank.dx),
        dp: rows(|rank| &rank.dp),
        retained: retained.collect(),
        gradient: ranks
            .iter()
            .flat_map(|rank| rank.gradient.iter().copied())
            .collect(),
        stats: ranks.iter().map(|rank| rank.stats.clone()).collect(),
    }
}

/// `|a - b| / |b|` over whole tensors; 0 where both are 0.
pub(crate) fn relative_error<'a>(
    a: impl IntoIterator<Item = &'a f32>,
    b: impl IntoIterator<Item = &'a f32>,
) -> f64 {
    let (mut difference, mut size) = (0.0, 0.0);
    for (a, b) in a.into_iter().zip(b) {
        difference += (f64::from(*a) - f64::from(*b)).powi(2);
        size += f64::from(*b).powi(2);
    }
    if difference == 0.0 {
        0.0
    } else {
        (difference / size).sqrt()
    }
}
