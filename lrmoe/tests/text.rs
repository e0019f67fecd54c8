//! Reading a text and cutting it into windows.

use std::fs;
use std::path::{Path, PathBuf};

use lrmoe::text::{Corpus, TextError};
use tempfile::TempDir;

/// A folder with the given files.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    folder
}

fn load(path: impl AsRef<Path>, context: usize) -> Result<Corpus, TextError> {
    Corpus::load(&[path.as_ref().to_path_buf()], context)
}

/// A text in which every byte says where it stands.
fn counting(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| i as u8).collect()
}

#[test]
fn folders_are_read_in_order() {
    let folder = folder(&[
        ("b.md", b"2"),
        ("a/z.rs", b"1"),
        ("a/a.txt", b"0"),
        ("c.txt", b"3"),
        ("c.bin", b"x"),
        ("txt", b"x"),
        (".git/d.txt", b"x"),
        ("target/e.rs", b"x"),
        ("a/target/f.md", b"x"),
        ("g.target.txt", b"4"),
    ]);
    let all = load(folder.path(), 0).unwrap();
    let files = ["a/a.txt", "a/z.rs", "b.md", "c.txt", "g.target.txt"];
    let files: Vec<PathBuf> = files.iter().map(|name| folder.path().join(name)).collect();
    assert_eq!(all, Corpus::load(&files, 0).unwrap());
    assert_eq!(all.len(), 5);
    // A folder that is named outright is read, whatever it is called.
    let named = Corpus::load(&[folder.path().join("target"), files[4].clone()], 0).unwrap();
    assert_eq!(named.len(), 2);
}

#[test]
fn unusable_texts_are_refused() {
    let folder = folder(&[
        ("empty.txt", b""),
        ("none/picture.png", b"png"),
        ("short.txt", &counting(100)),
        ("enough.txt", &counting(101)),
    ]);
    let at = |name: &str| folder.path().join(name);
    let shown = |name: &str| at(name).display().to_string();
    let hint = "(folders are searched for .txt, .md and .rs files)";
    let cases = [
        ("missing.txt", format!("text {} does not exist", shown("missing.txt"))),
        ("empty.txt", format!("no text found in {} {hint}", shown("empty.txt"))),
        ("none", format!("no text found in {} {hint}", shown("none"))),
        (
            "short.txt",
            "text of 100 bytes is too short: its held-out part has 10 bytes, a context of 10 needs 11"
                .to_owned(),
        ),
    ];
    for (name, message) in cases {
        assert_eq!(load(at(name), 10).unwrap_err().to_string(), message);
    }
    assert_eq!(load(at("enough.txt"), 10).unwrap().len(), 101);
    assert!(matches!(
        Corpus::load(&[], 10),
        Err(TextError::Empty { .. })
    ));
}

#[test]
fn unreadable_paths_are_named() {
    let folder = folder(&[("a.txt", b"text")]);
    let path = folder.path().join("a.txt/below-a-file");
    let error = load(&path, 0).unwrap_err();
    // Some systems call it missing.
    assert!(matches!(
        error,
        TextError::Unreadable { path: named, .. } | TextError::Missing { path: named } if named == path
    ));
}

#[test]
fn targets_are_the_next_bytes_of_the_training_part() {
    let folder = folder(&[("a.txt", &counting(250))]);
    let corpus = load(folder.path(), 8).unwrap();
    let mut seen = [false; 225];
    for step in 0..200 {
        let (inputs, targets) = corpus.batch(1, step, 0..10);
        for (input, target) in inputs.chunks(8).zip(targets.chunks(8)) {
            assert!(input.windows(2).all(|pair| pair[0] + 1 == pair[1]));
            assert_eq!(input[1..], target[..7]);
            assert_eq!(input[7] + 1, target[7]);
            for byte in input.iter().chain(target) {
                seen[usize::from(*byte)] = true;
            }
        }
    }
    assert!(
        seen.iter().all(|&seen| seen),
        "some of the training part is never drawn"
    );
}

#[test]
fn batches_do_not_depend_on_the_ranks() {
    let folder = folder(&[("a.txt", &counting(5000))]);
    let corpus = load(folder.path(), 16).unwrap();
    let whole = corpus.batch(7, 3, 0..8);
    assert_eq!(whole, corpus.batch(7, 3, 0..8));
    for ranks in [1, 2, 4, 8] {
        let parts = (0..ranks).map(|rank| {
            let share = 8 / ranks;
            corpus.batch(7, 3, rank * share..(rank + 1) * share)
        });
        let (inputs, targets): (Vec<_>, Vec<_>) = parts.unzip();
        assert_eq!(whole, (inputs.concat(), targets.concat()));
    }
    assert_ne!(whole, corpus.batch(7, 4, 0..8));
    assert_ne!(whole, corpus.batch(8, 3, 0..8));
    assert_eq!(corpus.batch(7, 3, 2..2), (vec![], vec![]));
}

#[test]
fn held_out_windows_span_the_last_tenth() {
    let folder = folder(&[("a.txt", &counting(200))]);
    let corpus = load(folder.path(), 4).unwrap();
    let starts = |count| -> Vec<u8> {
        let windows = corpus.held_out(count);
        for (input, target) in &windows {
            assert_eq!((input.len(), target.len()), (4, 4));
            assert_eq!(input[3] + 1, target[3]);
        }
        windows.iter().map(|(input, _)| input[0]).collect()
    };
    assert!(starts(0).is_empty());
    assert_eq!(starts(1), [180]);
    assert_eq!(starts(2), [180, 195]);
    assert_eq!(starts(4), [180, 185, 190, 195]);
    assert_eq!(starts(40).len(), 40);
}

#[test]
fn the_smallest_text_has_one_window() {
    let folder = folder(&[("a.txt", b"0123456789")]);
    let corpus = load(folder.path(), 0).unwrap();
    assert_eq!(corpus.batch(1, 0, 0..3), (vec![], vec![]));
    assert_eq!(corpus.held_out(1), [(vec![], vec![])]);
}
