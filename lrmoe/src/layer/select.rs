//! Which pairs run backward.

use lrmoe_comm::Collective;
use lrmoe_metric::{Draw, Pairs, Selection};

use super::stash::Stash;
use super::stats::{Clock, Stage};
use super::{Backend, MoeLayer, unmasked};
use crate::error::Error;
use crate::exchange::Over;
use crate::policy::{Policy, Selecting};

impl<B: Backend> MoeLayer<B> {
    /// The pairs of this rank that run backward, by the policy.
    pub(super) fn choose<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        (stash, step): (&Stash<B>, u32),
        pairs: &Pairs<'_>,
        dy: &B::Buffer<f32>,
    ) -> Result<Selection, Error> {
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
            _ => Ok(everything(pairs)),
        }
    }

    fn select<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        selecting: Selecting,
        (pairs, dy, h): (
            &Pairs<'_>,
            &B::Buffer<f32>,
            Option<&B::Buffer<lrmoe_metric::SquaredNorm>>,
        ),
        quotas: &[u32],
        draw: Draw,
    ) -> Result<Selection, Error> {
        let backend = &self.backend;
        let of_backend = backend.pairs(pairs)?;
        let needs_dy = selecting.score.needs_dy();
        let norms = &mut self.buffers.dy_norms;
        if needs_dy {
            let shape = [pairs.tokens(), self.config.shape.width];
            backend.squared_norms(dy, shape, norms)?;
        }
        let dy = needs_dy.then_some(&*norms);
        let scores = backend.score(selecting.score, &of_backend, dy, h, &mut Over(comm))?;
        let on_host = backend.host_scores(&scores)?;
        let decay = self.config.profile_decay;
        self.profile
            .observe(pairs, &on_host, decay, &mut Over(comm))?;
        self.scores = self.keeps_scores.then(|| on_host.into_owned());
        clock.lap(&mut self.stats.seconds, Stage::Score);
        let kept = backend.select(
            selecting.method,
            &of_backend,
            &scores,
            quotas,
            draw,
            &mut Over(comm),
        )?;
        let selection = Selection {
            pairs: backend.download(&kept.pairs)?,
            weights: backend.download(&kept.weights)?,
        };
        clock.lap(&mut self.stats.seconds, Stage::Select);
        Ok(selection)
    }
}

/// Every pair that is not masked, at weight 1.
fn everything(pairs: &Pairs<'_>) -> Selection {
    let mut all = Vec::new();
    unmasked(pairs, &mut all);
    Selection {
        weights: vec![1.0; all.len()],
        pairs: all,
    }
}
