//! Who sends what to whom, in which order and in which parts: host arithmetic alone.

use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Send,
    Receive,
}

/// A part of a message, between a buffer of the caller and staging memory on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) way: Way,
    pub(crate) peer: usize,
    /// Of the caller's send or receive buffer.
    pub(crate) elements: Range<usize>,
    /// Element of the staging memory at which they start.
    pub(crate) at: usize,
}

/// The groups of an all-to-all, as `rank` makes them. What it sends to itself is in none.
///
/// Part g of every message, of at most `most` elements, goes in group g, whatever the lengths of
/// other messages; so both its ends have it in the same group, and a group needs no rank that has
/// nothing to do in it. Within a group the peers come by distance, sends upwards and receives
/// downwards in rank, so that at any place of the order all ranks talk to different peers.
pub(crate) fn all_to_all(
    rank: usize,
    send_counts: &[usize],
    recv_counts: &[usize],
    most: usize,
) -> Vec<Vec<Transfer>> {
    let ranks = send_counts.len();
    let sides = [(Way::Send, send_counts), (Way::Receive, recv_counts)];
    let others = sides.iter().flat_map(|(_, counts)| {
        let others = counts.iter().enumerate().filter(|(peer, _)| *peer != rank);
        others.map(|(_, count)| *count)
    });
    let groups = others.max().unwrap_or(0).div_ceil(most);
    let group = |group: usize| {
        let mut transfers = vec![];
        let mut staged = [0, 0];
        for distance in 1..ranks {
            for ((way, counts), at) in sides.iter().zip(&mut staged) {
                let peer = match way {
                    Way::Send => (rank + distance) % ranks,
                    Way::Receive => (rank + ranks - distance) % ranks,
                };
                let start = counts[..peer].iter().sum::<usize>();
                let (first, end) = (group * most, counts[peer].min((group + 1) * most));
                if first < end {
                    transfers.push(Transfer {
                        way: *way,
                        peer,
                        elements: start + first..start + end,
                        at: *at,
                    });
                    *at += end - first;
                }
            }
        }
        transfers
    };
    (0..groups).map(group).collect()
}

/// The parts of at most `most` of `len` elements, in order.
pub(crate) fn pieces(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len)
        .step_by(most)
        .map(move |start| start..len.min(start + most))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of two ranks that send each other 5 and 2 elements, in parts of 3.
    #[test]
    fn both_ends_have_a_part_in_the_same_group() {
        let transfer = |way, elements, at| Transfer {
            way,
            peer: 1,
            elements,
            at,
        };
        let expected = vec![
            vec![
                transfer(Way::Send, 1..4, 0),
                transfer(Way::Receive, 1..3, 0),
            ],
            vec![transfer(Way::Send, 4..6, 0)],
        ];
        assert_eq!(all_to_all(0, &[1, 5], &[1, 2], 3), expected);
        let other = all_to_all(1, &[2, 0], &[5, 0], 3);
        assert_eq!(other.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
        assert!(all_to_all(0, &[7], &[7], 3).is_empty());
    }

    #[test]
    fn pieces_cover_everything_once() {
        assert_eq!(pieces(7, 3).collect::<Vec<_>>(), [0..3, 3..6, 6..7]);
        assert_eq!(pieces(0, 3).count(), 0);
    }
}
