//! Counts as text.

use lrmoe::trace::ConvertOptions;
use ndarray::array;

use super::{Folder, counts, options, run};

pub(super) const CSV: &str = "step, rank, layer, expert, count, note
3,0,0,0,5,a
3,1,1,2,4000000000,b
4,0,0,1,7,c
";

#[test]
fn csv_columns_come_in_any_order() {
    let folder = Folder::new();
    let header = run(&folder, &[&folder.file("counts.csv", CSV)], &options()).expect("converts");
    assert_eq!(
        (
            header.steps,
            header.first_step,
            header.layers,
            header.ranks,
            header.experts
        ),
        (2, 3, 2, 2, 3)
    );
    assert_eq!(
        counts(&folder)[0],
        array![[[5, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 4_000_000_000]]]
    );
    assert_eq!(counts(&folder)[1].sum(), 7);
    let more = ConvertOptions {
        experts: Some(8),
        ..options()
    };
    let path = folder.file("few.csv", "expert,count\n1,2\n0,3\n");
    let header = run(&folder, &[&path], &more).expect("converts");
    assert_eq!(
        (header.steps, header.layers, header.ranks, header.experts),
        (1, 1, 1, 8)
    );
}

#[test]
fn bad_csv_is_named() {
    let folder = Folder::new();
    let three = ConvertOptions {
        experts: Some(3),
        ..options()
    };
    let cases = [
        (
            CSV.replace(",5,", ",-5,"),
            "line 2: count is `-5`, must be a whole number from 0 to 4294967295",
        ),
        (
            CSV.replace("4000000000", "5000000000"),
            "line 3: count is `5000000000`, must be",
        ),
        (
            CSV.replace("4000000000", "nan"),
            "line 3: count is `nan`, must be",
        ),
        (
            CSV.replace("1,1,2", "1,1,3"),
            "line 3, step 3, layer 1, rank 1: expert 3 does not exist among 3",
        ),
        (
            CSV.replace("1,1,2", "1,1,70000"),
            "line 3: expert is `70000`, must be a whole number from 0 to 65535",
        ),
        (
            CSV.replace("4,0,0,1", "2,0,0,1"),
            "line 4: step 2 comes after step 3; sort the file by step",
        ),
        (
            CSV.replace("4,0,0,1", "3,0,0,0"),
            "line 4, step 3, layer 0, rank 0: there is a record of it before",
        ),
        (CSV.replace(",7,c", ""), "found record with 4 fields"),
        (
            CSV.replace("count", "number"),
            "the first line has no column `count`",
        ),
        (
            CSV.lines().next().expect("a line").to_owned(),
            "it has no steps",
        ),
        (
            "step,layer,rank,expert,count\n0,0,0,0,4294967295\n0,0,0,1,1\n".to_owned(),
            "bad.csv: step 0, layer 0: 4294967296 pairs of a layer",
        ),
    ];
    for (text, message) in cases {
        let error = run(&folder, &[&folder.file("bad.csv", text)], &three).expect_err(message);
        assert!(error.contains(message), "{error}\nnot {message}");
    }
}
