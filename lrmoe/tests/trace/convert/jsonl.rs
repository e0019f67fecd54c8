//! One record per token and layer.

use lrmoe::trace::ConvertOptions;
use ndarray::{Axis, array};

use super::{Folder, counts, options, read_all, run};

/// Two layers of five tokens, token by token, the layers not in order.
pub(super) const JSONL: &str = r#"{"type": "meta", "model": "m", "num_experts": 4, "top_k": 2, "layers": [3, 7]}
{"token":0,"layer":7,"topk_ids":[0,1],"topk_weights":[0.5,0.25]}
{"token":0,"layer":3,"topk_ids":[2,3],"topk_weights":[0.5,0.25]}

{"token":1,"layer":3,"topk_ids":[0,3],"topk_weights":[0.5,0.25]}
{"token":1,"layer":7,"topk_ids":[1,2],"topk_weights":[0.5,0.25]}
{"token":2,"layer":3,"topk_ids":[0,1],"topk_weights":[0.5,0.25]}
{"token":2,"layer":7,"topk_ids":[0,1],"topk_weights":[0.5,0.25]}
{"token":4,"layer":3,"topk_ids":[3,-1],"topk_weights":[1.0,0.0]}
{"token":3,"layer":3,"topk_ids":[0,1],"topk_weights":[0.5,0.25]}
{"token":3,"layer":7,"topk_ids":[0,1],"topk_weights":[0.5,0.25]}
{"token":4,"layer":7,"topk_ids":[2,1],"topk_weights":[0.75,0.25]}
"#;

#[test]
fn jsonl_makes_one_step_of_one_rank() {
    let folder = Folder::new();
    let path = folder.file("routing.jsonl", JSONL);
    let header = run(&folder, &[&path], &options()).expect("converts");
    assert_eq!(
        (header.steps, header.layers, header.ranks, header.experts),
        (1, 2, 1, 4)
    );
    assert_eq!((header.top_k, header.tokens_per_rank), (Some(2), Some(5)));
    assert_eq!(
        (
            header.metadata["model"].as_str(),
            header.metadata["source_layers"].as_str()
        ),
        ("m", "3,7")
    );
    assert_eq!(counts(&folder), [array![[[3, 2, 1, 3]], [[3, 5, 2, 0]]]]);
}

#[test]
fn jsonl_is_cut_into_steps_and_ranks() {
    let folder = Folder::new();
    let path = folder.file("routing.jsonl", JSONL);
    let cut = ConvertOptions {
        tokens_per_step: Some(3),
        ranks: Some(2),
        ..options()
    };
    let header = run(&folder, &[&path], &cut).expect("converts");
    assert_eq!(
        (header.steps, header.ranks, header.tokens_per_rank),
        (2, 2, Some(2))
    );
    assert_eq!(header.recorded, [0, 1]);
    let (counts, pairs) = read_all(&folder.path("out.safetensors")).expect("reads");
    // Three tokens: two on the first rank, one on the second.
    assert_eq!(
        counts[0],
        array![[[1, 0, 1, 2], [1, 1, 0, 0]], [[1, 2, 1, 0], [1, 1, 0, 0]]]
    );
    // The last two tokens, the masked one without its pair.
    assert_eq!(
        counts[1],
        array![[[1, 1, 0, 1], [0, 0, 0, 0]], [[1, 2, 1, 0], [0, 0, 0, 0]]]
    );
    assert_eq!(
        pairs[1].expert.index_axis(Axis(0), 1),
        array![[0, 1], [2, 1], [-1, -1], [-1, -1]]
    );
    assert_eq!(pairs[1].gate_weight[[1, 1, 0]], 0.75);
}

#[test]
fn jsonl_layers_may_lie_in_files_of_their_own_and_tokens_without_numbers() {
    let folder = Folder::new();
    let layer = |layer: usize| {
        let line = |token: usize| {
            format!(
                "{{\"layer\":{layer},\"topk_ids\":[{}]}}\n",
                (token + layer) % 3
            )
        };
        folder.file(
            &format!("{layer}.jsonl"),
            (0..6).map(line).collect::<String>(),
        )
    };
    let (first, second) = (layer(0), layer(1));
    let cut = ConvertOptions {
        tokens_per_step: Some(2),
        ..options()
    };
    let header = run(&folder, &[&second, &first], &cut).expect("converts");
    assert_eq!((header.steps, header.layers, header.experts), (3, 2, 3));
    assert_eq!(header.recorded, [] as [u32; 0], "there are no weights");
    assert_eq!(counts(&folder)[0], array![[[1, 1, 0]], [[0, 1, 1]]]);
}

#[test]
fn bad_jsonl_is_named() {
    let folder = Folder::new();
    let line = |ids: &str, weights: &str| {
        format!(
            "{{\"token\":0,\"topk_ids\":[0,1],\"topk_weights\":[0.5,0.5]}}\n{{\"token\":1,\"topk_ids\":{ids},\"topk_weights\":{weights}}}\n"
        )
    };
    let four = ConvertOptions {
        experts: Some(4),
        ..options()
    };
    let cases = [
        (String::new(), &four, "it has no steps"),
        (
            JSONL[..JSONL.len() / 2].to_owned(),
            &four,
            "EOF while parsing",
        ),
        (
            line("[0,4]", "[0.5,0.5]"),
            &four,
            "line 2, layer 0, token 1, slot 1: expert 4 does not exist among 4",
        ),
        (
            line("[0,-2]", "[0.5,0.5]"),
            &four,
            "line 2, layer 0, token 1, slot 1: expert -2 does not exist among 4",
        ),
        (
            line("[1,1]", "[0.5,0.5]"),
            &four,
            "line 2, layer 0, token 1, slot 1: expert 1 appears twice",
        ),
        (line("[0,1]", "[0.5,NaN]"), &four, "near `NaN]}`"),
        (
            line("[0,1]", "[0.5,-1]"),
            &four,
            "line 2, layer 0, token 1, slot 1: gate weight -1 must be",
        ),
        (
            line("[0,1]", "[0.5,1e39]"),
            &four,
            "line 2, layer 0, token 1, slot 1: gate weight inf must be",
        ),
        (
            line("[0,1.5]", "[0.5,0.5]"),
            &four,
            "line 2: invalid type: floating point `1.5`",
        ),
        (
            line("[0,99999999999]", "[0.5,0.5]"),
            &four,
            "line 2: invalid value: integer `99999999999`",
        ),
        (
            line("[0]", "[0.5]"),
            &four,
            "line 2: topk_ids is `1 numbers`, must be 2 numbers as before",
        ),
        (
            line("[0,1]", "[0.5]"),
            &four,
            "line 2: topk_weights is `1 numbers`, must be 2 numbers as before",
        ),
        (
            "{\"token\":0}\n".to_owned(),
            &four,
            "line 1: topk_ids is `nothing`",
        ),
        (
            line("[0,1]", "[0.5,0.5]").replace("\"token\":1", "\"token\":0"),
            &four,
            "layer 0: 2 records for tokens 0 to 0",
        ),
        (
            line("[0,1]", "[0.5,0.5]").replace("\"token\":1", "\"token\":7"),
            &four,
            "layer 0: 2 records for tokens 0 to 7",
        ),
        (
            line("[0,1]", "[0.5,0.5]"),
            &ConvertOptions {
                experts: Some(1),
                ..options()
            },
            "2 experts per token must be at least 1 and at most 1",
        ),
        (
            line("[0,1]", "[0.5,0.5]"),
            &ConvertOptions {
                tokens_per_step: Some(3),
                ..options()
            },
            "3 tokens per step must be at least 1 and at most 2",
        ),
        (
            line("[0,1]", "[0.5,0.5]"),
            &ConvertOptions {
                ranks: Some(0),
                ..options()
            },
            "0 ranks must be",
        ),
        (
            line("[0,1]", "[0.5,0.5]"),
            &ConvertOptions {
                axes: Some("experts".parse().expect("axes")),
                ..options()
            },
            "--axes does not apply to jsonl",
        ),
    ];
    for (text, options, message) in cases {
        let error = run(&folder, &[&folder.file("bad.jsonl", text)], options).expect_err(message);
        assert!(
            error.contains("bad.jsonl: ") && error.contains(message),
            "{error}\nnot {message}"
        );
    }
}
