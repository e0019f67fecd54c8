//! The rows of each instance that have the largest keys so far.

use std::cmp::Reverse;

use lrmoe_metric::{EarlyKey, SquaredNorm};

/// Stands for a row that has no slot.
const NOWHERE: u32 = u32::MAX;

/// Chooses among rows as they come, in their order. A row that is not among the `room` largest of its instance cannot be among as many
/// largest of its expert, so what is chosen later among all instances is here.
#[derive(Debug, Default)]
pub(super) struct Largest {
    /// Of the instances, in order.
    rooms: Vec<Room>,
    /// What is in each slot.
    held: Vec<Candidate>,
    /// Of all rows of the rank.
    keys: Vec<EarlyKey>,
    /// Those of an instance.
    candidates: Vec<Candidate>,
    free: Vec<u32>,
    moves: Vec<[u32; 2]>,
    slots: Vec<u32>,
}

/// The slots of an instance.
#[derive(Clone, Copy, Debug)]
struct Room {
    first: u32,
    size: u32,
    held: u32,
}

/// A row, by what it is compared by: the order of its key, then the smaller number.
#[derive(Clone, Copy, Debug, Default)]
struct Candidate {
    order: u64,
    row: u32,
    slot: u32,
}

impl Largest {
    pub(super) fn bytes(&self) -> usize {
        let candidates = self.held.capacity() + self.candidates.capacity();
        candidates * size_of::<Candidate>()
            + self.keys.capacity() * size_of::<EarlyKey>()
            + (self.free.capacity() + self.slots.capacity()) * size_of::<u32>()
            + self.moves.capacity() * size_of::<[u32; 2]>()
    }

    /// Begins with no rows and so many slots for each instance. Returns the number of all slots.
    pub(super) fn start(&mut self, rooms: impl Iterator<Item = u32>) -> usize {
        let mut first = 0;
        self.rooms.clear();
        self.rooms.extend(rooms.map(|size| {
            let start = first;
            first += size;
            Room {
                first: start,
                size,
                held: 0,
            }
        }));
        self.held.clear();
        self.held.resize(first as usize, Candidate::default());
        first as usize
    }

    /// What is known of the keys of all rows.
    pub(super) fn set_keys(&mut self, keys: impl Iterator<Item = EarlyKey>) {
        self.keys.clear();
        self.keys.extend(keys);
    }

    /// Takes up the rows from `first` on, whose instances begin at `offsets` and whose norms are these. Makes `rows` those that stay for now,
    /// counted from `first`, and `slots` where, in ascending order of the slots; what was there before goes.
    pub(super) fn take(
        &mut self,
        first: usize,
        offsets: &[usize],
        norms: &[SquaredNorm],
        [rows, slots]: [&mut Vec<u32>; 2],
    ) {
        self.moves.clear();
        for (room, group) in self.rooms.iter_mut().zip(offsets.windows(2)) {
            let held = room.first as usize..(room.first + room.held) as usize;
            let candidates = &mut self.candidates;
            candidates.clear();
            candidates.extend_from_slice(&self.held[held]);
            candidates.extend((group[0]..group[1]).map(|row| Candidate {
                order: self.keys[first + row].order(norms[row]),
                row: (first + row) as u32,
                slot: NOWHERE,
            }));
            let size = room.size as usize;
            self.free.clear();
            if candidates.len() > size {
                if size > 0 {
                    let by_key = |c: &Candidate| (Reverse(c.order), c.row);
                    candidates.select_nth_unstable_by_key(size - 1, by_key);
                }
                let gone = candidates.drain(size..).map(|gone| gone.slot);
                self.free.extend(gone.filter(|slot| *slot != NOWHERE));
            }
            self.free
                .extend(room.first + room.held..room.first + candidates.len() as u32);
            room.held = candidates.len() as u32;
            let come = candidates.iter().filter(|row| row.slot == NOWHERE);
            for (candidate, &slot) in come.zip(&self.free) {
                self.held[slot as usize] = Candidate { slot, ..*candidate };
                self.moves.push([slot, candidate.row - first as u32]);
            }
        }
        self.moves.sort_unstable();
        slots.extend(self.moves.iter().map(|[slot, _]| slot));
        rows.extend(self.moves.iter().map(|[_, row]| row));
    }

    /// Makes `slots` those of these rows. Returns whether all of them have one.
    pub(super) fn slots_of(&mut self, rows: &[u32], slots: &mut Vec<u32>) -> bool {
        self.slots.clear();
        self.slots.resize(self.keys.len(), NOWHERE);
        for room in &self.rooms {
            let held = room.first as usize..(room.first + room.held) as usize;
            for candidate in &self.held[held] {
                self.slots[candidate.row as usize] = candidate.slot;
            }
        }
        slots.extend(rows.iter().map(|row| self.slots[*row as usize]));
        !slots.contains(&NOWHERE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(values: &[f32]) -> Vec<SquaredNorm> {
        values
            .iter()
            .map(|value| SquaredNorm::of(&[*value]))
            .collect()
    }

    /// The rows that are left, by instance, after rows in chunks.
    fn left(sizes: &[u32], groups: &[&[f32]], chunk: usize) -> Vec<Vec<u32>> {
        let values = groups.concat();
        let mut ends = vec![0];
        for group in groups {
            ends.push(ends[ends.len() - 1] + group.len());
        }
        let mut largest = Largest::default();
        let slots = largest.start(sizes.iter().copied());
        let key = EarlyKey {
            gate: 1.0,
            draw: 1.0,
        };
        largest.set_keys(values.iter().map(|_| key));
        let mut content = vec![NOWHERE; slots];
        for first in (0..values.len()).step_by(chunk) {
            let end = values.len().min(first + chunk);
            let offsets: Vec<_> = ends
                .iter()
                .map(|e| (*e).clamp(first, end) - first)
                .collect();
            let (mut rows, mut to) = (vec![], vec![]);
            largest.take(
                first,
                &offsets,
                &keys(&values[first..end]),
                [&mut rows, &mut to],
            );
            assert!(to.is_sorted());
            for (row, slot) in rows.iter().zip(to) {
                content[slot as usize] = first as u32 + row;
            }
        }
        let all: Vec<u32> = content
            .iter()
            .copied()
            .filter(|row| *row != NOWHERE)
            .collect();
        let mut found = Vec::new();
        assert!(largest.slots_of(&all, &mut found));
        assert!(
            all.iter()
                .zip(found)
                .all(|(row, slot)| content[slot as usize] == *row)
        );
        let mut start = 0;
        let of = |size: &u32| {
            let end = start + *size as usize;
            let mut rows: Vec<_> = content[start..end].to_vec();
            rows.retain(|row| *row != NOWHERE);
            rows.sort_unstable();
            start = end;
            rows
        };
        sizes.iter().map(of).collect()
    }

    #[test]
    fn the_largest_of_each_instance_stay_in_any_chunks() {
        let groups: [&[f32]; 4] = [&[3.0, 1.0, 2.0, 5.0, 4.0], &[], &[1.0, 1.0, 1.0], &[7.0]];
        for chunk in [1, 2, 3, 4, 100] {
            let found = left(&[2, 0, 2, 3], &groups, chunk);
            // Of equals the first.
            assert_eq!(found, [vec![3, 4], vec![], vec![5, 6], vec![8]], "{chunk}");
            assert_eq!(left(&[0, 0, 0, 0], &groups, chunk).concat(), [0; 0]);
        }
    }
}
