//! What ranks tell each other before a collective, to see whether they make the same call.

use std::time::Duration;

use crate::check::counts_agree;
use crate::{Call, Error, Reduction};

const ELEMENTS: [&str; 3] = ["u32", "f32", "bf16"];

/// Words of one rank: whether its own arguments fit, the call, its counts.
const STATE: usize = 0;
const CALL: usize = 1;
const COUNTS: usize = 6;

pub(crate) fn words(ranks: usize) -> usize {
    COUNTS + 4 * ranks
}

/// What a rank says; `None` if its own arguments do not fit, and it will not take part.
pub(crate) fn encode(ranks: usize, call: Option<(Call, Option<[&[usize]; 2]>)>) -> Vec<u32> {
    let mut words = vec![0; words(ranks)];
    if let Some((call, counts)) = call {
        words[STATE] = 1;
        words[CALL..COUNTS].copy_from_slice(&encode_call(call));
        let counts = counts.into_iter().flatten().flatten();
        for (pair, &count) in words[COUNTS..].chunks_exact_mut(2).zip(counts) {
            pair.copy_from_slice(&halves(count));
        }
    }
    words
}

/// Whether all ranks make the same call, from the words of all, which took this rank so long to have. Every rank comes to the same verdict.
pub(crate) fn agree(ranks: usize, all: &[u32], mine: Call, waited: Duration) -> Result<(), Error> {
    let of = |rank: usize| &all[rank * words(ranks)..][..words(ranks)];
    if let Some(rank) = (0..ranks).find(|&rank| of(rank)[STATE] == 0) {
        return Err(Error::PeerLost {
            rank,
            collective: mine,
            waited,
        });
    }
    let call = |rank: usize| &of(rank)[CALL..COUNTS];
    if let Some(rank) = (0..ranks).find(|&rank| call(rank) != call(0)) {
        return Err(Error::Mismatch {
            rank,
            found: decode_call(call(rank)),
            expected: decode_call(call(0)),
        });
    }
    if !matches!(mine, Call::AllToAll { .. }) {
        return Ok(());
    }
    let counts = |rank: usize| -> Vec<usize> {
        let (pairs, _) = of(rank)[COUNTS..].as_chunks();
        pairs.iter().map(|&pair| whole(pair)).collect()
    };
    let counts: Vec<_> = (0..ranks).map(counts).collect();
    counts_agree(
        ranks,
        |rank| &counts[rank][..ranks],
        |rank| &counts[rank][ranks..],
    )
}

/// Which collective, element type, length in two words, reduction or root.
fn encode_call(call: Call) -> [u32; 5] {
    let (which, element, len, extra) = match call {
        Call::AllToAll { element } => (0, element, 0, 0),
        Call::AllReduce {
            element,
            len,
            reduction,
        } => (1, element, len, reduction as u32),
        Call::AllGather { element, len } => (2, element, len, 0),
        Call::ReduceScatter {
            element,
            len,
            reduction,
        } => (3, element, len, reduction as u32),
        Call::Broadcast { element, len, root } => (4, element, len, root as u32),
        Call::Barrier => (5, ELEMENTS[0], 0, 0),
    };
    let element = ELEMENTS.iter().position(|name| *name == element);
    let [low, high] = halves(len);
    [which, element.unwrap_or(0) as u32, low, high, extra]
}

fn decode_call(words: &[u32]) -> Call {
    let element = ELEMENTS[words[1] as usize % ELEMENTS.len()];
    let len = whole([words[2], words[3]]);
    let reduction = match words[4] {
        0 => Reduction::Sum,
        _ => Reduction::Max,
    };
    match words[0] {
        0 => Call::AllToAll { element },
        1 => Call::AllReduce {
            element,
            len,
            reduction,
        },
        2 => Call::AllGather { element, len },
        3 => Call::ReduceScatter {
            element,
            len,
            reduction,
        },
        4 => {
            let root = words[4] as usize;
            Call::Broadcast { element, len, root }
        }
        _ => Call::Barrier,
    }
}

fn halves(number: usize) -> [u32; 2] {
    [number as u32, (number as u64 >> 32) as u32]
}

fn whole([low, high]: [u32; 2]) -> usize {
    (u64::from(high) << 32 | u64::from(low)) as usize
}
