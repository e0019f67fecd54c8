use serde::{Deserialize, Serialize};

use crate::Error;
use crate::arithmetic::{product, sum};

/// Size of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertShape {
    /// Model width D.
    pub width: usize,
    /// Hidden width F.
    pub hidden: usize,
    /// Whether there is a gate projection besides up and down.
    pub gated: bool,
    /// Bytes of one element of weights, gradients and rows.
    pub bytes: usize,
}

impl ExpertShape {
    /// Weights of one expert: gate (if gated), up and down, D * F each.
    pub fn parameters(&self) -> u64 {
        product(&[self.matrices(), self.width as u64, self.hidden as u64])
    }

    /// Projections of one expert: 3 gated, 2 plain.
    pub fn matrices(&self) -> u64 {
        if self.gated { 3 } else { 2 }
    }

    /// Bytes of one expert's weights.
    pub fn weight_bytes(&self) -> u64 {
        product(&[self.parameters(), self.bytes as u64])
    }

    /// Bytes of one expert's weight gradients, held in the type of the weights.
    pub fn gradient_bytes(&self) -> u64 {
        self.weight_bytes()
    }

    /// Bytes of one slot: weights and gradients.
    pub fn slot_bytes(&self) -> u64 {
        sum(&[self.weight_bytes(), self.gradient_bytes()])
    }

    /// Bytes of `widths` * D + `hiddens` * F elements.
    pub(crate) fn row_bytes(&self, widths: u64, hiddens: u64) -> u64 {
        let elements = sum(&[
            product(&[widths, self.width as u64]),
            product(&[hiddens, self.hidden as u64]),
        ]);
        product(&[elements, self.bytes as u64])
    }
}

/// Sizes of a model's MoE layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Name in reports and on the command line.
    pub name: String,
    /// MoE layers.
    pub layers: usize,
    /// Routed experts E of a layer.
    pub experts: usize,
    /// Experts k per token.
    pub top_k: usize,
    /// Model width D.
    pub width: usize,
    /// Hidden width F of an expert.
    pub hidden: usize,
    /// Whether experts have a gate projection besides up and down.
    pub gated: bool,
    /// Experts that take every token. They are on every rank, never routed to, and no part of a plan.
    pub shared_experts: usize,
}

impl ModelSpec {
    /// Names of the presets.
    pub const PRESETS: [&'static str; 5] = [
        "qwen3-30b-a3b",
        "glm-4.5-air",
        "olmoe-1b-7b",
        "mixtral-8x7b",
        "tiny",
    ];

    /// All presets, in the order of [`PRESETS`](Self::PRESETS): the models' published configurations, and what
    /// `lrmoe train` trains by default.
    pub fn presets() -> [Self; 5] {
        let [qwen, glm, olmoe, mixtral, tiny] = Self::PRESETS;
        let spec = |name: &str, [layers, experts, top_k, width, hidden]: [usize; 5]| Self {
            name: name.to_owned(),
            layers,
            experts,
            top_k,
            width,
            hidden,
            gated: true,
            shared_experts: 0,
        };
        [
            spec(qwen, [48, 128, 8, 2048, 768]),
            Self {
                shared_experts: 1,
                ..spec(glm, [45, 128, 8, 4096, 1408])
            },
            spec(olmoe, [16, 64, 8, 2048, 1024]),
            spec(mixtral, [32, 8, 2, 4096, 14336]),
            spec(tiny, [2, 16, 2, 128, 128]),
        ]
    }

    /// The preset called `name`.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`] if there is none.
    pub fn preset(name: &str) -> Result<Self, Error> {
        let found = Self::presets().into_iter().find(|spec| spec.name == name);
        found.ok_or_else(|| Error::UnknownName {
            what: "model",
            name: name.to_owned(),
            expected: "qwen3-30b-a3b, glm-4.5-air, olmoe-1b-7b, mixtral-8x7b, tiny",
        })
    }

    /// One routed expert whose elements have `bytes` bytes: 2 for bf16, 4 for f32.
    pub fn expert(&self, bytes: usize) -> ExpertShape {
        ExpertShape {
            width: self.width,
            hidden: self.hidden,
            gated: self.gated,
            bytes,
        }
    }
}
