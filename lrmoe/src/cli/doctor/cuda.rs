//! What there is of CUDA.

use std::fmt;

use serde::Serialize;

use super::Missing;
use crate::cli::model::GIB;

/// Cards, and what it takes to use them.
#[derive(Default, Serialize)]
pub(super) struct Cuda {
    /// Whether this program has the backend.
    built: bool,
    /// Latest CUDA that the driver runs; nothing without a driver.
    driver_cuda: Option<Version>,
    nvrtc: Option<Version>,
    cards: Vec<Card>,
    /// Why none can be used.
    problem: Option<String>,
    /// NVIDIA's graphics and compute devices on the PCI bus, with a driver or without; nothing where the system does not list them.
    pci_devices: Option<usize>,
}

/// (major, minor).
#[derive(Clone, Copy, Serialize)]
pub(super) struct Version(u32, u32);

#[derive(Serialize)]
struct Card {
    /// N of `--device cuda:N`.
    number: usize,
    name: String,
    compute_capability: Version,
    memory_bytes: u64,
}

impl Cuda {
    #[cfg(not(feature = "cuda"))]
    pub(super) fn new() -> Self {
        Self {
            pci_devices: pci_devices(),
            ..Self::default()
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn new() -> Self {
        use lrmoe_kernels::cuda;

        let (driver, nvrtc, found) = (cuda::find_driver(), cuda::find_nvrtc(), cuda::cards());
        let problem = [found.as_ref().err(), nvrtc.as_ref().err()]
            .into_iter()
            .flatten()
            .next()
            .map(ToString::to_string);
        let cards = found.unwrap_or_default().into_iter().enumerate();
        let version = |(major, minor)| Version(major, minor);
        Self {
            built: true,
            driver_cuda: driver.ok().map(version),
            nvrtc: nvrtc.ok().map(version),
            cards: cards
                .map(|(number, card)| Card {
                    number,
                    name: card.name,
                    compute_capability: version(card.compute_capability),
                    memory_bytes: card.memory_bytes,
                })
                .collect(),
            problem,
            pci_devices: pci_devices(),
        }
    }

    /// What would make more of it usable.
    pub(super) fn missing(&self) -> Vec<Missing> {
        if !self.built {
            return vec![Missing {
                what: "the cuda backend, which this program was built without".into(),
                command: "cargo build --release -p lrmoe --features cuda",
            }];
        }
        let mut missing = Vec::new();
        if self.driver_cuda.is_none() {
            let of = match self.pci_devices {
                Some(0) => "; but there is no NVIDIA device on this machine's PCI bus",
                Some(_) => ", for the NVIDIA device on the PCI bus",
                None => "",
            };
            missing.push(Missing {
                what: format!(
                    "the NVIDIA driver (libcuda){of}. A container takes that of its host: docker run --gpus all. On Debian (non-free) or Ubuntu"
                ),
                command: "apt-get install -y nvidia-driver || ubuntu-drivers install",
            });
        }
        match (self.nvrtc, self.driver_cuda) {
            (None, Some(Version(..13, _))) => missing.push(nvrtc_for(12, "which compiles kernels")),
            (None, _) => missing.push(nvrtc_for(13, "which compiles kernels")),
            (Some(Version(13.., _)), Some(Version(..13, _))) => {
                missing.push(nvrtc_for(
                    12,
                    "as the driver does not run what NVRTC 13 compiles",
                ));
            }
            _ => {}
        }
        missing
    }
}

fn nvrtc_for(major: u32, why: &str) -> Missing {
    Missing {
        what: format!("NVRTC {major} (libnvrtc), {why}"),
        command: if major > 12 {
            "python3 -m venv ~/nvrtc && ~/nvrtc/bin/pip install 'nvidia-cuda-nvrtc==13.0.*' && \
             export LD_LIBRARY_PATH=\"$(echo ~/nvrtc/lib/python3*/site-packages/nvidia/cu13/lib)\""
        } else {
            "python3 -m venv ~/nvrtc && ~/nvrtc/bin/pip install nvidia-cuda-nvrtc-cu12 && \
             export LD_LIBRARY_PATH=\"$(echo ~/nvrtc/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib)\""
        },
    }
}

/// Devices of NVIDIA's that are no bridges nor sound, as Linux lists them.
fn pci_devices() -> Option<usize> {
    let devices = std::fs::read_dir("/sys/bus/pci/devices").ok()?;
    let is_card = |device: &std::fs::DirEntry| {
        let says = |file: &str, start: &str| {
            let text = std::fs::read_to_string(device.path().join(file));
            text.is_ok_and(|text| text.starts_with(start))
        };
        says("vendor", "0x10de") && says("class", "0x03")
    };
    Some(devices.filter_map(Result::ok).filter(is_card).count())
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl fmt::Display for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.built {
            return writeln!(f, "cuda: not in this program");
        }
        let none = if self.cards.is_empty() {
            ": no card"
        } else {
            ""
        };
        writeln!(f, "cuda{none}")?;
        let found = |version: Option<Version>| {
            version.map_or("not found".to_owned(), |version| version.to_string())
        };
        match self.driver_cuda {
            Some(version) => writeln!(f, "  driver        runs CUDA up to {version}")?,
            None => writeln!(f, "  driver        not found")?,
        }
        writeln!(f, "  NVRTC         {}", found(self.nvrtc))?;
        if let Some(problem) = &self.problem {
            writeln!(f, "  problem       {problem}")?;
        }
        for card in &self.cards {
            writeln!(
                f,
                "  cuda:{:<8} {}, compute capability {}, {:.1} GiB",
                card.number,
                card.name,
                card.compute_capability,
                card.memory_bytes as f64 / GIB
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(driver: Option<Version>, nvrtc: Option<Version>) -> Cuda {
        Cuda {
            built: true,
            driver_cuda: driver,
            nvrtc,
            ..Cuda::default()
        }
    }

    fn missing(driver: Option<Version>, nvrtc: Option<Version>) -> Vec<String> {
        let missing = built(driver, nvrtc).missing();
        let line = |missing: &Missing| format!("{}: {}", missing.what, missing.command);
        missing.iter().map(line).collect()
    }

    #[test]
    fn what_is_missing_is_named_with_what_installs_it() {
        let (twelve, thirteen) = (Version(12, 4), Version(13, 0));
        let nothing: [String; 0] = [];
        assert_eq!(missing(Some(thirteen), Some(thirteen)), nothing);
        assert_eq!(missing(Some(thirteen), Some(twelve)), nothing);
        assert_eq!(missing(Some(twelve), Some(twelve)), nothing);
        let of = |driver, nvrtc, parts: &[&[&str]]| {
            let found = missing(driver, nvrtc);
            assert_eq!(found.len(), parts.len(), "{found:?}");
            for (line, parts) in found.iter().zip(parts) {
                assert!(parts.iter().all(|part| line.contains(part)), "{line}");
            }
        };
        let driver = &[
            "NVIDIA driver (libcuda)",
            "apt-get install -y nvidia-driver",
        ];
        let [new, old] = [
            &["NVRTC 13", "nvidia-cuda-nvrtc==13.0.*"],
            &["NVRTC 12", "nvidia-cuda-nvrtc-cu12"],
        ];
        of(None, None, &[driver, new]);
        of(None, Some(thirteen), &[driver]);
        of(Some(thirteen), None, &[new]);
        of(Some(twelve), None, &[old]);
        of(Some(twelve), Some(thirteen), &[old]);
        let unbuilt = Cuda::default().missing();
        assert!(unbuilt[0].command.ends_with("--features cuda"));
    }

    #[test]
    fn cards_are_listed_with_what_they_are() {
        let found = Cuda {
            cards: vec![Card {
                number: 1,
                name: "a card".into(),
                compute_capability: Version(9, 0),
                memory_bytes: 150 << 30,
            }],
            ..built(Some(Version(13, 0)), Some(Version(12, 9)))
        };
        assert_eq!(
            found.to_string(),
            "cuda\n  driver        runs CUDA up to 13.0\n  NVRTC         12.9\n  cuda:1        a card, compute capability 9.0, 150.0 GiB\n"
        );
        let none = built(None, None).to_string();
        assert!(none.starts_with("cuda: no card\n  driver        not found\n"));
        let json = serde_json::to_value(&found).expect("JSON");
        assert_eq!(
            json["cards"][0]["compute_capability"],
            serde_json::json!([9, 0])
        );
    }
}
