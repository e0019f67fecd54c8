//! Rows that stay at the instances they ran on, until the backward pass: stash modes `stash` and `forward-select`.

use lrmoe_comm::Collective;
use lrmoe_compact::Grouping;
use lrmoe_kernels::{FfnShape, Memory, PreActivationBuffers, RowIndex};
use lrmoe_metric::{Draw, EarlyKey, Method, Pairs, SquaredNorm, early_keys};
use lrmoe_route::{KeptPlaces, RoutingTable};
use ndarray::{Array2, Axis};

use super::Backend;
use super::buffers::{bytes, columns, columns_mut};
use super::element::LayerElement;
use super::largest::Largest;
use super::pass::on_host;
use crate::error::Error;

/// Rows of x and their pre-activations.
type XAndPre<'a, B, T> = (
    &'a <B as Memory>::Buffer<T>,
    &'a mut PreActivationBuffers<B, T>,
);

/// Indices of rows and of their slots, and pre-activations by slot.
type ChosenRows<'a, B, T> = ([&'a RowIndex<B>; 2], &'a mut PreActivationBuffers<B, T>);

/// Which rows stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Keeping {
    /// None: the backward pass gets x again.
    #[default]
    Nothing,
    /// All.
    All,
    /// Those of the pairs that were chosen before their rows came.
    Chosen,
    /// Those that can still be chosen: of each instance the rows with the largest keys so far, as many as its expert has quota.
    Largest,
}

/// Rows of x and pre-activations of a rank's instances. A row of the rank is numbered by (instance, source, pair id) among all that it computes
/// in the forward pass, which is the order of the chunks; where it stays is its slot.
#[derive(Debug)]
pub(super) struct InstanceRows<B: Backend<T>, T: LayerElement> {
    keeping: Keeping,
    /// `[slots, width]`
    x: B::Buffer<T>,
    pre_activations: PreActivationBuffers<B, T>,
    slots: usize,
    /// What was routed forward, and what of it runs backward.
    table: Option<RoutingTable>,
    retained: Option<RoutingTable>,
    /// Rows that run backward, ascending, and their slots.
    rows: Vec<u32>,
    slots_of_rows: Vec<u32>,
    largest: Largest,
    /// Rows that have been computed in this pass.
    done: usize,
    places: KeptPlaces,
    incoming: Vec<u32>,
    /// Rows of a chunk and the slots they go to, or come from.
    moves: [Vec<u32>; 2],
    indices: [RowIndex<B>; 2],
    norms: Vec<SquaredNorm>,
    out_norms: B::Buffer<SquaredNorm>,
    /// Of the rank's own pairs, and their factors on their way.
    keys: Vec<EarlyKey>,
    factors: [Vec<f32>; 2],
}

impl<B: Backend<T>, T: LayerElement> Default for InstanceRows<B, T> {
    fn default() -> Self {
        Self {
            keeping: Keeping::Nothing,
            x: Default::default(),
            pre_activations: PreActivationBuffers::default(),
            slots: 0,
            table: None,
            retained: None,
            rows: Vec::new(),
            slots_of_rows: Vec::new(),
            largest: Largest::default(),
            done: 0,
            places: KeptPlaces::default(),
            incoming: Vec::new(),
            moves: Default::default(),
            indices: Default::default(),
            norms: Vec::new(),
            out_norms: Default::default(),
            keys: Vec::new(),
            factors: Default::default(),
        }
    }
}

impl<B: Backend<T>, T: LayerElement> InstanceRows<B, T> {
    pub(super) fn keeping(&self) -> Keeping {
        self.keeping
    }

    pub(super) fn bytes(&self) -> usize {
        let PreActivationBuffers { gate, up } = &self.pre_activations;
        let lists = [
            &self.rows,
            &self.slots_of_rows,
            &self.places.before,
            &self.incoming,
        ];
        let numbers: usize = lists
            .into_iter()
            .chain(&self.moves)
            .map(Vec::capacity)
            .sum();
        [&self.x, gate, up].map(bytes::<B, T>).iter().sum::<usize>()
            + numbers * size_of::<u32>()
            + self.factors.iter().map(Vec::capacity).sum::<usize>() * size_of::<f32>()
            + self.keys.capacity() * size_of::<EarlyKey>()
            + self.norms.capacity() * size_of::<SquaredNorm>()
            + self.largest.bytes()
    }

    /// Begins a forward pass whose pairs go by `table`.
    pub(super) fn start(&mut self, table: &RoutingTable, keeping: Keeping) {
        self.keeping = keeping;
        self.table = (keeping != Keeping::Nothing).then(|| table.clone());
        self.retained = None;
    }

    /// Makes room for the rows that stay on `rank`, of whose experts so many pairs are chosen (`quotas`, `[experts]`).
    pub(super) fn make_room(
        &mut self,
        backend: &B,
        shape: &FfnShape,
        (rank, quotas): (usize, &[u32]),
    ) -> Result<(), Error> {
        self.done = 0;
        self.slots = match (self.keeping, &self.table) {
            (Keeping::Nothing, _) | (_, None) => 0,
            (Keeping::All, Some(table)) => table.rank_loads()[rank] as usize,
            (Keeping::Chosen, _) => self.rows.len(),
            (Keeping::Largest, Some(table)) => {
                let placement = table.placement();
                let rooms = placement.on_rank(rank).map(|instance| {
                    let rows: u32 = table.counts().column(instance).sum();
                    rows.min(quotas[placement.expert_of(instance)])
                });
                self.largest.start(rooms)
            }
        };
        backend.resize(&mut self.x, self.slots * shape.width)?;
        Ok(self.pre_activations.resize(backend, shape, self.slots)?)
    }

    /// Brings what is known of the keys of rows before they are computed from the pairs of this rank, which go out in this order, to where they are.
    pub(super) fn bring_keys<C: Collective>(
        &mut self,
        comm: &mut C,
        rank: usize,
        (pairs, order): (&Pairs<'_>, &[u32]),
        (method, draw): (Method, Draw),
    ) -> Result<(), Error> {
        let table = self.table.as_ref().ok_or(Error::NoForward)?;
        let [outgoing, incoming] = &mut self.factors;
        early_keys(method, pairs, draw, &mut self.keys);
        outgoing.clear();
        outgoing.extend(order.iter().flat_map(|pair| {
            let key = self.keys[*pair as usize];
            [key.gate, key.draw]
        }));
        let [sent, received] =
            peers(table, rank).map(|rows| rows.map(|n| 2 * n).collect::<Vec<_>>());
        incoming.resize(received.iter().sum(), 0.0);
        comm.all_to_all(outgoing, &sent, incoming, &received)?;
        let here = table.placement().on_rank(rank);
        let grouping = Grouping::new(table.counts().slice_axis(Axis(1), here.into()), 1)?;
        outgoing.resize(incoming.len(), 0.0);
        grouping.group(columns(incoming, 2), columns_mut(outgoing, 2))?;
        let (grouped, _) = outgoing.as_chunks();
        let key = |&[gate, draw]: &[f32; 2]| EarlyKey { gate, draw };
        self.largest.set_keys(grouped.iter().map(key));
        Ok(())
    }

    /// Exchanges with a pass its rows of x and pre-activations, where these are computed in place: when there is one chunk, and all of it stays.
    pub(super) fn lend(
        &mut self,
        is_one_chunk: bool,
        x: &mut B::Buffer<T>,
        pre_activations: &mut PreActivationBuffers<B, T>,
    ) {
        if self.is_in_place(is_one_chunk) {
            std::mem::swap(x, &mut self.x);
            std::mem::swap(pre_activations, &mut self.pre_activations);
        }
    }

    fn is_in_place(&self, is_one_chunk: bool) -> bool {
        is_one_chunk && self.keeping == Keeping::All
    }

    /// Which of the next `count` rows stay, and in which slots, where that is known before they are computed; and where their pre-activations go.
    pub(super) fn chosen_of_next(
        &mut self,
        backend: &B,
        count: usize,
    ) -> Result<Option<ChosenRows<'_, B, T>>, Error> {
        if self.keeping != Keeping::Chosen {
            return Ok(None);
        }
        let before = |bound: usize| self.rows.partition_point(|row| (*row as usize) < bound);
        let mine = before(self.done)..before(self.done + count);
        let [rows, slots] = &mut self.moves;
        rows.clear();
        slots.clear();
        rows.extend(
            self.rows[mine.clone()]
                .iter()
                .map(|row| row - self.done as u32),
        );
        slots.extend(mine.start as u32..mine.end as u32);
        let [from, to] = &mut self.indices;
        backend.row_index_into(rows, count, from)?;
        backend.row_index_into(slots, self.slots, to)?;
        Ok(Some(([from, to], &mut self.pre_activations)))
    }

    /// Keeps what is to stay of a chunk's rows, whose instances begin at `offsets`, but the pre-activations of rows that were known to stay, which
    /// are there already. Keys are of the norms, or of those of `out` if there are none.
    pub(super) fn take(
        &mut self,
        backend: &B,
        shape: &FfnShape,
        (offsets, is_one_chunk): (&[usize], bool),
        (x, pre_activations): (&B::Buffer<T>, &PreActivationBuffers<B, T>),
        (norms, out): (Option<&B::Buffer<SquaredNorm>>, &B::Buffer<T>),
    ) -> Result<(), Error> {
        let count = offsets.last().copied().unwrap_or(0);
        if self.keeping == Keeping::Nothing || self.is_in_place(is_one_chunk) {
            return Ok(());
        }
        if self.keeping == Keeping::Chosen {
            self.done += count;
            let [from, to] = &self.indices;
            return Ok(backend.put(x, shape.width, [from, to], &mut self.x)?);
        }
        let [rows, slots] = &mut self.moves;
        rows.clear();
        slots.clear();
        match self.keeping {
            Keeping::Nothing | Keeping::Chosen => {}
            Keeping::All => {
                rows.extend(0..count as u32);
                slots.extend(self.done as u32..(self.done + count) as u32);
            }
            Keeping::Largest => {
                let norms = match norms {
                    Some(norms) => norms,
                    None => {
                        backend.squared_norms(out, [count, shape.width], &mut self.out_norms)?;
                        &self.out_norms
                    }
                };
                let norms = on_host(backend, norms, &mut self.norms)?;
                self.largest.take(self.done, offsets, norms, [rows, slots]);
            }
        }
        self.done += count;
        let [from, to] = &mut self.indices;
        backend.row_index_into(rows, count, from)?;
        backend.row_index_into(slots, self.slots, to)?;
        let (index, hidden) = ([&*from, &*to], shape.hidden);
        backend.put(x, shape.width, index, &mut self.x)?;
        let PreActivationBuffers { gate, up } = pre_activations;
        let kept = &mut self.pre_activations;
        if shape.activation.is_gated() {
            backend.put(gate, hidden, index, &mut kept.gate)?;
        }
        Ok(backend.put(up, hidden, index, &mut kept.up)?)
    }

    /// Finds which rows of the rank the retained pairs of all ranks are. `pairs` are those of this rank, `expert_ids` the experts of all its pairs.
    /// Returns their table.
    pub(super) fn locate<C: Collective>(
        &mut self,
        comm: &mut C,
        rank: usize,
        (expert_ids, pairs): (&[i32], &[u32]),
        capacities: Option<&[u64]>,
    ) -> Result<&RoutingTable, Error> {
        let table = self.table.as_ref().ok_or(Error::NoForward)?;
        table.places_into(rank, expert_ids, pairs, &mut self.places)?;
        let KeptPlaces { counts, before } = &self.places;
        let mut all = vec![0; counts.len() * comm.ranks()];
        comm.all_gather(counts, &mut all)?;
        let counts = Array2::from_shape_vec((comm.ranks(), counts.len()), all)
            .expect("ranks times instances");
        let retained = table.kept(counts, capacities)?;
        let [sent, received] = peers(&retained, rank).map(|rows| rows.collect::<Vec<_>>());
        self.incoming.resize(received.iter().sum(), 0);
        comm.all_to_all(before, &sent, &mut self.incoming, &received)?;
        table.kept_rows_into(&retained, rank, &self.incoming, &mut self.rows);
        Ok(self.retained.insert(retained))
    }

    /// As [`locate`](Self::locate) where all pairs run backward, of which no rank has to tell another.
    pub(super) fn locate_all(
        &mut self,
        rank: usize,
        capacities: Option<&[u64]>,
    ) -> Result<&RoutingTable, Error> {
        let table = self.table.as_ref().ok_or(Error::NoForward)?;
        let retained = table.kept(table.counts().to_owned(), capacities)?;
        self.rows.clear();
        self.rows.extend(0..table.rank_loads()[rank] as u32);
        Ok(self.retained.insert(retained))
    }

    /// The table of the retained pairs, if they were located.
    pub(super) fn retained(&self) -> Option<&RoutingTable> {
        self.retained.as_ref()
    }

    /// Finds the slots of the rows that run backward. Returns whether all of them are here.
    pub(super) fn settle(&mut self) -> bool {
        let slots = &mut self.slots_of_rows;
        slots.clear();
        match self.keeping {
            Keeping::Nothing => {}
            Keeping::All => slots.extend_from_slice(&self.rows),
            Keeping::Chosen => slots.extend(0..self.rows.len() as u32),
            Keeping::Largest => return self.largest.slots_of(&self.rows, slots),
        }
        true
    }

    /// The chosen rows stay from here on: the pass is done again with them.
    pub(super) fn choose_again(&mut self) {
        self.keeping = Keeping::Chosen;
    }

    /// At the beginning of a backward pass.
    pub(super) fn rewound(&mut self) -> &mut Self {
        self.done = 0;
        self
    }

    /// x and pre-activations of the next `count` rows that run backward: where they are, if all of them run in their order, else gathered.
    pub(super) fn give<'a>(
        &'a mut self,
        backend: &B,
        shape: &FfnShape,
        count: usize,
        (x, pre_activations): (&'a mut B::Buffer<T>, &'a mut PreActivationBuffers<B, T>),
    ) -> Result<XAndPre<'a, B, T>, Error> {
        let slots = &self.slots_of_rows[self.done..self.done + count];
        self.done += count;
        if count == self.slots && slots.iter().zip(0..).all(|(slot, place)| *slot == place) {
            return Ok((&self.x, &mut self.pre_activations));
        }
        let [index, _] = &mut self.indices;
        backend.row_index_into(slots, self.slots, index)?;
        backend.gather(&self.x, shape.width, index, x)?;
        let kept = &self.pre_activations;
        if shape.activation.is_gated() {
            backend.gather(&kept.gate, shape.hidden, index, &mut pre_activations.gate)?;
        }
        backend.gather(&kept.up, shape.hidden, index, &mut pre_activations.up)?;
        Ok((x, pre_activations))
    }
}

/// Rows that a rank sends to each peer and receives from it.
fn peers(table: &RoutingTable, rank: usize) -> [Box<dyn Iterator<Item = usize> + '_>; 2] {
    let (placement, counts) = (table.placement(), table.counts());
    let rows = move |source: usize, destination: usize| {
        let instances = placement.on_rank(destination);
        instances.map(|i| counts[[source, i]] as usize).sum()
    };
    let ranks = placement.ranks();
    [
        Box::new((0..ranks).map(move |peer| rows(rank, peer))),
        Box::new((0..ranks).map(move |peer| rows(peer, rank))),
    ]
}
