//! Which pairs run backward.

use lrmoe_comm::Collective;
use lrmoe_metric::{Draw, Pairs, Selection};

use super::buffers::Buffers;
use super::element::LayerElement;
use super::stash::Stash;
use super::stats::{Clock, Stage};
use super::{Backend, MoeLayer, unmasked};
use crate::error::Error;
use crate::exchange::Over;
use crate::policy::{Policy, Selecting};

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// Makes the selection of `selector` the pairs of this rank that run backward, by the policy.
    pub(super) fn choose<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        (stash, step): (&Stash<B, T>, u32),
        pairs: &Pairs<'_>,
        dy: &B::Buffer<T>,
    ) -> Result<(), Error> {
        match self.config.policy {
            Policy::Lrmoe(selecting) => {
                let quotas = stash.quotas.as_ref().ok_or(Error::NoForward)?;
                let draw = Draw {
                    seed: self.config.seed,
                    step,
                    layer: self.config.layer,
                };
                let h = stash.pairs.h_norms();
                self.select(
                    comm,
                    clock,
                    selecting,
                    (pairs, dy, h),
                    quotas.as_slice(),
                    draw,
                )
            }
            _ => {
                let Selection {
                    pairs: all,
                    weights,
                } = &mut self.selector.selection;
                unmasked(pairs, all);
                weights.clear();
                weights.resize(all.len(), 1.0);
                Ok(())
            }
        }
    }

    fn select<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        selecting: Selecting,
        (pairs, dy, h): (
            &Pairs<'_>,
            &B::Buffer<T>,
            Option<&B::Buffer<lrmoe_metric::SquaredNorm>>,
        ),
        quotas: &[u32],
        draw: Draw,
    ) -> Result<(), Error> {
        let backend = &self.backend;
        let of_backend = backend.pairs(pairs)?;
        let needs_dy = selecting.score.needs_dy();
        let Buffers {
            dy_norms: norms,
            scores,
            ..
        } = &mut self.buffers;
        if needs_dy {
            let shape = [pairs.tokens(), self.config.shape.width];
            backend.squared_norms(dy, shape, norms)?;
        }
        let dy = needs_dy.then_some(&*norms);
        backend.score_into(
            selecting.score,
            &of_backend,
            [dy, h],
            &mut Over(comm),
            scores,
        )?;
        let scores = scores.as_ref().expect("just made");
        let on_host = backend.host_scores(scores)?;
        let decay = self.config.profile_decay;
        self.profile
            .observe(pairs, &on_host, decay, &mut Over(comm))?;
        self.scores = self.keeps_scores.then(|| on_host.into_owned());
        clock.lap(&mut self.stats.seconds, Stage::Score);
        backend.select_to_host(
            selecting.method,
            &of_backend,
            scores,
            quotas,
            draw,
            &mut Over(comm),
            &mut self.selector,
        )?;
        clock.lap(&mut self.stats.seconds, Stage::Select);
        Ok(())
    }
}
