//! Gradients beside those of the step.

use lrmoe::layer::{LayerGradients, MoeLayer};
use lrmoe::policy::{Policy, RouterGradient, Selecting};
use lrmoe_comm::Collective;
use ndarray::{Axis, concatenate, s};

use crate::common::{Batch, Stepped, lrmoe, on_ranks, relative_error, split, step};
use crate::{ROUNDING, bits};

/// A rank's gradients beside those of its step, and the step's own after them.
struct Beside {
    full: LayerGradients,
    /// Draws 1, 2 and 1 again.
    redrawn: Vec<LayerGradients>,
    own: LayerGradients,
}

fn beside(batch: &Batch, ranks: usize, policy: &Policy) -> Vec<Beside> {
    let config = batch.config(ranks, policy.clone());
    let shares = split(batch.tokens(), ranks);
    on_ranks(ranks, |comm| {
        let rows = s![shares[comm.rank()].clone(), ..];
        let [x, dy] = [&batch.x, &batch.dy].map(|all| all.slice(rows));
        let (ids, p) = (batch.expert_ids.slice(rows), batch.gate_weights.slice(rows));
        let mut layer =
            MoeLayer::new(config.clone(), comm.rank(), |e| batch.parameters(e)).expect("a layer");
        layer.forward(comm, x, ids, p, Some(1)).expect("forward");
        let before = layer.stats().clone();
        let full = layer.full_gradient(comm, dy).expect("the full gradient");
        let redrawn = [1, 2, 1].map(|draw| layer.redrawn_gradient(comm, dy, draw).expect("a draw"));
        assert_eq!(*layer.stats(), before);
        let (dx, dp) = layer.backward(comm, dy).expect("backward");
        layer.reduce_gradients(comm).expect("reduction");
        let shard = layer.shard_gradient().to_vec();
        let elements: usize = layer.shard_experts().map(|(_, length)| length).sum();
        assert_eq!(elements, shard.len());
        Beside {
            full,
            redrawn: redrawn.into(),
            own: LayerGradients { dx, dp, shard },
        }
    })
}

/// dx, dp and the weight gradients over all ranks.
fn joined(parts: &[Beside], of: impl Fn(&Beside) -> &LayerGradients) -> [Vec<f32>; 3] {
    let rows = |of_part: &dyn Fn(&Beside) -> ndarray::Array2<f32>| {
        let parts: Vec<_> = parts.iter().map(of_part).collect();
        let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
        let all = concatenate(Axis(0), &views).expect("one width");
        all.into_iter().collect::<Vec<_>>()
    };
    [
        rows(&|part| of(part).dx.clone()),
        rows(&|part| of(part).dp.clone()),
        parts
            .iter()
            .flat_map(|part| of(part).shard.clone())
            .collect(),
    ]
}

fn of_step(stepped: &Stepped) -> [Vec<f32>; 3] {
    [
        stepped.dx.iter().copied().collect(),
        stepped.dp.iter().copied().collect(),
        stepped.gradient.clone(),
    ]
}

#[test]
fn the_full_gradient_is_dropless_and_the_step_goes_on_as_without() {
    let mut batch = Batch::random(70, (16, 24), (8, 2), 31);
    for id in batch.expert_ids.iter_mut().step_by(9) {
        *id = -1;
    }
    let all = Policy::Lrmoe(Selecting {
        retention: 0.3,
        router_gradient: RouterGradient::All,
        ..Selecting::default()
    });
    for ranks in [1, 3] {
        let dropless = of_step(&step(&batch, &batch.config(ranks, Policy::Dropless)));
        for policy in [lrmoe(0.3), lrmoe(0.0), all.clone(), Policy::Dropless] {
            let parts = beside(&batch, ranks, &policy);
            let alone = of_step(&step(&batch, &batch.config(ranks, policy.clone())));
            let full = joined(&parts, |part| &part.full);
            for (i, what) in ["dx", "dp", "dw"].into_iter().enumerate() {
                // A sum of products in another order where the outputs were kept.
                assert!(
                    relative_error(&full[i], &dropless[i]) < ROUNDING,
                    "{what} of {policy:?} on {ranks} ranks"
                );
            }
            assert_eq!(
                joined(&parts, |part| &part.own).map(|values| bits(&values)),
                alone.map(|values| bits(&values)),
                "{policy:?} on {ranks} ranks"
            );
        }
    }
}

#[test]
fn draws_repeat_and_differ() {
    let batch = Batch::random(64, (16, 24), (8, 2), 32);
    let parts = beside(&batch, 2, &lrmoe(0.4));
    let draw = |number: usize| joined(&parts, |part| &part.redrawn[number]);
    let own = joined(&parts, |part| &part.own);
    assert_eq!(draw(0), draw(2));
    for (i, what) in ["dx", "dp", "dw"].into_iter().enumerate() {
        assert!(relative_error(&draw(0)[i], &draw(1)[i]) > 0.1, "{what}");
        assert!(relative_error(&draw(0)[i], &own[i]) > 0.1, "{what}");
    }
}

#[test]
fn there_is_no_gradient_before_a_forward_pass() {
    let batch = Batch::random(4, (4, 4), (2, 1), 33);
    let config = batch.config(1, lrmoe(0.5));
    let mut layer = MoeLayer::new(config, 0, |e| batch.parameters(e)).expect("a layer");
    let error = layer.full_gradient(&mut lrmoe_comm::Solo, batch.dy.view());
    let error = error.expect_err("no forward pass").to_string();
    assert_eq!(error, "a training forward pass must come first");
}
