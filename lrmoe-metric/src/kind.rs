use std::fmt;
use std::str::FromStr;

use crate::Error;

/// By what pairs are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Score {
    /// `p |dy| |h|`, the Frobenius norm of the pair's term in the gradient of the down projection.
    DownGrad,
    /// `p |h|`, known in the forward pass.
    Forward,
    /// `sqrt(p^2 |dy|^2 |h|^2 + (|dgate|^2 + |dup|^2) |x|^2)`, the norm of the pair's terms in all weight gradients. To know it is to have run the
    /// pair backward: an oracle that other scores are measured by.
    FullGrad,
    /// `p |dy| |x|`.
    InputGrad,
    /// `p |dy|`.
    GateGrad,
    /// `p |f(x)|`, f the expert; known in the forward pass.
    OutNorm,
    /// The gate weight `p`.
    Gate,
    /// Nothing: all pairs are equal to [`Method::Priority`](crate::Method::Priority), so that it samples uniformly with weights near n/q;
    /// [`Method::Top`](crate::Method::Top) takes the order of the top 30 random bits.
    Random,
}

/// The rows whose norms are a factor of a score, beside those of dy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Row {
    /// The layer's input x, one row per token.
    Input,
    /// The input h of the down projection, one row per pair.
    Hidden,
    /// The expert's output f(x), one row per pair.
    Output,
    /// The pair's terms in all weight gradients, one row per pair.
    Gradient,
}

impl Score {
    /// All scores.
    pub const ALL: [Self; 8] = [
        Self::DownGrad,
        Self::Forward,
        Self::FullGrad,
        Self::InputGrad,
        Self::GateGrad,
        Self::OutNorm,
        Self::Gate,
        Self::Random,
    ];

    /// Whether dy must be known, as it is in the backward pass alone.
    pub fn needs_dy(self) -> bool {
        self.has_dy() || self == Self::FullGrad
    }

    /// Whether the gate weight is a factor.
    pub fn has_gate(self) -> bool {
        !matches!(self, Self::FullGrad | Self::Random)
    }

    /// Whether the norm of dy is a factor.
    pub fn has_dy(self) -> bool {
        matches!(self, Self::DownGrad | Self::InputGrad | Self::GateGrad)
    }

    /// The rows whose norm is a factor.
    pub fn row(self) -> Option<Row> {
        match self {
            Self::DownGrad | Self::Forward => Some(Row::Hidden),
            Self::FullGrad => Some(Row::Gradient),
            Self::InputGrad => Some(Row::Input),
            Self::OutNorm => Some(Row::Output),
            Self::GateGrad | Self::Gate | Self::Random => None,
        }
    }

    /// Whether the norms of h are a factor.
    pub fn needs_h(self) -> bool {
        self.row() == Some(Row::Hidden)
    }

    fn name(self) -> &'static str {
        match self {
            Self::DownGrad => "down-grad",
            Self::Forward => "forward",
            Self::FullGrad => "full-grad",
            Self::InputGrad => "input-grad",
            Self::GateGrad => "gate-grad",
            Self::OutNorm => "out-norm",
            Self::Gate => "gate",
            Self::Random => "random",
        }
    }

    pub(crate) fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Score {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|score| score.name() == name);
        known.ok_or_else(|| Error::UnknownScore { name: name.into() })
    }
}

impl Row {
    /// Whether there is one for each token, not for each pair.
    pub fn is_per_token(self) -> bool {
        self == Self::Input
    }

    /// Symbol of the rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Input => "x",
            Self::Hidden => "h",
            Self::Output => "f(x)",
            Self::Gradient => "the pairs' gradients",
        }
    }
}
