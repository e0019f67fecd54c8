//! What a row gives does not depend on its company or on the number of threads, to the bit.

use crate::problem::{Problem, Results};
use lrmoe_kernels::{Activation, Workspace};
use proptest::prelude::*;

fn bits<'a>(values: impl IntoIterator<Item = &'a f32>) -> Vec<u32> {
    values.into_iter().map(|v| v.to_bits()).collect()
}

/// Row `a` of one result equals row `b` of another.
fn assert_same_row(one: &Results, a: usize, other: &Results, b: usize) {
    assert_eq!(
        bits(one.out.row(a)),
        bits(other.out.row(b)),
        "out of rows {a}, {b}"
    );
    assert_eq!(one.h_norms[a], other.h_norms[b], "norm of rows {a}, {b}");
    assert_eq!(
        bits(one.dx.row(a)),
        bits(other.dx.row(b)),
        "dx of rows {a}, {b}"
    );
    assert_eq!(
        one.dp[a].to_bits(),
        other.dp[b].to_bits(),
        "dp of rows {a}, {b}"
    );
}

fn assert_same(one: &Results, other: &Results) {
    for row in 0..one.dp.len() {
        assert_same_row(one, row, other, row);
    }
    assert_eq!(
        one.dgate.as_ref().map(bits),
        other.dgate.as_ref().map(bits),
        "gate gradients"
    );
    assert_eq!(bits(&one.dup), bits(&other.dup), "up gradients");
    assert_eq!(bits(&one.ddown), bits(&other.ddown), "down gradients");
}

fn with_threads(threads: usize, problem: &Problem) -> Results {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap();
    pool.install(|| problem.run(&mut Workspace::new()))
}

/// Every row alone, rows in another order, and a part of the rows, against all together.
fn check_rows(problem: &Problem) {
    let workspace = &mut Workspace::new();
    let all = problem.run(workspace);
    for row in 0..problem.rows() {
        assert_same_row(&all, row, &problem.only(&[row]).run(workspace), 0);
    }
    let mut reversed: Vec<_> = (0..problem.rows()).rev().collect();
    reversed.sort_by_key(|&row| problem.instance_of(row));
    let tail: Vec<_> = (problem.rows() / 3..problem.rows()).collect();
    for rows in [reversed, tail] {
        let part = problem.only(&rows).run(workspace);
        for (place, &row) in rows.iter().enumerate() {
            assert_same_row(&all, row, &part, place);
        }
    }
}

#[test]
fn rows_do_not_depend_on_their_company() {
    // Sizes about those at which gemm changes its ways: 1, 2 terms, 16 * 16 elements, 64, 512 terms.
    for (width, hidden) in [
        (1, 1),
        (1, 40),
        (40, 1),
        (2, 3),
        (3, 2),
        (15, 17),
        (64, 65),
        (300, 128),
    ] {
        for rows in [1, 2, 15, 16, 17, 63, 64, 65] {
            check_rows(&Problem::random(
                Activation::SwiGlu,
                width,
                hidden,
                &[rows, 3],
            ));
        }
    }
}

#[test]
fn long_rows_do_not_depend_on_their_company() {
    for (width, hidden) in [(2048, 8), (7, 1025), (513, 512), (512, 513)] {
        check_rows(&Problem::random(
            Activation::Gelu,
            width,
            hidden,
            &[3, 0, 70],
        ));
    }
}

#[test]
fn nothing_depends_on_the_number_of_threads() {
    for (width, hidden) in [(1, 1), (33, 129), (600, 70)] {
        let groups = [0, 1, 200, 17, 64, 65, 0, 5];
        let problem = Problem::random(Activation::GegluErf, width, hidden, &groups);
        let one = with_threads(1, &problem);
        for threads in [2, 5] {
            assert_same(&one, &with_threads(threads, &problem));
        }
    }
}

#[test]
fn a_weight_scales_weight_gradients_alone() {
    let mut problem = Problem::random(Activation::SwiGlu, 20, 30, &[70, 2]);
    problem.w.fill(1.0);
    let plain = problem.run(&mut Workspace::new());
    problem.w.fill(4.0);
    let mut four = problem.run(&mut Workspace::new());
    // A power of two, so nothing rounds differently.
    for gradient in [four.dgate.as_mut().unwrap(), &mut four.dup, &mut four.ddown] {
        gradient.mapv_inplace(|g| g / 4.0);
    }
    assert_same(&plain, &four);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_size(
        width in 1_usize..=300,
        hidden in 1_usize..=300,
        groups in prop::collection::vec(0_usize..=70, 1..4),
        activation in prop::sample::select(&Activation::ALL[..]),
    ) {
        let problem = Problem::random(activation, width, hidden, &groups);
        let all = problem.run(&mut Workspace::new());
        for row in (0..problem.rows()).step_by(7) {
            assert_same_row(&all, row, &problem.only(&[row]).run(&mut Workspace::new()), 0);
        }
        assert_same(&all, &with_threads(5, &problem));
    }
}
