//! Figures against a calculation by hand, and runs that are gone on with.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use lrmoe::sweep::{GroupReport, Report, Spread, State, Sweep, page};
use lrmoe::train::{LayerRecord, MODELLED_AT, Observer, StepRecord};

use super::{Folder, Nobody, log, run};

const TABLES: &str = r#"
[[grid]]
policy = "dropless"
control = "ceiling"

[[grid]]
retention = 0.0
control = "floor"

[[grid]]
title = "Policies"
policy = "symi"
capacity-factor = [1.0, 2.0]

[[grid]]
title = "Policies"
retention = 0.25
"#;

/// Six steps with evaluations after 2, 4 and 6, each step with the same seconds and bytes.
fn write(out: &Path, run: &str, losses: [f32; 3], seconds: f64, bytes: u64) {
    let record = |step: u32| StepRecord {
        step,
        held_out_loss: step
            .is_multiple_of(2)
            .then(|| losses[step as usize / 2 - 1]),
        seconds: 2.0 * seconds,
        moe_seconds: seconds,
        modelled_moe_seconds: seconds / 100.0,
        modelled_moe_seconds_at: MODELLED_AT
            .iter()
            .zip([2.0, 3.0])
            .map(|(name, factor)| ((*name).to_owned(), factor * seconds))
            .collect(),
        forward_bytes: 3 * bytes,
        backward_bytes: bytes,
        update_bytes: 1,
        buffer_bytes: 100 + u64::from(step),
        layers: vec![LayerRecord {
            load: vec![30, 10],
            retained: 10,
            dropped: 4,
            ..LayerRecord::default()
        }],
        ..StepRecord::default()
    };
    let line = |step| serde_json::to_string(&record(step)).expect("a record") + "\n";
    fs::write(log(out, run), (1..=6).map(line).collect::<String>()).expect("a log");
}

/// A sweep whose runs are finished, with losses and seconds put in their place.
fn written(folder: &Folder, head: &str) -> Sweep {
    let grid = || folder.grid(head, TABLES).expect("a grid");
    let out = folder.out();
    run(&mut Sweep::open(grid(), &out, false).expect("a sweep")).expect("all runs");
    for (group, losses, seconds, bytes) in [
        ("dropless", [[3.0, 2.5, 2.0], [3.0, 2.5, 2.0]], 6.0, 300),
        (
            "lrmoe@0.0",
            [[3.0, 2.75, 2.5625], [3.0, 2.875, 2.625]],
            2.0,
            0,
        ),
        (
            "symi+capacity-factor=1.0",
            [[3.0, 2.625, 2.375], [3.0, 2.75, 2.5]],
            4.0,
            200,
        ),
        (
            "symi+capacity-factor=2.0",
            [[3.0, 2.5, 2.125], [3.0, 2.625, 2.375]],
            5.0,
            250,
        ),
        (
            "lrmoe@0.25",
            [[3.0, 2.625, 2.125], [3.0, 2.75, 2.4375]],
            3.0,
            75,
        ),
    ] {
        for (&seed, losses) in grid().seeds.iter().zip(losses.into_iter().cycle()) {
            write(
                &out,
                &format!("{group}/seed-{seed}"),
                losses,
                seconds,
                bytes,
            );
        }
    }
    Sweep::open(grid(), &out, false).expect("a sweep")
}

fn close(found: Option<Spread>, mean: f64, error: f64) {
    let found = found.expect("a figure");
    assert!((found.mean - mean).abs() < 1e-9, "{found:?} is not {mean}");
    let standard_error = found.standard_error.expect("of two runs");
    assert!(
        (standard_error - error).abs() < 1e-9,
        "{found:?} is not +- {error}"
    );
}

#[test]
fn figures_are_those_of_a_hand_calculation() {
    let folder = Folder::new();
    let report = Report::of(&written(&folder, "seeds = [1, 2]\ntargets = [2.5]"));
    let gap = report.gap.as_ref().expect("a gap");
    // Floor less ceiling: 0.5625 and 0.625.
    close(Some(gap.nats), 0.59375, 0.03125);
    assert!((gap.share_of_loss - 0.59375 / 2.0).abs() < 1e-9);
    assert_eq!(report.sections.len(), 2);
    assert_eq!(report.sections[1].groups, [0, 1, 2, 3, 4]);

    let lrmoe = &report.groups[4];
    assert_eq!((lrmoe.name.as_str(), lrmoe.steps), ("lrmoe@0.25", 6));
    close(Some(lrmoe.end.loss), 2.28125, 0.15625);
    // (2.5625 - 2.125) / 0.5625 and (2.625 - 2.4375) / 0.625.
    close(
        lrmoe.gap_kept,
        (7.0 / 9.0 + 0.3) / 2.0,
        (7.0 / 9.0 - 0.3) / 2.0,
    );
    close(lrmoe.end.moe_seconds, 18.0, 0.0);
    for (modelled, expected) in lrmoe.end.modelled.into_iter().zip([0.18, 36.0, 54.0]) {
        close(Some(modelled), expected, 0.0);
    }
    close(Some(lrmoe.end.backward_bytes), 450.0, 0.0);
    close(Some(lrmoe.end.bytes), 6.0 * 301.0, 0.0);
    close(Some(lrmoe.peak_buffer_bytes), 106.0, 0.0);
    assert_eq!((lrmoe.retention, lrmoe.dropped), (0.25, 0.1));
    let steps: Vec<f64> = lrmoe.curve.iter().map(|at| at.step).collect();
    assert_eq!(steps, [2.0, 4.0, 6.0]);
    let band = (lrmoe.curve[1].loss_min, lrmoe.curve[1].loss_max);
    assert_eq!(band, (2.625, 2.75));

    // 2.5 lies 1/4 of the way from 2.625 (step 4) to 2.125 (step 6), and 4/5 from 2.75 to 2.4375: 4.5 and 5.6 steps.
    let target = &lrmoe.targets[0];
    assert_eq!((target.target, target.reached, target.runs), (2.5, 2, 2));
    let reached = target.figures.as_ref().expect("reached");
    close(Some(reached.steps), 5.05, 0.55);
    close(reached.moe_seconds, 15.15, 1.65);
    close(Some(reached.backward_bytes), 378.75, 41.25);
    // The SYMI policy takes 4 s for each of 5 and 6 steps at 1.0, and 5 s for each of 4 and 5 at 2.0: 44 s against 45.
    close(reached.moe_seconds_saved, 0.3125, 0.0125);
    for (modelled, factor) in reached.modelled.into_iter().zip([0.01, 2.0, 3.0]) {
        close(Some(modelled), 15.15 * factor, 1.65 * factor);
    }
    for saved in reached.modelled_saved {
        close(saved, 0.3125, 0.0125);
    }

    // The floor never comes there.
    let floor = &report.groups[1].targets[0];
    assert_eq!((floor.reached, floor.figures), (0, None));
}

#[test]
fn targets_are_losses_of_the_ceiling() {
    let folder = Folder::new();
    let report = Report::of(&written(&folder, "seeds = [1, 2]\ntimed = false"));
    // It goes through 3.0, 2.5 and 2.0 after 2, 4 and 6 steps; these it has after 3, 4 and 5.
    assert_eq!(report.header.targets, [2.75, 2.5, 2.25]);
    let untimed = |group: &GroupReport| group.end.moe_seconds.is_none();
    assert!(report.groups.iter().all(untimed));
    let text = report.to_string();
    assert!(
        text.contains("### Policies") && !text.contains("MoE s, measured"),
        "{text}"
    );
    assert!(text.contains("| dropless (ceiling)"), "{text}");
    assert!(
        text.contains("modelled (8xA100)") && text.contains(" glm-4.5-air "),
        "{text}"
    );
    let page = page(&report).expect("a page");
    assert_eq!(page.matches("<svg").count(), 3, "{page}");
    assert!(page.contains("Policies: loss against modelled time") && !page.contains("http://"));
}

#[test]
fn missing_runs_are_said() {
    let folder = Folder::new();
    let head = "seeds = [1, 2, 3]";
    written(&folder, head);
    fs::remove_file(log(&folder.out(), "dropless/seed-2")).expect("a log");
    let grid = folder.grid(head, TABLES).expect("a grid");
    let report = Report::of(&Sweep::open(grid, &folder.out(), false).expect("a sweep"));
    assert_eq!(report.header.missing, ["dropless/seed-2"]);
    assert_eq!(report.gap.expect("a gap").nats.runs, 2);
    assert_eq!(report.groups[4].end.loss.runs, 3);
    assert_eq!(report.groups[4].gap_kept.expect("a share").runs, 2);
}

/// Sets a flag after a few steps, as Ctrl-C would.
struct StopAfter<'a>(u32, &'a AtomicBool);

impl Observer for StopAfter<'_> {
    fn start(&mut self, _: u32, _: u32) {}
    fn step(&mut self, record: &StepRecord) {
        if record.step == self.0 {
            self.1.store(true, Ordering::Relaxed);
        }
    }
}

fn losses(out: &Path, run: &str) -> Vec<(u32, Option<u32>)> {
    let text = fs::read_to_string(log(out, run)).expect("a log");
    let records = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("a record"));
    let bits = |record: StepRecord| {
        (
            record.loss.to_bits(),
            record.held_out_loss.map(f32::to_bits),
        )
    };
    records.map(bits).collect()
}

#[test]
fn an_interrupted_sweep_goes_on() {
    let folder = Folder::new();
    let tables = "[[grid]]\nretention = [0.5, 0.25]\nsteps = 200";
    let grid = || folder.grid("seeds = [1]", tables).expect("a grid");
    let (whole, out) = (folder.path("whole"), folder.out());
    run(&mut Sweep::open(grid(), &whole, false).expect("a sweep")).expect("all runs");

    static STOP: AtomicBool = AtomicBool::new(false);
    let mut sweep = Sweep::open(grid(), &out, false).expect("a sweep");
    let stopped = sweep.run(
        1,
        false,
        &STOP,
        &|_| Box::new(StopAfter(3, &STOP)),
        &|_, _| {},
    );
    stopped.expect("no failure");
    let states = |sweep: &Sweep| {
        sweep
            .runs()
            .iter()
            .map(|run| run.state.clone())
            .collect::<Vec<_>>()
    };
    assert!(matches!(
        states(&sweep)[..],
        [State::Interrupted(3..), State::Missing]
    ));

    let mut sweep = Sweep::open(grid(), &out, false).expect("a sweep");
    assert!(matches!(
        states(&sweep)[..],
        [State::Interrupted(3..), State::Missing]
    ));
    run(&mut sweep).expect("the rest");
    assert_eq!(sweep.left().finished, 2);
    for name in ["lrmoe@0.5+steps=200/seed-1", "lrmoe@0.25+steps=200/seed-1"] {
        assert_eq!(losses(&out, name), losses(&whole, name));
        assert!(
            !out.join("runs")
                .join(name)
                .join("checkpoint.safetensors")
                .exists()
        );
    }
    // Nothing is left to run.
    let before = fs::metadata(log(&out, "lrmoe@0.5+steps=200/seed-1"))
        .and_then(|log| log.modified())
        .expect("a log");
    run(&mut Sweep::open(grid(), &out, false).expect("a sweep")).expect("nothing");
    let after = fs::metadata(log(&out, "lrmoe@0.5+steps=200/seed-1"))
        .and_then(|log| log.modified())
        .expect("a log");
    assert_eq!(before, after);
}

#[test]
fn other_options_are_refused_or_run_again() {
    let folder = Folder::new();
    let out = folder.out();
    let open = |tables: &str, again: bool| {
        let grid = folder
            .grid("seeds = [1]\ntimed = false", tables)
            .expect("a grid");
        Sweep::open(grid, &out, again)
    };
    run(&mut open("[[grid]]\nname = \"a\"", false).expect("a sweep")).expect("all runs");
    // What is said by default and what is said are the same, and so is what changes no result.
    let same = "[[grid]]\nname = \"a\"\nretention = 0.5\ncheckpoint-every = 3";
    assert_eq!(open(same, false).expect("a sweep").left().finished, 1);

    let other = "[[grid]]\nname = \"a\"\nretention = 0.25\nscore = \"gate\"";
    let error = open(other, false).expect_err("changed").to_string();
    assert!(
        error.contains("a/seed-1 was started with another retention, score"),
        "{error}"
    );
    let mut sweep = open(other, true).expect("a sweep");
    assert!(sweep.runs()[0].is_changed() && sweep.left().finished == 0);
    sweep
        .run(
            2,
            true,
            &AtomicBool::new(false),
            &|_| Box::new(Nobody),
            &|_, left| assert_eq!(left.finished, 1),
        )
        .expect("all runs");
    assert!(out.join("runs/a/seed-1/checkpoint.safetensors").exists());
    assert_eq!(open(other, false).expect("a sweep").left().finished, 1);

    fs::write(
        folder.path("text.txt"),
        "another text, of other words. ".repeat(40),
    )
    .expect("a text");
    let error = open(other, false).expect_err("another text").to_string();
    assert!(error.contains("another text (other bytes)"), "{error}");

    fs::remove_file(out.join("runs/a/seed-1/run.toml")).expect("a file");
    let error = open(other, true).expect_err("foreign").to_string();
    assert!(
        error.contains("it has steps.jsonl, but no run.toml"),
        "{error}"
    );
}

#[test]
fn runs_that_share_the_machine_are_not_timed() {
    let folder = Folder::new();
    let grid = folder.grid("seeds = [1]", "[[grid]]").expect("a grid");
    let mut sweep = Sweep::open(grid, &folder.out(), false).expect("a sweep");
    let stop = AtomicBool::new(false);
    let error = sweep.run(2, false, &stop, &|_| Box::new(Nobody), &|_, _| {});
    let error = error.expect_err("refused").to_string();
    assert!(error.contains("set `timed = false`"), "{error}");
    assert!(!folder.out().exists());
}

#[test]
fn a_run_that_diverges_does_not_end_the_others() {
    let folder = Folder::new();
    let tables = "[[grid]]\nlearning-rate = [1e30, 0.003]\nclip = 0.0";
    let grid = folder.grid("seeds = [1]", tables).expect("a grid");
    let mut sweep = Sweep::open(grid, &folder.out(), false).expect("a sweep");
    let error = run(&mut sweep).expect_err("diverged").to_string();
    assert!(
        error.contains("learning-rate=1") && error.contains("diverged in step"),
        "{error}"
    );
    assert_eq!(sweep.left().finished, 1);
}
