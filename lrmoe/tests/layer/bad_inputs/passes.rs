//! Arrays and calls of the passes.

use lrmoe::adamw::AdamW;
use lrmoe::error::Error;
use lrmoe_comm::{Solo, Threads};
use lrmoe_metric::Error as MetricError;
use lrmoe_plan::Error as PlanError;
use ndarray::{Array2, s};

use super::{batch, bits, expect, layer, lrmoe};

#[test]
fn arrays_of_the_forward_pass() {
    let batch = batch();
    let (x, ids, p) = (&batch.x, &batch.expert_ids, &batch.gate_weights);
    let run = |x: &Array2<f32>, ids: &Array2<i32>, p: &Array2<f32>| {
        let mut layer = layer(&batch, lrmoe(0.5));
        let y = layer.forward(&mut Solo, x.view(), ids.view(), p.view(), Some(1));
        y.map(|y| bits(&y))
    };
    let good = run(x, ids, p).expect("forward");
    let shapes = |x, expert_ids, gate_weights| {
        Err(Error::ForwardShapes {
            x,
            expert_ids,
            gate_weights,
            width: 8,
            top_k: 2,
        })
    };
    let metric = |error| Err(Error::Metric(error));
    let (tall, wide) = (Array2::zeros((7, 8)), Array2::zeros((6, 9)));
    expect(
        "a token too many",
        run(&tall, ids, p),
        shapes((7, 8), (6, 2), (6, 2)),
    );
    expect(
        "a column too many",
        run(&wide, ids, p),
        shapes((6, 9), (6, 2), (6, 2)),
    );
    expect(
        "ids",
        run(x, &Array2::zeros((6, 1)), p),
        shapes((6, 8), (6, 1), (6, 2)),
    );
    expect(
        "weights",
        run(x, ids, &Array2::zeros((5, 2))),
        shapes((6, 8), (6, 2), (5, 2)),
    );
    let changed = |id| {
        let mut ids = ids.clone();
        ids[[4, 1]] = id;
        ids
    };
    for id in [5, -2, i32::MIN, i32::MAX] {
        let expected = MetricError::ExpertId {
            token: 4,
            slot: 1,
            id,
            experts: 5,
        };
        expect("id", run(x, &changed(id), p), metric(expected));
    }
    let twice = ids[[4, 0]];
    let expert = twice as usize;
    expect(
        "twice",
        run(x, &changed(twice), p),
        metric(MetricError::RepeatedExpert { token: 4, expert }),
    );
    // Rows in any layout are taken; ids and weights are not.
    let columns = x.t().as_standard_layout().into_owned().reversed_axes();
    expect("columns", run(&columns, ids, p), Ok(good));
    let columns = ids.t().as_standard_layout().into_owned().reversed_axes();
    expect(
        "columns of ids",
        run(x, &columns, p),
        metric(MetricError::Layout { what: "expert ids" }),
    );
    let columns = p.t().as_standard_layout().into_owned().reversed_axes();
    expect(
        "columns of weights",
        run(x, ids, &columns),
        metric(MetricError::Layout {
            what: "gate weights",
        }),
    );
}

/// What is no number in a token's x stays with it in y, and is named where scores meet it.
#[test]
fn numbers_that_are_none() {
    let batch = batch();
    let mut clean = layer(&batch, lrmoe(0.5));
    let (ids, p) = (batch.expert_ids.view(), batch.gate_weights.view());
    let good = clean
        .forward(&mut Solo, batch.x.view(), ids, p, Some(1))
        .expect("forward");
    let first = |pair: usize| {
        let expert = batch.expert_ids[[pair / 2, pair % 2]] as usize;
        Err(Error::Metric(MetricError::NanScore {
            pair: pair as u64,
            expert,
        }))
    };
    let mut x = batch.x.clone();
    x[[2, 3]] = f32::NAN;
    let mut bad = layer(&batch, lrmoe(0.5));
    let y = bad
        .forward(&mut Solo, x.view(), ids, p, Some(1))
        .expect("forward");
    for (token, (found, good)) in y.rows().into_iter().zip(good.rows()).enumerate() {
        match token {
            2 => assert!(found.iter().all(|y| y.is_nan())),
            _ => assert_eq!(bits(found), bits(good), "token {token}"),
        }
    }
    expect(
        "x",
        bad.backward(&mut Solo, batch.dy.view()).map(drop),
        first(4),
    );
    for value in [f32::NAN, f32::INFINITY] {
        let mut dy = batch.dy.clone();
        dy[[1, 0]] = value;
        let mut layer = layer(&batch, lrmoe(0.5));
        layer
            .forward(&mut Solo, batch.x.view(), ids, p, Some(1))
            .expect("forward");
        let found = layer.backward(&mut Solo, dy.view()).map(drop);
        match value.is_nan() {
            true => expect("dy", found, first(2)),
            // The largest score there is.
            false => {
                expect("infinite dy", found, Ok(()));
                let kept = &layer.selection().expect("a selection").pairs;
                assert!(kept.contains(&2) || kept.contains(&3), "{kept:?}");
            }
        }
    }
    let mut p = batch.gate_weights.clone();
    p[[5, 1]] = f32::NAN;
    let mut layer = layer(&batch, lrmoe(0.5));
    layer
        .forward(&mut Solo, batch.x.view(), ids, p.view(), Some(1))
        .expect("forward");
    expect(
        "gate weight",
        layer.backward(&mut Solo, batch.dy.view()).map(drop),
        first(11),
    );
}

#[test]
fn calls_out_of_turn() {
    let batch = batch();
    let mut layer = layer(&batch, lrmoe(0.5));
    let (x, ids, p) = (
        batch.x.view(),
        batch.expert_ids.view(),
        batch.gate_weights.view(),
    );
    let before = || Err(Error::NoForward);
    expect(
        "backward",
        layer.backward(&mut Solo, batch.dy.view()).map(drop),
        before(),
    );
    expect(
        "update",
        layer.update(&mut Solo, &AdamW::default(), 1, 0.1, 1.0),
        before(),
    );
    layer.forward(&mut Solo, x, ids, p, None).expect("forward");
    expect(
        "backward of no step",
        layer.backward(&mut Solo, batch.dy.view()).map(drop),
        before(),
    );
    layer
        .forward(&mut Solo, x, ids, p, Some(1))
        .expect("forward");
    let (dy, expected) = ((5, 8), (6, 8));
    let found = layer
        .backward(&mut Solo, batch.dy.slice(s![..5, ..]))
        .map(drop);
    expect(
        "a token too few",
        found,
        Err(Error::BackwardShape { dy, expected }),
    );
    expect(
        "the right ones",
        layer.backward(&mut Solo, batch.dy.view()).map(drop),
        Ok(()),
    );

    // A world that is not the layer's.
    let mut world = Threads::world(2, std::time::Duration::from_secs(1)).expect("a world");
    let found = layer.forward(&mut world[1], x, ids, p, Some(2)).map(drop);
    let other = Error::OtherWorld {
        rank: 0,
        ranks: 1,
        found_rank: 1,
        found_ranks: 2,
    };
    expect("another world", found, Err(other));

    layer.set_retention(f64::NAN);
    let found = layer.forward(&mut Solo, x, ids, p, Some(2)).map(drop);
    let outside = PlanError::OutOfRange {
        what: "retention",
        value: f64::NAN,
        range: "0 to 1",
    };
    expect("retention", found, Err(Error::Plan(outside)));
}
