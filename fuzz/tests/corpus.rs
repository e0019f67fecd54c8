//! Every target over its corpus and over generated inputs, with any compiler. `FUZZ_INPUTS` says how many of these, the same ones in every run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Longest input of random bytes.
const LONGEST: usize = 300;
/// Numbers that are at the edge of something.
const EDGES: [&[u8]; 8] = [
    b"0",
    b"-1",
    b"65536",
    b"4294967296",
    b"1e999",
    &[0xFF; 8],
    &[0, 0, 0x80, 0x7F],
    &[0, 0, 0, 0x80],
];

/// Runs a target, and says on which input it failed.
fn run(name: &str, target: fn(&[u8]), input: &[u8], from: &str) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(input))) {
        let saved = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}"));
        std::fs::write(&saved, input).expect("a file for the input");
        eprintln!(
            "target {name} failed on {from}, saved as {}",
            saved.display()
        );
        std::panic::resume_unwind(panic);
    }
}

/// The corpus in order of its names.
fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(name);
    let files = std::fs::read_dir(&folder).expect("every target has a corpus");
    let mut files: Vec<_> = files
        .map(|file| file.expect("a file").path())
        .map(|path| (path.clone(), std::fs::read(path).expect("a readable file")))
        .collect();
    files.sort();
    files
}

/// An input of the corpus, changed in a few places, or random bytes.
fn generated(rng: &mut impl Rng, corpus: &[(PathBuf, Vec<u8>)]) -> Vec<u8> {
    let mut input: Vec<u8> = match rng.random_range(0..4) {
        0 => (0..rng.random_range(0..LONGEST))
            .map(|_| rng.random())
            .collect(),
        _ => corpus[rng.random_range(0..corpus.len())].1.clone(),
    };
    for _ in 0..rng.random_range(0..4) {
        let other = &corpus[rng.random_range(0..corpus.len())].1;
        let at = rng.random_range(0..=input.len());
        let end = rng.random_range(at..=input.len().min(at + 16));
        match rng.random_range(0..6) {
            0 if at < input.len() => input[at] ^= 1 << rng.random_range(0..8),
            1 if at < input.len() => input[at] = rng.random(),
            2 => drop(input.drain(at..end)),
            3 => input
                .splice(at..end, EDGES[rng.random_range(0..EDGES.len())].to_vec())
                .for_each(drop),
            4 => {
                let again = input[at..end].to_vec();
                input.splice(at..at, again).for_each(drop);
            }
            _ => {
                let from = rng.random_range(0..=other.len());
                let to = rng.random_range(from..=other.len().min(from + 64));
                input
                    .splice(at..end, other[from..to].to_vec())
                    .for_each(drop);
            }
        }
    }
    input
}

fn check(name: &str, target: fn(&[u8]), standard: u64) {
    let asked = std::env::var("FUZZ_INPUTS").ok();
    let inputs = asked.map_or(standard, |n| n.parse().expect("FUZZ_INPUTS is a number"));
    let corpus = corpus(name);
    for (path, input) in &corpus {
        run(name, target, input, &path.display().to_string());
    }
    for seed in 0..inputs {
        let input = generated(&mut ChaCha8Rng::seed_from_u64(seed), &corpus);
        run(name, target, &input, &format!("the input of seed {seed}"));
    }
}

macro_rules! targets {
    ($($name:ident $inputs:literal)*) => {$(
        #[test]
        fn $name() {
            check(stringify!($name), lrmoe_fuzz::$name, $inputs);
        }
    )*};
}

targets! {
    select 400
    emulator 200
    plan 4000
    route 4000
    compact 4000
    trace_native 4000
    trace_jsonl 4000
    trace_megatron 4000
    trace_numpy 4000
    trace_csv 4000
    checkpoint 4000
    train_toml 4000
    sweep_toml 2000
    cluster_toml 4000
    command_line 2000
}
