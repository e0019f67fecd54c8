use std::fmt;
use std::str::FromStr;

use super::UnknownName;

/// What the pairs that are not selected are left out of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All gradients: they do not run backward.
    #[default]
    Pair,
    /// The weight gradients alone. All pairs run backward; the gradients of the layer's input and of the gate weights are exact.
    Wgrad,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pair => "pair",
            Self::Wgrad => "wgrad",
        })
    }
}

impl FromStr for Scope {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "pair" => Ok(Self::Pair),
            "wgrad" => Ok(Self::Wgrad),
            _ => Err(UnknownName {
                what: "scope",
                name: name.into(),
                expected: "pair or wgrad",
            }),
        }
    }
}
