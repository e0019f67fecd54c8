//! Every collective, over sizes and element types.

use std::sync::atomic::{AtomicUsize, Ordering};

use lrmoe_comm::{Collective, Reduction};

use crate::checks::{
    check_all_gather, check_all_reduce, check_all_to_all, check_broadcast, check_reduce_scatter,
};
use crate::sample::Sample;
use crate::{Worlds, run};

const LENGTHS: [usize; 8] = [0, 1, 511, 512, 513, 1024, 1025, 5000];
/// More than a rank of threads copies for the others, whatever the type.
const LARGE: usize = 20_000;
const REDUCTIONS: [Reduction; 2] = [Reduction::Sum, Reduction::Max];

pub(crate) fn all_to_all<T: Sample>(world: impl Worlds) {
    run(world, |comm| {
        let ranks = comm.ranks();
        check_all_to_all::<T>(comm, 1, |from, to| (from * 3 + to * 5) % 4);
        check_all_to_all::<T>(comm, 2, |_, _| 0);
        check_all_to_all::<T>(comm, 3, |_, to| if to == 0 { 300 } else { 0 });
        check_all_to_all::<T>(comm, 4, |from, _| if from == ranks - 1 { 1000 } else { 0 });
        check_all_to_all::<T>(comm, 5, |from, to| usize::from(from == to));
        check_all_to_all::<T>(
            comm,
            6,
            |from, to| if from < 2 { 20_000 } else { from + to },
        );
    });
}

pub(crate) fn all_reduce<T: Sample>(world: impl Worlds) {
    run(world, |comm| {
        for (len, reduction) in LENGTHS
            .iter()
            .flat_map(|&len| REDUCTIONS.map(|reduction| (len, reduction)))
        {
            check_all_reduce::<T>(comm, len as u32, len, reduction);
        }
    });
}

pub(crate) fn all_gather<T: Sample>(world: impl Worlds) {
    run(world, |comm| {
        LENGTHS
            .iter()
            .for_each(|&len| check_all_gather::<T>(comm, len as u32, len))
    });
}

pub(crate) fn reduce_scatter<T: Sample>(world: impl Worlds) {
    run(world, |comm| {
        for (len, reduction) in LENGTHS
            .iter()
            .flat_map(|&len| REDUCTIONS.map(|reduction| (len, reduction)))
        {
            check_reduce_scatter::<T>(comm, len as u32, len, reduction);
        }
    });
}

pub(crate) fn broadcast<T: Sample>(world: impl Worlds) {
    run(world, |comm| {
        for (len, root) in LENGTHS
            .iter()
            .flat_map(|&len| (0..comm.ranks()).map(move |root| (len, root)))
            .collect::<Vec<_>>()
        {
            check_broadcast::<T>(comm, len as u32, len, root);
        }
    });
}

pub(crate) fn large<T: Sample>(world: impl Worlds) {
    run(world, |comm| {
        check_all_to_all::<T>(comm, 6, |from, to| if from < 2 { LARGE } else { from + to });
        check_all_reduce::<T>(comm, 7, LARGE, Reduction::Sum);
        check_all_gather::<T>(comm, 8, LARGE);
        check_reduce_scatter::<T>(comm, 9, LARGE, Reduction::Sum);
        check_broadcast::<T>(comm, 10, LARGE, comm.ranks() - 1);
    });
}

/// No rank passes a barrier before all have come to it.
pub(crate) fn barrier(world: impl Worlds) {
    let come = AtomicUsize::new(0);
    run(world, |comm| {
        for round in 1..=50 {
            come.fetch_add(1, Ordering::SeqCst);
            comm.barrier().unwrap();
            assert!(come.load(Ordering::SeqCst) >= round * comm.ranks());
        }
    });
}

/// A NaN is the largest, of equal values the lowest rank's is taken, and a sum of -0.0 stays -0.0.
pub(crate) fn special_values(world: impl Worlds) {
    run(world, |comm| {
        let (first, last) = (comm.rank() == 0, comm.rank() == comm.ranks() - 1);
        let zero = if first { -0.0 } else { 0.0 };
        let nan = if last { f32::NAN } else { f32::INFINITY };
        let mut values = [zero, nan, f32::NEG_INFINITY];
        comm.all_reduce(&mut values, Reduction::Max).unwrap();
        assert_eq!(values[0].to_bits(), (-0f32).to_bits());
        assert!(values[1].is_nan());
        assert_eq!(values[2], f32::NEG_INFINITY);

        let mut zeros = [-0f32];
        comm.all_reduce(&mut zeros, Reduction::Sum).unwrap();
        assert_eq!(zeros[0].to_bits(), (-0f32).to_bits());
    });
}
