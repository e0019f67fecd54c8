use serde::{Deserialize, Serialize};

use crate::Error;

/// A cluster as the cost model sees it, read from TOML.
///
/// Rates are effective ones: what a kernel or an all-to-all reaches, not the data sheet.
///
/// The presets assume half of the dense bf16 peak for grouped GEMMs (A100 312, H100 and H200 989 TFLOP/s) and
/// four fifths of the link rate, per rank and direction: NVLink 300 GB/s (A100) or 450 GB/s (H100, H200) inside
/// a node of 8 ranks; between nodes one 100 Gb/s port shared by the 8 ranks (A100), or 400 Gb/s for each rank
/// (H100, H200). These are assumptions, not measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSpec {
    /// Name in reports.
    pub name: String,
    /// Ranks that share fast links.
    pub ranks_per_node: usize,
    /// Floating-point operations per second of one rank in grouped GEMMs.
    pub flops: f64,
    /// Seconds that each group adds to a pass.
    pub launch_seconds: f64,
    /// Memory of one rank in bytes.
    pub memory_bytes: u64,
    /// Links between ranks of a node.
    pub intra: Link,
    /// Links between nodes.
    pub inter: Link,
}

/// A class of links.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Seconds that an all-to-all takes at least.
    pub latency_seconds: f64,
    /// Bytes per second and direction of one rank.
    pub bytes_per_second: f64,
}

impl ClusterSpec {
    /// Names of the presets.
    pub const PRESETS: [&'static str; 3] = ["8xA100", "8xH100", "8xH200"];

    /// All presets, in the order of [`PRESETS`](Self::PRESETS).
    pub fn presets() -> [Self; 3] {
        let [a100, h100, h200] = Self::PRESETS;
        let hopper = |name: &str, memory_bytes| Self {
            name: name.to_owned(),
            ranks_per_node: 8,
            flops: 494e12,
            launch_seconds: 5e-6,
            memory_bytes,
            intra: Link {
                latency_seconds: 10e-6,
                bytes_per_second: 360e9,
            },
            inter: Link {
                latency_seconds: 20e-6,
                bytes_per_second: 40e9,
            },
        };
        let ampere = Self {
            flops: 156e12,
            intra: Link {
                latency_seconds: 10e-6,
                bytes_per_second: 240e9,
            },
            inter: Link {
                latency_seconds: 20e-6,
                bytes_per_second: 1.25e9,
            },
            ..hopper(a100, 80_000_000_000)
        };
        [
            ampere,
            hopper(h100, 80_000_000_000),
            hopper(h200, 141_000_000_000),
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
            what: "cluster",
            name: name.to_owned(),
            expected: "8xA100, 8xH100, 8xH200",
        })
    }

    /// Reads a description with the fields of this type; `intra` and `inter` are tables.
    ///
    /// # Errors
    ///
    /// [`Error::ClusterToml`] if it is not valid TOML or a field is missing, unknown or of another type;
    /// [`Error::NoRanksPerNode`]; [`Error::OutOfRange`] if a rate is not positive and finite or a time is
    /// negative or not finite.
    pub fn from_toml(text: &str) -> Result<Self, Error> {
        let spec: Self = toml::from_str(text)?;
        spec.check()?;
        Ok(spec)
    }

    /// Checks the numbers.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.ranks_per_node == 0 {
            return Err(Error::NoRanksPerNode);
        }
        for (what, value) in [
            ("flops", self.flops),
            ("bandwidth inside a node", self.intra.bytes_per_second),
            ("bandwidth between nodes", self.inter.bytes_per_second),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                let range = "the positive numbers";
                return Err(Error::OutOfRange { what, value, range });
            }
        }
        for (what, value) in [
            ("launch time", self.launch_seconds),
            ("latency inside a node", self.intra.latency_seconds),
            ("latency between nodes", self.inter.latency_seconds),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                let range = "the numbers from 0";
                return Err(Error::OutOfRange { what, value, range });
            }
        }
        Ok(())
    }
}
