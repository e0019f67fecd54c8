//! Rows put to places, to the bit, against plain loops.

use crate::{
    Backend,
    compact::rows,
    random::{bits, numbers},
};

fn check_put<B: Backend>(
    backend: &B,
    [from, to]: [usize; 2],
    width: usize,
    index: &[u32],
    places: &[u32],
) {
    let rows = rows(from, width);
    let before = vec![-1.0; to * width];
    let on = backend.upload(&rows).unwrap();
    let mut out = backend.upload(&before).unwrap();
    let both = [(index, from), (places, to)];
    let [at, go] = both.map(|(list, count)| backend.row_index(list, count).unwrap());
    backend.put(&on, width, [&at, &go], &mut out).unwrap();
    let mut expected = before;
    for (&row, &place) in index.iter().zip(places) {
        let (row, place) = (row as usize * width, place as usize * width);
        expected[place..place + width].copy_from_slice(&rows[row..row + width]);
    }
    assert_eq!(bits(&backend.download(&out).unwrap()), bits(&expected));
}

pub(crate) fn puts<B: Backend>(backend: &B) {
    let mut number = numbers(6);
    for (from, to, width, count) in [
        (1, 1, 1, 1),
        (5, 4, 0, 3),
        (3, 9, 2, 0),
        (7, 300, 5, 255),
        (64, 64, 4, 64),
        (300, 257, 33, 257),
        (6000, 7000, 7, 6001),
        (20, 90, 2000, 50),
    ] {
        let index: Vec<_> = (0..count).map(|_| number() % from).collect();
        let mut places: Vec<u32> = (0..to).collect();
        while places.len() > count as usize {
            places.remove(number() as usize % places.len());
        }
        check_put(
            backend,
            [from as usize, to as usize],
            width,
            &index,
            &places,
        );
    }
    let rows = backend.upload(&[1.0, 2.0]).unwrap();
    let mut out = backend.upload(&[0.0; 3]).unwrap();
    let [two, one] = [&[0, 1][..], &[0]].map(|list| backend.row_index(list, 2).unwrap());
    let places = backend.row_index(&[0, 2], 3).unwrap();
    let error = backend
        .put(&rows, 1, [&one, &places], &mut out)
        .unwrap_err();
    assert_eq!(error.to_string(), "shape of places is [2], expected [1]");
    let error = backend
        .put(&rows, 2, [&two, &places], &mut out)
        .unwrap_err();
    assert_eq!(error.to_string(), "shape of rows is [2], expected [4]");
    let error = backend.put(&rows, 1, [&two, &two], &mut out).unwrap_err();
    assert_eq!(error.to_string(), "shape of out is [3], expected [2]");
    backend.put(&rows, 1, [&two, &places], &mut out).unwrap();
    assert_eq!(backend.download(&out).unwrap(), [1.0, 0.0, 2.0]);
}
