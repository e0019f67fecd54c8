//! Control messages as words.

use std::time::Duration;

use crate::{Call, Error, Reduction, Side};

/// A control message, without the counts and elements that may follow a `Meet`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message {
    /// The sender has come to a collective.
    Meet { call: Call },
    /// The world has ended with this error in exchange `number`; of those before, the sender has done its part.
    Failed { error: Error, number: u64 },
    /// The sender was dropped.
    Left,
}

/// Words of a message.
pub(super) const WORDS: usize = 12;

/// The one that no error uses.
const NUMBER: usize = WORDS - 1;

type Words = [u64; WORDS];

impl Message {
    pub(super) fn to_words(&self) -> Words {
        match self {
            Self::Meet { call } => words(0, &[], Some(*call), &[]),
            Self::Left => words(1, &[], None, &[]),
            Self::Failed { error, number } => {
                let mut words = error_words(error);
                words[NUMBER] = *number;
                words
            }
        }
    }

    pub(super) fn from_words(words: &Words) -> Self {
        match words[0] {
            0 => Self::Meet { call: call(words) },
            1 => Self::Left,
            _ => Self::Failed {
                error: error(words),
                number: words[NUMBER],
            },
        }
    }
}

/// Kind, two words, a call in words 3 to 6, and more words.
fn words(kind: u64, first: &[u64], call: Option<Call>, more: &[usize]) -> Words {
    let mut words = [0; WORDS];
    words[0] = kind;
    words[1..][..first.len()].copy_from_slice(first);
    if let Some(call) = call {
        words[3..7].copy_from_slice(&call_words(call));
    }
    for (word, &value) in words[7..].iter_mut().zip(more) {
        *word = value as u64;
    }
    words
}

const ELEMENTS: [&str; 3] = ["u32", "f32", "bf16"];
const REDUCTIONS: [Reduction; 2] = [Reduction::Sum, Reduction::Max];
const SIDES: [Side; 2] = [Side::Send, Side::Receive];

/// The place of a value in a list that has it.
fn place<T: PartialEq>(list: &[T], value: &T) -> u64 {
    list.iter().take_while(|known| *known != value).count() as u64
}

fn at<T: Copy>(list: &[T], place: u64) -> T {
    list[(place as usize).min(list.len() - 1)]
}

fn call_words(call: Call) -> [u64; 4] {
    let element = |name| place(&ELEMENTS, &name);
    match call {
        Call::Barrier => [0; 4],
        Call::AllToAll { element: name } => [1, element(name), 0, 0],
        Call::AllReduce {
            element: name,
            len,
            reduction,
        } => [2, element(name), len as u64, place(&REDUCTIONS, &reduction)],
        Call::AllGather { element: name, len } => [3, element(name), len as u64, 0],
        Call::ReduceScatter {
            element: name,
            len,
            reduction,
        } => [4, element(name), len as u64, place(&REDUCTIONS, &reduction)],
        Call::Broadcast {
            element: name,
            len,
            root,
        } => [5, element(name), len as u64, root as u64],
    }
}

fn call(words: &Words) -> Call {
    let [kind, element, len, extra] = [words[3], words[4], words[5], words[6]];
    let (element, len) = (at(&ELEMENTS, element), len as usize);
    match kind {
        0 => Call::Barrier,
        1 => Call::AllToAll { element },
        2 => Call::AllReduce {
            element,
            len,
            reduction: at(&REDUCTIONS, extra),
        },
        3 => Call::AllGather { element, len },
        4 => Call::ReduceScatter {
            element,
            len,
            reduction: at(&REDUCTIONS, extra),
        },
        _ => Call::Broadcast {
            element,
            len,
            root: extra as usize,
        },
    }
}

/// Errors that end a world on all ranks; what concerns one rank alone is told as its loss.
fn error_words(error: &Error) -> Words {
    let side = |side| place(&SIDES, side) as usize;
    match *error {
        Error::Deadline {
            rank,
            collective,
            waited,
        } => words(
            4,
            &[rank as u64, waited.as_nanos() as u64],
            Some(collective),
            &[],
        ),
        Error::CountMismatch {
            from,
            to,
            sent,
            expected,
        } => words(5, &[], None, &[from, to, sent, expected]),
        Error::Overflow { index, collective } => words(6, &[], Some(collective), &[index]),
        Error::PeerCounts {
            rank,
            collective,
            side: ref of,
            found,
            ranks,
        } => words(7, &[], Some(collective), &[rank, side(of), found, ranks]),
        Error::BufferLength {
            rank,
            collective,
            side: ref of,
            found,
            expected,
        } => words(8, &[], Some(collective), &[rank, side(of), found, expected]),
        Error::Root { rank, root, ranks } => words(9, &[], None, &[rank, root, ranks]),
        Error::Mismatch {
            rank,
            found,
            expected,
        } => {
            let mut words = words(10, &[rank as u64], Some(found), &[]);
            words[7..11].copy_from_slice(&call_words(expected));
            words
        }
        Error::PeerLost {
            rank,
            collective,
            waited,
        } => words(
            11,
            &[rank as u64, waited.as_nanos() as u64],
            Some(collective),
            &[],
        ),
        // Not errors of a collective.
        _ => words(11, &[], None, &[]),
    }
}

fn error(words: &Words) -> Error {
    let [a, b, c, d] = [words[7], words[8], words[9], words[10]].map(|word| word as usize);
    let (rank, collective) = (words[1] as usize, call(words));
    match words[0] {
        4 => Error::Deadline {
            rank,
            collective,
            waited: Duration::from_nanos(words[2]),
        },
        5 => Error::CountMismatch {
            from: a,
            to: b,
            sent: c,
            expected: d,
        },
        6 => Error::Overflow {
            index: a,
            collective,
        },
        7 => Error::PeerCounts {
            rank: a,
            collective,
            side: at(&SIDES, b as u64),
            found: c,
            ranks: d,
        },
        8 => Error::BufferLength {
            rank: a,
            collective,
            side: at(&SIDES, b as u64),
            found: c,
            expected: d,
        },
        9 => Error::Root {
            rank: a,
            root: b,
            ranks: c,
        },
        10 => {
            let mut other = *words;
            other.copy_within(7..11, 3);
            Error::Mismatch {
                rank,
                found: collective,
                expected: call(&other),
            }
        }
        _ => Error::PeerLost {
            rank,
            collective,
            waited: Duration::from_nanos(words[2]),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_went() {
        let (element, len, reduction) = ("bf16", usize::MAX, Reduction::Max);
        let calls = [
            Call::Barrier,
            Call::AllToAll { element },
            Call::AllReduce {
                element,
                len,
                reduction,
            },
            Call::AllGather { element, len },
            Call::ReduceScatter {
                element,
                len,
                reduction,
            },
            Call::Broadcast {
                element,
                len,
                root: 7,
            },
        ];
        let mut messages = vec![Message::Left];
        for collective in calls {
            let (rank, side) = (5, Side::Receive);
            messages.push(Message::Meet { call: collective });
            let errors = [
                Error::PeerLost {
                    rank,
                    collective,
                    waited: Duration::from_secs(1),
                },
                Error::Deadline {
                    rank,
                    collective,
                    waited: Duration::from_micros(1500),
                },
                Error::Mismatch {
                    rank,
                    found: collective,
                    expected: calls[2],
                },
                Error::CountMismatch {
                    from: 1,
                    to: 2,
                    sent: 3,
                    expected: 4,
                },
                Error::Overflow {
                    index: 9,
                    collective,
                },
                Error::PeerCounts {
                    rank,
                    collective,
                    side,
                    found: 6,
                    ranks: 8,
                },
                Error::BufferLength {
                    rank,
                    collective,
                    side,
                    found: 6,
                    expected: 7,
                },
                Error::Root {
                    rank,
                    root: 9,
                    ranks: 8,
                },
            ];
            messages.extend(errors.map(|error| Message::Failed { error, number: 9 }));
        }
        for message in messages {
            assert_eq!(Message::from_words(&message.to_words()), message);
        }
    }
}
