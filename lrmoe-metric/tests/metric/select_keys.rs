//! Selection on keys against a plain sort, over ranks and threads.

use std::cmp::Reverse;
use std::ops::Range;

use lrmoe_metric::{
    Error, Exchange, KeySelection, MASKED, Pairs, Solo, keys_from_scores, select_keys,
};
use ndarray::{Array2, s};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::subsequence;

/// The pairs of all ranks.
#[derive(Clone, Debug)]
struct Case {
    ids: Array2<i32>,
    keys: Vec<u32>,
    quotas: Vec<u32>,
    /// Tokens of each rank.
    ranks: Vec<Range<usize>>,
}

impl Case {
    /// Kept global pair ids, and the key that follows in each expert: sorts every expert's pairs.
    fn expected(&self) -> (Vec<usize>, Vec<u32>) {
        let mut kept = Vec::new();
        let mut next = Vec::new();
        for (expert, &quota) in self.quotas.iter().enumerate() {
            let of_expert = |&(_, &id): &(usize, &i32)| id == expert as i32;
            let mut pairs: Vec<usize> = self
                .ids
                .iter()
                .enumerate()
                .filter(of_expert)
                .map(|(pair, _)| pair)
                .collect();
            pairs.sort_by_key(|&pair| Reverse(self.keys[pair]));
            kept.extend(pairs.iter().take(quota as usize));
            next.push(pairs.get(quota as usize).map_or(0, |&pair| self.keys[pair]));
        }
        kept.sort_unstable();
        (kept, next)
    }

    fn found(&self, threads: Option<usize>) -> Vec<KeySelection> {
        let gates = Array2::zeros(self.ids.dim());
        let top_k = self.ids.ncols();
        crate::common::run(self.ranks.len(), |exchange| {
            let tokens = self.ranks[exchange.rank()].clone();
            let pairs = tokens.start * top_k..tokens.end * top_k;
            let keys = &self.keys[pairs.clone()];
            let ids = self.ids.slice(s![tokens.clone(), ..]);
            let gates = gates.slice(s![tokens, ..]);
            let pairs = Pairs::new(ids, gates, self.quotas.len(), pairs.start as u64).unwrap();
            let mut select = || select_keys(&pairs, keys, &self.quotas, exchange).unwrap();
            match threads {
                None => select(),
                Some(threads) => {
                    // A pool for each rank: ranks that wait for each other must not share threads.
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                    pool.unwrap().install(select)
                }
            }
        })
    }

    fn check(&self) -> Result<(), TestCaseError> {
        self.compare(&self.found(None))
    }

    fn compare(&self, found: &[KeySelection]) -> Result<(), TestCaseError> {
        let (expected, next) = self.expected();
        let global = |(selection, tokens): (&KeySelection, &Range<usize>)| {
            let first = tokens.start * self.ids.ncols();
            selection
                .pairs
                .iter()
                .map(move |&pair| first + pair as usize)
                .collect::<Vec<_>>()
        };
        let kept: Vec<_> = found.iter().zip(&self.ranks).flat_map(global).collect();
        prop_assert_eq!(kept, expected);
        for selection in found {
            prop_assert_eq!(&selection.next, &next);
        }
        Ok(())
    }
}

fn keys(pairs: usize) -> impl Strategy<Value = Vec<u32>> {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    prop_oneof![
        any::<u32>().prop_map(move |key| vec![key; pairs]),
        vec(prop::sample::select(vec![6, 7]), pairs),
        vec(0..0x0080_0000u32, pairs),
        vec(
            prop::sample::select(vec![0, 1, 0x3f80_0000, INFINITY]),
            pairs
        ),
        vec((0.0..1.0f32).prop_map(f32::to_bits), pairs),
        vec(prop_oneof![any::<u32>(), Just(u32::MAX)], pairs),
    ]
}

/// The token's experts, some of them masked.
fn token(experts: usize, top_k: usize) -> impl Strategy<Value = Vec<i32>> {
    let ids = subsequence((0..experts as i32).collect::<Vec<_>>(), top_k).prop_shuffle();
    (ids, vec(prop::bool::weighted(0.2), top_k)).prop_map(|(ids, masked)| {
        let mask = |(id, masked)| if masked { MASKED } else { id };
        ids.into_iter().zip(masked).map(mask).collect()
    })
}

fn quota(load: u32) -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(0),
        Just(load),
        Just(load + 1),
        Just(u32::MAX),
        Just(load / 2),
        0..=load
    ]
}

fn case() -> impl Strategy<Value = Case> {
    (1..=12usize, 0..=60usize, 1..=64usize)
        .prop_flat_map(|(experts, tokens, ranks)| {
            (Just((experts, tokens, ranks)), 1..=experts.min(5))
        })
        .prop_flat_map(|((experts, tokens, ranks), top_k)| {
            let ids = vec(token(experts, top_k), tokens);
            (
                ids,
                keys(tokens * top_k),
                vec(0..=tokens, ranks - 1),
                Just((experts, top_k)),
            )
        })
        .prop_flat_map(|(ids, keys, mut cuts, (experts, top_k))| {
            cuts.extend([0, ids.len()]);
            cuts.sort_unstable();
            let ids = Array2::from_shape_vec((ids.len(), top_k), ids.concat()).unwrap();
            let load = |expert| ids.iter().filter(|&&id| id == expert).count() as u32;
            let quotas: Vec<_> = (0..experts as i32)
                .map(|expert| quota(load(expert)))
                .collect();
            let ranks: Vec<_> = cuts.windows(2).map(|ends| ends[0]..ends[1]).collect();
            (Just((ids, keys, ranks)), quotas)
        })
        .prop_map(|((ids, keys, ranks), quotas)| Case {
            ids,
            keys,
            quotas,
            ranks,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn equals_a_sort_on_any_ranks(case in case()) {
        case.check()?;
    }

    #[test]
    fn equals_a_sort_on_one_rank(mut case in case()) {
        case.ranks = crate::common::even(case.ids.nrows(), 1);
        case.check()?;
    }
}

/// Pseudo-random values below `end`, the same in every run.
fn numbers(seed: u64, end: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    }
}

/// Every token takes `top_k` consecutive experts from a random one on; one pair in 16 is masked; keys are below `key_end`.
fn large(tokens: usize, top_k: usize, experts: usize, key_end: u64, ranks: usize) -> Case {
    let mut number = numbers(experts as u64, u64::MAX);
    let mut first = 0;
    let ids = Array2::from_shape_fn((tokens, top_k), |(_, slot)| {
        if slot == 0 {
            first = number() as usize;
        }
        let expert = (first + slot) % experts;
        if number().is_multiple_of(16) {
            MASKED
        } else {
            expert as i32
        }
    });
    let keys = ids
        .iter()
        .map(|_| (number() * 2 % key_end) as u32)
        .collect();
    let mut loads = vec![0; experts];
    ids.iter()
        .filter(|&&id| id >= 0)
        .for_each(|&id| loads[id as usize] += 1);
    let quotas = loads.iter().map(|load| load / 2).collect();
    Case {
        ids,
        keys,
        quotas,
        ranks: crate::common::even(tokens, ranks),
    }
}

#[test]
fn many_experts() {
    for key_end in [3, 1 << 20, 1 << 32] {
        for ranks in [1, 3] {
            large(4000, 10, 512, key_end, ranks).check().unwrap();
        }
    }
}

#[test]
fn more_than_65536_pairs_on_one_expert() {
    for key_end in [1, 2, 1 << 24, 1 << 32] {
        for ranks in [1, 2] {
            large(140_000, 1, 1, key_end, ranks).check().unwrap();
        }
    }
    large(70_000, 2, 2, 1 << 32, 4).check().unwrap();
}

#[test]
fn threads_change_nothing() {
    for (ranks, key_end) in [(1, 1 << 32), (1, 2), (3, 1 << 32), (3, 2)] {
        let case = large(30_000, 4, 24, key_end, ranks);
        for threads in [1, 2, 5] {
            case.compare(&case.found(Some(threads))).unwrap();
        }
    }
}

/// Keys of f32 scores that differ between experts by powers of two; some are zero, infinite, or of masked pairs.
#[test]
fn scales_of_experts_differ() {
    for ranks in [1, 3] {
        for key_end in [1, 8, 1 << 23] {
            let mut case = large(30_000, 4, 24, 1 << 32, ranks);
            for (key, &id) in case.keys.iter_mut().zip(&case.ids) {
                let exponent = (8 * id.max(0) as u32 + 20) << 23;
                *key = match *key % 16 {
                    _ if id == MASKED => u32::MAX,
                    0..3 => 0,
                    3 => f32::INFINITY.to_bits(),
                    _ => exponent + (*key >> 4) % key_end,
                };
            }
            case.check().unwrap();
            case.quotas.iter_mut().for_each(|quota| *quota /= 10);
            case.check().unwrap();
        }
    }
}

#[test]
fn one_outlier_does_not_hide_the_rest() {
    let mut case = large(60_000, 1, 1, 1 << 10, 1);
    case.keys[17] = u32::MAX;
    case.check().unwrap();
}

fn row(ids: &[i32]) -> Array2<i32> {
    Array2::from_shape_vec((1, ids.len()), ids.to_vec()).unwrap()
}

#[test]
fn keys_order_scores() {
    let scores = [
        0.0,
        -0.0,
        f32::from_bits(0x007f_ffff),
        f32::MIN_POSITIVE,
        1.0,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
    ];
    let ids = row(&[0, 1, 2, 3, 4, 5, 6, MASKED]);
    let gates = Array2::zeros(ids.dim());
    let pairs = Pairs::new(ids.view(), gates.view(), 7, 0).unwrap();
    let keys = keys_from_scores(&pairs, &scores).unwrap();
    assert_eq!(keys[..3], [0; 3]);
    assert!(keys[2..7].is_sorted_by(|a, b| a < b));
    assert_eq!(keys[7], 0);
}

#[test]
fn bad_scores_name_their_pair() {
    let ids = row(&[2, MASKED, 1]);
    let gates = Array2::zeros(ids.dim());
    let pairs = Pairs::new(ids.view(), gates.view(), 3, 100).unwrap();
    let nan = keys_from_scores(&pairs, &[0.0, 0.0, f32::NAN]).unwrap_err();
    assert!(
        matches!(
            nan,
            Error::NanScore {
                pair: 102,
                expert: 1
            }
        ),
        "{nan}"
    );
    let negative = keys_from_scores(&pairs, &[-1.5, 0.0, f32::NAN]).unwrap_err();
    assert_eq!(
        negative.to_string(),
        "the score -1.5 of pair 100 with expert 2 is negative"
    );
    let length = keys_from_scores(&pairs, &[0.0]).unwrap_err();
    assert_eq!(length.to_string(), "1 scores, expected 3");
}

#[test]
fn an_error_on_one_rank_ends_the_call_on_all() {
    let ids = row(&[0, 1]);
    let gates = Array2::zeros(ids.dim());
    let found = crate::common::run(3, |exchange| {
        let pairs = Pairs::new(ids.view(), gates.view(), 2, 2 * exchange.rank() as u64).unwrap();
        let keys: &[u32] = if exchange.rank() == 1 { &[1] } else { &[1, 2] };
        select_keys(&pairs, keys, &[1, 1], exchange).unwrap_err()
    });
    assert!(matches!(found[0], Error::Elsewhere));
    assert!(matches!(
        found[1],
        Error::Length {
            found: 1,
            expected: 2,
            ..
        }
    ));
    assert!(matches!(found[2], Error::Elsewhere));
}

#[test]
fn the_sum_of_all_loads_fits_in_32_bits() {
    /// Two ranks, the other of which has `load` pairs of each expert.
    struct Other(u32);
    impl Exchange for Other {
        fn rank(&self) -> usize {
            0
        }
        fn ranks(&self) -> usize {
            2
        }
        fn sum(&mut self, values: &mut [u32]) -> Result<(), lrmoe_metric::ExchangeError> {
            let loads = values.len() - 1;
            values[..loads]
                .iter_mut()
                .for_each(|value| *value += self.0);
            Ok(())
        }
        fn max(&mut self, _: &mut [u32]) -> Result<(), lrmoe_metric::ExchangeError> {
            Ok(())
        }
        fn all_gather(
            &mut self,
            _: &[u32],
            _: &mut [u32],
        ) -> Result<(), lrmoe_metric::ExchangeError> {
            Ok(())
        }
    }
    let ids = row(&[0, 1]);
    let gates = Array2::zeros(ids.dim());
    let pairs = Pairs::new(ids.view(), gates.view(), 2, 0).unwrap();
    let all = [u32::MAX; 2];
    assert!(select_keys(&pairs, &[1, 2], &all, &mut Other(0x7fff_fffe)).is_ok());
    let error = select_keys(&pairs, &[1, 2], &all, &mut Other(0x7fff_ffff)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TooManyPairsOverall {
                pairs: 0x1_0000_0000
            }
        ),
        "{error}"
    );
}

#[test]
fn no_pairs_and_no_experts() {
    let ids = Array2::zeros((0, 2));
    let gates = Array2::zeros((0, 2));
    for experts in [0, 3] {
        let pairs = Pairs::new(ids.view(), gates.view(), experts, 0).unwrap();
        let found = select_keys(&pairs, &[], &vec![1; experts], &mut Solo).unwrap();
        assert_eq!(
            found,
            KeySelection {
                pairs: vec![],
                next: vec![0; experts]
            }
        );
    }
}
