use std::fmt;
use std::str::FromStr;

use lrmoe_comm::Algorithm;

use super::ConfigError;

/// How rows travel between nodes; losses are the same to the bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllToAll {
    /// Every rank sends to every other.
    #[default]
    Direct,
    /// Within a node first, then in one message for each pair of node and receiver.
    Hierarchical,
    /// Hierarchical where each message that this saves between nodes costs at most 64 KiB more within them.
    Auto,
}

impl AllToAll {
    /// The same for a communicator.
    pub fn algorithm(self) -> Algorithm {
        match self {
            Self::Direct => Algorithm::Direct,
            Self::Hierarchical => Algorithm::Hierarchical,
            Self::Auto => Algorithm::Auto {
                most_bytes: 64 << 10,
            },
        }
    }
}

impl fmt::Display for AllToAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Direct => "direct",
            Self::Hierarchical => "hierarchical",
            Self::Auto => "auto",
        })
    }
}

impl FromStr for AllToAll {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        let known = [Self::Direct, Self::Hierarchical, Self::Auto];
        let found = known.into_iter().find(|known| known.to_string() == name);
        found.ok_or_else(|| ConfigError::AllToAll { name: name.into() })
    }
}
