//! Backward passes from pre-activations that the forward pass kept.

use lrmoe_kernels::{
    Activation, CompactRows, ComputeExperts, ExpertBuffers, FfnElement, PreActivationBuffers,
    ndarray::Array3,
};

use crate::{
    experts::assert_close,
    passes::{Found, no_gradients, rounded, run, run_keeping},
    problem::Problem,
    random::{bits, numbers},
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

/// Of chosen rows the pre-activations go to their places, to the bit those of a pass that keeps all; other places stay as they are.
pub(crate) fn chosen<B: ComputeExperts<T> + CompactRows, T: FfnElement>(backend: &B) {
    let mut number = numbers(9);
    for (activation, width, hidden, groups) in [
        (Activation::SwiGlu, 33, 50, &[0, 70, 1, 0, 16, 3][..]),
        (Activation::Relu2, 16, 65, &[0, 0]),
        (Activation::GegluTanh, 5, 7, &[1]),
        (Activation::Silu, 17, 64, &[300]),
        (Activation::SwiGlu, 16, 272, &[40, 400, 2]),
    ] {
        let problem = rounded::<T>(Problem::random(activation, width, hidden, groups));
        let rows = problem.rows() as u32;
        let sparse = (0..rows).filter(|_| number().is_multiple_of(4)).collect();
        let dense = (0..rows).filter(|_| !number().is_multiple_of(16)).collect();
        let last = (0..rows).skip(rows.saturating_sub(1) as usize).collect();
        for chosen in [sparse, dense, last, vec![], (0..rows).collect::<Vec<_>>()] {
            check_chosen::<B, T>(backend, &problem, &chosen, 2 * rows as usize + 3, |i| {
                2 * i + 1 + u32::from(i > 2)
            });
            check_chosen::<B, T>(backend, &problem, &chosen, chosen.len(), |i| i);
        }
    }
}

fn check_chosen<B: ComputeExperts<T> + CompactRows, T: FfnElement>(
    backend: &B,
    problem: &Problem,
    chosen: &[u32],
    room: usize,
    place: impl Fn(u32) -> u32,
) {
    let upload = |values: &[f32]| {
        let values: Vec<_> = values.iter().map(|&value| T::from_f32(value)).collect();
        backend.upload(&values).unwrap()
    };
    let matrices = |values: &Array3<f32>| upload(values.as_slice().unwrap());
    let weights = ExpertBuffers::<B, T> {
        gate: problem.gate.as_ref().map(matrices),
        up: matrices(&problem.up),
        down: matrices(&problem.down),
    };
    let x = upload(problem.x.as_slice().unwrap());
    let (shape, offsets) = (&problem.shape, &problem.offsets);
    let (mut scratch, mut all, mut whole_norms) = Default::default();
    let mut whole = Default::default();
    let norms = Some(&mut whole_norms);
    backend
        .forward(
            shape,
            &weights,
            offsets,
            &x,
            &mut scratch,
            &mut whole,
            norms,
            Some(&mut all),
        )
        .unwrap();

    let places: Vec<_> = (0..chosen.len() as u32).map(place).collect();
    let hidden = shape.hidden;
    let gated = shape.activation.is_gated();
    let before = |is_there: bool| upload(&vec![-1.0; if is_there { room * hidden } else { 0 }]);
    let mut kept = PreActivationBuffers::<B, T> {
        gate: before(gated),
        up: before(true),
    };
    let index = backend.row_index(chosen, problem.rows()).unwrap();
    let slots = backend.row_index(&places, room).unwrap();
    let (mut out, mut norms, mut more) = Default::default();
    backend
        .forward_chosen(
            shape,
            &weights,
            offsets,
            &x,
            &mut scratch,
            &mut out,
            Some(&mut norms),
            [&index, &slots],
            [&mut more, &mut kept],
        )
        .unwrap();
    let widened = |buffer: &B::Buffer<T>| -> Vec<f32> {
        let values = backend.download(buffer).unwrap();
        values.into_iter().map(T::to_f32).collect()
    };
    let what = format!("{} of {} rows", chosen.len(), problem.rows());
    assert_eq!(bits(&widened(&out)), bits(&widened(&whole)), "{what}");
    let read = |buffer| backend.download(buffer).unwrap();
    assert_eq!(read(&norms), read(&whole_norms), "{what}");
    for (all, kept) in [(&all.gate, &kept.gate), (&all.up, &kept.up)] {
        let (all, kept) = (widened(all), widened(kept));
        let mut expected = vec![-1.0; kept.len()];
        if !kept.is_empty() {
            for (&row, &place) in chosen.iter().zip(&places) {
                let (row, place) = (row as usize * hidden, place as usize * hidden);
                expected[place..place + hidden].copy_from_slice(&all[row..row + hidden]);
            }
        }
        assert_eq!(bits(&kept), bits(&expected), "{what}");
    }
}

/// Rows and places that do not fit together.
pub(crate) fn bad_choices<B: ComputeExperts + CompactRows>(backend: &B) {
    let problem = Problem::random(Activation::Silu, 4, 6, &[2, 3]);
    let matrices = |values: &Array3<f32>| backend.upload(values.as_slice().unwrap()).unwrap();
    let weights = ExpertBuffers::<B> {
        gate: None,
        up: matrices(&problem.up),
        down: matrices(&problem.down),
    };
    let x = backend.upload(problem.x.as_slice().unwrap()).unwrap();
    let message = |index: &[u32], rows: usize, places: &[u32], room: usize| {
        let index = backend.row_index(index, rows).unwrap();
        let places = backend.row_index(places, 4).unwrap();
        let mut kept = PreActivationBuffers::<B> {
            gate: Default::default(),
            up: backend.upload(&vec![0.0; room]).unwrap(),
        };
        let (mut scratch, mut out, mut all) = Default::default();
        let result = backend.forward_chosen(
            &problem.shape,
            &weights,
            &problem.offsets,
            &x,
            &mut scratch,
            &mut out,
            None,
            [&index, &places],
            [&mut all, &mut kept],
        );
        result.map_err(|error| error.to_string())
    };
    assert_eq!(message(&[0, 4], 5, &[1, 3], 24), Ok(()));
    let lengths = "shape of places is [1], expected [2]";
    assert_eq!(message(&[0, 4], 5, &[1], 24).unwrap_err(), lengths);
    let rows = "shape of rows of the index is [4], expected [5]";
    assert_eq!(message(&[0, 3], 4, &[1, 3], 24).unwrap_err(), rows);
    let room = "shape of up pre-activations is [23], expected [24]";
    assert_eq!(message(&[0, 4], 5, &[1, 3], 23).unwrap_err(), room);
    if B::host(&x).is_some() {
        let rows = "chosen row 1 is row 2, which is not above 2, the one before it";
        assert_eq!(message(&[2, 2], 5, &[1, 3], 24).unwrap_err(), rows);
        let places = "place 1 of row 1 is not above 3, that of the row before it";
        assert_eq!(message(&[0, 4], 5, &[3, 1], 24).unwrap_err(), places);
    }
}
