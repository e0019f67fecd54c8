//! A layer's state between two steps, for checkpoints.

use lrmoe_comm::Collective;
use lrmoe_metric::Profile;
use lrmoe_plan::Placement;

use super::{Backend, MoeLayer};
use crate::adamw::Moments;
use crate::error::Error;

/// State of a layer that a checkpoint keeps, the same for any reader: vectors over all experts, see `MoeLayer::export`.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerState {
    /// Parameters of all experts: gate, up, down; within each, expert by expert.
    pub parameters: Vec<f32>,
    /// Their moments.
    pub moments: Moments,
    /// Experts on each rank, ascending.
    pub placement: Vec<Vec<u32>>,
    /// Histogram of scores, `Profile::to_counts`.
    pub profile: Vec<f32>,
    /// Slots per expert of the SYMI policy; empty for other policies.
    pub replicas: Vec<u32>,
}

impl<B: Backend> MoeLayer<B> {
    /// State for a checkpoint, whole on rank 0, `None` on the others. Every rank calls it.
    ///
    /// # Errors
    /// A failed exchange.
    pub fn export<C: Collective>(&self, comm: &mut C) -> Result<Option<LayerState>, Error> {
        let (parameters, moments) = self.experts.owned();
        let mut gathered = Vec::with_capacity(3);
        for owned in [parameters, &moments.first, &moments.second] {
            gathered.push(self.gather_to_root(comm, owned)?);
        }
        let [parameters, first, second] =
            <[Vec<f32>; 3]>::try_from(gathered).expect("three vectors");
        Ok((self.rank == 0).then(|| LayerState {
            parameters,
            moments: Moments { first, second },
            placement: (0..comm.ranks())
                .map(|rank| self.placement().local_experts(rank).to_vec())
                .collect(),
            profile: self.profile.to_counts().to_vec(),
            replicas: self
                .symi
                .as_ref()
                .map_or_else(Vec::new, |symi| symi.replicas().to_vec()),
        }))
    }

    /// Takes up the state that `export` gave.
    ///
    /// # Errors
    /// State of another model, another number of ranks or another policy.
    pub fn restore(&mut self, state: &LayerState) -> Result<(), Error> {
        let expected = self.experts.len();
        for (what, len) in [
            ("parameters", state.parameters.len()),
            ("first moments", state.moments.first.len()),
            ("second moments", state.moments.second.len()),
        ] {
            if len != expected {
                return Err(Error::StateLength {
                    what,
                    len,
                    expected,
                });
            }
        }
        let ranks = self.config.topology.ranks();
        if state.placement.len() != ranks {
            return Err(Error::PerRank {
                what: "placement",
                len: state.placement.len(),
                ranks,
            });
        }
        let replicas = if self.symi.is_some() {
            self.config.experts
        } else {
            0
        };
        if state.replicas.len() != replicas {
            return Err(Error::StateLength {
                what: "replicas",
                len: state.replicas.len(),
                expected: replicas,
            });
        }
        let placement = Placement::new(self.config.experts, state.placement.clone())?;
        self.profile = Profile::from_counts(self.config.experts, state.profile.clone())?;
        self.experts
            .restore(&self.backend, placement, &state.parameters, &state.moments)?;
        if let Some(symi) = &mut self.symi {
            symi.set_replicas(state.replicas.clone());
        }
        self.stash.step = None;
        Ok(())
    }

    fn gather_to_root<C: Collective>(
        &self,
        comm: &mut C,
        owned: &[f32],
    ) -> Result<Vec<f32>, Error> {
        let mut send = vec![0; comm.ranks()];
        send[0] = owned.len();
        let receive: Vec<usize> = (0..comm.ranks())
            .map(|rank| {
                if self.rank == 0 {
                    self.experts.shard(rank).len()
                } else {
                    0
                }
            })
            .collect();
        let mut all = vec![0.0; receive.iter().sum()];
        comm.all_to_all(owned, &send, &mut all, &receive)?;
        Ok(all)
    }
}
