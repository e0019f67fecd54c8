//! Figures of a trace, by hand on small ones.

use indicatif::ProgressBar;
use lrmoe::trace::{HeatMap, Inspection, TraceReader, TraceWriter, inspect};
use ndarray::{Array3, array};

use super::{Folder, settings};

fn inspected(steps: &[Array3<u32>], layer: usize) -> Result<(Inspection, HeatMap), String> {
    let folder = Folder::new();
    let (layers, ranks, experts) = steps[0].dim();
    let path = folder.path("trace.safetensors");
    let mut writer = TraceWriter::create(&path, settings(layers, ranks, experts)).expect("created");
    for step in steps {
        writer.push(step.view()).expect("pushed");
    }
    writer.finish().expect("finished");
    let mut reader = TraceReader::open(&path).expect("opens");
    inspect(&mut reader, layer, &ProgressBar::hidden()).map_err(|error| error.to_string())
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-12, "{found}, not {expected}");
}

#[test]
fn figures_are_those_of_the_definitions() {
    // Loads 6, 2, 0, 0 of experts, 8 and 0 of ranks; then 4, 4, 0, 0.
    let steps = [
        array![[[3, 1, 0, 0], [3, 1, 0, 0]]],
        array![[[4, 0, 0, 0], [0, 4, 0, 0]]],
    ];
    let (inspection, _) = inspected(&steps, 0).expect("inspected");
    let layer = &inspection.per_layer[0];
    close(layer.expert_max_over_mean, (3.0 + 2.0) / 2.0);
    close(layer.expert_max_over_mean_worst, 3.0);
    close(layer.rank_max_over_mean, 2.0);
    close(layer.share_top_1, (0.75 + 0.5) / 2.0);
    close(layer.share_top_10_percent, layer.share_top_1);
    close(layer.share_top_25_percent, layer.share_top_1);
    // Mean absolute difference over twice the mean: (2 * (4 + 6 + 6 + 2 + 2 + 0) / 16) / 4 and (2 * 16 / 16) / 4.
    close(layer.gini, (0.625 + 0.5) / 2.0);
    // Variances 6 and 4 around 2.
    close(layer.variation, (6.0_f64.sqrt() / 2.0 + 1.0) / 2.0);
    close(layer.drift, 0.25);
    close(layer.idle_experts, 2.0);
    close(layer.pairs, 8.0);
    assert_eq!(inspection.pairs, 16);
    close(inspection.over_time[0].drift, 0.0);
    close(inspection.over_time[1].drift, 0.25);
}

#[test]
fn steps_without_pairs_are_left_out() {
    let steps = [array![[[0, 0]]], array![[[1, 1]]], array![[[0, 0]]]];
    let (inspection, heat_map) = inspected(&steps, 0).expect("inspected");
    close(inspection.per_layer[0].expert_max_over_mean, 1.0);
    close(inspection.per_layer[0].drift, 0.0);
    assert!(heat_map.to_svg().contains("</svg>"));
    let (nothing, _) = inspected(&[array![[[0, 0]]]], 0).expect("inspected");
    close(nothing.per_layer[0].gini, 0.0);
}

#[test]
fn long_traces_are_binned() {
    let steps: Vec<_> = (0..1001).map(|step| array![[[1, step]]]).collect();
    let (inspection, heat_map) = inspected(&steps, 0).expect("inspected");
    let parts = &inspection.over_time;
    assert_eq!(parts.len(), 167, "1001 steps, 6 in a bin");
    assert_eq!((parts[0].first_step, parts[0].last_step), (0, 5));
    assert_eq!((parts[166].first_step, parts[166].last_step), (996, 1000));
    let svg = heat_map.to_svg();
    for text in [
        "Layer 0: load of each expert over the mean",
        "step",
        "expert",
        "</svg>",
    ] {
        assert!(svg.contains(text), "{text}");
    }
    assert!(svg.len() < 200_000, "{} bytes", svg.len());
    let text = inspection.to_string();
    assert!(
        text.contains("1001 steps from 0, 1 layers, 1 ranks, 2 experts"),
        "{text}"
    );
}

#[test]
fn a_layer_that_does_not_exist_is_refused() {
    let error = inspected(&[array![[[1, 2]]]], 1).expect_err("refused");
    assert!(
        error.contains("trace.safetensors: layer 1 is beyond the 1 there are"),
        "{error}"
    );
}
