//! The composed layer: gradients, invariance, and routing that leaves ranks or experts empty.

#[path = "../common/mod.rs"]
mod common;
mod edges;
mod moments;
mod oracle;
mod overlap;
mod precision;
mod scores;
mod stash;
mod unbiased;

use common::{Batch, Stepped, lrmoe, relative_error, split, step, steps};
use lrmoe::config::Dtype;
use lrmoe::layer::{LayerConfig, MoeLayer, imbalance};
use lrmoe::policy::{Policy, RouterGradient, Selecting};
use lrmoe_comm::Solo;
use lrmoe_metric::{Method, Score};
use lrmoe_plan::{ExpertShape, Fixed, MemoryModel};

/// f32 sums in another order: a few hundred terms at most.
const ROUNDING: f64 = 1e-5;

fn bits<'a>(values: impl IntoIterator<Item = &'a f32>) -> Vec<u32> {
    values.into_iter().map(|v| v.to_bits()).collect()
}

fn assert_close(a: &Stepped, b: &Stepped, what: &str) {
    assert!(relative_error(&a.y, &b.y) < ROUNDING, "{what}: y");
    assert!(relative_error(&a.dx, &b.dx) < ROUNDING, "{what}: dx");
    assert!(relative_error(&a.dp, &b.dp) < ROUNDING, "{what}: dp");
    assert!(
        relative_error(&a.gradient, &b.gradient) < ROUNDING,
        "{what}: gradient"
    );
}

#[test]
fn retention_one_is_dropless_bit_for_bit_on_one_rank() {
    let batch = Batch::random(64, (16, 24), (8, 2), 1);
    let full = step(&batch, &batch.config(1, Policy::Dropless));
    for method in [Method::Priority, Method::Top] {
        let policy = Policy::Lrmoe(Selecting {
            retention: 1.0,
            method,
            ..Selecting::default()
        });
        let kept = step(&batch, &batch.config(1, policy));
        assert_eq!(bits(&kept.y), bits(&full.y));
        assert_eq!(bits(&kept.dx), bits(&full.dx));
        assert_eq!(bits(&kept.dp), bits(&full.dp));
        assert_eq!(bits(&kept.gradient), bits(&full.gradient));
    }
}

#[test]
fn the_router_gradient_of_all_pairs_is_exact() {
    let batch = Batch::random(64, (16, 24), (8, 2), 16);
    let full = step(&batch, &batch.config(3, Policy::Dropless));
    for retention in [0.0, 0.3] {
        let policy = Policy::Lrmoe(Selecting {
            retention,
            router_gradient: RouterGradient::All,
            ..Selecting::default()
        });
        let part = step(&batch, &batch.config(3, policy));
        assert!(relative_error(&part.dp, &full.dp) < ROUNDING);
        assert!(relative_error(&part.dx, &full.dx) > 0.1);
    }
}

#[test]
fn any_number_of_ranks_gives_the_gradients_of_one() {
    let batch = Batch::random(70, (16, 24), (8, 2), 2);
    let one = step(&batch, &batch.config(1, Policy::Dropless));
    for ranks in [2, 3, 4, 8] {
        assert_close(
            &step(&batch, &batch.config(ranks, Policy::Dropless)),
            &one,
            &format!("dropless on {ranks} ranks"),
        );
        assert_close(
            &step(&batch, &batch.config(ranks, lrmoe(1.0))),
            &one,
            &format!("lrmoe on {ranks} ranks"),
        );
    }
}

#[test]
fn selections_do_not_depend_on_the_number_of_ranks() {
    let batch = Batch::random(96, (16, 24), (8, 3), 3);
    for score in Score::ALL {
        for method in [Method::Priority, Method::Top] {
            let policy = Policy::Lrmoe(Selecting {
                retention: 0.4,
                score,
                method,
                ..Selecting::default()
            });
            let one = step(&batch, &batch.config(1, policy.clone()));
            assert_eq!(one.retained.len(), (0.4_f64 * 96.0 * 3.0).round() as usize);
            for ranks in [2, 4, 8] {
                let many = step(&batch, &batch.config(ranks, policy.clone()));
                assert_eq!(
                    many.retained, one.retained,
                    "{score} {method} on {ranks} ranks"
                );
                assert_close(&many, &one, &format!("{score} {method} on {ranks} ranks"));
            }
        }
    }
}

#[test]
fn nothing_depends_on_the_number_of_threads() {
    let batch = Batch::random(80, (33, 20), (8, 2), 4);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("a pool");
        // Rank threads use the ambient pool only on the thread that installed it; one rank runs inside.
        pool.install(|| {
            let mut comm = Solo;
            let config = batch.config(1, lrmoe(0.5));
            let mut layer =
                MoeLayer::new(config, 0, |expert| batch.parameters(expert)).expect("a layer");
            (1..=3)
                .map(|number| {
                    format!(
                        "{:?}",
                        strip_clock(common::rank_step(
                            &batch,
                            &mut layer,
                            &mut comm,
                            0..80,
                            number
                        ))
                    )
                })
                .collect::<Vec<_>>()
        })
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(5));
}

fn strip_clock(mut step: common::RankStep) -> common::RankStep {
    step.stats.seconds = Default::default();
    step.stats.buffer_bytes = 0;
    step
}

#[test]
fn chunks_change_nothing_but_rounding() {
    let batch = Batch::random(64, (16, 24), (8, 2), 9);
    let whole = step(
        &batch,
        &LayerConfig {
            chunk_rows: u64::MAX,
            ..batch.config(4, lrmoe(0.5))
        },
    );
    for chunk_rows in [1, 7, 64] {
        let chunked = step(
            &batch,
            &LayerConfig {
                chunk_rows,
                ..batch.config(4, lrmoe(0.5))
            },
        );
        assert_eq!(chunked.retained, whole.retained, "chunks of {chunk_rows}");
        assert_close(&chunked, &whole, &format!("chunks of {chunk_rows}"));
    }
}

/// A token's rows are added in slot order, an instance's in row order, whatever the chunks they came in.
#[test]
fn backward_is_the_same_to_the_bit_in_any_chunks() {
    let mut batch = Batch::random(64, (33, 20), (8, 3), 19);
    for id in batch.expert_ids.iter_mut().step_by(7) {
        *id = -1;
    }
    for (ranks, policy) in [(1, Policy::Dropless), (1, lrmoe(0.6)), (3, lrmoe(0.6))] {
        let config = batch.config(ranks, policy);
        let run = |chunk_rows| {
            let config = LayerConfig {
                chunk_rows,
                ..config.clone()
            };
            let stepped = step(&batch, &config);
            let values = [
                bits(&stepped.dx),
                bits(&stepped.dp),
                bits(&stepped.gradient),
            ];
            (stepped.retained, values)
        };
        let whole = run(u64::MAX);
        for chunk_rows in [1, 5, 32, 64] {
            let chunked = run(chunk_rows);
            assert_eq!(chunked, whole, "chunks of {chunk_rows} on {ranks} ranks");
        }
    }
}

#[test]
fn steps_on_many_ranks_follow_those_on_one() {
    let batch = Batch::random(64, (16, 24), (8, 2), 10);
    let one = steps(&batch, &batch.config(1, Policy::Dropless), &split(64, 1), 6);
    for policy in [Policy::Dropless, lrmoe(1.0)] {
        let four = steps(&batch, &batch.config(4, policy), &split(64, 4), 6);
        // Rounding grows through the updates; a weight delivered to the wrong place would show at once.
        assert!(
            relative_error(&four[5].y, &one[5].y) < 1e-3,
            "{}",
            relative_error(&four[5].y, &one[5].y)
        );
        assert!(
            relative_error(&one[5].y, &one[0].y) > 1e-2,
            "the weights must have moved"
        );
    }
}

#[test]
fn replicas_balance_the_ranks() {
    // Two experts draw everything; contiguous placement puts both on rank 0.
    let mut batch = Batch::random(96, (8, 12), (8, 1), 11);
    batch
        .expert_ids
        .indexed_iter_mut()
        .for_each(|((token, _), id)| *id = (token % 2) as i32);
    let stepped = steps(&batch, &batch.config(4, lrmoe(0.5)), &split(96, 4), 2);
    assert!(
        imbalance(&stepped[1].stats[0].backward_rows) < 1.5,
        "{}",
        stepped[1].stats[0].backward_rows
    );
}

#[test]
fn frozen_experts_keep_their_weights() {
    let batch = Batch::random(32, (8, 12), (4, 2), 12);
    let stepped = steps(&batch, &batch.config(2, lrmoe(0.0)), &split(32, 2), 4);
    assert_eq!(bits(&stepped[0].y), bits(&stepped[3].y));
    assert!(
        stepped[3]
            .gradient
            .iter()
            .chain(&stepped[3].dx)
            .all(|v| *v == 0.0)
    );
}

#[test]
fn symi_drops_by_position_beyond_the_capacity() {
    let mut batch = Batch::random(40, (8, 12), (4, 1), 13);
    batch.expert_ids.fill(0);
    let mut config = batch.config(
        2,
        Policy::Symi {
            capacity_factor: 1.0,
        },
    );
    config.slots = vec![2, 2];
    let stepped = step(&batch, &config);
    // Four slots for four experts: capacity 40 / 4 = 10 pairs each.
    assert_eq!(stepped.stats[0].dropped, 30);
    assert_eq!(
        stepped
            .retained
            .iter()
            .map(|(pair, _)| *pair)
            .collect::<Vec<_>>(),
        (0..10).collect::<Vec<_>>()
    );
    assert!(
        stepped
            .y
            .rows()
            .into_iter()
            .skip(10)
            .all(|row| row.iter().all(|y| *y == 0.0))
    );
}

#[test]
fn measured_buffers_stay_within_the_memory_model() {
    let (tokens, width, hidden, top_k) = (512, 64, 96, 2);
    let batch = Batch::random(tokens, (width, hidden), (8, top_k), 14);
    let cases = [
        (1, 1.0, Dtype::F32, false),
        (1, 0.25, Dtype::F32, false),
        (4, 0.5, Dtype::F32, false),
        (4, 0.5, Dtype::F32, true),
        (1, 1.0, Dtype::Bf16, false),
        (1, 0.25, Dtype::Bf16, false),
        (4, 0.5, Dtype::Bf16, false),
        (4, 0.5, Dtype::Bf16, true),
    ];
    let cases = cases
        .into_iter()
        .flat_map(|case| stash::MODES.map(|stash| (case, stash)));
    for ((ranks, retention, dtype, overlap), stash) in cases {
        let policy = Policy::Lrmoe(Selecting {
            retention,
            score: Score::Forward,
            ..Selecting::default()
        });
        // Without replicas, so that no instance holds more than is chosen of it.
        let config = LayerConfig {
            chunk_rows: 200,
            overlap,
            stash,
            slots: vec![(8 / ranks) as u32; ranks],
            ..batch.config(ranks, policy)
        };
        let stepped = match dtype {
            Dtype::F32 => step(&batch, &config),
            Dtype::Bf16 => precision::bf16_step(&batch, &config),
        };
        let model = MemoryModel {
            shape: ExpertShape {
                width,
                hidden,
                gated: true,
                bytes: dtype.bytes(),
            },
            top_k,
            tokens: tokens / ranks,
            chunk_rows: 200,
            overlap,
            stash,
            keeps_outputs: false,
            fixed: 0,
        };
        for (rank, stats) in stepped.stats.iter().enumerate() {
            let (forward, retained) = (
                stats.forward_rows.column(rank).sum(),
                stats.backward_rows.column(rank).sum(),
            );
            let placement = Fixed::placement(8, ranks).expect("a placement");
            let memory = model.of_rank(&placement, rank, config.slots[rank], forward, retained);
            let modelled = memory.forward_buffers + memory.backward_buffers + memory.stash;
            // The kernels add scratch per thread and round each group up to 16 rows; an array of dy is copied once.
            let copy = tokens / ranks * width * dtype.bytes();
            let allowed = modelled + (8 * 16 * 3 * hidden * 4 + copy) as u64 + (1 << 20);
            assert!(
                stats.buffer_bytes <= allowed && stats.buffer_bytes > modelled / 3,
                "{ranks} ranks, retention {retention}, {dtype}, {stash}: measured {}, modelled {modelled}",
                stats.buffer_bytes
            );
        }
    }
}
