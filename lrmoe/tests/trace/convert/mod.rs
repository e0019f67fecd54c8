//! Other programs' recordings.

mod csv;
mod jsonl;
mod megatron;
mod numpy;

use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use lrmoe::trace::{ConvertOptions, Format, TraceHeader, TraceReader, TraceWriter, convert};
use ndarray::{Array3, array};

use super::memory::largest;
use super::{Folder, read_all, settings, small};

/// Converts into `out.safetensors`; an error's text, which leaves no file.
fn run(folder: &Folder, inputs: &[&Path], options: &ConvertOptions) -> Result<TraceHeader, String> {
    let inputs: Vec<PathBuf> = inputs.iter().map(|path| path.to_path_buf()).collect();
    let out = folder.path("out.safetensors");
    let _ = std::fs::remove_file(&out);
    let before = folder.names();
    convert(&inputs, &out, options, &ProgressBar::hidden()).map_err(|error| {
        assert_eq!(folder.names(), before, "an error leaves nothing");
        error.to_string()
    })
}

fn options() -> ConvertOptions {
    ConvertOptions::default()
}

fn counts(folder: &Folder) -> Vec<Array3<u32>> {
    read_all(&folder.path("out.safetensors")).expect("reads").0
}

#[test]
fn damaged_input_never_panics() {
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;
    let inputs = [
        ("in.npy", numpy::npy(&array![[1_i64, 2], [3, 4]])),
        (
            "in.npz",
            numpy::npz(&[("counts", numpy::npy(&array![[1_i64, 2], [3, 4]]))]),
        ),
        ("in.jsonl", jsonl::JSONL.into()),
        ("in.csv", csv::CSV.into()),
    ];
    let mut runner = TestRunner::default();
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
    let strategy = (0..inputs.len(), damage);
    let result = runner.run(&strategy, |(input, damage)| {
        let folder = Folder::new();
        let (name, mut bytes) = inputs[input].clone();
        for (at, byte) in damage {
            *at.get_mut(&mut bytes) = byte;
        }
        let path = folder.file(name, bytes);
        let (_, largest) = largest(|| run(&folder, &[&path], &options()));
        prop_assert!(largest < 16 << 20, "{largest} bytes");
        Ok(())
    });
    result.expect("no panic");
}

#[test]
fn parts_of_a_run_are_joined() {
    let folder = Folder::new();
    let part = |name: &str, first_step: u32, counts: &[u32]| {
        let settings = lrmoe::trace::TraceSettings {
            first_step,
            ..settings(1, 1, 1)
        };
        let mut writer = TraceWriter::create(folder.path(name), settings).expect("created");
        for count in counts {
            writer.push(array![[[*count]]].view()).expect("pushed");
        }
        writer.finish().expect("finished");
        folder.path(name)
    };
    let first = part("first.safetensors", 2, &[1, 2, 3]);
    let next = part("next.safetensors", 5, &[4]);
    let again = part("again.safetensors", 3, &[20, 30, 40]);
    let far = part("far.safetensors", 7, &[9]);
    let header = run(&folder, &[&first, &next], &options()).expect("joins");
    assert_eq!((header.steps, header.first_step), (4, 2));
    run(&folder, &[&first, &again], &options()).expect("joins");
    let joined: Vec<u32> = counts(&folder)
        .iter()
        .map(|counts| counts[[0, 0, 0]])
        .collect();
    assert_eq!(
        joined,
        [1, 20, 30, 40],
        "where they overlap, the later counts"
    );
    let error = run(&folder, &[&first, &far], &options()).expect_err("a gap");
    assert!(
        error.contains("far.safetensors: its first step is 7, must be from 2 to 5"),
        "{error}"
    );
    let error = run(
        &folder,
        &[&first, &folder.file("small.safetensors", small().bytes())],
        &options(),
    );
    assert!(
        error
            .expect_err("another shape")
            .contains("small.safetensors: it has 2 ranks, ")
    );
}

#[test]
fn pairs_of_another_trace_are_taken_over() {
    let folder = Folder::new();
    let counts_only = {
        let mut raw = small();
        raw.tensors.retain(|(name, ..)| *name == "counts");
        folder.file("counts.safetensors", raw.bytes())
    };
    let pairs_only = {
        let mut raw = small();
        raw.tensors.retain(|(name, ..)| *name != "counts");
        folder.file("pairs.safetensors", raw.bytes())
    };
    let merge = |pairs: &Path| ConvertOptions {
        pairs: Some(pairs.to_path_buf()),
        ..options()
    };
    let header = run(&folder, &[&counts_only], &merge(&pairs_only)).expect("merges");
    assert_eq!(
        (header.steps, header.recorded, header.scored),
        (2, vec![1], true)
    );
    let whole = read_all(&folder.file("whole.safetensors", small().bytes())).expect("reads");
    assert_eq!(
        read_all(&folder.path("out.safetensors")).expect("reads"),
        whole
    );

    let error = run(&folder, &[&counts_only], &merge(&counts_only)).expect_err("no pairs");
    assert!(
        error.contains("counts.safetensors: it has no per-pair data"),
        "{error}"
    );
    let other = folder.file("other.safetensors", {
        let mut raw = small().ids("expert", &[1, 1, 2, 2], &[2, 1, 1, 3]);
        raw.tensors.retain(|(name, ..)| *name != "counts");
        raw.bytes()
    });
    let error = run(&folder, &[&counts_only], &merge(&other)).expect_err("another run");
    assert!(
        error.contains(
            "other.safetensors: step 6, layer 0, rank 0: expert 0 has 0 pairs by their ids, 1 by the counts"
        ),
        "{error}"
    );
    let late = folder.file("late.safetensors", {
        let mut raw = small().ids("steps", &[1], &[9]);
        raw.tensors.retain(|(name, ..)| *name != "counts");
        raw.bytes()
    });
    let error = run(&folder, &[&counts_only], &merge(&late)).expect_err("another step");
    assert!(
        error.contains("late.safetensors: step 9: it has pairs of this step"),
        "{error}"
    );
}

#[test]
fn formats_are_told_apart() {
    let folder = Folder::new();
    let path = folder.file("counts.txt", csv::CSV);
    let error = run(&folder, &[&path], &options()).expect_err("unknown");
    assert!(
        error.contains("counts.txt: its format is unknown; name it with --from"),
        "{error}"
    );
    let named = ConvertOptions {
        from: Some(Format::Csv),
        ..options()
    };
    assert_eq!(run(&folder, &[&path], &named).expect("converts").steps, 2);
    for name in ["native", "jsonl", "megatron", "numpy", "csv"] {
        assert_eq!(name.parse::<Format>().expect(name).to_string(), name);
    }
    assert!("pickle".parse::<Format>().is_err());
    assert!(TraceReader::open(folder.path("out.safetensors")).is_ok());
}
