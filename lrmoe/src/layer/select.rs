//! Which pairs run backward.

use lrmoe_comm::Collective;
use lrmoe_metric::{Draw, Pairs, Row, Selection, SquaredNorm, rescale};
use lrmoe_plan::Quotas;

use super::buffers::Buffers;
use super::element::LayerElement;
use super::stats::{Clock, Stage};
use super::{Backend, MoeLayer, unmasked};
use crate::error::Error;
use crate::exchange::Over;
use crate::policy::{Policy, Selecting};

/// Rows that a score may take the norms of.
struct Rows<'a, B: Backend<T>, T: LayerElement> {
    /// `[tokens, width]`, as dy; none where they are not known.
    x: Option<&'a B::Buffer<T>>,
    dy: Option<&'a B::Buffer<T>>,
    /// The norms themselves, of what there is per pair.
    of_pairs: &'a B::Buffer<SquaredNorm>,
}

impl<B: Backend<T>, T: LayerElement> MoeLayer<B, T> {
    /// Makes the selection of `selector` the pairs of this rank that run backward, by the policy.
    pub(super) fn choose<C: Collective>(
        &mut self,
        comm: &mut C,
        clock: &mut Clock,
        (quotas, step): (Option<&Quotas>, u32),
        pairs: &Pairs<'_>,
        [x, dy]: [Option<&B::Buffer<T>>; 2],
        of_pairs: &B::Buffer<SquaredNorm>,
    ) -> Result<(), Error> {
        match self.config.policy {
            Policy::Lrmoe(selecting) => {
                let quotas = quotas.ok_or(Error::NoForward)?;
                let draw = self.draw(step);
                let rows = Rows { x, dy, of_pairs };
                let quotas = quotas.as_slice();
                self.select(comm, clock, selecting, (pairs, rows), quotas, draw)
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
        (pairs, rows): (&Pairs<'_>, Rows<'_, B, T>),
        quotas: &[u32],
        draw: Draw,
    ) -> Result<(), Error> {
        let backend = &self.backend;
        let of_backend = backend.pairs(pairs)?;
        let score = selecting.score;
        let Buffers {
            dy_norms,
            x_norms,
            scores,
            ..
        } = &mut self.buffers;
        let shape = [pairs.tokens(), self.config.shape.width];
        let dy = rows.dy.filter(|_| score.has_dy());
        if let Some(dy) = dy {
            backend.squared_norms(dy, shape, dy_norms)?;
        }
        let of_rows = match score.row() {
            Some(Row::Input) => {
                let x = rows.x.ok_or(Error::NoForward)?;
                backend.squared_norms(x, shape, x_norms)?;
                Some(&*x_norms)
            }
            row => row.map(|_| rows.of_pairs),
        };
        backend.score_into(
            score,
            &of_backend,
            [dy.map(|_| &*dy_norms), of_rows],
            &mut Over(comm),
            scores,
        )?;
        let scores = scores.as_ref().expect("just made");
        let on_host = backend.host_scores(scores)?;
        let decay = self.config.profile_decay;
        self.profile
            .observe(pairs, &on_host, decay, &mut Over(comm))?;
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
        let kept = &mut self.selector.selection;
        rescale(selecting.rescale, pairs, &on_host, kept, &mut Over(comm))?;
        self.scores = self.keeps_scores.then(|| on_host.into_owned());
        clock.lap(&mut self.stats.seconds, Stage::Select);
        Ok(())
    }
}
