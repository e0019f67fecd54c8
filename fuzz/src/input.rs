//! Structured inputs from bytes.

use arbitrary::{Arbitrary, Unstructured};

/// The input that the bytes describe; none if there are too few.
pub(crate) fn of<'a, T: Arbitrary<'a>>(data: &'a [u8]) -> Option<T> {
    T::arbitrary_take_rest(Unstructured::new(data)).ok()
}

/// The values over and over; `standard` if there are none.
pub(crate) fn cycled<T: Copy>(values: &[T], standard: T) -> impl Iterator<Item = T> {
    let standard = [standard];
    let values = if values.is_empty() {
        standard.to_vec()
    } else {
        values.to_vec()
    };
    let mut at = 0;
    std::iter::from_fn(move || {
        at += 1;
        Some(values[(at - 1) % values.len()])
    })
}
