//! What stages have to move and to compute, and how fast a card could.

use lrmoe_kernels::FfnShape;

/// A card by its data sheet: bytes and operations a second.
pub(super) struct Card {
    pub(super) name: &'static str,
    bandwidth: f64,
    f32_rate: f64,
}

pub(super) const CARDS: [Card; 3] = [
    Card {
        name: "A100-80G",
        bandwidth: 2.04e12,
        f32_rate: 19.5e12,
    },
    Card {
        name: "H100",
        bandwidth: 3.35e12,
        f32_rate: 67e12,
    },
    Card {
        name: "H200",
        bandwidth: 4.8e12,
        f32_rate: 67e12,
    },
];

/// Bytes that a stage has to move, each once, and its operations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Work {
    pub(super) bytes: f64,
    pub(super) flop: f64,
}

impl Work {
    /// Seconds below which the card cannot do it.
    pub(super) fn floor(&self, card: &Card) -> f64 {
        (self.bytes / card.bandwidth).max(self.flop / card.f32_rate)
    }
}

/// Sizes of a rank's part of a layer in f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) tokens: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    /// Pairs that run backward.
    pub(super) kept: usize,
    pub(super) shape: FfnShape,
}

/// Stages of a table.
pub(super) const STAGES: usize = 7;

const F32: f64 = 4.0;
/// Of a squared norm.
const NORM: f64 = 8.0;
/// Counts of an expert in a round of a selection.
const COUNTS: f64 = 2048.0;
/// Rounds of a selection: of keys, and of ties.
const ROUNDS: f64 = 5.0;

impl Sizes {
    fn pairs(&self) -> f64 {
        (self.tokens * self.top_k) as f64
    }

    /// Bytes of a row.
    fn row(&self) -> f64 {
        F32 * self.shape.width as f64
    }

    /// Elements of the matrices of all experts, which are gated.
    fn matrices(&self) -> f64 {
        (3 * self.experts * self.shape.width * self.shape.hidden) as f64
    }

    /// The stages in the order of a table, by name.
    pub(super) fn stages(&self) -> [(&'static str, Work); STAGES] {
        [
            ("squared norms of dy", self.norms()),
            ("scores of all pairs", self.scores()),
            ("selection of the kept pairs", self.selection()),
            ("gather of all pairs", self.gather()),
            ("scatter-add of all pairs, weighted", self.scatter_add()),
            ("FFN forward of all pairs", self.forward()),
            ("FFN backward of the kept pairs", self.backward()),
        ]
    }

    fn norms(&self) -> Work {
        Self::moved(self.tokens as f64 * (self.row() + NORM))
    }

    /// Ids, gate weights and norms of h for each pair, norms of dy for each token, read to find the scales and to form the scores.
    fn scores(&self) -> Work {
        let factors = self.pairs() * (2.0 * F32 + NORM) + self.tokens as f64 * NORM;
        Self::moved(2.0 * factors + self.pairs() * F32)
    }

    /// Keys from scores; in each round all keys and ids, and the counts, which are cleared, added to and read; kept pairs and weights.
    fn selection(&self) -> Work {
        let keys = self.pairs() * 2.0 * F32;
        let rounds = ROUNDS * (self.pairs() * 2.0 * F32 + 3.0 * F32 * COUNTS * self.experts as f64);
        let kept = self.pairs() * 2.0 * F32 + self.kept as f64 * 3.0 * F32;
        Self::moved(keys + rounds + kept)
    }

    fn gather(&self) -> Work {
        Self::moved(2.0 * self.pairs() * self.row())
    }

    fn scatter_add(&self) -> Work {
        Self::moved(self.pairs() * self.row() + 2.0 * self.tokens as f64 * self.row())
    }

    /// Three products of a row.
    fn forward(&self) -> Work {
        Work {
            bytes: F32 * self.matrices() + 2.0 * self.pairs() * self.row(),
            flop: self.products(3.0, self.pairs()),
        }
    }

    /// Two products again, three for gradients of rows and three for those of matrices.
    fn backward(&self) -> Work {
        let kept = self.kept as f64;
        Work {
            bytes: 2.0 * F32 * self.matrices() + 3.0 * kept * self.row(),
            flop: self.products(8.0, kept),
        }
    }

    fn products(&self, each: f64, rows: f64) -> f64 {
        each * rows * 2.0 * (self.shape.width * self.shape.hidden) as f64
    }

    fn moved(bytes: f64) -> Work {
        Work { bytes, flop: 0.0 }
    }
}
