//! A training run on a device.

use std::sync::atomic::AtomicBool;

use clap::Parser;
use lrmoe::config::TrainOptions;
use lrmoe::text::Corpus;
use lrmoe::train::{Observer, StepRecord, train};
use lrmoe_kernels::Wgpu;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: TrainOptions,
}

struct Silent;

impl Observer for Silent {
    fn start(&mut self, _: u32, _: u32) {}
    fn step(&mut self, _: &StepRecord) {}
}

/// A model small enough for tests.
const SMALL: &str = "--layers 2 --width 16 --heads 2 --context 16 --experts 4 --top-k 2 --hidden 16 --batch 4 --steps 8 \
     --eval-every 4 --eval-sequences 4 --chunk-rows 40";

fn run(device: &str, ranks: usize) -> Vec<StepRecord> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(60);
    std::fs::write(path("text.txt"), text).expect("a text");
    let (text, out) = (path("text.txt"), path("out"));
    let ranks = ranks.to_string();
    let given = [
        "train", "--text", &text, "--out", &out, "--device", device, "--ranks", &ranks,
    ];
    let arguments = given.into_iter().chain(SMALL.split_whitespace());
    let config = Cli::parse_from(arguments)
        .options
        .resolve()
        .expect("a configuration");
    let corpus = Corpus::load(&config.text, config.model.context).expect("a corpus");
    train(&config, &corpus, &AtomicBool::new(false), &mut Silent).expect("training")
}

/// The first step selects the same pairs in every layer, losses follow those of the CPU.
pub(super) fn first_steps(_: &Wgpu) {
    for ranks in [1, 2] {
        let (cpu, device) = (run("cpu", ranks), run("wgpu", ranks));
        assert_eq!(device.len(), cpu.len());
        for (layer, expected) in device[0].layers.iter().zip(&cpu[0].layers) {
            assert_eq!(layer.load, expected.load);
            assert_eq!(layer.quota, expected.quota);
            assert_eq!(layer.selection, expected.selection);
        }
        for (number, (device, cpu)) in device.iter().zip(&cpu).enumerate() {
            // Rounding at first; later a near tie may fall to another pair, on which a few thousandths hang.
            let tolerance = if number == 0 { 1e-6 } else { 5e-3 };
            let difference = (device.loss / cpu.loss - 1.0).abs();
            assert!(
                difference < tolerance,
                "step {number}: {difference} on {ranks} ranks"
            );
        }
    }
}
