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

/// A rank's pairs that are kept for sure or lie in the window of their expert, in lists that are kept.
#[derive(Debug, Default)]
pub(crate) struct Grouped {
    chunks: Vec<Chunk>,
    /// Keys of windows that are put in order.
    windows: Vec<u32>,
}

/// The same for [`CHUNK`] consecutive pairs.
#[derive(Debug, Default)]
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
    /// Where the next key of each expert goes, `[experts]`.
    next: Vec<u32>,
}

impl Grouped {
    /// Takes up the pairs of another selection; `windows` is `[experts]`.
    pub(crate) fn fill(&mut self, pairs: &Pairs<'_>, keys: &[u32], windows: &[Window]) {
        let needed = keys.len().div_ceil(CHUNK);
        if self.chunks.len() < needed {
            self.chunks.resize_with(needed, Chunk::default);
        }
        let fill = |(at, chunk): (usize, &mut Chunk)| {
            // Those that are left over from a larger selection stay empty.
            let [start, end] = [at, at + 1].map(|at| keys.len().min(at * CHUNK));
            let ids = &pairs.expert_ids()[start..end];
            chunk.fill(start as u32, ids, &keys[start..end], windows);
        };
        self.chunks.par_iter_mut().enumerate().for_each(fill);
    }

    /// The keys in the window of an expert, in pair order, as one slice per chunk.
    pub(crate) fn of(&self, expert: usize) -> impl Iterator<Item = &[u32]> + Clone {
        self.chunks.iter().map(move |chunk| chunk.of(expert))
    }

    /// The keys in the windows of these experts, a slice for each, in which they may be moved about.
    pub(crate) fn windows(&mut self, experts: &[usize]) -> Vec<&mut [u32]> {
        let Self { chunks, windows } = self;
        windows.clear();
        windows.reserve(chunks.iter().map(|chunk| chunk.keys.capacity()).sum());
        let mut lengths = Vec::with_capacity(experts.len());
        for &expert in experts {
            let start = windows.len();
            let parts = chunks.iter().map(|chunk| chunk.of(expert));
            parts.for_each(|part| windows.extend_from_slice(part));
            lengths.push(windows.len() - start);
        }
        let mut rest = windows.as_mut_slice();
        let mut cut = |length| {
            let (window, others) = std::mem::take(&mut rest).split_at_mut(length);
            rest = others;
            window
        };
        lengths.into_iter().map(&mut cut).collect()
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

    /// Makes `kept` all pairs above the windows, and those in the windows that `keep` names; ascending. The others are left out from here on.
    pub(crate) fn keep(&mut self, keep: impl Fn(u32) -> bool + Sync, kept: &mut Vec<u32>) {
        let chunks = &mut self.chunks;
        chunks.par_iter_mut().for_each(|chunk| chunk.retain(&keep));
        kept.clear();
        kept.reserve(chunks.iter().map(|chunk| chunk.pairs.len()).sum());
        for Chunk { first, pairs, .. } in chunks {
            kept.extend(pairs.iter().map(|&pair| *first + u32::from(pair)));
        }
    }
}

impl Chunk {
    /// The keys in the window of an expert, in pair order.
    fn of(&self, expert: usize) -> &[u32] {
        let [start, end] = [expert, expert + 1].map(|at| self.offsets[at] as usize);
        &self.keys[start..end]
    }

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

    fn fill(&mut self, first: u32, ids: &[i32], keys: &[u32], windows: &[Window]) {
        self.first = first;
        let (pairs, open) = (&mut self.pairs, &mut self.open);
        pairs.resize(ids.len(), 0);
        open.clear();
        // Room for any keys, so that a later selection needs no more.
        open.reserve(ids.len());
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
        self.offsets.clear();
        self.offsets.resize(windows.len() + 1, 0);
        let (_, counts) = self.offsets.split_at_mut(1);
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
        self.next.clear();
        self.next.extend_from_slice(&self.offsets[..windows.len()]);
        self.keys.clear();
        self.keys.reserve(ids.len());
        self.keys.resize(end as usize, 0);
        for pair in open.iter().map(at) {
            if let Some(next) = self.next.get_mut(slot(ids[pair])) {
                self.keys[*next as usize] = keys[pair];
                *next += 1;
            }
        }
    }
}
