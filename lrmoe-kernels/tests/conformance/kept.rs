//! Backward passes from pre-activations that the forward pass kept.

use lrmoe_kernels::{Activation, ComputeExperts, FfnElement};

use crate::{
    experts::assert_close,
    passes::{Found, no_gradients, rounded, run, run_keeping},
    problem::Problem,
    random::bits,
};

/// Pre-activations that were kept give what recomputing them gives: in f32, and wherever they are stored as rows of x are, to the bit.
pub(crate) fn as_recomputed<B: ComputeExperts<T>, T: FfnElement>(backend: &B, to_the_bit: bool) {
    let (mut scratch, mut room) = Default::default();
    for (activation, width, hidden) in [
        (Activation::SwiGlu, 33, 50),
        (Activation::Relu2, 64, 65),
        (Activation::GegluTanh, 5, 7),
        (Activation::Silu, 17, 64),
    ] {
        for groups in [&[0, 70, 1, 0, 16, 3][..], &[0, 0], &[300]] {
            let problem = rounded::<T>(Problem::random(activation, width, hidden, groups));
            let again = run(backend, &problem, &mut scratch);
            let gradients = &mut no_gradients(backend, &problem);
            let accumulate = vec![false; groups.len()];
            let kept = Some(&mut room);
            let kept = run_keeping(
                backend,
                &problem,
                &mut scratch,
                kept,
                gradients,
                &accumulate,
            );
            assert_eq!(bits(&kept.out), bits(&again.out), "{activation}");
            assert_eq!(kept.h_norms, again.h_norms, "{activation}");
            let of = |found: &Found| {
                let gate = found.dgate.clone().unwrap_or_default();
                [&found.dx, &found.dp, &gate, &found.dup, &found.ddown].map(Vec::clone)
            };
            for (kept, again) in of(&kept).iter().zip(&of(&again)) {
                if to_the_bit {
                    assert_eq!(bits(kept), bits(again), "{activation}");
                }
                let wide =
                    |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
                assert_close::<T>("kept", wide(kept), wide(again));
            }
        }
    }
}
