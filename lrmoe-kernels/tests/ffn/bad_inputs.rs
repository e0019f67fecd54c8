//! What every public entry point of the CPU does with inputs at and past the edge: the exact error, or the right result.
//!
//! Not repeated here: offsets, gates and shapes that do not fit (`errors.rs`); buffers, indices, pairs, scores and keys that no backend takes
//! (`tests/conformance`, all backends).

use std::fmt::Debug;

use crate::problem::{Problem, Results, poisoned};
use lrmoe_compact::Grouping;
use lrmoe_kernels::{
    Activation, BackwardRows, CompactRows, Cpu, Error, ExpertBuffers, ExpertFfn, FfnShape,
    HostBuffer, Memory, PreActivationsMut, StashFfn, WeightGradients, Weights, Workspace,
    ndarray::{Array2, Array3, ArrayView2, array, s},
};

/// Compares with all values; errors of this crate hold those of others, so they have no equality.
fn expect<T: Debug>(case: &str, found: Result<T, Error>, expected: Result<T, Error>) {
    assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{case}");
}

fn shape<T>(what: &'static str, got: &[usize], expected: &[usize]) -> Result<T, Error> {
    Err(Error::Shape {
        what,
        got: got.to_vec(),
        expected: expected.to_vec(),
    })
}

fn layout<T>(what: &'static str, shape: &[usize], strides: &[isize]) -> Result<T, Error> {
    Err(Error::Layout {
        what,
        shape: shape.to_vec(),
        strides: strides.to_vec(),
    })
}

fn problem() -> Problem {
    Problem::random(Activation::SwiGlu, 4, 6, &[2, 3])
}

fn forward(
    p: &Problem,
    weights: &Weights<'_>,
    x: ArrayView2<'_, f32>,
    out: &mut Array2<f32>,
) -> Result<(), Error> {
    let workspace = &mut Workspace::new();
    Cpu.forward(
        &p.shape,
        weights,
        &p.offsets,
        x,
        workspace,
        out.view_mut(),
        None,
    )
}

#[test]
fn nothing_to_do() {
    let none = |instances: usize, width: usize, hidden: usize| {
        let (up, down) = (
            Array3::<f32>::zeros((instances, hidden, width)),
            Array3::zeros((instances, width, hidden)),
        );
        let weights = Weights {
            gate: None,
            up: up.view(),
            down: down.view(),
        };
        let shape = FfnShape {
            width,
            hidden,
            activation: Activation::Gelu,
        };
        let mut out = Array2::zeros((0, width));
        let offsets = vec![0; instances + 1];
        let x = Array2::zeros((0, width));
        Cpu.forward(
            &shape,
            &weights,
            &offsets,
            x.view(),
            &mut Workspace::new(),
            out.view_mut(),
            Some(&mut []),
        )
    };
    let empty = |width, hidden| Err(Error::EmptyExpert { width, hidden });
    expect("no rows", none(3, 4, 6), Ok(()));
    expect("no instances", none(0, 4, 6), Ok(()));
    expect("no width", none(3, 0, 6), empty(0, 6));
    expect("no hidden units", none(3, 4, 0), empty(4, 0));
    expect("neither", none(0, 0, 0), empty(0, 0));
}

/// Views into larger arrays, turned and backwards: every argument that is an array.
#[test]
fn arrays_that_are_not_contiguous() {
    let p = problem();
    let (weights, x) = (p.weights(), p.x.view());
    let mut out = Array2::zeros((5, 4));
    let wide = Array3::zeros((2, 6, 8));
    let up = Weights {
        up: wide.slice(s![.., .., ..4]),
        ..weights
    };
    expect(
        "up",
        forward(&p, &up, x, &mut out),
        layout("up weights", &[2, 6, 4], &[48, 8, 1]),
    );
    let turned = p.up.view().permuted_axes([0, 2, 1]);
    let down = Weights {
        down: turned,
        ..weights
    };
    expect(
        "down",
        forward(&p, &down, x, &mut out),
        layout("down weights", &[2, 4, 6], &[24, 1, 4]),
    );
    let gate = p.gate.as_ref().map(|gate| gate.slice(s![..;-1, .., ..]));
    let gate = Weights { gate, ..weights };
    expect(
        "gate",
        forward(&p, &gate, x, &mut out),
        layout("gate weights", &[2, 6, 4], &[-24, 4, 1]),
    );
    let backwards = p.x.slice(s![..;-1, ..]);
    expect(
        "x",
        forward(&p, &weights, backwards, &mut out),
        layout("x", &[5, 4], &[-4, 1]),
    );
    let mut turned = Array2::zeros((4, 5)).reversed_axes();
    expect(
        "out",
        forward(&p, &weights, x, &mut turned),
        layout("out", &[5, 4], &[1, 5]),
    );
    assert!(
        out.iter().chain(&turned).all(|&value| value == 0.0),
        "nothing is written"
    );

    let mut stash = Array2::zeros((5, 7));
    let mut stashed = |columns: std::ops::Range<usize>| {
        let mut gate = Array2::zeros((5, 6));
        let stash = PreActivationsMut {
            gate: Some(gate.view_mut()),
            up: stash.slice_mut(s![.., columns]),
        };
        let workspace = &mut Workspace::new();
        let out = out.view_mut();
        Cpu.forward_stash(
            &p.shape, &weights, &p.offsets, x, workspace, out, None, stash,
        )
    };
    let what = "up pre-activations";
    expect("stash", stashed(0..6), layout(what, &[5, 6], &[7, 1]));
    expect("its width", stashed(0..7), shape(what, &[5, 7], &[5, 6]));

    let backward = |rows: BackwardRows<'_>, gradients: &mut WeightGradients<'_>| {
        let mut dx = Array2::zeros((5, 4));
        let (mut dp, workspace) = ([0.0; 5], &mut Workspace::new());
        Cpu.backward(
            &p.shape,
            &weights,
            &p.offsets,
            &rows,
            workspace,
            dx.view_mut(),
            &mut dp,
            gradients,
            &[false; 2],
        )
    };
    let rows = p.backward_rows();
    let (mut gate, mut up, mut down) = (
        Array3::zeros((2, 6, 4)),
        Array3::zeros((2, 6, 4)),
        Array3::zeros((2, 6, 4)),
    );
    let mut gradients = WeightGradients {
        gate: Some(gate.view_mut()),
        up: up.view_mut(),
        down: down.view_mut().permuted_axes([0, 2, 1]),
    };
    let found = backward(rows, &mut gradients);
    expect(
        "down gradients",
        found,
        layout("down gradients", &[2, 4, 6], &[24, 1, 4]),
    );
    let dy = Array2::zeros((4, 5));
    let turned = BackwardRows { dy: dy.t(), ..rows };
    expect(
        "dy",
        backward(turned, &mut gradients),
        layout("dy", &[5, 4], &[1, 5]),
    );
}

fn bits<'a>(values: impl IntoIterator<Item = &'a f32>) -> Vec<u32> {
    values.into_iter().map(|value| value.to_bits()).collect()
}

/// All that the rows of a problem give by themselves, without one of them.
fn rows_without(results: &Results, bad: usize) -> Vec<Vec<u32>> {
    let of = |row: usize| {
        let values = results.out.row(row).to_vec();
        let mut values = bits(
            values
                .iter()
                .chain(results.dx.row(row))
                .chain([&results.dp[row]]),
        );
        values.extend([
            results.h_norms[row].significand.to_bits(),
            results.h_norms[row].scale,
        ]);
        values
    };
    (0..results.dp.len())
        .filter(|&row| row != bad)
        .map(of)
        .collect()
}

/// What is no number stays in its row and in the gradients of its instance.
#[test]
fn numbers_that_are_none() {
    let p = problem();
    let good = p.run(&mut poisoned(&p));
    let bad = 1;
    type Change = (&'static str, fn(&mut Problem, f32));
    let changes: [Change; 4] = [
        ("x", |p, value| p.x[[1, 2]] = value),
        ("dy", |p, value| p.dy[[1, 2]] = value),
        ("gate weight", |p, value| p.p[1] = value),
        ("weight", |p, value| p.w[1] = value),
    ];
    for (case, change) in changes {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut changed = p.clone();
            change(&mut changed, value);
            let found = changed.run(&mut poisoned(&changed));
            assert_eq!(
                rows_without(&found, bad),
                rows_without(&good, bad),
                "{value} in {case}"
            );
            let second = |all: &Array3<f32>| bits(all.slice(s![1, .., ..]));
            assert_eq!(
                second(&found.ddown),
                second(&good.ddown),
                "{value} in {case}"
            );
            assert_eq!(second(&found.dup), second(&good.dup), "{value} in {case}");
            let first = found.ddown.slice(s![0, .., ..]);
            assert!(
                first.iter().any(|d| !d.is_finite()),
                "{value} in {case} vanished"
            );
        }
    }
    // In an instance without rows nobody multiplies with its weights.
    let empty = Problem::random(Activation::SwiGlu, 4, 6, &[0, 3]);
    let mut changed = empty.clone();
    changed.up.slice_mut(s![0, .., ..]).fill(f32::NAN);
    changed.down.slice_mut(s![0, .., ..]).fill(f32::INFINITY);
    let [good, found] = [&empty, &changed].map(|p| p.run(&mut poisoned(p)));
    assert_eq!(
        rows_without(&found, usize::MAX),
        rows_without(&good, usize::MAX)
    );
    assert_eq!((&found.ddown, &found.dup), (&good.ddown, &good.dup));
}

#[test]
fn buffers_of_extreme_sizes() {
    let limit = (isize::MAX as usize - (2 << 20)) as u64;
    let resized = |len| {
        let mut buffer = HostBuffer::<f32>::default();
        Cpu.resize(&mut buffer, len).map(|()| buffer.len())
    };
    let too_large = |bytes| {
        Err(Error::TooLarge {
            what: "a buffer",
            bytes,
            limit,
        })
    };
    expect("nothing", resized(0), Ok(0));
    expect("past isize", resized(1 << 61), too_large(1 << 63));
    expect("past u64", resized(usize::MAX), too_large(u64::MAX));
    let none_has = Err(Error::OutOfMemory {
        operation: "allocating a buffer",
        bytes: 1 << 60,
    });
    expect("more than there is", resized(1 << 58), none_has);

    let three = Cpu.upload(&[1.0_f32, 2.0, 3.0]).unwrap();
    let read = |len: usize| {
        let mut values = vec![0.0; len];
        Cpu.read(&three, &mut values).map(|()| values)
    };
    expect("read all", read(3), Ok(vec![1.0, 2.0, 3.0]));
    expect("read fewer", read(2), shape("values", &[2], &[3]));
    let mut to = Cpu.upload(&[0.0_f32; 4]).unwrap();
    for (at, end) in [(2, 5), (4, 7), (usize::MAX, usize::MAX)] {
        expect(
            "copy",
            Cpu.copy(&three, &mut to, at),
            shape("to", &[4], &[end]),
        );
    }
    assert_eq!(to[..], [0.0; 4]);
}

#[test]
fn rows_of_other_buffers() {
    let p = problem();
    let upload = |values: &Array3<f32>| Cpu.upload(values.as_slice().unwrap()).unwrap();
    let weights = ExpertBuffers::<Cpu> {
        gate: p.gate.as_ref().map(upload),
        up: upload(&p.up),
        down: upload(&p.down),
    };
    let found = |x: usize, offsets: &[usize]| {
        let x = Cpu.upload(&vec![0.0; x]).unwrap();
        let (mut scratch, mut out) = (Workspace::new(), HostBuffer::default());
        lrmoe_kernels::ComputeExperts::forward(
            &Cpu,
            &p.shape,
            &weights,
            offsets,
            &x,
            &mut scratch,
            &mut out,
            None,
            None,
        )
        .map(|()| out.len())
    };
    expect("all", found(20, &[0, 2, 5]), Ok(20));
    expect(
        "a number too many",
        found(21, &[0, 2, 5]),
        shape("x", &[21], &[20]),
    );
    expect(
        "no offsets",
        found(20, &[]),
        shape("row offsets", &[0], &[3]),
    );
    expect(
        "offsets past usize",
        found(0, &[0, usize::MAX, 0]),
        Err(Error::OffsetOrder {
            instance: 1,
            start: usize::MAX,
            offset: 0,
        }),
    );

    // More grouped rows than can be numbered, none of which is allocated.
    let padded = Grouping::new(array![[1_u32]].view(), usize::MAX).unwrap();
    let too_large = |bytes| {
        Err(Error::TooLarge {
            what: "a table of rows",
            bytes,
            limit: u64::from(u32::MAX) * 4,
        })
    };
    expect(
        "padding",
        Cpu.grouping(&padded).map(drop),
        too_large(u64::MAX),
    );
    let many = Grouping::new(array![[u32::MAX]].view(), 1).unwrap();
    expect(
        "rows",
        Cpu.grouping(&many).map(drop),
        too_large(u64::from(u32::MAX) * 4),
    );

    let index = Cpu.row_index(&[2, 0], 3).unwrap();
    let gathered = |len: usize, width| {
        let mut out = HostBuffer::default();
        let rows = Cpu.upload(&vec![1.0_f32; len]).unwrap();
        Cpu.gather(&rows, width, &index, &mut out)
            .map(|()| out.len())
    };
    expect("rows", gathered(6, 2), Ok(4));
    expect("no width", gathered(0, 0), Ok(0));
    expect("a row short", gathered(4, 2), shape("rows", &[4], &[6]));
    expect(
        "a width past usize",
        gathered(4, usize::MAX),
        shape("rows", &[4], &[usize::MAX]),
    );
}
