//! One record per step, rank and layer.

use std::path::{Path, PathBuf};

use lrmoe::trace::ConvertOptions;
use ndarray::array;

use super::{Folder, counts, options, run};

/// Two pipeline stages of one layer each, two ranks a stage with numbers of their own, two steps.
fn megatron(folder: &Folder) -> Vec<PathBuf> {
    let line = |step: usize, stage: usize, rank: usize, indices: &str, tokens: usize| {
        format!(
            "{{\"step\":{step},\"stage\":{stage},\"block\":0,\"layer\":0,\"rank\":{rank},\"num_tokens\":{tokens},\"topk\":2,\"top_indices\":{indices}}}\n"
        )
    };
    let files = [
        line(10, 0, 0, "[[0,1],[2,1]]", 2) + &line(11, 0, 0, "[[0,2]]", 1),
        line(10, 0, 1, "[[0,1]]", 1) + &line(10, 0, 1, "[[3,1]]", 1) + &line(11, 0, 1, "[]", 0),
        line(10, 1, 2, "[0,1,0,2]", 2) + &line(11, 1, 2, "[[3,-1]]", 1),
        line(10, 1, 3, "[[1,2]]", 1),
    ];
    let write = |(index, text): (usize, String)| folder.file(&format!("rank{index}.jsonl"), text);
    files.into_iter().enumerate().map(write).collect()
}

#[test]
fn megatron_layers_and_ranks_fall_into_place() {
    let folder = Folder::new();
    let files = megatron(&folder);
    let inputs: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    let header = run(&folder, &inputs, &options()).expect("converts");
    assert_eq!((header.steps, header.first_step), (2, 10));
    assert_eq!(
        (header.layers, header.ranks, header.experts, header.top_k),
        (2, 2, 4, Some(2))
    );
    assert_eq!(
        counts(&folder)[0],
        array![[[1, 2, 1, 0], [1, 2, 0, 1]], [[2, 1, 1, 0], [0, 1, 1, 0]]]
    );
    assert_eq!(
        counts(&folder)[1],
        array![[[1, 0, 1, 0], [0, 0, 0, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]]]
    );
}

#[test]
fn bad_megatron_is_named() {
    let folder = Folder::new();
    let good = std::fs::read_to_string(&megatron(&folder)[0]).expect("a file");
    let four = ConvertOptions {
        experts: Some(4),
        ..options()
    };
    let cases = [
        (
            good.replace("[0,2]", "[0,9]"),
            "line 2, step 11, layer 0, rank 0, token 0, slot 1: expert 9 does not exist among 4",
        ),
        (
            good.replace("[0,2]", "[2,2]"),
            "line 2, step 11, layer 0, rank 0, token 0, slot 1: expert 2 appears twice",
        ),
        (
            good.replace("[[0,2]]", "[[0,2,3]]"),
            "line 2, step 11, layer 0, rank 0: top_indices is `a list of 1 lists`, must be 1 tokens of 2 experts",
        ),
        (
            good.replace("\"step\":11", "\"step\":9"),
            "line 2: step 9 comes after step 10; sort the file by step",
        ),
        (
            good.replace("\"step\":11", "\"step\":-1"),
            "line 2: invalid value: integer `-1`",
        ),
        (
            good.replace("\"rank\":0,", ""),
            "line 1: missing field `rank`",
        ),
        (
            good.replace("\"step\":10", "\"step\":4294967296")
                .replace("\"step\":11", "\"step\":4294967297"),
            "4294967296 steps before the first are more than the limit",
        ),
    ];
    for (text, message) in cases {
        let error = run(&folder, &[&folder.file("bad.jsonl", text)], &four).expect_err(message);
        assert!(
            error.contains("bad.jsonl: ") && error.contains(message),
            "{error}\nnot {message}"
        );
    }
}
