//! Which rank hosts which expert, with the flow of each instance.

/// No instance.
pub(crate) const NONE: u32 = u32::MAX;

/// An instance: `amount` pairs of `expert` go to `rank`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instance {
    pub(crate) expert: u32,
    pub(crate) rank: u32,
    pub(crate) amount: u64,
    /// The expert's next and previous instance.
    pub(crate) next: u32,
    previous: u32,
}

const EMPTY: Instance = Instance {
    expert: NONE,
    rank: NONE,
    amount: 0,
    next: NONE,
    previous: NONE,
};

/// Instances, contiguous for each rank and linked for each expert.
#[derive(Clone, Debug)]
pub(crate) struct Hosts {
    instances: Vec<Instance>,
    /// Start of each rank's slots in `instances`, `[ranks + 1]`.
    first: Vec<u32>,
    /// Slots in use on each rank.
    used: Vec<u32>,
    /// First instance of each expert.
    head: Vec<u32>,
    /// Instances of each expert.
    count: Vec<u32>,
}

impl Hosts {
    /// No instances yet on ranks with that many slots.
    pub(crate) fn new(experts: usize, slots: impl Iterator<Item = usize>) -> Self {
        let mut first = vec![0];
        let mut end = 0;
        for slots in slots {
            end += slots as u32;
            first.push(end);
        }
        Self {
            instances: vec![EMPTY; end as usize],
            used: vec![0; first.len() - 1],
            first,
            head: vec![NONE; experts],
            count: vec![0; experts],
        }
    }

    pub(crate) fn ranks(&self) -> usize {
        self.used.len()
    }

    pub(crate) fn experts(&self) -> usize {
        self.head.len()
    }

    /// Slots of all ranks.
    pub(super) fn total_slots(&self) -> usize {
        self.instances.len()
    }

    /// Slots of `rank`.
    pub(crate) fn slots(&self, rank: usize) -> usize {
        (self.first[rank + 1] - self.first[rank]) as usize
    }

    /// Free slots of `rank`.
    pub(crate) fn free(&self, rank: usize) -> usize {
        self.slots(rank) - self.used[rank] as usize
    }

    /// Number of instances of `expert`.
    pub(crate) fn count(&self, expert: usize) -> u32 {
        self.count[expert]
    }

    /// First instance of `expert`; the others follow by `next`.
    pub(super) fn head(&self, expert: usize) -> u32 {
        self.head[expert]
    }

    /// First instance on `rank`; the others follow in order.
    pub(super) fn first(&self, rank: usize) -> u32 {
        self.first[rank]
    }

    /// One past the last instance on `rank`.
    pub(super) fn end(&self, rank: usize) -> u32 {
        self.first[rank] + self.used[rank]
    }

    pub(super) fn at(&self, id: u32) -> &Instance {
        &self.instances[id as usize]
    }

    pub(super) fn at_mut(&mut self, id: u32) -> &mut Instance {
        &mut self.instances[id as usize]
    }

    /// Instances on `rank`.
    pub(crate) fn on_rank(&self, rank: usize) -> &[Instance] {
        &self.instances[self.first(rank) as usize..self.end(rank) as usize]
    }

    pub(super) fn on_rank_mut(&mut self, rank: usize) -> &mut [Instance] {
        let here = self.first(rank) as usize..self.end(rank) as usize;
        &mut self.instances[here]
    }

    /// Instances of `expert`.
    pub(crate) fn of_expert(&self, expert: usize) -> impl Iterator<Item = &Instance> {
        let mut next = self.head[expert];
        std::iter::from_fn(move || {
            let instance = self.instances.get(next as usize)?;
            next = instance.next;
            Some(instance)
        })
    }

    /// Whether `rank` hosts `expert`.
    pub(crate) fn hosts(&self, rank: usize, expert: u32) -> bool {
        self.on_rank(rank).iter().any(|i| i.expert == expert)
    }

    /// Adds an instance without flow to a free slot of `rank`.
    pub(super) fn add(&mut self, rank: usize, expert: u32) {
        let id = self.end(rank);
        debug_assert!(self.free(rank) > 0 && !self.hosts(rank, expert));
        let next = std::mem::replace(&mut self.head[expert as usize], id);
        if next != NONE {
            self.at_mut(next).previous = id;
        }
        *self.at_mut(id) = Instance {
            expert,
            rank: rank as u32,
            amount: 0,
            next,
            previous: NONE,
        };
        self.used[rank] += 1;
        self.count[expert as usize] += 1;
    }

    /// Removes the instance of `expert` on `rank`; returns its flow.
    pub(super) fn remove(&mut self, rank: usize, expert: u32) -> u64 {
        let Some(offset) = self.on_rank(rank).iter().position(|i| i.expert == expert) else {
            return 0;
        };
        let id = self.first(rank) + offset as u32;
        let removed = *self.at(id);
        self.link(removed, removed.previous, removed.next);
        self.used[rank] -= 1;
        self.count[expert as usize] -= 1;
        let last = self.end(rank);
        if last != id {
            let moved = *self.at(last);
            *self.at_mut(id) = moved;
            self.link(moved, id, id);
        }
        removed.amount
    }

    /// Makes the neighbours of `instance` point to `after` (the one before it) and `before` (the one after it).
    fn link(&mut self, instance: Instance, before: u32, after: u32) {
        match instance.previous {
            NONE => self.head[instance.expert as usize] = after,
            previous => self.at_mut(previous).next = after,
        }
        if instance.next != NONE {
            self.at_mut(instance.next).previous = before;
        }
    }
}
