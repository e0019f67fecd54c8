//! Inputs, and the means to try many.

use lrmoe_kernels::lrmoe_metric::MASKED;
use lrmoe_kernels::ndarray::Array2;
use proptest::{
    collection::vec,
    prelude::*,
    sample::subsequence,
    test_runner::{Config, TestRunner},
};

/// Tries so many values.
pub(crate) fn check<S: Strategy>(
    cases: u32,
    values: S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    if let Err(error) = TestRunner::new(config).run(&values, test) {
        panic!("{error}");
    }
}

/// Any f32 that is no NaN, and more often than not a telling one.
pub(crate) fn telling() -> impl Strategy<Value = f32> + Clone {
    prop_oneof![
        any::<u32>()
            .prop_map(f32::from_bits)
            .prop_filter("NaN", |x| !x.is_nan()),
        -4.0..4.0f32,
        prop::sample::select(vec![
            0.0,
            -0.0,
            1.0,
            f32::MAX,
            f32::MIN_POSITIVE,
            -f32::MIN_POSITIVE,
            f32::from_bits(0x007f_ffff),
            f32::from_bits(1),
            f32::from_bits(0x0100_0000),
            1.0 / (1u64 << 62) as f32,
        ]),
    ]
}

/// Experts of tokens, some of them masked, in slots.
pub(crate) fn ids(
    experts: usize,
    tokens: usize,
    top_k: usize,
) -> impl Strategy<Value = Array2<i32>> {
    let token = subsequence((0..experts as i32).collect::<Vec<_>>(), top_k).prop_shuffle();
    let masked = vec(prop::bool::weighted(0.2), tokens * top_k);
    (vec(token, tokens), masked).prop_map(move |(ids, masked)| {
        let mask = |(id, masked)| if masked { MASKED } else { id };
        let ids = ids.concat().into_iter().zip(masked).map(mask);
        Array2::from_shape_vec((tokens, top_k), ids.collect()).unwrap()
    })
}

/// (experts, tokens, slots).
pub(crate) fn sizes() -> impl Strategy<Value = (usize, usize, usize)> {
    (1..=12usize, 0..=60usize)
        .prop_flat_map(|(experts, tokens)| (Just(experts), Just(tokens), 1..=experts.min(5)))
}

/// Quotas about the loads.
pub(crate) fn quotas(ids: &Array2<i32>, experts: usize) -> impl Strategy<Value = Vec<u32>> + use<> {
    let of = |expert| ids.iter().filter(|&&id| id == expert).count() as u32;
    let quota = |load| {
        prop_oneof![
            Just(0),
            Just(load),
            Just(u32::MAX),
            Just(load / 2),
            0..=load + 1
        ]
    };
    (0..experts as i32)
        .map(|expert| quota(of(expert)))
        .collect::<Vec<_>>()
}

/// Pseudo-random numbers, the same in every run.
pub(crate) fn numbers(mut state: u64) -> impl FnMut() -> u32 {
    move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 ^ (state >> 20) as u32
    }
}

/// Their bits.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
