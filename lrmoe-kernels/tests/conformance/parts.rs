//! Weight gradients from several calls, against those of one.

use lrmoe_kernels::{Activation, ComputeExperts, FfnElement, half::bf16};

#[cfg(any(feature = "cuda", feature = "cuda-emu"))]
use crate::experts::assert_close;
use crate::{
    passes::{no_gradients, run, run_into},
    problem::Problem,
    random::bits,
};

/// Instances' rows in several calls, the gradients of all of which go on from those before, give the bits of one call. Gradients of an
/// instance that accumulates nothing are not looked at.
pub(crate) fn equal<B: ComputeExperts>(backend: &B) {
    let same = |found: &[f32], expected: &[f32]| assert_eq!(bits(found), bits(expected));
    in_parts(backend, (5, 7), &[70, 0, 3, 0, 40], &[1, 36, 71, 71], same);
    let groups = [100, 33, 0, 0, 129];
    in_parts(backend, (64, 65), &groups, &[1, 36, 71, 71], same);
}

/// In bf16, where all calls but the last of an instance bring whole steps of 32 rows of it.
pub(crate) fn equal_bf16<B: ComputeExperts<bf16>>(backend: &B) {
    let same = |found: &[f32], expected: &[f32]| assert_eq!(bits(found), bits(expected));
    in_parts(
        backend,
        (5, 7),
        &[70, 0, 3, 0, 40],
        &[32, 64, 64, 105],
        same,
    );
    let groups = [100, 33, 0, 0, 129];
    in_parts(backend, (64, 65), &groups, &[32, 64, 64, 132], same);
}

/// The same within rounding, for cuBLAS, which promises no order of sums.
#[cfg(any(feature = "cuda", feature = "cuda-emu"))]
pub(crate) fn close<B: ComputeExperts>(backend: &B) {
    let close = |found: &[f32], expected: &[f32]| {
        let wide = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        assert_close::<f32>("gradients", wide(found), wide(expected));
    };
    in_parts(backend, (5, 7), &[70, 0, 3, 0, 40], &[1, 36, 71, 71], close);
    let groups = [100, 33, 0, 0, 129];
    in_parts(backend, (64, 65), &groups, &[1, 36, 71, 71], close);
}

/// `cuts` are the rows before which calls other than the first begin.
fn in_parts<B: ComputeExperts<T>, T: FfnElement>(
    backend: &B,
    (width, hidden): (usize, usize),
    groups: &[usize],
    cuts: &[usize],
    compare: impl Fn(&[f32], &[f32]),
) {
    let scratch = &mut B::Scratch::default();
    for activation in [Activation::SwiGlu, Activation::Relu2] {
        let problem = Problem::random(activation, width, hidden, groups);
        let all = run(backend, &problem, scratch);
        let gradients = &mut no_gradients(backend, &problem);
        let cuts = [&[0], cuts, &[problem.rows()]].concat();
        let mut found = None;
        for (call, cut) in cuts.windows(2).enumerate() {
            let last = call + 2 == cuts.len();
            let part = problem.only(&(cut[0]..cut[1]).collect::<Vec<_>>());
            let accumulate: Vec<_> = (0..groups.len())
                .map(|i| {
                    let is_begun = problem.offsets[i] < cut[0];
                    let has_rows = part.offsets[i + 1] > part.offsets[i];
                    if has_rows {
                        is_begun
                    } else {
                        groups[i] > 0 || !last
                    }
                })
                .collect();
            found = Some(run_into(backend, &part, scratch, gradients, &accumulate));
        }
        let found = found.unwrap();
        assert_eq!(found.dgate.is_some(), all.dgate.is_some());
        if let (Some(found), Some(all)) = (&found.dgate, &all.dgate) {
            compare(found, all);
        }
        compare(&found.dup, &all.dup);
        compare(&found.ddown, &all.ddown);
    }
}
