//! What every world must do, as generic functions, run for each world.

mod checks;
mod failures;
mod lost;
mod overlap;
#[cfg(feature = "mpi")]
mod processes;
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

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(60);

/// Starts worlds of one kind and size.
trait Worlds: Copy + Send + 'static {
    type Comm: Collective;

    fn ranks(self) -> usize;

    /// Runs `body` on every rank of a new world; the results of the ranks of this process, in rank
    /// order.
    fn start<R: Send>(self, deadline: Duration, body: impl Fn(Self::Comm) -> R + Sync) -> Vec<R>;
}

#[derive(Clone, Copy)]
struct OneRank;

impl Worlds for OneRank {
    type Comm = Solo;

    fn ranks(self) -> usize {
        1
    }

    fn start<R: Send>(self, _: Duration, body: impl Fn(Solo) -> R + Sync) -> Vec<R> {
        vec![body(Solo)]
    }
}

#[derive(Clone, Copy)]
struct OfThreads(usize);

impl Worlds for OfThreads {
    type Comm = Threads;

    fn ranks(self) -> usize {
        self.0
    }

    fn start<R: Send>(self, deadline: Duration, body: impl Fn(Threads) -> R + Sync) -> Vec<R> {
        let body = &body;
        std::thread::scope(|scope| {
            let spawn = |comm| scope.spawn(move || body(comm));
            let world = Threads::world(self.0, deadline).unwrap();
            let ranks: Vec<_> = world.into_iter().map(spawn).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

/// Threads in nodes of so many ranks.
#[derive(Clone, Copy)]
struct InNodes(usize, usize, Algorithm);

impl Worlds for InNodes {
    type Comm = Hierarchical<Counted<Threads>>;

    fn ranks(self) -> usize {
        self.0
    }

    fn start<R: Send>(self, deadline: Duration, body: impl Fn(Self::Comm) -> R + Sync) -> Vec<R> {
        let Self(ranks, per_node, algorithm) = self;
        OfThreads(ranks).start(deadline, |comm| {
            let counted = Counted::new(comm, per_node).unwrap();
            body(Hierarchical::new(counted, per_node, algorithm).unwrap())
        })
    }
}

/// Runs `body` on every rank of a new world that no test should keep waiting.
fn run<W: Worlds, R: Send>(world: W, body: impl Fn(&mut W::Comm) -> R + Sync) -> Vec<R> {
    world.start(LONG, |mut comm| body(&mut comm))
}

type Test<W> = (&'static str, fn(W));

fn tests<W: Worlds>(world: W) -> Vec<Test<W>> {
    let mut tests: Vec<Test<W>> = vec![
        ("all_to_all::u32", all_to_all::<u32>),
        ("all_to_all::f32", all_to_all::<f32>),
        ("all_to_all::bf16", all_to_all::<bf16>),
        ("all_reduce::u32", all_reduce::<u32>),
        ("all_reduce::f32", all_reduce::<f32>),
        ("all_reduce::bf16", all_reduce::<bf16>),
        ("all_gather::u32", all_gather::<u32>),
        ("all_gather::f32", all_gather::<f32>),
        ("all_gather::bf16", all_gather::<bf16>),
        ("reduce_scatter::u32", reduce_scatter::<u32>),
        ("reduce_scatter::f32", reduce_scatter::<f32>),
        ("reduce_scatter::bf16", reduce_scatter::<bf16>),
        ("broadcast::u32", broadcast::<u32>),
        ("broadcast::f32", broadcast::<f32>),
        ("broadcast::bf16", broadcast::<bf16>),
        ("large", large),
        ("barrier", barrier),
        ("special_values", special_values),
        ("misuse::all_to_all", misuse_of_all_to_all),
        ("misuse::others", misuse_of_others),
        ("counts_differ", counts_differ),
        ("random_sequences", random_sequences),
        ("overlap::every_collective", overlap::every_collective),
        ("overlap::goes_on", overlap::goes_on_while_the_rank_computes),
        ("overlap::panic", overlap::a_panic_harms_no_peer),
        ("overlap::error", overlap::an_error_leaves_what_was_computed),
    ];
    if world.ranks() > 1 {
        tests.extend([
            ("overflow", overflow as fn(W)),
            ("calls_differ", calls_differ),
            ("lost::left", lost::a_rank_that_leaves_is_named),
            ("lost::late", lost::a_late_rank_is_named),
            ("lost::stays_failed", lost::a_failed_world_stays_failed),
            (
                "lost::leaving_last",
                lost::leaving_after_the_last_collective_harms_nobody,
            ),
            ("lost::one_wait", lost::a_deadline_is_for_one_wait),
            ("overlap::late", overlap::a_late_rank_is_named),
        ]);
    }
    tests
}

fn trials<W: Worlds>(name: &str, world: W) -> Vec<Trial> {
    let trial = |(test, body): Test<W>| {
        Trial::test(format!("{name}::{test}"), move || {
            body(world);
            Ok(())
        })
    };
    tests(world).into_iter().map(trial).collect()
}

fn main() {
    #[cfg(feature = "mpi")]
    if processes::is_rank() {
        return processes::run_tests();
    }
    let mut all = trials("solo", OneRank);
    for ranks in 1..=8 {
        all.extend(trials(&format!("threads::{ranks}"), OfThreads(ranks)));
        // One node, nodes of one rank, even and uneven nodes.
        for per_node in [1, 2, 3, 4] {
            let world = InNodes(ranks, per_node, Algorithm::Hierarchical);
            let mut trials = trials(&format!("nodes::{ranks}_by_{per_node}"), world);
            // The tests that take or wait long, where they meet all cases.
            let is_full = matches!((ranks, per_node), (8, 2) | (8, 4) | (7, 3));
            let is_long = |name: &str| {
                name.ends_with("large") || name.ends_with("late") || name.contains("::random")
            };
            trials.retain(|trial| is_full || !is_long(trial.name()));
            all.extend(trials);
        }
    }
    // Messages of about the sizes at which the way changes.
    let auto = Algorithm::Auto { most_bytes: 1000 };
    all.extend(trials("auto::6_by_2", InNodes(6, 2, auto)));
    #[cfg(feature = "mpi")]
    all.extend((1..=8).map(processes::trial));
    libtest_mimic::run(&Arguments::from_args(), all).exit();
}
