use rayon::prelude::*;

use crate::Pairs;
use crate::pairs::{CHUNK, slot};

/// The keys of an expert that need another look: pairs below are left out, pairs above are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) low: u32,
    pub(crate) high: u32,
}

impl Window {
    /// Keeps nothing for sure.
    pub(crate) const TOP: Self = Self {
        low: u32::MAX,
        high: u32::MAX,
    };
    /// Leaves nothing out for sure.
    pub(crate) const BOTTOM: Self = Self { low: 0, high: 0 };
}

/// A rank's pairs that are kept for sure or lie in the window of their expert.
pub(crate) struct Grouped {
    chunks: Vec<Chunk>,
}

/// The same for [`CHUNK`] consecutive pairs.
struct Chunk {
    /// The first of the consecutive pairs.
    first: u32,
    /// Those above and in the windows, ascending, from `first` on.
    pairs: Vec<u16>,
    /// Where in `pairs` those in the windows are.
    open: Vec<u16>,
    /// Start of each expert in `keys`, `[experts + 1]`.
    offsets: Vec<u32>,
    /// The keys in the windows, grouped by expert, in pair order.
    keys: Vec<u32>,
}

impl Grouped {
    /// `windows` is `[experts]`.
    pub(crate) fn new(pairs: &Pairs<'_>, keys: &[u32], windows: &[Window]) -> Self {
        let chunks = pairs
            .expert_ids()
            .par_chunks(CHUNK)
            .zip(keys.par_chunks(CHUNK))
            .enumerate()
            .map(|(chunk, (ids, keys))| Chunk::new((chunk * CHUNK) as u32, ids, keys, windows))
            .collect();
        Self { chunks }
    }

    /// The keys in the window of an expert, in pair order, as one slice per chunk.
    pub(crate) fn of(&self, expert: usize) -> impl Iterator<Item = &[u32]> + Clone {
        self.chunks.iter().map(move |chunk| {
            let [start, end] = [expert, expert + 1].map(|at| chunk.offsets[at] as usize);
            &chunk.keys[start..end]
        })
    }

    /// The largest key in the window of an expert that is at most `bound`, 0 if there is none.
    pub(crate) fn largest_up_to(&self, expert: usize, bound: u32) -> u32 {
        self.of(expert)
            .flatten()
            .map(|&key| if key <= bound { key } else { 0 })
            .max()
            .unwrap_or(0)
    }

    /// The number of keys in the window of an expert that are `key`.
    pub(crate) fn count(&self, expert: usize, key: u32) -> u32 {
        self.of(expert)
            .flatten()
            .map(|&other| u32::from(other == key))
            .sum()
    }

    /// The pairs in the windows, ascending.
    pub(crate) fn open(&self) -> impl Iterator<Item = u32> {
        let chunks = self.chunks.iter();
        chunks.flat_map(|chunk| {
            let pair = |&at: &u16| chunk.first + u32::from(chunk.pairs[usize::from(at)]);
            chunk.open.iter().map(pair)
        })
    }

    /// All pairs above the windows, and those in the windows that `keep` names; ascending.
    pub(crate) fn into_kept(mut self, keep: impl Fn(u32) -> bool + Sync) -> Vec<u32> {
        let chunks = &mut self.chunks;
        chunks.par_iter_mut().for_each(|chunk| chunk.retain(&keep));
        let length = chunks.iter().map(|chunk| chunk.pairs.len()).sum();
        let mut kept = Vec::with_capacity(length);
        for Chunk { first, pairs, .. } in chunks {
            kept.extend(pairs.iter().map(|&pair| *first + u32::from(pair)));
        }
        kept
    }
}

impl Chunk {
    /// Removes the pairs in the windows that `keep` does not name.
    fn retain(&mut self, keep: impl Fn(u32) -> bool) {
        let pairs = &mut self.pairs;
        let (mut length, mut start) = (0, 0);
        // Moves the runs between pairs that leave.
        for at in self.open.drain(..).map(usize::from) {
            if !keep(self.first + u32::from(pairs[at])) {
                pairs.copy_within(start..at, length);
                length += at - start;
                start = at + 1;
            }
        }
        pairs.copy_within(start.., length);
        pairs.truncate(length + pairs.len() - start);
    }

    fn new(first: u32, ids: &[i32], keys: &[u32], windows: &[Window]) -> Self {
        let mut pairs = vec![0; ids.len()];
        let mut open = Vec::new();
        let mut length = 0;
        for ((&id, &key), pair) in ids.iter().zip(keys).zip(0..) {
            let Window { low, high } = windows.get(slot(id)).copied().unwrap_or(Window::TOP);
            // Written whether needed or not: a branch would be mispredicted half of the time. Few pairs are in a window, as a rule.
            pairs[length] = pair;
            if key.wrapping_sub(low) <= high - low {
                open.push(length as u16);
            }
            length += usize::from(key >= low);
        }
        pairs.truncate(length);

        let at = |&at: &u16| usize::from(pairs[usize::from(at)]);
        let mut offsets = vec![0; windows.len() + 1];
        let (_, counts) = offsets.split_at_mut(1);
        for pair in open.iter().map(at) {
            if let Some(count) = counts.get_mut(slot(ids[pair])) {
                *count += 1;
            }
        }
        let mut end = 0;
        for count in counts {
            end += *count;
            *count = end;
        }
        let mut next = offsets.clone();
        let mut grouped = vec![0; end as usize];
        for pair in open.iter().map(at) {
            if let Some(next) = next[..windows.len()].get_mut(slot(ids[pair])) {
                grouped[*next as usize] = keys[pair];
                *next += 1;
            }
        }
        Self {
            first,
            pairs,
            open,
            offsets,
            keys: grouped,
        }
    }
}
