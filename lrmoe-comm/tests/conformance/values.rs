//! Every collective, over sizes and element types.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lrmoe_comm::{Collective, Reduction, bf16};

use crate::checks::{
    check_all_gather, check_all_reduce, check_all_to_all, check_broadcast, check_reduce_scatter,
};
use crate::sample::Sample;
use crate::{Worlds, run};

const LENGTHS: [usize; 8] = [0, 1, 511, 512, 513, 1024, 1025, 5000];
const REDUCTIONS: [Reduction; 2] = [Reduction::Sum, Reduction::Max];

pub(crate) fn all_to_all<T: Sample>(world: impl Worlds) {
    run(world, |comm| {
        let ranks = comm.ranks();
        check_all_to_all::<T>(comm, 1, |from, to| (from * 3 + to * 5) % 4);
        check_all_to_all::<T>(comm, 2, |_, _| 0);
        check_all_to_all::<T>(comm, 3, |_, to| if to == 0 { 300 } else { 0 });
        check_all_to_all::<T>(comm, 4, |from, _| if from == ranks - 1 { 1000 } else { 0 });
        check_all_to_all::<T>(comm, 5, |from, to| usize::from(from == to));
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

/// Messages that are too long to be copied on the way, of which one rank sends most.
pub(crate) fn large<W: Worlds>(world: W) {
    run(world, |comm| {
        let ranks = comm.ranks();
        check_all_to_all::<f32>(comm, 1, |from, to| match (from == ranks - 1, to == 0) {
            (true, true) => 200_001,
            (true, false) => 70_003,
            (false, _) => 33 * from * to,
        });
        check_all_to_all::<bf16>(comm, 2, |from, to| 10_001 * (from + 2 * to));
        check_all_reduce::<f32>(comm, 3, 300_007, Reduction::Sum);
        check_all_reduce::<bf16>(comm, 4, 100_001, Reduction::Max);
        check_reduce_scatter::<f32>(comm, 5, 70_001, Reduction::Sum);
        check_all_gather::<f32>(comm, 6, 70_001);
        check_broadcast::<f32>(comm, 7, 200_003, ranks - 1);
    });
}

/// No rank passes a barrier before all have come to it, by the clock of this machine.
pub(crate) fn barrier(world: impl Worlds) {
    let nanos = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64
    };
    let words = |time: u64| [(time >> 32) as u32, time as u32];
    run(world, |comm| {
        for round in 0..20 {
            if round % comm.ranks() == comm.rank() {
                thread::sleep(Duration::from_micros(500));
            }
            let come = words(nanos());
            comm.barrier().unwrap();
            let passed = nanos();
            let mut all = vec![0; 2 * comm.ranks()];
            comm.all_gather(&come, &mut all).unwrap();
            assert!(all.chunks(2).all(|come| come <= &words(passed)[..]));
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
