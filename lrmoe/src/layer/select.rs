//! Which pairs run backward.

use lrmoe_comm::Collective;
use lrmoe_kernels::Memory;
use lrmoe_metric::{Draw, Pairs, Selection, SquaredNorm};
use lrmoe_plan::Quotas;

use super::buffers::Buffers;
use super::element::LayerElement;
use super::stats::{Clock, Stage};
use super::{Backend, MoeLayer, unmasked};
use crate::error::Error;
use crate::exchange::Over;
use crate::policy::{Policy, Selecting};

/// dy of each token and |h|^2 of each pair, as far as they are known.
pub(super) type Known<'a, B, T> = (
    Option<&'a <B as Memory>::Buffer<T>>,
    Option<&'a <B as Memory>::Buffer<SquaredNorm>>,
);

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// Makes the selection of `selector` the pairs of this rank that run backward, by the policy.
    pub(super) fn choose<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        (quotas, step): (Option<&Quotas>, u32),
        pairs: &Pairs<'_>,
        (dy, h): Known<'_, B, T>,
    ) -> Result<(), Error> {
        match self.config.policy {
            Policy::Lrmoe(selecting) => {
                let quotas = quotas.ok_or(Error::NoForward)?;
                let draw = self.draw(step);
                self.select(
                    comm,
                    clock,
                    selecting,
                    (pairs, (dy, h)),
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

    /// The random numbers of a step.
    pub(super) fn draw(&self, step: u32) -> Draw {
        Draw {
            seed: self.config.seed,
            step,
            layer: self.config.layer,
        }
    }

    fn select<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        selecting: Selecting,
        (pairs, (dy, h)): (&Pairs<'_>, Known<'_, B, T>),
        quotas: &[u32],
        draw: Draw,
    ) -> Result<(), Error> {
        let backend = &self.backend;
        let of_backend = backend.pairs(pairs)?;
        let dy = dy.filter(|_| selecting.score.needs_dy());
        let Buffers {
            dy_norms: norms,
            scores,
            ..
        } = &mut self.buffers;
        if let Some(dy) = dy {
            let shape = [pairs.tokens(), self.config.shape.width];
            backend.squared_norms(dy, shape, norms)?;
        }
        let dy = dy.map(|_| &*norms);
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
