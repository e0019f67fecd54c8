//! Squared norms, to the bit, against the definition.

use lrmoe_kernels::{FfnElement, SquaredNorm, half::bf16};
use proptest::{collection::vec, prelude::*};

use crate::{Backend, random::check};

/// In f32, and rounded to bf16.
fn check_rows<B: Backend>(backend: &B, values: &[f32], width: usize) -> Result<(), TestCaseError> {
    check_rows_of(backend, values, values, width)?;
    let rounded: Vec<_> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    let widened: Vec<_> = rounded.iter().map(|x| x.to_f32()).collect();
    check_rows_of(backend, &rounded, &widened, width)
}

fn check_rows_of<T: FfnElement, B: Backend>(
    backend: &B,
    stored: &[T],
    values: &[f32],
    width: usize,
) -> Result<(), TestCaseError> {
    let rows = values.len().checked_div(width).unwrap_or(3);
    let buffer = backend.upload(stored).unwrap();
    let nan = SquaredNorm {
        significand: f32::NAN,
        scale: 7,
    };
    let mut norms = backend.upload(&vec![nan; rows + 1]).unwrap();
    backend
        .squared_norms(&buffer, [rows, width], &mut norms)
        .unwrap();
    let found = backend.download(&norms).unwrap();
    prop_assert_eq!(found.len(), rows);
    for (row, found) in found.iter().enumerate() {
        let expected = SquaredNorm::of(&values[row * width..][..width]);
        let bits = |norm: &SquaredNorm| (norm.significand.to_bits(), norm.scale);
        prop_assert_eq!(bits(found), bits(&expected), "row {} of {}", row, rows);
    }
    Ok(())
}

pub(crate) fn special_rows<B: Backend>(backend: &B) {
    let rows = [
        [0.0, -0.0, f32::from_bits(1), f32::from_bits(0x007f_ffff)],
        [f32::MAX, -f32::MAX, f32::MAX, 1.0],
        [f32::MIN_POSITIVE, 0.0, -f32::MIN_POSITIVE, 0.0],
        [f32::INFINITY, 1.0, 2.0, 3.0],
        [f32::NEG_INFINITY, f32::NAN, 2.0, 3.0],
        [1.0, -f32::NAN, 2.0, 3.0],
        [1.0, (0.5_f32).powi(62), (0.5_f32).powi(63), 3.0],
    ];
    check_rows(backend, rows.as_flattened(), 4).unwrap();
    for width in [0, 1, 31, 32, 33, 64, 65, 1000] {
        for rows in [0, 1, 7, 8, 9] {
            let values: Vec<_> = (0..width * rows).map(|i| (i as f32).sin()).collect();
            check_rows(backend, &values, width).unwrap();
        }
    }
}

pub(crate) fn any_bits<B: Backend>(backend: &B) {
    let element = prop_oneof![
        any::<u32>().prop_map(f32::from_bits),
        -4.0..4.0f32,
        (-140..127i32).prop_map(|e| 1.25 * (e as f32).exp2()),
    ];
    let rows = (1..100usize, 0..20usize)
        .prop_flat_map(move |(width, rows)| (vec(element.clone(), width * rows), Just(width)));
    check(60, rows, |(values, width)| {
        check_rows(backend, &values, width)
    });
}
