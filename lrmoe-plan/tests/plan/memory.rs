//! The memory model against bytes counted plainly.

use lrmoe_plan::{Error, ExpertShape, Memory, MemoryModel, Placement, Stash};
use proptest::prelude::*;

fn model(gated: bool) -> MemoryModel {
    MemoryModel {
        shape: ExpertShape {
            width: 10,
            hidden: 7,
            gated,
            bytes: 2,
        },
        top_k: 3,
        tokens: 11,
        chunk_rows: 64,
        overlap: false,
        stash: Stash::Recompute,
        keeps_outputs: false,
        fixed: 1000,
    }
}

#[test]
fn every_term_by_hand() {
    let placement = Placement::new(3, vec![vec![0, 1], vec![0, 2]]).unwrap();
    let first = model(true).of_rank(&placement, 0, 3, 100, 5);
    let forward_row = 4 * 10 * 2 + 32;
    let backward_row = (5 * 10 + 3 * 7) * 2 + 24;
    let slot = 2 * 3 * 10 * 7 * 2;
    let expected = Memory {
        placement: 2 * slot,
        replicas: slot,
        forward_buffers: 64 * forward_row,
        backward_buffers: 5 * backward_row,
        stash: 11 * 10 * 2 + 11 * 3 * 16,
        optimizer: 3 * 4 * (3 * 3 * 10 * 7u64).div_ceil(2),
        fixed: 1000,
    };
    assert_eq!(first, expected);
    let second = model(true).of_rank(&placement, 1, 2, 9, 5);
    assert_eq!((second.placement, second.replicas), (slot, slot));
    assert_eq!(second.forward_buffers, 9 * forward_row);
    let sum: u64 = first.parts().iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(first.total(), sum);
    assert!(first.to_string().ends_with(&format!(" {sum}")));
    assert_eq!(model(false).shape.weight_bytes(), 2 * 10 * 7 * 2);
    for (stash, elements) in [
        (Stash::Recompute, 8),
        (Stash::Full, 6),
        (Stash::ForwardSelect, 6),
    ] {
        let overlapping = MemoryModel {
            overlap: true,
            stash,
            ..model(true)
        };
        assert_eq!(overlapping.forward_row_bytes(), elements * 10 * 2 + 32);
    }
    let kept = MemoryModel {
        keeps_outputs: true,
        ..model(true)
    };
    assert_eq!(
        kept.stash_bytes(100, 5),
        model(true).stash_bytes(100, 5) + 11 * 3 * 10 * 2
    );
}

#[test]
fn sizes_beyond_u64_stay_at_its_end() {
    let mut huge = model(true);
    huge.shape.width = usize::MAX;
    let result = huge.capacities(&[1], 1, &[7]);
    assert!(matches!(
        result,
        Err(Error::BudgetTooSmall {
            smallest: u64::MAX,
            ..
        })
    ));
}

#[test]
fn bad_requests() {
    let model = model(true);
    assert!(matches!(model.capacities(&[], 1, &[]), Err(Error::NoRanks)));
    assert!(matches!(
        model.capacities(&[1], 1, &[1, 1]),
        Err(Error::Mismatch { .. })
    ));
    assert!(matches!(
        model.capacities(&[1, 1], 3, &[0, 0]),
        Err(Error::TooFewSlots {
            slots: 2,
            experts: 3
        })
    ));
    let error = model.capacities(&[1], 1, &[0]).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("budget of 0 bytes on rank 0 is "),
        "{text}"
    );
}

proptest! {
    #[test]
    fn capacities_fill_the_budget(
        slots in prop::collection::vec(1u32..6, 1..5),
        spare in 0u64..100_000,
        gated: bool,
        stash in stashes(),
    ) {
        let model = MemoryModel { stash, ..model(gated) };
        let experts = slots.len();
        let by_rank = (0..experts as u32).map(|e| vec![e]).collect();
        let placement = Placement::new(experts, by_rank).unwrap();
        // All pairs of the layer.
        let forward = (experts * model.tokens * model.top_k) as u64;
        let memory = |rank: usize, rows| {
            model.of_rank(&placement, rank, slots[rank], forward, rows).total()
        };
        let budget: Vec<u64> = (0..experts).map(|rank| memory(rank, 0) + spare).collect();
        let capacities = model.capacities(&slots, experts, &budget).unwrap();
        for (rank, &rows) in capacities.iter().enumerate() {
            prop_assert!(memory(rank, rows) <= budget[rank]);
            prop_assert!(memory(rank, rows + 1) > budget[rank]);
            prop_assert_eq!(memory(rank, rows + 1) - memory(rank, rows), model.retained_row_bytes());
        }
    }

    #[test]
    fn the_smallest_budget_is_the_smallest(
        slots in prop::collection::vec(1u32..6, 1..5),
        short in 1u64..2000,
        stash in stashes(),
    ) {
        let model = MemoryModel { stash, ..model(true) };
        let rank = slots.len() - 1;
        let mut budget = vec![u64::MAX; slots.len()];
        budget[rank] = 2000 - short;
        let result = model.capacities(&slots, slots.len(), &budget);
        let Err(Error::BudgetTooSmall { rank: named, budget: given, missing, smallest }) = result
        else {
            panic!("{result:?}");
        };
        prop_assert_eq!((named, given), (rank, budget[rank]));
        prop_assert!(given + missing <= smallest);
        budget[rank] = given + missing;
        prop_assert!(model.capacities(&slots, slots.len(), &budget).is_ok());
        budget.fill(smallest);
        prop_assert!(model.capacities(&slots, slots.len(), &budget).is_ok());
        budget.fill(smallest - 1);
        let result = model.capacities(&slots, slots.len(), &budget);
        let one_missing = matches!(result, Err(Error::BudgetTooSmall { missing: 1, .. }));
        prop_assert!(one_missing);
    }
}

fn stashes() -> impl Strategy<Value = Stash> {
    prop::sample::select(vec![Stash::Recompute, Stash::Full, Stash::ForwardSelect])
}

#[test]
fn stash_modes_by_hand() {
    let of = |stash| MemoryModel {
        stash,
        ..model(true)
    };
    let pairs = 11 * 3 * 16;
    let row = (10 + 2 * 7) * 2;
    assert_eq!(of(Stash::Full).stash_bytes(100, 5), pairs + 100 * row);
    assert_eq!(
        of(Stash::ForwardSelect).stash_bytes(100, 5),
        pairs + 5 * row
    );
    let plain = MemoryModel {
        stash: Stash::Full,
        ..model(false)
    };
    assert_eq!(plain.stash_bytes(100, 5), pairs + 100 * (10 + 7) * 2);
    for stash in [Stash::Recompute, Stash::Full, Stash::ForwardSelect] {
        assert_eq!(of(stash).backward_row_bytes(), (5 * 10 + 3 * 7) * 2 + 24);
        assert_eq!(stash.to_string().parse::<Stash>().unwrap(), stash);
    }
    let error = "keep".parse::<Stash>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "unknown stash mode `keep`, expected one of recompute, stash, forward-select"
    );
}

#[test]
fn rows_at_once_are_counted_in_full() {
    let whole = MemoryModel {
        chunk_rows: u64::MAX,
        ..model(true)
    };
    let placement = Placement::new(1, vec![vec![0]]).unwrap();
    let memory = whole.of_rank(&placement, 0, 1, 1000, 7);
    assert_eq!(memory.forward_buffers, 1000 * whole.forward_row_bytes());
    assert_eq!(
        memory.token_buffers(),
        memory.forward_buffers + 7 * whole.backward_row_bytes()
    );
}
