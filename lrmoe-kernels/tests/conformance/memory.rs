//! Ways into a backend's memory and out of it.

use lrmoe_kernels::SquaredNorm;

use crate::Backend;

pub(crate) fn zeros<B: Backend>(backend: &B) {
    let mut buffer = backend.upload(&[7_u32; 5]).unwrap();
    for len in [3, 5, 9, 0, 2] {
        backend.zero(&mut buffer, len).unwrap();
        assert_eq!(backend.download(&buffer).unwrap(), vec![0; len]);
        backend.write(&vec![7; len], &mut buffer).unwrap();
    }
}

pub(crate) fn copies<B: Backend>(backend: &B) {
    let norms = |numbers: &[f32]| -> Vec<_> {
        let rows = numbers.iter();
        rows.map(|&number| SquaredNorm::of(&[number])).collect()
    };
    let mut to = backend.upload(&norms(&[1.0, 2.0, 3.0, 4.0])).unwrap();
    let from = backend.upload(&norms(&[5.0, 6.0])).unwrap();
    backend.copy(&from, &mut to, 1).unwrap();
    backend.copy(&from, &mut to, 2).unwrap();
    let nothing = backend.upload(&[]).unwrap();
    backend.copy(&nothing, &mut to, 4).unwrap();
    let expected = norms(&[1.0, 5.0, 5.0, 6.0]);
    for at in [3, 4, usize::MAX] {
        let error = backend.copy(&from, &mut to, at).unwrap_err().to_string();
        assert!(
            error.starts_with("shape of to is [4], expected "),
            "{error}"
        );
    }
    assert_eq!(backend.download(&to).unwrap(), expected);
}

/// What the host sees in place is what it would read.
pub(crate) fn borrows<B: Backend>(backend: &B) {
    let mut buffer = backend.upload(&[1_i32, -2, 3]).unwrap();
    if let Some(values) = B::host(&buffer) {
        assert_eq!(values, [1, -2, 3]);
    }
    let expected = match B::host_mut(&mut buffer) {
        Some(values) => {
            values[1] = 5;
            [1, 5, 3]
        }
        None => [1, -2, 3],
    };
    assert_eq!(backend.download(&buffer).unwrap(), expected);
}
