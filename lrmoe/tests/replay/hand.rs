//! Two ranks, two experts, four tokens a rank with one expert each, two steps; every figure follows from the few lines beside it.
//!
//! A slot takes 24 bytes (6 parameters, weights and gradients of 2 bytes), a row forward 4 * 2 * 2 + 32 = 48, a row backward
//! (5 * 2 + 3 * 1) * 2 + 24 = 50. The stash holds 16 bytes a pair beside x, 4 bytes a token, or x, gate and up, 8 bytes a row.

use lrmoe::replay::{LinkBytes, MemoryParts};
use lrmoe::trace::PairRecord;
use ndarray::{Array3, array};

use super::{Trace, settings, write};

fn steps() -> [Array3<u32>; 2] {
    [array![[[3, 1], [2, 2]]], array![[[4, 0], [4, 0]]]]
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9, "{found} is not {expected}");
}

#[test]
fn fixed() {
    let policies = Trace::counts(1, &steps()).policies(&settings("fixed"));
    let fixed = &policies[0];
    // Rank 0 runs 5 rows, then 8.
    let peak = MemoryParts {
        placement: 24,
        replicas: 0,
        token_buffers: 8 * 98,
        forward_buffers: 8 * 48,
        backward_buffers: 8 * 50,
        stash: 8 * 8 + 4 * 16,
        total: 24 + 8 * 98 + 128,
    };
    assert_eq!(fixed.memory.peak_bytes, peak);
    assert_eq!(fixed.memory.mean_bytes.total, (618 + 936) / 2);
    assert_eq!(fixed.memory.peak_without_stash_bytes, 24 + 8 * 98);
    // 12 parameters over two ranks, 12 bytes each.
    assert_eq!(fixed.memory.optimizer_bytes, 72);
    assert_eq!(fixed.memory.needed_bytes, 936 + 72);
    // 10 and 6 rows in both passes, then 16 and 0.
    close(fixed.load_max_over_mean, (1.25 + 2.0) / 2.0);
    close(fixed.worst_load_max_over_mean, 2.0);
    // 3 rows cross, then 4; 4 bytes out and back forward, with 8 and 4 bytes of scalars backward.
    assert_eq!(fixed.forward_bytes, (3 + 4) * 8 / 2);
    assert_eq!(fixed.backward_bytes, (3 + 4) * 20 / 2);
    assert_eq!(fixed.update_bytes, 0);
    // A row takes 1 s forward and 2 s backward; 2 rows, then 4, of 4 bytes cross four times at 4 bytes a second.
    close(
        fixed.modelled_step_seconds,
        (5.5 + 10.5 + 4.0 * 2.25 + 8.5 + 16.5 + 4.0 * 4.25) / 2.0,
    );
    // 4 rows each; 6 and 8 bytes each way.
    close(
        fixed.share_of_balanced,
        (4.5 + 8.5 + 4.0 * 1.75 + 4.5 + 8.5 + 4.0 * 2.25) / 67.0,
    );
    assert_eq!((fixed.dropped, fixed.left_out), (0.0, 0.0));
    assert_eq!(fixed.contribution_kept, None);
}

#[test]
fn lrmoe() {
    let policies = Trace::counts(1, &steps()).policies(&settings("lrmoe@0.5"));
    let lrmoe = &policies[0];
    // Step 0: contiguous; 5 and 3 rows forward in chunks of 4, quotas 3 and 1. Step 1: expert 0 on both ranks, 4 and 4 rows, 2 and 2.
    let peak = MemoryParts {
        placement: 24,
        replicas: 24,
        token_buffers: 4 * 48 + 3 * 50,
        forward_buffers: 4 * 48,
        backward_buffers: 3 * 50,
        stash: 4 * 4 + 4 * 16,
        total: 470,
    };
    assert_eq!(lrmoe.memory.peak_bytes, peak);
    assert_eq!(lrmoe.memory.mean_bytes.total, (470 + 420) / 2);
    // 8 and 4 rows in both passes, then 6 and 6.
    close(lrmoe.load_max_over_mean, (8.0 / 6.0 + 1.0) / 2.0);
    // 3 rows cross forward in step 0, with 8 bytes for the norm; of the 2 + 1 + 1 retained one: x and dy out.
    assert_eq!(lrmoe.forward_bytes, 3 * 16 / 2);
    assert_eq!(lrmoe.backward_bytes, (8 + 8 + 4 + 4) / 2);
    assert_eq!(
        lrmoe.backward_links,
        LinkBytes {
            intra: 12,
            inter: 0
        }
    );
    // Of each expert's six parameters, four lie on the rank of its number, two on the other. Step 0: both send 4 bytes of gradients; weights
    // go to expert 1 on rank 1 and to both instances of expert 0. Step 1: from both instances, and back.
    assert_eq!(lrmoe.update_bytes, (8 + 16 + 16 + 16) / 2);
    // Backward a row takes 2 2/3 s.
    let first = 5.5 + 8.5 + (2.25 + 2.25 + 2.25 + 1.25 + 1.25) + 3.25;
    let second = 5.0 + (16.0 / 3.0 + 1.0) + 3.25 + 3.25;
    close(lrmoe.modelled_step_seconds, (first + second) / 2.0);
    close(lrmoe.left_out, 0.5);
}

#[test]
fn warm_up_counts_in_no_figure() {
    let mut asked = settings("lrmoe@0.5");
    asked.warmup = 1;
    let report = Trace::counts(1, &steps()).replay(&asked).expect("a replay");
    let lrmoe = &report.policies[0];
    assert_eq!(lrmoe.memory.peak_bytes.total, 420);
    assert_eq!(lrmoe.memory.mean_bytes, lrmoe.memory.peak_bytes);
    assert_eq!((lrmoe.forward_bytes, lrmoe.update_bytes), (0, 32));
    close(lrmoe.worst_load_max_over_mean, 1.0);
}

#[test]
fn symi() {
    let mut asked = settings("symi");
    asked.slots = Some(1);
    let policies = Trace::counts(1, &steps()).policies(&asked);
    let symi = &policies[0];
    // Two slots of 4 pairs each: 4 + 3 rows, then 4 + 0.
    close(symi.dropped, (1.0 + 4.0) / 16.0);
    assert_eq!(symi.memory.peak_bytes.total, 24 + 4 * 98 + 4 * 8 + 4 * 16);
    // The fifth pair of expert 0 is the second of rank 1, so 1 + 1 rows cross in step 0, none in step 1.
    assert_eq!(symi.backward_bytes, 2 * 20 / 2);
}

#[test]
fn layers_share_buffers_and_add_up_the_rest() {
    let step = array![[[3, 1], [2, 2]], [[4, 0], [4, 0]]];
    let trace = Trace::counts(1, &[step]);
    let policies = trace.policies(&settings("fixed"));
    let peak = policies[0].memory.peak_bytes;
    assert_eq!((peak.placement, peak.token_buffers), (48, 8 * 98));
    assert_eq!(peak.stash, (5 + 8) * 8 + 2 * 4 * 16);

    let mut asked = settings("fixed");
    asked.model_layers = Some(3);
    let scaled = &trace.policies(&asked)[0];
    assert_eq!(scaled.memory.peak_bytes.placement, 72);
    assert_eq!(scaled.memory.peak_bytes.token_buffers, 8 * 98);
    assert_eq!(scaled.memory.peak_bytes.stash, peak.stash * 3 / 2);
    close(
        scaled.modelled_step_seconds,
        1.5 * policies[0].modelled_step_seconds,
    );
}

/// `steps()[0]` pair by pair.
fn pairs() -> PairRecord {
    let expert = array![[[0], [0], [0], [1], [0], [0], [1], [1]]];
    let score = array![[[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0], [8.0_f32]]];
    PairRecord {
        gate_weight: Array3::ones(expert.dim()),
        expert,
        score: Some(score),
    }
}

#[test]
fn contribution() {
    let trace = Trace::new(1, &[(steps()[0].clone(), Some(pairs()))]);
    let mut asked = settings("fixed,symi,lrmoe@0.5,lrmoe@0");
    asked.method = lrmoe_metric::Method::Top;
    asked.slots = Some(1);
    let kept: Vec<_> = trace
        .policies(&asked)
        .iter()
        .map(|p| p.contribution_kept)
        .collect();
    // SYMI drops the fifth pair of expert 0; quotas 3 and 1 leave the scores 6, 5, 3 and 8.
    assert_eq!(
        kept,
        [Some(1.0), Some(30.0 / 36.0), Some(22.0 / 36.0), Some(0.0)]
    );
    // Without scores in every step the others are not guessed.
    let trace = Trace::new(
        1,
        &[
            (steps()[0].clone(), Some(pairs())),
            (steps()[1].clone(), None),
        ],
    );
    let kept: Vec<_> = trace
        .policies(&asked)
        .iter()
        .map(|p| p.contribution_kept)
        .collect();
    assert_eq!(kept[2], Some(22.0 / 36.0));
}

#[test]
fn files_of_one_run_are_one_trace() {
    let trace = Trace::counts(1, &steps());
    let other = trace.folder.path().join("pairs.safetensors");
    write(&other, 0, 1, &[(steps()[0].clone(), Some(pairs()))]);
    let paths = [trace.path.clone(), other];
    let mut source = lrmoe::replay::Source::open(&paths).expect("two files");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let report = lrmoe::replay::replay(&mut source, &settings("lrmoe"), &stop, |_, _| ());
    let header = report.expect("a replay").header;
    assert_eq!((header.steps, header.scored_steps), (2, 1));

    write(&paths[1], 0, 1, &[(steps()[1].clone(), None)]);
    let mut source = lrmoe::replay::Source::open(&paths).expect("two files");
    let error = lrmoe::replay::replay(&mut source, &settings("lrmoe"), &stop, |_, _| ());
    let message = error.expect_err("different counts").to_string();
    assert!(
        message.ends_with("for step 0, layer 0, rank 0, expert 0: 3 and 4"),
        "{message}"
    );
}

#[test]
fn ranks_and_tokens_are_repeated() {
    let trace = Trace::new(1, &[(steps()[0].clone(), Some(pairs()))]);
    let once = &trace.policies(&settings("fixed"))[0];
    let mut asked = settings("fixed,lrmoe@1");
    asked.tokens_per_rank = Some(12);
    let thrice = trace.policies(&asked);
    let buffers = |policy: &lrmoe::replay::PolicyReport| policy.memory.peak_bytes.token_buffers;
    assert_eq!(buffers(&thrice[0]), 3 * buffers(once));
    assert_eq!(thrice[0].forward_bytes, 3 * once.forward_bytes);
    assert_eq!(thrice[1].contribution_kept, Some(1.0));

    asked.tokens_per_rank = None;
    asked.ranks = Some(4);
    asked.slots = Some(1);
    let report = trace.replay(&asked).expect("a replay");
    // Two ranks have no expert; those that have one run the pairs of two.
    assert_eq!(report.header.ranks, 4);
    assert!(
        report
            .header
            .notes
            .iter()
            .any(|note| note.contains("weak scaling"))
    );
    assert_eq!(buffers(&report.policies[0]), 2 * buffers(once));
}
