//! Chunks that travel while another is computed with.

use lrmoe::layer::{LayerConfig, MoeLayer};
use lrmoe::policy::{Compensation, DxWeight, Policy, RouterGradient, Selecting};
use lrmoe_comm::Collective;
use ndarray::s;

use super::common::{Batch, Stepped, lrmoe, on_ranks, split, steps};
use super::{bits, precision};

fn values(step: &Stepped) -> [Vec<u32>; 4] {
    [&step.y, &step.dx, &step.dp]
        .map(bits)
        .into_iter()
        .chain([bits(&step.gradient)])
        .collect::<Vec<_>>()
        .try_into()
        .expect("four")
}

/// In chunks of any size, with ranks that have no tokens, on one rank too, where there is nothing to overlap.
#[test]
fn overlap_changes_no_bit() {
    let mut batch = Batch::random(64, (16, 24), (8, 2), 31);
    for id in batch.expert_ids.iter_mut().step_by(9) {
        *id = -1;
    }
    let unbiased = Policy::Lrmoe(Selecting {
        retention: 0.5,
        dx_weight: DxWeight::Selection,
        router_gradient: RouterGradient::All,
        ..Selecting::default()
    });
    let compensated = Policy::Lrmoe(Selecting {
        retention: 0.25,
        compensation: Compensation::Moments,
        ..Selecting::default()
    });
    for policy in [Policy::Dropless, lrmoe(0.5), unbiased, compensated] {
        for shares in [
            split(64, 1),
            split(64, 2),
            split(64, 3),
            vec![0..0, 0..1, 1..1, 1..64],
        ] {
            for chunk_rows in [1, 5, 16, 64] {
                let of = |overlap| LayerConfig {
                    chunk_rows,
                    overlap,
                    ..batch.config(shares.len(), policy.clone())
                };
                let [off, on] = [false, true].map(|on| steps(&batch, &of(on), &shares, 2));
                for (off, on) in off.iter().zip(&on) {
                    let what = format!("{} ranks, chunks of {chunk_rows}", shares.len());
                    assert_eq!(values(on), values(off), "{what}");
                    assert_eq!(on.retained, off.retained, "{what}");
                    for (on, off) in on.stats.iter().zip(&off.stats) {
                        assert_eq!(on.forward_bytes, off.forward_bytes, "{what}");
                        assert_eq!(on.backward_bytes, off.backward_bytes, "{what}");
                    }
                }
            }
        }
    }
}

/// Nor does it change those gradients that are computed beside the step's: of all pairs, and of another draw.
#[test]
fn overlap_changes_no_bit_of_gradients_aside() {
    let batch = Batch::random(64, (16, 24), (8, 2), 33);
    let shares = split(64, 3);
    for chunk_rows in [5, 64] {
        let [off, on] = [false, true].map(|overlap| {
            let config = LayerConfig {
                chunk_rows,
                overlap,
                ..batch.config(shares.len(), lrmoe(0.5))
            };
            on_ranks(shares.len(), |comm| {
                let rows = s![shares[comm.rank()].clone(), ..];
                let [x, dy] = [&batch.x, &batch.dy].map(|all| all.slice(rows));
                let (ids, p) = (batch.expert_ids.slice(rows), batch.gate_weights.slice(rows));
                let mut layer = MoeLayer::new(config.clone(), comm.rank(), |e| batch.parameters(e))
                    .expect("a layer");
                layer.forward(comm, x, ids, p, Some(1)).expect("forward");
                let full = layer.full_gradient(comm, dy).expect("the full gradient");
                let drawn = layer.redrawn_gradient(comm, dy, 1).expect("a draw");
                let (dx, _) = layer.backward(comm, dy).expect("backward");
                let aside = [full, drawn].map(|found| {
                    let list = found.shard.iter().chain(&found.dx).chain(&found.dp);
                    list.map(|value| value.to_bits()).collect::<Vec<_>>()
                });
                (aside, bits(&dx))
            })
        });
        assert_eq!(on, off, "chunks of {chunk_rows}");
    }
}

#[test]
fn overlap_changes_no_bit_of_bf16() {
    let batch = Batch::random(48, (33, 20), (6, 2), 32);
    for chunk_rows in [7, 20] {
        let of = |overlap| LayerConfig {
            chunk_rows,
            overlap,
            ..batch.config(3, lrmoe(0.5))
        };
        let [off, on] = [false, true].map(|on| precision::bf16_step(&batch, &of(on)));
        assert_eq!(values(&on), values(&off), "chunks of {chunk_rows}");
    }
}

/// A second set of rows on their way is held where there are several chunks, and only there.
#[test]
fn overlap_holds_rows_twice_only_where_it_overlaps() {
    let batch = Batch::random(256, (64, 16), (8, 2), 33);
    let held = |ranks, chunk_rows, overlap| {
        let config = LayerConfig {
            chunk_rows,
            overlap,
            ..batch.config(ranks, Policy::Dropless)
        };
        let steps = steps(&batch, &config, &split(256, ranks), 1);
        steps[0].stats[0].buffer_bytes
    };
    for (ranks, chunk_rows) in [(1, 32), (2, u64::MAX)] {
        let [off, on] = [false, true].map(|on| held(ranks, chunk_rows, on));
        assert_eq!(on, off, "{ranks} ranks, chunks of {chunk_rows}");
    }
    // dy out and dx back, each sent and received: about 4 rows of 64 f32 for each row of a chunk, more where a rank sends more than it gets.
    let [off, on] = [false, true].map(|on| held(2, 32, on));
    let added = 32 * 4 * 64 * 4;
    assert!(
        on > off + added / 2 && on < off + 2 * added,
        "{on}, {off} bytes"
    );
}
