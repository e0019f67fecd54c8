//! Random sequences of collectives.

use lrmoe_comm::{Collective, Reduction, bf16};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::checks::{
    check_all_gather, check_all_reduce, check_all_to_all, check_broadcast, check_reduce_scatter,
};
use crate::sample::{Sample, sample};
use crate::{Worlds, run};

/// One collective of a random sequence.
#[derive(Clone, Copy, Debug)]
struct Step {
    which: u8,
    element: u8,
    seed: u32,
    len: usize,
    max: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![0..3usize, 1000..1050usize, 0..3000usize];
    (0..6u8, 0..3u8, any::<u32>(), len, any::<bool>()).prop_map(
        |(which, element, seed, len, max)| Step {
            which,
            element,
            seed,
            len,
            max,
        },
    )
}

fn check_step<T: Sample>(comm: &mut impl Collective, step: Step) {
    let Step { seed, len, .. } = step;
    let reduction = if step.max {
        Reduction::Max
    } else {
        Reduction::Sum
    };
    match step.which {
        0 => check_all_to_all::<T>(comm, seed, |from, to| {
            sample::<u32>(seed, from, to) as usize % (len + 1)
        }),
        1 => check_all_reduce::<T>(comm, seed, len, reduction),
        2 => check_all_gather::<T>(comm, seed, len),
        3 => check_reduce_scatter::<T>(comm, seed, len, reduction),
        4 => check_broadcast::<T>(comm, seed, len, seed as usize % comm.ranks()),
        _ => comm.barrier().unwrap(),
    }
}

/// 1,000 sequences of collectives of mixed types and sizes in one world, the same on every rank.
pub(crate) fn random_sequences(world: impl Worlds) {
    run(world, |comm| {
        let mut runner = TestRunner::deterministic();
        let steps = proptest::collection::vec(step(), 1..8);
        for _ in 0..1000 {
            for step in steps.new_tree(&mut runner).unwrap().current() {
                match step.element {
                    0 => check_step::<u32>(comm, step),
                    1 => check_step::<f32>(comm, step),
                    _ => check_step::<bf16>(comm, step),
                }
            }
        }
    });
}
