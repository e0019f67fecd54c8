//! One collective against plain loops. Inputs are a function of the rank, so that each rank knows
//! what all the others gave and works out what it should get.

use lrmoe_comm::{Collective, Reduction};

use crate::sample::{Sample, assert_same, reduced, samples};

/// Sends `count(from, to)` elements.
pub(crate) fn check_all_to_all<T: Sample>(
    comm: &mut impl Collective,
    seed: u32,
    count: impl Fn(usize, usize) -> usize,
) {
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let message = |from, to| samples::<T>(seed ^ to as u32, from, count(from, to));
    let send: Vec<T> = (0..ranks).flat_map(|to| message(rank, to)).collect();
    let send_counts: Vec<usize> = (0..ranks).map(|to| count(rank, to)).collect();
    let expected: Vec<T> = (0..ranks).flat_map(|from| message(from, rank)).collect();
    let recv_counts: Vec<usize> = (0..ranks).map(|from| count(from, rank)).collect();
    let mut recv = vec![T::poison(); expected.len()];
    comm.all_to_all(&send, &send_counts, &mut recv, &recv_counts)
        .unwrap();
    assert_same(&recv, &expected);
}

pub(crate) fn check_all_reduce<T: Sample>(
    comm: &mut impl Collective,
    seed: u32,
    len: usize,
    reduction: Reduction,
) {
    let mut values = samples::<T>(seed, comm.rank(), len);
    comm.all_reduce(&mut values, reduction).unwrap();
    let expected: Vec<T> = (0..len)
        .map(|index| reduced(seed, comm.ranks(), index, reduction))
        .collect();
    assert_same(&values, &expected);
}

pub(crate) fn check_all_gather<T: Sample>(comm: &mut impl Collective, seed: u32, len: usize) {
    let mut all = vec![T::poison(); comm.ranks() * len];
    comm.all_gather(&samples::<T>(seed, comm.rank(), len), &mut all)
        .unwrap();
    let expected: Vec<T> = (0..comm.ranks())
        .flat_map(|rank| samples(seed, rank, len))
        .collect();
    assert_same(&all, &expected);
}

pub(crate) fn check_reduce_scatter<T: Sample>(
    comm: &mut impl Collective,
    seed: u32,
    len: usize,
    reduction: Reduction,
) {
    let values = samples::<T>(seed, comm.rank(), comm.ranks() * len);
    let mut mine = vec![T::poison(); len];
    comm.reduce_scatter(&values, &mut mine, reduction).unwrap();
    let part = comm.rank() * len..(comm.rank() + 1) * len;
    let expected: Vec<T> = part
        .map(|index| reduced(seed, comm.ranks(), index, reduction))
        .collect();
    assert_same(&mine, &expected);
}

pub(crate) fn check_broadcast<T: Sample>(
    comm: &mut impl Collective,
    seed: u32,
    len: usize,
    root: usize,
) {
    let mut values = match comm.rank() == root {
        true => samples(seed, root, len),
        false => vec![T::poison(); len],
    };
    comm.broadcast(&mut values, root).unwrap();
    assert_same(&values, &samples(seed, root, len));
}
