//! Every way in which a native trace can be wrong has a message that names file, record and value.

use safetensors::Dtype;

use super::{Folder, Raw, read_all, small};

/// What is done to the small trace, and the message after the file's name.
type Case = (&'static str, fn() -> Vec<u8>, &'static str);

fn replaced(bytes: Vec<u8>, from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes
        .windows(from.len())
        .position(|window| window == from.as_bytes());
    let at = at.expect("the text is there");
    [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat()
}

const CASES: &[Case] = &[
    (
        "empty",
        Vec::new,
        "not a safetensors file: a header of 0 bytes in a file of 0",
    ),
    (
        "another file",
        || b"what is this, a trace?".to_vec(),
        "not a safetensors file: a header of ",
    ),
    (
        "a huge header",
        || [&u64::MAX.to_le_bytes()[..], b"{}"].concat(),
        "a header of 18446744073709551615 bytes in a file of 10",
    ),
    (
        "a header that is no JSON",
        || [&4_u64.to_le_bytes()[..], b"nope"].concat(),
        "not a safetensors file: expected",
    ),
    (
        "truncated",
        || {
            let mut bytes = small().bytes();
            bytes.pop();
            bytes
        },
        "bytes, the file has ",
    ),
    (
        "too long",
        || [small().bytes(), vec![0]].concat(),
        "bytes, the file has ",
    ),
    (
        "a header that claims more than the file",
        || replaced(small().bytes(), "[2,1,2,4]", "[8,1,2,4]"),
        "not a safetensors file: ",
    ),
    (
        "no counts",
        || {
            Raw::new(&[("experts", "4")])
                .floats("loss", &[1], &[1.0])
                .bytes()
        },
        "it has no tensor `counts`",
    ),
    (
        "counts of another type",
        || small().ids("counts", &[2, 1, 2, 4], &[-1; 16]).bytes(),
        "`counts` is I32, must be U32",
    ),
    (
        "counts of another shape",
        || small().words("counts", &[2, 2, 4], &[0; 16]).bytes(),
        "`counts` is [2, 2, 4], must be [steps, layers, ranks, experts]",
    ),
    (
        "zero steps",
        || Raw::new(&[]).words("counts", &[0, 1, 2, 4], &[]).bytes(),
        "`counts` is [0, 1, 2, 4]: it has no steps",
    ),
    (
        "zero experts",
        || Raw::new(&[]).words("counts", &[1, 1, 2, 0], &[]).bytes(),
        "`counts` is [1, 1, 2, 0]: it has no experts",
    ),
    (
        "counts beyond 32 bits",
        || {
            small()
                .words(
                    "counts",
                    &[2, 1, 2, 4],
                    &[1, 1, 0, 0, 0, 0, u32::MAX, 1, 0, 0, 0, 0, 0, 0, 0, 0],
                )
                .bytes()
        },
        "step 5, layer 0: 4294967298 pairs of a layer are more than the limit, 4294967295",
    ),
    (
        "another number of experts",
        || {
            let mut raw = small();
            raw.metadata.insert("experts".into(), "5".into());
            raw.bytes()
        },
        "metadata `experts` is `5`, must be 4 by the shapes",
    ),
    (
        "another number of ranks",
        || {
            let mut raw = small();
            raw.metadata.insert("ranks".into(), "3".into());
            raw.bytes()
        },
        "metadata `ranks` is `3`, must be 2 by the shapes",
    ),
    (
        "another k",
        || {
            let mut raw = small();
            raw.metadata.insert("K".into(), "3".into());
            raw.bytes()
        },
        "metadata `K` is `3`, must be 2 by the shapes",
    ),
    (
        "a number that is none",
        || {
            let mut raw = small();
            raw.metadata.insert("first_step".into(), "-1".into());
            raw.bytes()
        },
        "metadata `first_step` is `-1`, must be a number of at least 0",
    ),
    (
        "a first step too large",
        || {
            let mut raw = small();
            raw.metadata
                .insert("first_step".into(), "2147483647".into());
            raw.bytes()
        },
        "metadata `first_step` is `2147483647`, must be 0 to 2147483645",
    ),
    (
        "pairs alone, experts unknown",
        || {
            Raw::new(&[])
                .ids("expert", &[1, 1, 2, 2], &[0; 4])
                .floats("gate_weight", &[1, 1, 2, 2], &[0.0; 4])
                .bytes()
        },
        "its metadata has no `experts`",
    ),
    (
        "pairs alone, experts beyond the limit",
        || {
            Raw::new(&[("E", "99999999999")])
                .ids("expert", &[1, 1, 2, 2], &[0; 4])
                .floats("gate_weight", &[1, 1, 2, 2], &[0.0; 4])
                .bytes()
        },
        "metadata `E` is `99999999999`, must be 1 to 65536",
    ),
    (
        "tokens that do not divide",
        || {
            Raw::new(&[("E", "4"), ("ranks", "3")])
                .ids("expert", &[1, 1, 4, 1], &[0; 4])
                .floats("gate_weight", &[1, 1, 4, 1], &[0.0; 4])
                .bytes()
        },
        "`expert` is [1, 1, 4, 1], must be a multiple of 3 ranks",
    ),
    (
        "ids of another type",
        || {
            small()
                .tensor("expert", Dtype::I64, &[1, 1, 2, 2], vec![0; 32])
                .bytes()
        },
        "`expert` is I64, must be U8, U16 or I32",
    ),
    (
        "pairs of other layers",
        || {
            small()
                .ids("expert", &[1, 2, 1, 2], &[0; 4])
                .floats("gate_weight", &[1, 2, 1, 2], &[0.0; 4])
                .floats("score", &[1, 2, 1, 2], &[0.0; 4])
                .bytes()
        },
        "`expert` is [1, 2, 1, 2], must be [steps, 1, tokens, k]",
    ),
    (
        "k beyond the experts",
        || {
            Raw::new(&[("E", "1")])
                .ids("expert", &[1, 1, 2, 2], &[0; 4])
                .floats("gate_weight", &[1, 1, 2, 2], &[0.0; 4])
                .bytes()
        },
        "2 experts per token are more than the limit, 1",
    ),
    (
        "no weights",
        || {
            let mut raw = small();
            raw.tensors.retain(|(name, ..)| *name != "gate_weight");
            raw.bytes()
        },
        "it has no tensor `gate_weight`",
    ),
    (
        "weights of another shape",
        || {
            small()
                .floats("gate_weight", &[1, 1, 4, 1], &[0.0; 4])
                .bytes()
        },
        "`gate_weight` is [1, 1, 4, 1], must be [1, 1, 2, 2]",
    ),
    (
        "scores of another type",
        || small().ids("score", &[1, 1, 2, 2], &[0; 4]).bytes(),
        "`score` is I32, must be F32",
    ),
    (
        "numbers of steps of another length",
        || small().ids("steps", &[2], &[5, 6]).bytes(),
        "`steps` is [2], must be [1]",
    ),
    (
        "a recorded step beyond the trace",
        || small().ids("steps", &[1], &[7]).bytes(),
        "`steps` has 7 at index 0, must ascend within 5 to 6",
    ),
    (
        "a recorded step before it",
        || small().ids("steps", &[1], &[-3]).bytes(),
        "`steps` has -3 at index 0, must ascend within 5 to 6",
    ),
    (
        "an id too large",
        || small().ids("expert", &[1, 1, 2, 2], &[2, 0, 1, 4]).bytes(),
        "step 6, layer 0, token 1, slot 1: expert 4 does not exist among 4",
    ),
    (
        "a negative id",
        || small().ids("expert", &[1, 1, 2, 2], &[2, -2, 1, 3]).bytes(),
        "step 6, layer 0, token 0, slot 1: expert -2 does not exist among 4",
    ),
    (
        "an expert twice",
        || small().ids("expert", &[1, 1, 2, 2], &[2, 0, 3, 3]).bytes(),
        "step 6, layer 0, token 1, slot 1: expert 3 appears twice",
    ),
    (
        "a NaN weight",
        || {
            small()
                .floats("gate_weight", &[1, 1, 2, 2], &[0.5, f32::NAN, 0.5, 0.5])
                .bytes()
        },
        "step 6, layer 0, token 0, slot 1: gate weight NaN must be finite and at least 0",
    ),
    (
        "a negative weight",
        || {
            small()
                .floats("gate_weight", &[1, 1, 2, 2], &[0.5, 0.5, 0.5, -0.25])
                .bytes()
        },
        "step 6, layer 0, token 1, slot 1: gate weight -0.25 must be finite and at least 0",
    ),
    (
        "an infinite score",
        || {
            small()
                .floats("score", &[1, 1, 2, 2], &[f32::INFINITY, 0.5, 0.5, 0.5])
                .bytes()
        },
        "step 6, layer 0, token 0, slot 0: score inf must be finite and at least 0",
    ),
    (
        "pairs that contradict the counts",
        || small().ids("expert", &[1, 1, 2, 2], &[2, 1, 1, 3]).bytes(),
        "step 6, layer 0, rank 0: expert 0 has 0 pairs by their ids, 1 by the counts",
    ),
];

#[test]
fn every_fault_is_named() {
    let folder = Folder::new();
    for (name, bytes, message) in CASES {
        let path = folder.file("bad.safetensors", bytes());
        let error = read_all(&path).map(drop).expect_err(name).to_string();
        let (file, rest) = error.split_once(": ").expect("a file's name first");
        assert_eq!(file, path.to_string_lossy(), "{name}");
        assert!(rest.contains(message), "{name} said: {rest}");
    }
}

#[test]
fn norms_are_checked_like_scores() {
    let folder = Folder::new();
    let mut raw = small();
    raw.tensors.retain(|(name, ..)| *name != "score");
    let raw = raw.floats("norm_h", &[1, 1, 2, 2], &[1.0, 1.0, 1.0, f32::NAN]);
    let cases = [
        (
            raw.clone().floats("norm_dy", &[1, 1, 2], &[1.0, 1.0]),
            "token 1, slot 1: |h| NaN must be",
        ),
        (
            raw.clone().floats("norm_dy", &[1, 1, 2], &[-1.0, 1.0]),
            "token 0, slot 0: |dy| -1 must be",
        ),
        (
            raw.floats("norm_dy", &[1, 1, 3], &[1.0; 3]),
            "`norm_dy` is [1, 1, 3], must be [1, 1, 2]",
        ),
    ];
    for (raw, message) in cases {
        let path = folder.file("bad.safetensors", raw.bytes());
        let error = read_all(&path).map(drop).expect_err(message).to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn steps_beyond_the_trace_are_refused() {
    let folder = Folder::new();
    let path = folder.file("small.safetensors", small().bytes());
    let mut reader = lrmoe::trace::TraceReader::open(&path).expect("opens");
    let error = reader.step(2).expect_err("refused").to_string();
    assert!(
        error.contains("step index 2 is beyond the 2 there are"),
        "{error}"
    );
    let error = reader.pairs(1).expect_err("refused").to_string();
    assert!(
        error.contains("step index 1 is beyond the 1 there are"),
        "{error}"
    );
    let missing = lrmoe::trace::TraceReader::open(folder.path("missing")).map(drop);
    assert!(
        missing
            .expect_err("refused")
            .to_string()
            .contains("missing: ")
    );
}
