use std::ops::Range;

use crate::Error;
use crate::error::expect;
use crate::flow::{Flow, mean_load};

/// Which experts live on which ranks.
///
/// Every expert has at least one instance, and at most one on a rank. Instances are numbered in the order
/// of (rank, expert).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Expert of each instance.
    expert: Vec<u32>,
    /// First instance of each rank, `[ranks + 1]`.
    first_of_rank: Vec<usize>,
    /// Instances sorted by (expert, instance).
    by_expert: Vec<u32>,
    /// Start of each expert in `by_expert`, `[experts + 1]`.
    first_of_expert: Vec<usize>,
}

impl Placement {
    /// Takes the experts of each rank, in any order.
    ///
    /// # Errors
    ///
    /// [`Error::NoRanks`], [`Error::NoExperts`], [`Error::ExpertOutOfRange`], [`Error::DuplicateExpert`], or
    /// [`Error::MissingExpert`].
    pub fn new(experts: usize, mut by_rank: Vec<Vec<u32>>) -> Result<Self, Error> {
        if by_rank.is_empty() {
            return Err(Error::NoRanks);
        }
        if experts == 0 {
            return Err(Error::NoExperts);
        }
        let mut first_of_rank = vec![0];
        let mut expert = Vec::new();
        for (rank, here) in by_rank.iter_mut().enumerate() {
            here.sort_unstable();
            if let Some(pair) = here.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(Error::DuplicateExpert {
                    rank,
                    expert: pair[0],
                });
            }
            if let Some(&last) = here.last().filter(|&&last| last as usize >= experts) {
                return Err(Error::ExpertOutOfRange {
                    rank,
                    expert: last,
                    experts,
                });
            }
            expert.extend_from_slice(here);
            first_of_rank.push(expert.len());
        }

        // Before anything as long as the number of experts is allocated.
        let mut present = expert.clone();
        present.sort_unstable();
        present.dedup();
        let in_order = present.iter().zip(0..).take_while(|(e, i)| *e == i);
        let missing = in_order.count();
        if missing < experts {
            return Err(Error::MissingExpert { expert: missing });
        }

        let mut first_of_expert = vec![0; experts + 1];
        for &e in &expert {
            first_of_expert[e as usize + 1] += 1;
        }
        for e in 0..experts {
            first_of_expert[e + 1] += first_of_expert[e];
        }
        let mut by_expert: Vec<u32> = (0..expert.len() as u32).collect();
        by_expert.sort_by_key(|&instance| expert[instance as usize]);
        Ok(Self {
            expert,
            first_of_rank,
            by_expert,
            first_of_expert,
        })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.first_of_rank.len() - 1
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.first_of_expert.len() - 1
    }

    /// Number of instances.
    pub fn instances(&self) -> usize {
        self.expert.len()
    }

    /// Instances on `rank`.
    ///
    /// # Panics
    ///
    /// If `rank` does not exist.
    pub fn on_rank(&self, rank: usize) -> Range<usize> {
        self.first_of_rank[rank]..self.first_of_rank[rank + 1]
    }

    /// Experts on `rank`, ascending.
    ///
    /// # Panics
    ///
    /// If `rank` does not exist.
    pub fn local_experts(&self, rank: usize) -> &[u32] {
        &self.expert[self.on_rank(rank)]
    }

    /// Expert of `instance`.
    ///
    /// # Panics
    ///
    /// If `instance` does not exist.
    pub fn expert_of(&self, instance: usize) -> usize {
        self.expert[instance] as usize
    }

    /// Rank of `instance`.
    ///
    /// # Panics
    ///
    /// If `instance` does not exist.
    pub fn rank_of(&self, instance: usize) -> usize {
        assert!(
            instance < self.instances(),
            "instance {instance} does not exist"
        );
        self.first_of_rank
            .partition_point(|&first| first <= instance)
            - 1
    }

    /// Instances of `expert`, ascending.
    ///
    /// # Panics
    ///
    /// If `expert` does not exist.
    pub fn instances_of(&self, expert: usize) -> &[u32] {
        &self.by_expert[self.first_of_expert[expert]..self.first_of_expert[expert + 1]]
    }

    /// The instance of `expert` on `rank`, if it lives there.
    ///
    /// # Panics
    ///
    /// If `rank` does not exist.
    pub fn instance_on(&self, rank: usize, expert: usize) -> Option<usize> {
        let here = self.on_rank(rank);
        let position = self.expert[here.clone()].binary_search(&u32::try_from(expert).ok()?);
        position.ok().map(|i| here.start + i)
    }

    /// The smallest possible largest rank load when `per_expert` pairs `[experts]` are divided among their expert's
    /// instances: the max over expert sets S of ceil(pairs of S / ranks hosting S).
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] if the number of experts differs.
    pub fn largest_load(&self, per_expert: &[u32]) -> Result<u64, Error> {
        expect("experts", self.experts(), per_expert.len())?;
        let mean = mean_load(per_expert, self.ranks());
        Ok(Flow::over(self).balance(per_expert, mean))
    }

    /// Experts of each rank, as [`Placement::new`] takes them.
    pub(crate) fn by_rank(&self) -> Vec<Vec<u32>> {
        (0..self.ranks())
            .map(|rank| self.local_experts(rank).to_vec())
            .collect()
    }
}
