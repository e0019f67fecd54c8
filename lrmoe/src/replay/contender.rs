use std::fmt;
use std::str::FromStr;

use lrmoe_plan::{Fixed, FixedReplicas, FlexMoe, Lrmoe, PlacementPolicy, Stash, Symi};

use super::ReplayError;

/// A placement policy by name alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyName {
    /// Contiguous experts, no replicas, never moved.
    Fixed,
    /// Replicas by the loads of the first steps, never moved.
    FixedReplicas,
    /// Replicas follow popularity, pairs beyond capacity are dropped.
    Symi,
    /// Replicas grow, shrink and move while that lowers the largest load.
    FlexMoe,
    /// Every pair runs forward, selected pairs run backward, over replicas that follow the loads.
    Lrmoe,
}

impl PolicyName {
    const ALL: [Self; 5] = [
        Self::Fixed,
        Self::FixedReplicas,
        Self::Symi,
        Self::FlexMoe,
        Self::Lrmoe,
    ];

    /// Whether an expert can have several instances.
    pub fn replicates(self) -> bool {
        self != Self::Fixed
    }

    /// Who places the experts.
    pub fn placing(self) -> Box<dyn PlacementPolicy> {
        match self {
            Self::Fixed => Box::new(Fixed),
            Self::FixedReplicas => Box::new(FixedReplicas),
            Self::Symi => Box::new(Symi),
            Self::FlexMoe => Box::new(FlexMoe),
            Self::Lrmoe => Box::new(Lrmoe::default()),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::FixedReplicas => "fixed-replicas",
            Self::Symi => "symi",
            Self::FlexMoe => "flexmoe",
            Self::Lrmoe => "lrmoe",
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PolicyName {
    type Err = ReplayError;

    fn from_str(name: &str) -> Result<Self, ReplayError> {
        let known = Self::ALL.into_iter().find(|policy| policy.name() == name);
        known.ok_or_else(|| ReplayError::UnknownPolicy { name: name.into() })
    }
}

/// What is held in memory at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffering {
    /// Buffers for all rows at once in both passes, and x, gate and up of every row kept for the backward pass: conventional training.
    Whole,
    /// The forward pass in chunks, x kept once per token and the rest recomputed, the backward pass at once: what `lrmoe train` does.
    ChunkedForward,
    /// The same with the backward pass in chunks too.
    Chunked,
}

impl Buffering {
    const ALL: [Self; 3] = [Self::Whole, Self::ChunkedForward, Self::Chunked];

    /// What the forward pass leaves.
    pub fn stash(self) -> Stash {
        match self {
            Self::Whole => Stash::Full,
            Self::ChunkedForward | Self::Chunked => Stash::Recompute,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::ChunkedForward => "chunked-forward",
            Self::Chunked => "chunked",
        }
    }
}

impl fmt::Display for Buffering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Buffering {
    type Err = ReplayError;

    fn from_str(name: &str) -> Result<Self, ReplayError> {
        let known = Self::ALL.into_iter().find(|known| known.name() == name);
        known.ok_or_else(|| ReplayError::UnknownBuffering { name: name.into() })
    }
}

/// One of the policies that a replay compares: `POLICY[@RETENTION][+BUFFERING]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contender {
    /// Where experts live, and what is dropped.
    pub policy: PolicyName,
    /// Share of the pairs that runs backward, for `lrmoe` alone; `None` for the common setting.
    pub retention: Option<f64>,
    /// What is held in memory; `None` for what is usual for the policy.
    pub buffering: Option<Buffering>,
}

impl Contender {
    /// What is held in memory: by default chunked forward for `lrmoe`, all at once for the others.
    pub fn buffering(&self) -> Buffering {
        self.buffering.unwrap_or(match self.policy {
            PolicyName::Lrmoe => Buffering::ChunkedForward,
            _ => Buffering::Whole,
        })
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.policy.name())?;
        if let Some(retention) = self.retention {
            write!(f, "@{retention}")?;
        }
        if let Some(buffering) = self.buffering {
            write!(f, "+{buffering}")?;
        }
        Ok(())
    }
}

impl FromStr for Contender {
    type Err = ReplayError;

    fn from_str(text: &str) -> Result<Self, ReplayError> {
        let (head, buffering) = match text.split_once('+') {
            Some((head, buffering)) => (head, Some(buffering.parse()?)),
            None => (text, None),
        };
        let (policy, retention) = match head.split_once('@') {
            Some((policy, share)) => (policy.parse()?, Some(retention(text, share)?)),
            None => (head.parse()?, None),
        };
        if retention.is_some() && policy != PolicyName::Lrmoe {
            return Err(ReplayError::NoRetention { policy });
        }
        Ok(Self {
            policy,
            retention,
            buffering,
        })
    }
}

fn retention(contender: &str, share: &str) -> Result<f64, ReplayError> {
    let number = share.parse().ok();
    let valid = number.filter(|share| (0.0..=1.0).contains(share));
    valid.ok_or_else(|| ReplayError::Retention {
        contender: contender.into(),
        share: share.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_as_they_went_in() {
        for name in [
            "fixed",
            "fixed+chunked",
            "fixed-replicas+chunked-forward",
            "symi",
            "flexmoe",
            "lrmoe",
            "lrmoe@0.25",
            "lrmoe@0+whole",
        ] {
            let contender: Contender = name.parse().expect("a contender");
            assert_eq!(contender.to_string(), name);
        }
    }

    #[test]
    fn other_names_are_refused() {
        for (name, message) in [
            ("best", "unknown policy `best`"),
            ("", "unknown policy ``"),
            ("fixed@0.5", "fixed runs every pair backward"),
            ("lrmoe@2", "retention `2` of `lrmoe@2`"),
            ("lrmoe@nan", "retention `nan`"),
            ("lrmoe@", "retention ``"),
            ("fixed+half", "unknown buffering `half`"),
            ("lrmoe+whole@0.5", "unknown buffering `whole@0.5`"),
        ] {
            let error = name.parse::<Contender>().expect_err(name).to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
