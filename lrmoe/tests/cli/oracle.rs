//! `train --oracle-every`.

use lrmoe::train::{Agreement, OracleRecord, StepRecord};

use crate::{Folder, assert_success, losses, text};

fn oracles(records: &[StepRecord]) -> Vec<(u32, &OracleRecord)> {
    records
        .iter()
        .flat_map(|record| {
            let layers = record.layers.iter();
            layers.filter_map(|layer| Some((record.step, layer.oracle.as_ref()?)))
        })
        .collect()
}

#[test]
fn a_run_with_an_oracle_is_the_run_without() {
    let folder = Folder::new();
    let policy = ["--retention", "0.4", "--ranks", "4"];
    assert_success(&folder.train(&[&policy[..], &["--out", "without"]].concat()));
    let oracle = ["--oracle-every", "5", "--oracle-draws", "3"];
    let whole = folder.train(&[&policy[..], &oracle, &["--out", "whole"]].concat());
    assert_success(&whole);
    let (without, with) = (folder.records("without"), folder.records("whole"));
    assert_eq!(losses(&without), losses(&with));
    for (a, b) in without.iter().zip(&with) {
        assert_eq!(a.sent, b.sent, "what the oracle sends is not counted");
        assert_eq!(a.buffer_bytes, b.buffer_bytes);
        let selections = |record: &StepRecord| -> Vec<String> {
            let layers = record.layers.iter();
            layers.map(|layer| layer.selection.clone()).collect()
        };
        assert_eq!(selections(a), selections(b));
    }

    // Stopped after an evaluation in step 6, then resumed.
    let parts = [&policy[..], &oracle, &["--out", "parts"]].concat();
    assert_success(&folder.train(&[&parts[..], &["--target-loss", "100"]].concat()));
    assert_success(&folder.train(&[&parts[..], &["--resume"]].concat()));
    let resumed = folder.records("parts");
    assert_eq!(losses(&resumed), losses(&with));
    assert_eq!(oracles(&resumed), oracles(&with));

    let found = oracles(&with);
    let steps: Vec<u32> = found.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [5, 5, 10, 10], "two layers each");
    for (_, record) in found {
        for agreement in [record.dw, record.dx, record.dp] {
            let cosine = agreement.cosine.expect("a cosine");
            assert!(cosine > 0.1 && cosine < 0.999, "{cosine}");
            assert!(agreement.error.is_some_and(|error| error > 0.05));
            let mean = agreement.mean_error.expect("repeated draws");
            let chance = agreement.standard_error.expect("repeated draws");
            assert!(mean > 0.2 * chance && mean < 5.0 * chance, "unbiased");
        }
        let share = record.share_kept.expect("scores");
        assert!(share > 0.4 && share < 1.0, "{share}");
        assert_eq!(record.expert_cosine.len(), 4);
        assert_eq!(record.expert_error.len(), 4);
        assert!(record.expert_share_kept.iter().flatten().all(|s| *s <= 1.0));
    }
    let table = text(&whole.stdout);
    assert!(
        table.contains("cosine dW") && table.contains("mean error dW"),
        "{table}"
    );
    assert!(table.contains("Means over 2 steps"), "{table}");
}

#[test]
fn the_oracle_knows_everything_from_nothing() {
    let folder = Folder::new();
    let oracle = ["--oracle-every", "12"];
    let run = |policy: &[&str]| {
        let output = folder.train(&[policy, &oracle[..], &["--overwrite"]].concat());
        assert_success(&output);
        folder.records("out")
    };
    let exact = |agreement: Agreement| {
        // Only the order of the sums over ranks is another.
        assert!((agreement.cosine.expect("a cosine") - 1.0).abs() < 1e-9);
        assert!(agreement.error.expect("an error") < 1e-5);
        assert_eq!(agreement.mean_error, None);
    };
    for policy in [
        &["--retention", "1"][..],
        &["--retention", "1", "--router-gradient", "all"],
        &["--policy", "dropless"],
        &["--policy", "symi"],
    ] {
        let records = run(policy);
        let found = oracles(&records);
        assert_eq!(found.len(), 2);
        for (_, record) in found {
            [record.dw, record.dx, record.dp]
                .into_iter()
                .for_each(exact);
            let scored = policy[0] == "--retention";
            assert_eq!(record.share_kept, scored.then_some(1.0));
        }
    }
    let records = run(&["--retention", "0"]);
    for (_, record) in oracles(&records) {
        for agreement in [record.dw, record.dx, record.dp] {
            assert_eq!(agreement.cosine, None);
            assert!((agreement.error.expect("an error") - 1.0).abs() < 1e-9);
        }
        assert_eq!(record.share_kept, Some(0.0));
    }
}
