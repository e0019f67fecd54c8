//! Stages on rows, on every path.

use half::bf16;
use lrmoe_metric::SquaredNorm;

use super::on_every_path;
use crate::{CompactRows, FfnElement, HostBuffer, Memory, SelectPairs, cpu::Cpu};

/// Norms and sums of rows are defined to the bit, so that no path may differ.
fn rows_on_every_path<T: FfnElement>() {
    let value = |i: usize| T::narrowed((i as f32 * 0.37).sin() * 2_f32.powi(i as i32 % 40 - 20));
    for (tokens, top_k, width) in [(1, 1, 1), (5, 3, 63), (9, 8, 200), (2, 2, 1024)] {
        let pairs: Vec<_> = (0..(tokens * top_k) as u32).rev().collect();
        let values: Vec<_> = (0..pairs.len() * width).map(value).collect();
        let weights: Vec<_> = (0..pairs.len()).map(|i| 0.1 + i as f32 / 7.0).collect();
        let mut expected = vec![0.0_f32; tokens * width];
        for (row, &pair) in pairs.iter().enumerate().rev() {
            let sums = &mut expected[pair as usize / top_k * width..][..width];
            for (sum, &value) in sums.iter_mut().zip(&values[row * width..]) {
                *sum += weights[row] * value.widened();
            }
        }
        let widened: Vec<_> = values.iter().map(|&value| value.widened()).collect();
        on_every_path(|isa| {
            let rows = Cpu.upload(&values).unwrap();
            let mut norms = HostBuffer::default();
            Cpu.squared_norms(&rows, [pairs.len(), width], &mut norms)
                .unwrap();
            for (norm, row) in norms.iter().zip(widened.chunks_exact(width)) {
                assert_eq!(*norm, SquaredNorm::of(row), "{isa}");
            }
            let pairs = Cpu.pair_rows(&pairs, tokens, top_k).unwrap();
            let (weights, mut out) = (Cpu.upload(&weights).unwrap(), HostBuffer::default());
            Cpu.combine(&rows, width, &pairs, Some(&weights), &mut out)
                .unwrap();
            let bits = |value: f32| value.to_bits();
            let found: Vec<_> = out.iter().map(|value| bits(value.widened())).collect();
            let rounded: Vec<_> =
                (expected.iter().map(|&sum| bits(T::narrowed(sum).widened()))).collect();
            assert_eq!(found, rounded, "{isa}");
        });
    }
}

#[test]
fn rows_are_the_same_on_every_path() {
    rows_on_every_path::<f32>();
    rows_on_every_path::<bf16>();
}
