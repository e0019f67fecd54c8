//! What every world must do, as generic functions, run for each world.

mod checks;
mod failures;
mod random;
mod sample;
mod values;

use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use lrmoe_comm::{Algorithm, Collective, Counted, Hierarchical, Solo, Threads, bf16};

use failures::{calls_differ, counts_differ, misuse_of_all_to_all, misuse_of_others, overflow};
use random::random_sequences;
use values::{
    all_gather, all_reduce, all_to_all, barrier, broadcast, large, reduce_scatter, special_values,
};

/// Makes the ranks of a world.
trait Worlds: Copy + Send + 'static {
    type Comm: Collective;
    fn make(self) -> Vec<Self::Comm>;
}

#[derive(Clone, Copy)]
struct OneRank;

impl Worlds for OneRank {
    type Comm = Solo;
    fn make(self) -> Vec<Solo> {
        vec![Solo]
    }
}

#[derive(Clone, Copy)]
struct OfThreads(usize);

impl Worlds for OfThreads {
    type Comm = Threads;
    fn make(self) -> Vec<Threads> {
        Threads::world(self.0, Duration::from_secs(60)).unwrap()
    }
}

/// Threads in nodes of so many ranks.
#[derive(Clone, Copy)]
struct InNodes(usize, usize, Algorithm);

impl Worlds for InNodes {
    type Comm = Hierarchical<Counted<Threads>>;
    fn make(self) -> Vec<Self::Comm> {
        let Self(ranks, per_node, algorithm) = self;
        let in_nodes = |comm| {
            let counted = Counted::new(comm, per_node).unwrap();
            Hierarchical::new(counted, per_node, algorithm).unwrap()
        };
        OfThreads(ranks).make().into_iter().map(in_nodes).collect()
    }
}

/// Runs `body` on every rank; the results are in rank order.
fn run<W: Worlds, R: Send>(world: W, body: impl Fn(&mut W::Comm) -> R + Sync) -> Vec<R> {
    let body = &body;
    std::thread::scope(|scope| {
        let spawn = |mut comm| scope.spawn(move || body(&mut comm));
        let ranks: Vec<_> = world.make().into_iter().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn trials(name: &str, world: impl Worlds) -> Vec<Trial> {
    let trial = |test: &str, body: fn(_)| {
        Trial::test(format!("{name}::{test}"), move || {
            body(world);
            Ok(())
        })
    };
    let mut trials = vec![
        trial("all_to_all::u32", all_to_all::<u32>),
        trial("all_to_all::f32", all_to_all::<f32>),
        trial("all_to_all::bf16", all_to_all::<bf16>),
        trial("all_reduce::u32", all_reduce::<u32>),
        trial("all_reduce::f32", all_reduce::<f32>),
        trial("all_reduce::bf16", all_reduce::<bf16>),
        trial("all_gather::u32", all_gather::<u32>),
        trial("all_gather::f32", all_gather::<f32>),
        trial("all_gather::bf16", all_gather::<bf16>),
        trial("reduce_scatter::u32", reduce_scatter::<u32>),
        trial("reduce_scatter::f32", reduce_scatter::<f32>),
        trial("reduce_scatter::bf16", reduce_scatter::<bf16>),
        trial("broadcast::u32", broadcast::<u32>),
        trial("broadcast::f32", broadcast::<f32>),
        trial("broadcast::bf16", broadcast::<bf16>),
        trial("large::u32", large::<u32>),
        trial("large::f32", large::<f32>),
        trial("large::bf16", large::<bf16>),
        trial("barrier", barrier),
        trial("special_values", special_values),
        trial("misuse::all_to_all", misuse_of_all_to_all),
        trial("misuse::others", misuse_of_others),
        trial("counts_differ", counts_differ),
        trial("random_sequences", random_sequences),
    ];
    if world.make().len() > 1 {
        trials.extend([
            trial("overflow", overflow),
            trial("calls_differ", calls_differ),
        ]);
    }
    trials
}

fn main() {
    let mut all = trials("solo", OneRank);
    for ranks in 1..=8 {
        all.extend(trials(&format!("threads::{ranks}"), OfThreads(ranks)));
        // One node, nodes of one rank, even and uneven nodes.
        for per_node in [1, 2, 3, 4] {
            let world = InNodes(ranks, per_node, Algorithm::Hierarchical);
            all.extend(trials(&format!("nodes::{ranks}_by_{per_node}"), world));
        }
        // Messages of about the sizes at which the way changes.
        let auto = Algorithm::Auto { most_bytes: 1000 };
        all.extend(trials(
            &format!("auto::{ranks}_by_2"),
            InNodes(ranks, 2, auto),
        ));
    }
    libtest_mimic::run(&Arguments::from_args(), all).exit();
}
