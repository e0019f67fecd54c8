//! Models of the world of threads, of which loom tries all orders of what the ranks do (up to a number of
//! preemptions) and all values that the memory model lets them see: `scripts/loom`.

use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use std::time::Duration;

use super::world::World;
use crate::{Call, Error};

/// Loom's clock stands still: a wait ends when there is nothing to wait for, or at once.
const LONG: Duration = Duration::from_secs(600);

const POISON: u32 = u32::MAX;

/// Elements for each rank that are copied, and that are lent.
const COPIED: usize = 1;
const LENT: usize = 3;

fn model(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(run);
}

/// Runs the ranks of a world as threads and returns what they return.
fn ranks<R: 'static>(
    ranks: usize,
    deadline: Duration,
    run: impl Fn(&World, usize) -> R + Copy + Send + 'static,
) -> Vec<R> {
    let world = Arc::new(World::new(ranks, deadline));
    let others: Vec<_> = (1..ranks)
        .map(|rank| {
            let world = Arc::clone(&world);
            thread::spawn(move || run(&world, rank))
        })
        .collect();
    let first = run(&world, 0);
    let others = others.into_iter().map(|rank| rank.join().unwrap());
    std::iter::once(first).chain(others).collect()
}

fn value(rank: usize, exchange: usize) -> u32 {
    (100 * exchange + rank) as u32
}

/// Gives a value to every rank, `len` times, and checks what comes from them.
fn exchange(world: &World, rank: usize, exchange: usize, len: usize) -> Result<(), Error> {
    let mut mine = vec![value(rank, exchange); len];
    // Loom lets other threads run where one touches this.
    let pause = AtomicBool::new(false);
    let count = world.ranks();
    let send = vec![&mine[..]; count];
    // SAFETY: each thread of a model is one rank.
    let result = unsafe {
        world.exchange(
            rank,
            Call::Barrier,
            None,
            &send,
            |posts| {
                for from in (0..count).filter(|&from| from != rank) {
                    pause.load(Ordering::Relaxed);
                    let part: &[u32] = bytemuck::cast_slice(posts.part(from, rank));
                    assert_eq!(part, vec![value(from, exchange); len]);
                }
            },
            || (),
        )
    };
    // As the caller may do with its own memory.
    mine.fill(POISON);
    result
}

#[test]
fn mailboxes_are_read_before_they_are_written_again() {
    model(3, || {
        let results = ranks(2, LONG, |world, rank| {
            (0..3).try_for_each(|number| exchange(world, rank, number, COPIED))
        });
        assert_eq!(results, vec![Ok(()); 2]);
    });
}

#[test]
fn memory_is_lent_until_it_is_read() {
    model(3, || {
        let results = ranks(2, LONG, |world, rank| {
            (0..2).try_for_each(|number| exchange(world, rank, number, LENT))
        });
        assert_eq!(results, vec![Ok(()); 2]);
    });
}

#[test]
fn only_the_lender_waits() {
    model(3, || {
        let results = ranks(2, LONG, |world, rank| {
            let len = [LENT, COPIED][rank];
            let mine = vec![value(rank, 0); len];
            let send = vec![&mine[..]; 2];
            // SAFETY: each thread of a model is one rank.
            unsafe {
                world.exchange(
                    rank,
                    Call::Barrier,
                    None,
                    &send,
                    |posts| bytemuck::cast_slice::<u8, u32>(posts.part(1 - rank, rank))[0],
                    || (),
                )
            }
        });
        assert_eq!(results, [Ok(value(1, 0)), Ok(value(0, 0))]);
    });
}

#[test]
fn the_last_of_three_wakes_all() {
    model(2, || {
        let results = ranks(3, LONG, |world, rank| exchange(world, rank, 0, COPIED));
        assert_eq!(results, vec![Ok(()); 3]);
    });
}

#[test]
fn memory_of_a_rank_that_gives_up_is_not_read() {
    model(3, || {
        // Whether an exchange comes about depends on the order; `exchange` checks what was read.
        let results = ranks(2, Duration::ZERO, |world, rank| {
            (0..2).try_for_each(|number| exchange(world, rank, number, LENT))
        });
        for result in results {
            let late = |error: &Error| matches!(error, Error::Deadline { .. });
            assert!(result.as_ref().err().is_none_or(late), "{result:?}");
        }
    });
}

#[test]
fn memory_of_three_of_which_one_leaves_is_not_read() {
    model(2, || {
        let results = ranks(3, LONG, |world, rank| {
            if rank == 2 {
                world.leave(rank);
                return Ok(());
            }
            exchange(world, rank, 0, LENT)
        });
        for result in &results[..2] {
            let lost = matches!(result, Err(Error::PeerLost { rank: 2, .. }));
            assert!(lost, "{result:?}");
        }
    });
}

#[test]
fn who_leaves_after_an_exchange_does_not_end_it() {
    for len in [COPIED, LENT] {
        model(3, move || {
            let results = ranks(2, LONG, move |world, rank| {
                let result = exchange(world, rank, 0, len);
                world.leave(rank);
                result
            });
            assert_eq!(results, vec![Ok(()); 2]);
        });
    }
}

#[test]
fn who_comes_to_a_rank_that_fails_is_told() {
    model(3, || {
        let results = ranks(2, LONG, |world, rank| {
            if rank == 1 {
                exchange(world, rank, 0, LENT)?;
                return Err(world.fail(rank, Error::NoRanks));
            }
            (0..2).try_for_each(|number| exchange(world, rank, number, LENT))
        });
        assert_eq!(results, vec![Err(Error::NoRanks); 2]);
    });
}
