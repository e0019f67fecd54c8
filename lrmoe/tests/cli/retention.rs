//! Retention by layer and over the steps of a run.

use lrmoe::train::StepRecord;

use super::{Folder, assert_success, losses, same_tensors};

/// Retention of the first layer and of the second, step by step.
fn of_layers(records: &[StepRecord]) -> [Vec<f64>; 2] {
    [0, 1].map(|layer| {
        let retention = |record: &StepRecord| record.layers[layer].retention.expect("a retention");
        records.iter().map(retention).collect()
    })
}

/// Pairs of a layer that ran backward, as a share.
fn kept(record: &StepRecord, layer: usize) -> f64 {
    let layer = &record.layers[layer];
    let load: u32 = layer.load.iter().sum();
    layer.retained as f64 / f64::from(load)
}

fn assert_kept(records: &[StepRecord]) {
    for record in records {
        for (layer, of_layer) in record.layers.iter().enumerate() {
            let (kept, asked) = (
                kept(record, layer),
                of_layer.retention.expect("a retention"),
            );
            assert!(
                (kept - asked).abs() < 0.01,
                "step {}: {kept} of {asked}",
                record.step
            );
        }
    }
}

#[test]
fn layers_can_have_their_own() {
    let folder = Folder::new();
    assert_success(&folder.train(&["--retention", "0.5,0.25", "--out", "run"]));
    let records = folder.records("run");
    assert_eq!(of_layers(&records), [vec![0.5; 12], vec![0.25; 12]]);
    assert_kept(&records);
    // Compared under a name of its own, a retention is that of all layers.
    let compared = [
        "--retention",
        "0.5,0.25",
        "--compare",
        "lrmoe,lrmoe@0.75,dropless",
    ];
    assert_success(&folder.train(&[&compared[..], &["--out", "runs"]].concat()));
    assert_eq!(losses(&folder.records("runs/lrmoe")), losses(&records));
    let named = folder.records("runs/lrmoe@0.75");
    assert_eq!(of_layers(&named), [vec![0.75; 12], vec![0.75; 12]]);
    let dropless = folder.records("runs/dropless");
    assert!(
        dropless
            .iter()
            .all(|record| record.layers[0].retention.is_none())
    );
}

#[test]
fn it_goes_down_in_a_line() {
    let folder = Folder::new();
    assert_success(&folder.train(&["--retention-schedule", "linear:1:0", "--out", "run"]));
    let records = folder.records("run");
    let line: Vec<f64> = (0..12).map(|step| 1.0 - f64::from(step) / 11.0).collect();
    for layer in of_layers(&records) {
        let apart = layer.iter().zip(&line).map(|(a, b)| (a - b).abs());
        assert!(apart.fold(0.0, f64::max) < 1e-12, "{layer:?}");
    }
    assert_kept(&records);
    // The first step keeps everything, the last nothing: experts neither send gradients nor weights.
    assert_eq!((records[0].retention, records[11].retention), (1.0, 0.0));
    assert!(records[0].update_bytes > 0 && records[11].update_bytes == 0);
}

#[test]
fn a_warm_up_keeps_everything_first() {
    let folder = Folder::new();
    let warm = [
        "--retention",
        "0.25",
        "--retention-schedule",
        "warmup:4",
        "--out",
        "warm",
    ];
    assert_success(&folder.train(&warm));
    assert_success(&folder.train(&["--retention", "1", "--out", "all"]));
    let (warm, all) = (folder.records("warm"), folder.records("all"));
    assert_eq!(of_layers(&warm)[0], [vec![1.0; 4], vec![0.25; 8]].concat());
    assert_kept(&warm);
    // Step 5 starts from the same parameters and selects; step 6 does not.
    assert_eq!(losses(&warm)[..4], losses(&all)[..4]);
    assert_eq!(warm[4].loss.to_bits(), all[4].loss.to_bits());
    assert_ne!(warm[5].loss.to_bits(), all[5].loss.to_bits());
}

#[test]
fn an_adaptive_one_follows_the_noise_and_resumes_bit_for_bit() {
    let folder = Folder::new();
    let schedule = [
        "--retention",
        "0.5",
        "--retention-schedule",
        "adaptive:0.5:3",
    ];
    let run = |more: &[&str]| assert_success(&folder.train(&[&schedule[..], more].concat()));
    run(&["--out", "whole"]);
    let whole = folder.records("whole");
    assert_kept(&whole);
    for (layer, retention) in of_layers(&whole).into_iter().enumerate() {
        // Measured in steps 1, 4, 7 and 10, it holds in the next three.
        let mut noise = 0.0_f64;
        let mut expected = 0.5;
        for (record, retention) in whole.iter().zip(retention) {
            assert!((retention - expected).abs() < 1e-6, "step {}", record.step);
            let measured = record.layers[layer].selection_variance;
            assert_eq!(
                measured.is_some(),
                record.step % 3 == 1,
                "step {}",
                record.step
            );
            if let Some(variance) = measured {
                let found = variance * retention / (1.0 - retention);
                noise = if noise > 0.0 {
                    0.5 * (noise + found)
                } else {
                    found
                };
                expected = (1.0 / (1.0 + 0.5 / noise)).clamp(0.02, 0.95);
            }
        }
        assert!(noise > 0.0);
    }

    run(&["--out", "parts", "--target-loss", "100"]);
    assert_eq!(folder.records("parts").len(), 6);
    run(&["--out", "parts", "--resume"]);
    let parts = folder.records("parts");
    assert_eq!(losses(&whole), losses(&parts));
    assert_eq!(of_layers(&whole), of_layers(&parts));
    let checkpoint = |out: &str| {
        std::fs::read(folder.path(out).join("checkpoint.safetensors")).expect("a checkpoint")
    };
    assert!(same_tensors(&checkpoint("whole"), &checkpoint("parts")));
}
