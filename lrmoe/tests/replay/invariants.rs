use lrmoe::replay::{ReplayError, Settings};
use ndarray::Array3;
use proptest::prelude::*;

use super::{Trace, settings};

const ALL: &str = "fixed,fixed-replicas,symi,flexmoe,lrmoe@0.5,fixed+chunked,lrmoe@1+chunked,lrmoe@0.25+whole,lrmoe@0";

/// Up to three steps of up to two layers, four ranks and eight experts.
fn steps() -> impl Strategy<Value = Vec<Array3<u32>>> {
    let shape = (1..4usize, 1..3usize, 1..5usize, 1..9usize);
    shape.prop_flat_map(|(steps, layers, ranks, experts)| {
        let counts = proptest::collection::vec(0..40u32, layers * ranks * experts);
        let step = counts.prop_map(move |counts| {
            Array3::from_shape_vec((layers, ranks, experts), counts).expect("as many as asked for")
        });
        proptest::collection::vec(step, steps)
    })
}

/// Sources differ in their tokens, so the trace says nothing of them.
fn trace(steps: &[Array3<u32>]) -> Trace {
    let trace = Trace::counts(1, steps);
    let (layers, ranks, experts) = steps[0].dim();
    let settings = lrmoe::trace::TraceSettings {
        layers,
        ranks,
        experts,
        ..lrmoe::trace::TraceSettings::default()
    };
    let mut writer = lrmoe::trace::TraceWriter::create(&trace.path, settings).expect("a trace");
    for counts in steps {
        writer.push(counts.view()).expect("counts");
    }
    writer.finish().expect("written");
    trace
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_counted_agrees(steps in steps()) {
        let report = trace(&steps).replay(&settings(ALL)).expect("a replay");
        for policy in &report.policies {
            let memory = &policy.memory;
            for parts in [memory.peak_bytes, memory.mean_bytes] {
                let rounding = if parts == memory.peak_bytes { 0 } else { 4 };
                let sum = parts.placement + parts.replicas + parts.token_buffers + parts.stash;
                prop_assert!(parts.total - sum <= rounding, "{policy:?}");
                prop_assert!(parts.token_buffers - parts.forward_buffers - parts.backward_buffers <= rounding);
            }
            prop_assert!(memory.mean_bytes.total <= memory.peak_bytes.total);
            prop_assert!(memory.peak_without_stash_bytes <= memory.peak_bytes.total);
            prop_assert!(policy.load_max_over_mean >= 1.0 - 1e-12);
            prop_assert!(policy.load_max_over_mean <= policy.worst_load_max_over_mean + 1e-12);
            prop_assert!((0.0..=1.0).contains(&(policy.dropped + policy.left_out)));
            prop_assert_eq!(policy.forward_bytes, policy.forward_links.total());
            prop_assert_eq!(policy.contribution_kept, None);
        }
        let [fixed, _, symi, flexmoe, half, _, whole, .., frozen] = &report.policies[..] else {
            panic!("as many as asked for");
        };
        prop_assert_eq!((fixed.update_bytes, fixed.memory.peak_bytes.replicas), (0, 0));
        prop_assert_eq!((frozen.update_bytes, frozen.backward_bytes), (0, 0));
        prop_assert_eq!((fixed.dropped, flexmoe.dropped, half.dropped, symi.left_out), (0.0, 0.0, 0.0, 0.0));
        prop_assert_eq!((fixed.left_out, whole.left_out), (0.0, 0.0));
    }

    #[test]
    fn everything_retained_in_chunks_is_dropless_in_chunks(step in steps()) {
        // Before the first step all experts count alike: without room for replicas both lie contiguously.
        let step = &step[..1];
        let experts = step[0].dim().2;
        let ranks = step[0].dim().1;
        prop_assume!(experts.is_multiple_of(ranks));
        let mut asked = settings("fixed+chunked,lrmoe@1+chunked");
        asked.slots = Some((experts / ranks) as u32);
        let policies = trace(step).policies(&asked);
        prop_assert_eq!(policies[0].backward_bytes, policies[1].backward_bytes);
        prop_assert_eq!(policies[0].memory, policies[1].memory);
        prop_assert_eq!(policies[0].load_max_over_mean, policies[1].load_max_over_mean);
    }

    #[test]
    fn lrmoe_keeps_its_budget(steps in steps(), share in 0.0..1.0f64) {
        let trace = trace(&steps);
        let asked = |budget| Settings { budget, ..settings("lrmoe@1,lrmoe@0.5+chunked") };
        let needed = |asked: &Settings| trace.policies(asked).iter().map(|p| p.memory.needed_bytes).max();
        let free = needed(&asked(1 << 30)).unwrap_or(0);
        let mut budget = (free as f64 * share) as u64;
        // The error names what works for the step at which it stops.
        for _ in 0..=steps.len() {
            match trace.replay(&asked(budget)) {
                Ok(report) => {
                    for policy in &report.policies {
                        prop_assert!(policy.memory.needed_bytes <= budget, "{budget}: {policy:?}");
                        prop_assert!(!policy.memory.over_budget);
                    }
                    return Ok(());
                }
                Err(ReplayError::Budget { missing, .. }) => {
                    prop_assert!(missing > 0);
                    budget += missing;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}
