//! Rows from place to place, to the bit, against plain loops.

use lrmoe_kernels::{FfnElement, half::bf16, lrmoe_compact::Grouping, ndarray::Array2};
use proptest::{collection::vec, prelude::*, sample::subsequence};

use crate::{
    Backend,
    random::{bits, check, numbers},
};

/// Rows that tell their place.
pub(crate) fn rows(count: usize, width: usize) -> Vec<f32> {
    (0..count * width).map(|i| 1.0 + i as f32 / 8.0).collect()
}

fn check_gather<B: Backend>(backend: &B, count: usize, width: usize, index: &[u32]) {
    let from = rows(count, width);
    let on = backend.upload(&from).unwrap();
    let mut out = backend.upload(&[f32::NAN; 7]).unwrap();
    let places = backend.row_index(index, count).unwrap();
    backend.gather(&on, width, &places, &mut out).unwrap();
    let row = |&index: &u32| &from[index as usize * width..][..width];
    let expected: Vec<_> = index.iter().flat_map(row).copied().collect();
    assert_eq!(bits(&backend.download(&out).unwrap()), bits(&expected));
}

pub(crate) fn gathers<B: Backend>(backend: &B) {
    let mut number = numbers(5);
    for (count, width, taken) in [
        (1, 1, 1),
        (5, 0, 3),
        (0, 4, 0),
        (3, 2, 0),
        (7, 5, 255),
        (64, 4, 64),
        (300, 33, 257),
        (6000, 7, 6001),
        (20, 2000, 50),
    ] {
        let index: Vec<_> = (0..taken).map(|_| number() % count.max(1)).collect();
        check_gather(backend, count as usize, width, &index);
    }
    check_gather(backend, 4, 3, &[2; 500]);
}

/// By (instance, source, row) with padding, from rows by (source, instance, row).
fn grouped(counts: &Array2<u32>, multiple: usize, received: &[f32], width: usize) -> Vec<f32> {
    let mut grouped = Vec::new();
    for instance in 0..counts.ncols() {
        let group = grouped.len();
        for source in 0..counts.nrows() {
            let before: u32 = counts
                .indexed_iter()
                .filter(|&((s, i), _)| (s, i) < (source, instance))
                .map(|(_, n)| n)
                .sum();
            let (start, len) = (before as usize, counts[[source, instance]] as usize);
            grouped.extend(&received[start * width..(start + len) * width]);
        }
        let len = (grouped.len() - group).checked_div(width).unwrap_or(0);
        grouped.resize(group + len.next_multiple_of(multiple) * width, 0.0);
    }
    grouped
}

fn check_groups<B: Backend>(backend: &B, counts: &Array2<u32>, multiple: usize, width: usize) {
    let host = Grouping::new(counts.view(), multiple).unwrap();
    let received = rows(host.received_rows(), width);
    let grouping = backend.grouping(&host).unwrap();
    let on = backend.upload(&received).unwrap();
    let mut there = backend.upload(&[f32::NAN; 50]).unwrap();
    backend.group(&grouping, &on, width, &mut there).unwrap();
    let expected = grouped(counts, multiple, &received, width);
    assert_eq!(backend.download(&there).unwrap(), expected, "{counts}");
    let mut back = backend.upload(&[f32::NAN; 50]).unwrap();
    backend
        .ungroup(&grouping, &there, width, &mut back)
        .unwrap();
    assert_eq!(backend.download(&back).unwrap(), received, "{counts}");
}

pub(crate) fn groups<B: Backend>(backend: &B) {
    let shapes = (0..5usize, 0..5usize, 1..5usize, 1..9usize);
    let cases = shapes.prop_flat_map(|(sources, instances, multiple, width)| {
        let count = prop_oneof![Just(0), 0..20u32];
        let counts = vec(count, sources * instances);
        let counts = counts
            .prop_map(move |counts| Array2::from_shape_vec((sources, instances), counts).unwrap());
        (counts, Just(multiple), Just(width))
    });
    check(40, cases, |(counts, multiple, width)| {
        check_groups(backend, &counts, multiple, width);
        Ok(())
    });
    check_groups(backend, &Array2::from_elem((2, 3), 500), 64, 13);
    check_groups(backend, &Array2::from_elem((1, 512), 1), 2, 3);
}

#[derive(Clone, Debug)]
struct Sum {
    tokens: usize,
    top_k: usize,
    width: usize,
    pairs: Vec<u32>,
    weighted: bool,
}

impl Sum {
    fn check<B: Backend>(&self, backend: &B) {
        let (width, count) = (self.width, self.pairs.len());
        // Sums of these are not exact, so that their order shows; none is subnormal.
        let mut number = numbers(count as u64);
        let mut values = |len: usize| -> Vec<f32> {
            let value = || (number() as f32 / 3e8 - 7.0) * 1.1;
            std::iter::repeat_with(value).take(len).collect()
        };
        let (rows, weights) = (values(count * width), values(count));
        let mut expected = values(self.tokens * width);
        let into = expected.clone();
        for token in 0..self.tokens {
            for slot in 0..self.top_k {
                let pair = (token * self.top_k + slot) as u32;
                let Some(row) = self.pairs.iter().position(|&other| other == pair) else {
                    continue;
                };
                for column in 0..width {
                    let value = rows[row * width + column];
                    let term = if self.weighted {
                        weights[row] * value
                    } else {
                        value
                    };
                    expected[token * width + column] += term;
                }
            }
        }
        let pairs = backend
            .pair_rows(&self.pairs, self.tokens, self.top_k)
            .unwrap();
        let (rows, weights) = (
            backend.upload(&rows).unwrap(),
            backend.upload(&weights).unwrap(),
        );
        let weights = self.weighted.then_some(&weights);
        let mut found = backend.upload(&into).unwrap();
        backend
            .scatter_add(&rows, width, &pairs, weights, &mut found)
            .unwrap();
        assert_eq!(
            bits(&backend.download(&found).unwrap()),
            bits(&expected),
            "{self:?}"
        );
    }

    /// The same rows in this type: written over, and added to zeros and rounded after.
    fn check_combine<T: FfnElement, B: Backend>(
        &self,
        backend: &B,
        narrow: fn(f32) -> T,
        widen: fn(T) -> f32,
    ) {
        let (width, count) = (self.width, self.pairs.len());
        let mut number = numbers(count as u64 + 1);
        let mut value = || (number() as f32 / 3e8 - 7.0) * 1.1;
        let rows: Vec<_> = (0..count * width).map(|_| narrow(value())).collect();
        let weights: Vec<_> = (0..count).map(|_| value()).collect();
        let mut sums = vec![0.0; self.tokens * width];
        for (pair, row) in self.by_pair() {
            for column in 0..width {
                let weight = if self.weighted { weights[row] } else { 1.0 };
                sums[pair / self.top_k * width + column] +=
                    weight * widen(rows[row * width + column]);
            }
        }
        let expected: Vec<_> = sums.iter().map(|&sum| widen(narrow(sum))).collect();

        let pairs = backend
            .pair_rows(&self.pairs, self.tokens, self.top_k)
            .unwrap();
        let (rows, weights) = (
            backend.upload(&rows).unwrap(),
            backend.upload(&weights).unwrap(),
        );
        let weights = self.weighted.then_some(&weights);
        let check = |found: Vec<T>| {
            let found: Vec<_> = found.into_iter().map(widen).collect();
            assert_eq!(bits(&found), bits(&expected), "{self:?}");
        };
        let mut out = backend.upload(&[narrow(f32::NAN); 9]).unwrap();
        backend
            .combine(&rows, width, &pairs, weights, &mut out)
            .unwrap();
        check(backend.download(&out).unwrap());
        let mut into = backend.upload(&vec![0.0; self.tokens * width]).unwrap();
        backend
            .scatter_add(&rows, width, &pairs, weights, &mut into)
            .unwrap();
        assert_eq!(bits(&backend.download(&into).unwrap()), bits(&sums));
        backend.narrow(&into, &mut out).unwrap();
        check(backend.download(&out).unwrap());
    }

    /// Pairs and their rows in ascending order of pairs.
    fn by_pair(&self) -> Vec<(usize, usize)> {
        let pairs = self.pairs.iter().enumerate();
        let mut pairs: Vec<_> = pairs.map(|(row, &pair)| (pair as usize, row)).collect();
        pairs.sort_unstable();
        pairs
    }
}

pub(crate) fn adds<B: Backend>(backend: &B) {
    let shapes = (0..20usize, 1..6usize, 0..40usize, any::<bool>());
    let cases = shapes.prop_flat_map(|(tokens, top_k, width, weighted)| {
        let all: Vec<_> = (0..(tokens * top_k) as u32).collect();
        let most = all.len();
        let pairs = subsequence(all, 0..=most).prop_shuffle();
        pairs.prop_map(move |pairs| Sum {
            tokens,
            top_k,
            width,
            pairs,
            weighted,
        })
    });
    check(60, cases, |sum| {
        sum.check(backend);
        sum.check_combine(backend, |x| x, |x| x);
        sum.check_combine(backend, bf16::from_f32, bf16::to_f32);
        Ok(())
    });
    for weighted in [false, true] {
        let many = Sum {
            tokens: 300,
            top_k: 4,
            width: 70,
            pairs: (0..1200).rev().filter(|pair| pair % 7 > 0).collect(),
            weighted,
        };
        many.check(backend);
        many.check_combine(backend, |x| x, |x| x);
        many.check_combine(backend, bf16::from_f32, bf16::to_f32);
    }
}

/// Rows of bf16, all bit patterns among them, gathered, grouped and back; and an f32 next to every one, rounded.
pub(crate) fn moves_bf16<B: Backend>(backend: &B) {
    let every: Vec<_> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let bits = |values: &[bf16]| -> Vec<_> { values.iter().map(|value| value.to_bits()).collect() };
    let on = backend.upload(&every).unwrap();
    assert_eq!(bits(&backend.download(&on).unwrap()), bits(&every));
    for (width, taken) in [(1, 70_000), (64, 3000), (32, 700), (128, 1)] {
        let rows = every.len() / width;
        let index: Vec<_> = (0..taken)
            .map(|i| (i * 7919) as u32 % rows as u32)
            .collect();
        let places = backend.row_index(&index, rows).unwrap();
        let mut out = Default::default();
        backend.gather(&on, width, &places, &mut out).unwrap();
        let row = |&index: &u32| &every[index as usize * width..][..width];
        let expected: Vec<_> = index.iter().flat_map(row).copied().collect();
        assert_eq!(bits(&backend.download(&out).unwrap()), bits(&expected));
    }
    let counts = Array2::from_shape_vec((2, 3), vec![100, 0, 28, 0, 1, 127]).unwrap();
    let host = Grouping::new(counts.view(), 8).unwrap();
    let grouping = backend.grouping(&host).unwrap();
    let (mut there, mut back) = Default::default();
    backend.group(&grouping, &on, 256, &mut there).unwrap();
    backend.ungroup(&grouping, &there, 256, &mut back).unwrap();
    assert_eq!(bits(&backend.download(&back).unwrap()), bits(&every));

    let near = |value: &bf16| {
        let bits = u32::from(value.to_bits()) << 16;
        [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(bits | low))
    };
    let values: Vec<_> = every.iter().flat_map(near).collect();
    let mut narrowed = Default::default();
    let on = backend.upload(&values).unwrap();
    backend.narrow::<bf16>(&on, &mut narrowed).unwrap();
    let expected: Vec<_> = values.iter().map(|&value| bf16::from_f32(value)).collect();
    assert_eq!(bits(&backend.download(&narrowed).unwrap()), bits(&expected));
}

/// So much that hosts write it past their caches, in whole and broken lines.
pub(crate) fn large_rows<B: Backend>(backend: &B) {
    for width in [512, 515, 33] {
        let count = 300;
        let from = rows(count, width);
        let on = backend.upload(&from).unwrap();
        let taken = (3 << 20) / width;
        let index: Vec<_> = (0..taken).map(|i| (i * 7919 % count) as u32).collect();
        let places = backend.row_index(&index, count).unwrap();
        let mut out = Default::default();
        backend.gather(&on, width, &places, &mut out).unwrap();
        let found = backend.download(&out).unwrap();
        for (row, &index) in found.chunks_exact(width).zip(&index) {
            assert_eq!(row, &from[index as usize * width..][..width]);
        }
    }
}

/// Rows are moved as they are, NaN and subnormals too; sums leave tokens without rows alone.
pub(crate) fn bits_are_kept<B: Backend>(backend: &B) {
    let odd = [
        0x7fc0_1234,
        0xff80_0001,
        0x8000_0000,
        0x0000_0001,
        0x807f_ffff,
        0x7f80_0000,
    ];
    let odd = odd.map(f32::from_bits);
    let on = backend.upload(&odd).unwrap();
    assert_eq!(bits(&backend.download(&on).unwrap()), bits(&odd));
    let index = backend.row_index(&[2, 0, 1], 3).unwrap();
    let mut out = Default::default();
    backend.gather(&on, 2, &index, &mut out).unwrap();
    let expected = [4, 5, 0, 1, 2, 3].map(|at: usize| odd[at]);
    assert_eq!(bits(&backend.download(&out).unwrap()), bits(&expected));
    let mut into = backend.upload(&odd).unwrap();
    let pairs = backend.pair_rows(&[1], 3, 1).unwrap();
    let one = backend.upload(&[1.0, 1.0]).unwrap();
    backend
        .scatter_add(&one, 2, &pairs, None, &mut into)
        .unwrap();
    let found = bits(&backend.download(&into).unwrap());
    assert_eq!(
        [&found[..2], &found[4..]].concat(),
        [&bits(&odd[..2])[..], &bits(&odd[4..])].concat()
    );
    assert_eq!(found[2], 1.0_f32.to_bits());
}

pub(crate) fn misuse<B: Backend>(backend: &B) {
    let message = |error: lrmoe_kernels::Error| error.to_string();
    let index = backend.row_index(&[1, 3, 4], 3);
    let expected = "index 3 at position 1 is out of range for 3 rows";
    assert_eq!(message(index.unwrap_err()), expected);
    let pairs = backend.pair_rows(&[1, 4], 2, 2);
    let expected = "pair 4 of row 1 is out of range for 2 tokens of 2 slots";
    assert_eq!(message(pairs.unwrap_err()), expected);
    let pairs = backend.pair_rows(&[3, 1, 3], 2, 2);
    assert_eq!(
        message(pairs.unwrap_err()),
        "rows 0 and 2 are both of pair 3"
    );
    let pairs = backend.pair_rows(&[], usize::MAX, 2);
    assert!(message(pairs.unwrap_err()).contains("more than 4294967295 pairs"));

    let refused = |result: Result<(), lrmoe_kernels::Error>, expected: &str| {
        assert_eq!(message(result.unwrap_err()), expected);
    };
    let index = backend.row_index(&[1, 1], 3).unwrap();
    let (five, mut out) = (backend.upload(&[0.0_f32; 5]).unwrap(), Default::default());
    let row = backend.upload(&[0.0_f32; 2]).unwrap();
    let result = backend.gather(&five, 2, &index, &mut out);
    refused(result, "shape of rows is [5], expected [6]");
    let result = backend.gather(&row, usize::MAX, &index, &mut out);
    let expected = format!("shape of rows is [2], expected [{}]", usize::MAX);
    refused(result, &expected);

    let pairs = backend.pair_rows(&[1], 2, 1).unwrap();
    let mut into = backend.upload(&[0.0; 4]).unwrap();
    let result = backend.scatter_add(&five, 2, &pairs, None, &mut into);
    refused(result, "shape of rows is [5], expected [2]");
    let result = backend.scatter_add(&row, 2, &pairs, Some(&five), &mut into);
    refused(result, "shape of weights is [5], expected [1]");
    let result = backend.scatter_add(&row, 2, &pairs, None, &mut out);
    refused(result, "shape of into is [0], expected [4]");

    let result = backend.read(&row, &mut [0.0; 3]);
    refused(result, "shape of values is [3], expected [2]");
    let result = backend.squared_norms(&row, [2, usize::MAX], &mut Default::default());
    let expected = format!("shape of rows is [2], expected [{}]", usize::MAX);
    refused(result, &expected);
}
