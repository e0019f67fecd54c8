//! Writing and reading.

use lrmoe::trace::{PairRecord, TraceReader, TraceSettings, TraceWriter};
use ndarray::{Array3, Axis, array};
use proptest::prelude::*;

use super::memory::largest;
use super::{Folder, Raw, read_all, settings, small};

/// Memory that reading a file of less than 1 KiB may take at once.
const MOST_BYTES: usize = 1 << 20;

/// Sizes of a trace and, for each step, the ids as numbers that make a permutation, whether pairs are recorded, and scores.
#[derive(Clone, Debug)]
struct Case {
    settings: TraceSettings,
    steps: Vec<(PairRecord, bool)>,
}

/// The first `k` of the experts in an order that `keys` give; some masked.
fn token(keys: &[u32], k: usize) -> Vec<i32> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by_key(|expert| keys[*expert]);
    let id = |expert: &usize| {
        if keys[*expert].is_multiple_of(7) {
            -1
        } else {
            *expert as i32
        }
    };
    order[..k].iter().map(id).collect()
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (
        1_usize..4,
        1_usize..4,
        1_usize..7,
        1_usize..4,
        any::<bool>(),
        0_u32..1000,
    );
    sizes.prop_flat_map(|(layers, ranks, experts, tokens, scored, first_step)| {
        let top_k = experts.div_ceil(2);
        let all = ranks * tokens;
        let keys = prop::collection::vec(any::<u32>(), layers * all * experts);
        let numbers = prop::collection::vec(0.0_f32..1e30, layers * all * top_k);
        let step = (keys, numbers, any::<bool>()).prop_map(move |(keys, numbers, recorded)| {
            let ids = keys
                .chunks(experts)
                .flat_map(|keys| token(keys, top_k))
                .collect();
            let dim = (layers, all, top_k);
            let expert = Array3::from_shape_vec(dim, ids).expect("the shape");
            let mut numbers = Array3::from_shape_vec(dim, numbers).expect("the shape");
            numbers.zip_mut_with(&expert, |number, id| {
                if *id == -1 {
                    *number = 0.0;
                }
            });
            let score = scored.then(|| numbers.mapv(f32::sqrt));
            (
                PairRecord {
                    expert,
                    gate_weight: numbers,
                    score,
                },
                recorded,
            )
        });
        let settings = TraceSettings {
            top_k: Some(top_k),
            tokens_per_rank: Some(tokens),
            first_step,
            metadata: [("name".to_owned(), "a \"quoted\"\nname".to_owned())].into(),
            ..settings(layers, ranks, experts)
        };
        prop::collection::vec(step, 1..6).prop_map(move |steps| Case {
            settings: settings.clone(),
            steps,
        })
    })
}

/// Counts as plainly as they can be taken.
fn count(case: &Case, pairs: &PairRecord) -> Array3<u32> {
    let TraceSettings {
        layers,
        ranks,
        experts,
        ..
    } = case.settings;
    let per_rank = pairs.expert.len_of(Axis(1)) / ranks;
    Array3::from_shape_fn((layers, ranks, experts), |(layer, rank, expert)| {
        let of_layer = pairs.expert.index_axis(Axis(0), layer);
        let of_rank =
            (rank * per_rank..(rank + 1) * per_rank).flat_map(|token| of_layer.row(token).to_vec());
        of_rank.filter(|id| *id == expert as i32).count() as u32
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(case in cases()) {
        let folder = Folder::new();
        let path = folder.path("trace.safetensors");
        let mut writer = TraceWriter::create(&path, case.settings.clone()).expect("created");
        for (pairs, recorded) in &case.steps {
            writer.push(count(&case, pairs).view()).expect("pushed");
            if *recorded {
                writer.push_pairs(pairs.clone()).expect("pushed");
            }
        }
        prop_assert!(!path.exists(), "before the end there is nothing under the name");
        writer.finish().expect("finished");
        prop_assert_eq!(folder.names(), ["trace.safetensors"]);

        let reader = TraceReader::open(&path).expect("opens");
        let header = reader.header();
        prop_assert_eq!(header.steps, case.steps.len());
        prop_assert_eq!(header.first_step, case.settings.first_step);
        prop_assert_eq!((header.layers, header.ranks, header.experts),
            (case.settings.layers, case.settings.ranks, case.settings.experts));
        prop_assert_eq!((header.top_k, header.tokens_per_rank), (case.settings.top_k, case.settings.tokens_per_rank));
        prop_assert_eq!(&header.metadata["name"], &case.settings.metadata["name"]);
        let (counts, pairs) = read_all(&path).expect("reads");
        let expected: Vec<_> = case.steps.iter().map(|(pairs, _)| count(&case, pairs)).collect();
        prop_assert_eq!(counts, expected);
        let expected: Vec<_> = case.steps.iter().filter(|(_, recorded)| *recorded).map(|(pairs, _)| pairs.clone()).collect();
        prop_assert_eq!(pairs, expected);
    }

    /// Flipped and lost bytes are found or change a number; reading never panics and takes no memory that the file does not back.
    #[test]
    fn damage_never_panics(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1_u8..), 1..8),
        length in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let folder = Folder::new();
        let mut bytes = small().bytes();
        for (at, flip) in flips {
            *at.get_mut(&mut bytes) ^= flip;
        }
        if cut {
            bytes.truncate(length.index(bytes.len()));
        }
        let path = folder.file("damaged.safetensors", bytes);
        let (result, largest) = largest(|| read_all(&path));
        prop_assert!(largest < MOST_BYTES, "{} bytes", largest);
        if let Err(error) = result {
            prop_assert!(error.to_string().contains("damaged.safetensors: "));
        }
    }

    /// Digits of the header become other digits: sizes that the file does not back are refused.
    #[test]
    fn wrong_sizes_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..6)) {
        let folder = Folder::new();
        let mut bytes = small().bytes();
        let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let digits: Vec<usize> = (8..8 + header).filter(|at| bytes[*at].is_ascii_digit()).collect();
        for (at, digit) in changes {
            bytes[*at.get(&digits)] = digit;
        }
        let path = folder.file("damaged.safetensors", bytes);
        let (_, largest) = largest(|| read_all(&path));
        prop_assert!(largest < MOST_BYTES, "{} bytes", largest);
    }
}

#[test]
fn a_trace_from_elsewhere_is_read() {
    let folder = Folder::new();
    let path = folder.file("small.safetensors", small().bytes());
    let mut reader = TraceReader::open(&path).expect("opens");
    let header = reader.header().clone();
    assert_eq!(
        (header.steps, header.layers, header.ranks, header.experts),
        (2, 1, 2, 4)
    );
    assert_eq!((header.top_k, header.tokens_per_rank), (Some(2), Some(1)));
    assert_eq!((header.first_step, header.number(1)), (5, 6));
    assert_eq!((header.recorded, header.scored), (vec![1], true));
    assert_eq!(
        reader.step(0).expect("a step"),
        array![[[1, 1, 0, 0], [0, 0, 1, 1]]]
    );
    let pairs = reader.pairs(0).expect("pairs");
    assert_eq!(pairs.expert, array![[[2, 0], [1, 3]]]);
    assert_eq!(pairs.score, Some(array![[[3.0, 1.0], [0.0, 2.0]]]));
}

#[test]
fn counts_and_scores_come_from_pairs_where_they_are_not_there() {
    let folder = Folder::new();
    let raw = Raw::new(&[
        ("E", "3"),
        ("ranks", "2"),
        ("tokens_per_rank", "1"),
        ("steps", "100"),
    ])
    .ids("steps", &[2], &[10, 40])
    .tensor(
        "expert",
        safetensors::Dtype::U8,
        &[2, 1, 2, 2],
        vec![2, 0, 1, 2, 0, 1, 1, 0],
    )
    .floats("gate_weight", &[2, 1, 2, 2], &[0.5; 8])
    .floats(
        "norm_h",
        &[2, 1, 2, 2],
        &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    )
    .floats("norm_dy", &[2, 1, 2], &[2.0, 4.0, 6.0, 8.0]);
    let mut reader =
        TraceReader::open(folder.file("pairs.safetensors", raw.bytes())).expect("opens");
    let header = reader.header().clone();
    assert_eq!(
        (header.steps, header.first_step, header.number(1)),
        (2, 10, 40)
    );
    assert_eq!((header.recorded, header.scored), (vec![0, 1], true));
    assert_eq!(
        reader.step(0).expect("a step"),
        array![[[1, 0, 1], [0, 1, 1]]]
    );
    assert_eq!(
        reader.step(1).expect("a step"),
        array![[[1, 1, 0], [1, 1, 0]]]
    );
    let score = reader.pairs(1).expect("pairs").score;
    assert_eq!(score, Some(array![[[15.0, 18.0], [28.0, 32.0]]]));
}

#[test]
fn numbers_of_masked_pairs_do_not_count() {
    let folder = Folder::new();
    let raw = small()
        .words(
            "counts",
            &[2, 1, 2, 4],
            &[1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1],
        )
        .ids("expert", &[1, 1, 2, 2], &[-1, 0, 1, 3])
        .floats("gate_weight", &[1, 1, 2, 2], &[f32::NAN, 0.25, 0.5, 0.5]);
    let (_, pairs) = read_all(&folder.file("masked.safetensors", raw.bytes())).expect("reads");
    assert_eq!(pairs[0].gate_weight[[0, 0, 0]], 0.0);
}

#[test]
fn equal_traces_are_equal_files() {
    let folder = Folder::new();
    let write = |name: &str| {
        let mut settings = settings(2, 3, 5);
        settings.metadata = ["a", "b", "c", "d"]
            .map(|key| (key.to_owned(), key.to_owned()))
            .into();
        let mut writer = TraceWriter::create(folder.path(name), settings).expect("created");
        writer.push(Array3::ones((2, 3, 5)).view()).expect("pushed");
        writer.finish().expect("finished");
        std::fs::read(folder.path(name)).expect("a file")
    };
    assert_eq!(write("a"), write("b"));
}

#[test]
fn an_unfinished_trace_leaves_nothing() {
    let folder = Folder::new();
    let before = folder.file("trace.safetensors", "what was there before");
    let mut writer = TraceWriter::create(&before, settings(1, 1, 2)).expect("created");
    writer.push(array![[[1, 2]]].view()).expect("pushed");
    drop(writer);
    assert_eq!(folder.names(), ["trace.safetensors"]);
    assert_eq!(
        std::fs::read(&before).expect("a file"),
        b"what was there before"
    );
}

#[test]
fn what_cannot_be_read_is_not_written() {
    let folder = Folder::new();
    let path = folder.path("trace.safetensors");
    let create = |settings| {
        TraceWriter::create(&path, settings)
            .map(drop)
            .expect_err("refused")
            .to_string()
    };
    assert!(create(settings(0, 1, 1)).contains("0 layers must be at least 1"));
    assert!(create(settings(1, 1 << 17, 1)).contains("131072 ranks must be"));
    assert!(create(settings(1 << 10, 1 << 10, 1 << 10)).contains("1073741824 counts of a step"));
    assert!(
        create(TraceSettings {
            top_k: Some(3),
            ..settings(1, 1, 2)
        })
        .contains("3 experts per token")
    );

    let with_pairs = TraceSettings {
        top_k: Some(1),
        tokens_per_rank: Some(1),
        ..settings(1, 1, 2)
    };
    let mut writer = TraceWriter::create(&path, with_pairs).expect("created");
    let error = writer
        .push(array![[[1]]].view())
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("`counts` is [1, 1, 1], must be [1, 1, 2]"),
        "{error}"
    );
    let error = writer
        .push(array![[[u32::MAX, 1]]].view())
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("step 0, layer 0: 4294967296 pairs of a layer"),
        "{error}"
    );
    writer.push(array![[[1, 0]]].view()).expect("pushed");
    let pairs = |id, score: Option<f32>| PairRecord {
        expert: array![[[id]]],
        gate_weight: array![[[1.0]]],
        score: score.map(|score| array![[[score]]]),
    };
    let error = writer
        .push_pairs(pairs(1, None))
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains(
            "step 0, layer 0, rank 0: expert 0 has 0 pairs by their ids, 1 by the counts"
        ),
        "{error}"
    );
    writer.push_pairs(pairs(0, Some(1.0))).expect("pushed");
    for again in [pairs(0, Some(1.0)), pairs(0, None)] {
        let error = writer.push_pairs(again).expect_err("refused").to_string();
        assert!(
            error.contains("per-pair data must follow the counts of their step"),
            "{error}"
        );
    }
    writer.finish().expect("what was refused is left out");
    assert_eq!(read_all(&path).expect("reads").0, [array![[[1, 0]]]]);
}
