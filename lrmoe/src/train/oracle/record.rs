//! The oracle's figures over all ranks, as they are recorded.

use lrmoe_comm::Collective;
use serde::{Deserialize, Serialize};

use super::sums::{Sums, ratio};
use super::{Figures, Oracle};
use crate::error::Error;
use crate::layer::{Backend, MoeLayer};

/// How near a gradient g is to the full gradient f.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Agreement {
    /// Cosine of the angle between them; `None` where one of them is 0.
    pub cosine: Option<f64>,
    /// `|g - f| / |f|`; `None` where f is 0.
    pub error: Option<f64>,
    /// `|m - f| / |f|` with m the mean over repeated draws of g; `None` where they are not repeated.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mean_error: Option<f64>,
    /// What `mean_error` would be about, were there no bias: the standard error of m over `|f|`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub standard_error: Option<f64>,
}

/// How near the gradients of one layer's step are to those of all pairs that ran forward.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OracleRecord {
    /// Weight gradients of all experts.
    pub dw: Agreement,
    /// Gradient of the layer's input.
    pub dx: Agreement,
    /// Gradient of the gate weights.
    pub dp: Agreement,
    /// Sum of the policy's scores of the retained pairs over that of all pairs; `None` where nothing is scored.
    pub share_kept: Option<f64>,
    /// Cosine of each expert's weight gradients, `[experts]`.
    pub expert_cosine: Vec<Option<f64>>,
    /// Relative error of each expert's weight gradients, `[experts]`.
    pub expert_error: Vec<Option<f64>>,
    /// Share kept of each expert, `[experts]`.
    pub expert_share_kept: Vec<Option<f64>>,
}

/// Puts together what the ranks found of each layer; every rank calls it and gets the same.
pub(in crate::train) fn gather<B: Backend, C: Collective>(
    comm: &mut C,
    oracle: Oracle,
    layer: &MoeLayer<B>,
    draws: u32,
) -> Result<OracleRecord, Error> {
    let mut figures = oracle.figures(layer);
    let mine: Vec<u32> = figures.to_numbers().flat_map(halves).collect();
    let mut all = vec![0; mine.len() * comm.ranks()];
    comm.all_gather(&mine, &mut all)?;
    let mut sums = vec![0.0; mine.len() / 2];
    for words in all.chunks(mine.len()) {
        for (sum, half) in sums.iter_mut().zip(words.as_chunks::<2>().0) {
            *sum += f64::from_bits(u64::from(half[0]) | u64::from(half[1]) << 32);
        }
    }
    figures.set_numbers(&sums);
    Ok(figures.record(draws))
}

fn halves(number: f64) -> [u32; 2] {
    let bits = number.to_bits();
    [bits as u32, (bits >> 32) as u32]
}

impl Figures {
    fn to_numbers(&self) -> impl Iterator<Item = f64> {
        let sums = [self.dx, self.dp].into_iter().chain(self.experts.clone());
        let scores = self.scores.clone().unwrap_or_default();
        sums.flat_map(Sums::to_array)
            .chain(scores.into_iter().flatten())
    }

    /// Takes numbers up in the order in which `to_numbers` gives them.
    fn set_numbers(&mut self, numbers: &[f64]) {
        let mut numbers = numbers.iter().copied();
        let mut next = || numbers.next().expect("as many as `to_numbers` gave");
        for sums in [&mut self.dx, &mut self.dp]
            .into_iter()
            .chain(&mut self.experts)
        {
            *sums = Sums::from_array(std::array::from_fn(|_| next()));
        }
        for score in self.scores.iter_mut().flatten().flatten() {
            *score = next();
        }
    }

    fn record(&self, draws: u32) -> OracleRecord {
        let mut dw = Sums::default();
        self.experts.iter().for_each(|expert| dw += *expert);
        let agreements = self.experts.iter().map(|expert| expert.agreement(1));
        let (expert_cosine, expert_error) = agreements
            .map(|agreement| (agreement.cosine, agreement.error))
            .unzip();
        let share = |[all, kept]: [f64; 2]| ratio(kept, all);
        let scores = self.scores.as_deref();
        let total = scores.map(|scores| {
            let add = |[a, b]: [f64; 2], [c, d]: &[f64; 2]| [a + c, b + d];
            scores.iter().fold([0.0; 2], add)
        });
        let none = || vec![None; self.experts.len()];
        OracleRecord {
            dw: dw.agreement(draws),
            dx: self.dx.agreement(draws),
            dp: self.dp.agreement(draws),
            share_kept: total.and_then(share),
            expert_cosine,
            expert_error,
            expert_share_kept: scores.map_or_else(none, |scores| {
                scores.iter().map(|sums| share(*sums)).collect()
            }),
        }
    }
}
