//! Arrays of counts.

use std::io::Write;

use lrmoe::trace::ConvertOptions;
use ndarray::{Array2, Array3, Array4, ArrayD, Axis, array};
use ndarray_npy::WriteNpyExt;

use super::{Folder, counts, options, run};

pub(super) fn npy(array: &impl WriteNpyExt) -> Vec<u8> {
    let mut bytes = Vec::new();
    array.write_npy(&mut bytes).expect("written");
    bytes
}

pub(super) fn npz(arrays: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, bytes) in arrays {
        let options = zip::write::SimpleFileOptions::default();
        archive
            .start_file(format!("{name}.npy"), options)
            .expect("started");
        archive.write_all(bytes).expect("written");
    }
    archive.finish().expect("finished").into_inner()
}

/// `[steps, layers, ranks, experts]` = `[2, 3, 2, 4]`, every count different.
fn numbered() -> Array4<i64> {
    Array4::from_shape_fn((2, 3, 2, 4), |(s, l, r, e)| {
        (1000 * s + 100 * l + 10 * r + e) as i64
    })
}

#[test]
fn numpy_arrays_of_every_order_say_the_same() {
    let folder = Folder::new();
    let array = numbered();
    let expected: Vec<Array3<u32>> = array
        .outer_iter()
        .map(|step| step.mapv(|n| n as u32))
        .collect();
    let given = |axes: &str| ConvertOptions {
        axes: Some(axes.parse().expect("axes")),
        ..options()
    };
    // Axes of `array` in the order of the names.
    let cases = [
        (npy(&array), options()),
        (npy(&array.mapv(|n| n as f32)), options()),
        (npy(&array.mapv(|n| n as f64)), options()),
        (npy(&array.mapv(|n| n as u16)), options()),
        (
            npy(&array.mapv(|n| n as u64)),
            given("steps,layers,ranks,experts"),
        ),
        (
            npy(&array
                .view()
                .permuted_axes([3, 1, 0, 2])
                .as_standard_layout()),
            given("experts,layers,steps,ranks"),
        ),
        (
            npy(&array
                .view()
                .permuted_axes([0, 3, 2, 1])
                .as_standard_layout()),
            given("steps,experts,ranks,layers"),
        ),
        // A transposed view is written in Fortran order.
        (
            npy(&array
                .view()
                .permuted_axes([3, 2, 1, 0])
                .as_standard_layout()
                .reversed_axes()),
            options(),
        ),
    ];
    for (index, (bytes, options)) in cases.into_iter().enumerate() {
        let header =
            run(&folder, &[&folder.file("counts.npy", bytes)], &options).expect("converts");
        assert_eq!(
            (header.steps, header.layers, header.ranks, header.experts),
            (2, 3, 2, 4)
        );
        assert_eq!(counts(&folder), expected, "case {index}");
    }
}

#[test]
fn fewer_axes_are_those_of_sglang_and_vllm() {
    let folder = Folder::new();
    let logical: Array3<i64> = numbered().sum_axis(Axis(2));
    let path = folder.file(
        "sglang.npz",
        npz(&[("other", npy(&array![1])), ("logical_count", npy(&logical))]),
    );
    let header = run(&folder, &[&path], &options()).expect("converts");
    assert_eq!(
        (header.steps, header.layers, header.ranks, header.experts),
        (2, 3, 1, 4)
    );
    assert_eq!(
        counts(&folder)[1].sum_axis(Axis(1)),
        logical.index_axis(Axis(0), 1).mapv(|n| n as u32)
    );

    let load: Array2<i32> = array![[1, 2, 3], [4, 5, 6]];
    let header =
        run(&folder, &[&folder.file("vllm.npy", npy(&load))], &options()).expect("converts");
    assert_eq!((header.steps, header.layers, header.experts), (1, 2, 3));
    // Several files are further steps.
    let path = folder.file("again.npy", npy(&load));
    let header = run(&folder, &[&path, &path], &options()).expect("converts");
    assert_eq!(header.steps, 2);

    let two = folder.file("two.npz", npz(&[("a", npy(&load)), ("b", npy(&logical))]));
    let chosen = ConvertOptions {
        array: Some("b".into()),
        ..options()
    };
    assert_eq!(run(&folder, &[&two], &chosen).expect("converts").steps, 2);
    let error = run(&folder, &[&two], &options()).expect_err("ambiguous");
    assert!(
        error.contains("choose one of its arrays with --array: a, b"),
        "{error}"
    );
}

/// An npy file with a header of the caller's.
fn raw_npy(descriptor: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': {descriptor}, 'fortran_order': False, 'shape': {shape}, }}\n");
    let length = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), data].concat()
}

#[test]
fn big_endian_arrays_are_read() {
    let folder = Folder::new();
    let path = folder.file(
        "big.npy",
        raw_npy("'>i4'", "(1, 2)", &[0, 0, 1, 2, 0, 0, 0, 3]),
    );
    run(&folder, &[&path], &options()).expect("converts");
    assert_eq!(counts(&folder), [array![[[258, 3]]]]);
}

/// What is packed may be a thousand times as large as the file: no more is unpacked than the array's header says.
#[test]
fn archives_that_unpack_to_more_are_refused() {
    let folder = Folder::new();
    let array = npy(&array![[1_i64, 2]]);
    let packed = [&array[..], &[0; 1 << 20]].concat();
    let archive = npz(&[("counts", packed.clone())]);
    let refused = |archive: &[u8]| {
        run(&folder, &[&folder.file("bad.npz", archive)], &options()).expect_err("refused")
    };
    let error = refused(&archive);
    let (expected, found) = (array.len(), packed.len());
    let message = format!("its header describes {expected} bytes, the file has {found}");
    assert!(error.contains(&message), "{error}");

    // The archive says that it unpacks to no more.
    let [long, short] = [packed.len(), array.len()].map(|len| (len as u32).to_le_bytes());
    let mut lies = archive;
    let places: Vec<usize> = (0..lies.len() - 3)
        .filter(|&at| lies[at..at + 4] == long)
        .collect();
    assert!(!places.is_empty());
    for at in places {
        lies[at..at + 4].copy_from_slice(&short);
    }
    let error = refused(&lies);
    assert!(
        error.contains("bad.npz: File is larger than its declared"),
        "{error}"
    );
}

#[test]
fn bad_arrays_are_named() {
    let folder = Folder::new();
    let with = |at: [usize; 4], value: f64| {
        let mut array = numbered().mapv(|n| n as f64);
        array[at] = value;
        npy(&array)
    };
    let long = [&b"\x93NUMPY\x02\x00"[..], &u32::MAX.to_le_bytes(), b"{}"].concat();
    let cases = [
        (
            raw_npy("'|O'", "(1, 2)", b"cos\nsystem\n"),
            "array `bad` has elements of type |O; export it with an integer type",
        ),
        (
            raw_npy("[('a', '<i4')]", "(1, 2)", &[0; 8]),
            "array `bad` has elements of type [('a', '<i4')]",
        ),
        (
            raw_npy("'<U3'", "(1, 2)", &[0; 24]),
            "array `bad` has elements of type <U3",
        ),
        (
            raw_npy("'<c8'", "(1, 2)", &[0; 16]),
            "array `bad` has elements of type <c8",
        ),
        (
            with([1, 2, 0, 3], -1.0),
            "step 1, layer 2, rank 0, expert 3: count is `-1`, must be a whole number",
        ),
        (
            with([1, 0, 1, 0], 0.5),
            "step 1, layer 0, rank 1, expert 0: count is `0.5`",
        ),
        (
            with([0, 0, 0, 0], f64::NAN),
            "step 0, layer 0, rank 0, expert 0: count is `NaN`",
        ),
        (with([0, 0, 0, 1], 5e9), "count is `5000000000`"),
        (
            npy(&array![[-3_i64, 1]]),
            "step 0, layer 0, rank 0, expert 0: count is `-3`",
        ),
        (
            npy(&ArrayD::<u8>::zeros(vec![1, 1, 1, 1, 1])),
            "array `bad` is [1, 1, 1, 1, 1], which is not [steps,layers,ranks,experts]",
        ),
        (
            npy(&Array3::<u8>::zeros((0, 2, 2))),
            "0 steps must be at least 1",
        ),
        (
            npy(&Array3::<u8>::zeros((2, 0, 2))),
            "0 layers must be at least 1",
        ),
        (raw_npy("'<i8'", "(1, 2)", &[0; 15]), "bytes, the file has "),
        (
            raw_npy("'<i8'", "(1000000000000, 1000000, 1000000)", &[0; 16]),
            "its header describes 18446744073709551615 bytes",
        ),
        (
            raw_npy("'<i8'", "(1, 2)", &[0; 16])[..40].to_vec(),
            "bytes, the file has 40",
        ),
        (b"no array".to_vec(), "start does not match magic string"),
        (
            long,
            "its header describes 4294967307 bytes, the file has 14",
        ),
    ];
    for (bytes, message) in cases {
        let error = run(&folder, &[&folder.file("bad.npy", bytes)], &options()).expect_err(message);
        assert!(
            error.contains("bad.npy: ") && error.contains(message),
            "{error}\nnot {message}"
        );
    }
    let error = run(
        &folder,
        &[&folder.file("bad.npz", b"no archive")],
        &options(),
    )
    .expect_err("refused");
    assert!(error.contains("bad.npz: "), "{error}");
    for axes in ["layers", "steps,experts,steps", "experts,tokens", ""] {
        assert!(axes.parse::<lrmoe::trace::Axes>().is_err(), "{axes}");
    }
}
