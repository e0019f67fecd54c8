use ndarray::{Array2, ArrayView2};

use crate::Error;

/// Routed pairs of one layer, counted by source rank and expert: `[ranks, experts]`.
///
/// At least one rank and one expert; the sum over all fits in u32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loads {
    counts: Array2<u32>,
    before: Array2<u32>,
    per_expert: Vec<u32>,
    total: u32,
}

impl Loads {
    /// Takes the counts `[ranks, experts]`, in any layout.
    ///
    /// # Errors
    ///
    /// [`Error::NoRanks`], [`Error::NoExperts`], or [`Error::TooManyPairs`] if the sum does not fit in u32.
    pub fn new(counts: Array2<u32>) -> Result<Self, Error> {
        let (ranks, experts) = counts.dim();
        if ranks == 0 {
            return Err(Error::NoRanks);
        }
        if experts == 0 {
            return Err(Error::NoExperts);
        }
        let pairs = counts.iter().map(|&n| u64::from(n)).sum();
        let total = u32::try_from(pairs).map_err(|_| Error::TooManyPairs { pairs })?;
        let mut before = Array2::zeros((ranks, experts));
        let mut per_expert = vec![0; experts];
        for (mut before, counts) in before.outer_iter_mut().zip(counts.outer_iter()) {
            for (expert, sum) in per_expert.iter_mut().enumerate() {
                before[expert] = *sum;
                *sum += counts[expert];
            }
        }
        Ok(Self {
            counts: counts.as_standard_layout().into_owned(),
            before,
            per_expert,
            total,
        })
    }

    /// Number of source ranks.
    pub fn ranks(&self) -> usize {
        self.counts.nrows()
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.counts.ncols()
    }

    /// Pairs by source rank and expert, `[ranks, experts]`, in standard layout.
    pub fn counts(&self) -> ArrayView2<'_, u32> {
        self.counts.view()
    }

    /// Pairs of each expert over all ranks, `[experts]`.
    pub fn per_expert(&self) -> &[u32] {
        &self.per_expert
    }

    /// All pairs.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Pairs of `expert` on ranks below `rank`.
    ///
    /// # Panics
    ///
    /// If `rank` or `expert` does not exist.
    pub fn before(&self, rank: usize, expert: usize) -> u32 {
        self.before[(rank, expert)]
    }
}
