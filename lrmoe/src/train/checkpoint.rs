//! Checkpoints: one safetensors file, which is always whole.
//!
//! Tensors: `dense.parameters`, `dense.first`, `dense.second` (all dense parameters in the model's order and their moments), and per MoE layer
//! `layer.N.{parameters,first,second}` (see `LayerState`), `layer.N.instances` (how many on each rank) and `layer.N.placement` (their experts,
//! rank by rank), `layer.N.profile`, `layer.N.replicas`. A run of adaptive retention has `retention.noise`, a number for each layer.
//! Metadata, as one JSON object under `lrmoe`: the format's name, the steps done, the options that a resumed run must share, and a CRC-32
//! of all of it and of the tensors, so that damage is refused.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::adamw::Moments;
use crate::error::Error;
use crate::files;
use crate::layer::LayerState;

const FORMAT: &str = "lrmoe-checkpoint-1";
/// Where the metadata lie; one key, as safetensors writes several in any order.
const METADATA: &str = "lrmoe";

/// A run's state between two steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Steps done.
    pub step: u32,
    /// All dense parameters, flat.
    pub dense: Vec<f32>,
    /// Their moments.
    pub moments: Moments,
    /// MoE layers in order.
    pub layers: Vec<LayerState>,
    /// What an adaptive retention has measured, a number for each layer; empty for other schedules.
    pub retention_noise: Vec<f32>,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// No file to resume from.
    #[error("{}: no checkpoint to resume from; run without --resume first", .0.display())]
    Missing(PathBuf),
    /// Not a checkpoint, or a damaged one.
    #[error("{}: not a readable checkpoint: {reason}", .path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A checkpoint of another run.
    #[error("{}: written with {key} {found}, this run has {expected}", .path.display())]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// The option that differs.
        key: String,
        /// Its value in the checkpoint.
        found: String,
        /// Its value in this run.
        expected: String,
    },
}

impl Checkpoint {
    /// Writes the checkpoint under a temporary name beside `path` and renames it, so that `path` is always whole.
    /// `identity`: options that a resumed run must share, by name.
    ///
    /// # Errors
    /// `Error::Io` with the path.
    pub fn save(&self, path: &Path, identity: &BTreeMap<String, String>) -> Result<(), Error> {
        let tensors = self.tensors();
        let mut facts = identity.clone();
        facts.insert("format".into(), FORMAT.into());
        facts.insert("step".into(), self.step.to_string());
        let contents = tensors
            .iter()
            .map(|(name, _, bytes)| (name.as_str(), bytes.as_slice()));
        facts.insert(CHECKSUM.into(), checksum(&facts, contents));
        let json = serde_json::to_string(&facts).expect("a map of strings");
        let views = tensors.iter().map(|(name, dtype, bytes)| {
            let view =
                TensorView::new(*dtype, vec![bytes.len() / 4], bytes).expect("four bytes a number");
            (name.as_str(), view)
        });
        let bytes = serialize(views, Some(HashMap::from([(METADATA.to_owned(), json)])))
            .map_err(|e| Error::io(path)(std::io::Error::other(e)))?;
        files::write(path, &bytes)
    }

    /// Reads a checkpoint and checks that it belongs to a run with the given `identity`.
    ///
    /// # Errors
    /// `CheckpointError`: missing, corrupt, or of another run.
    pub fn load(path: &Path, identity: &BTreeMap<String, String>) -> Result<Self, Error> {
        Self::parse(&Self::read(path)?, path, identity)
    }

    /// The bytes of a checkpoint.
    pub(super) fn read(path: &Path) -> Result<Vec<u8>, Error> {
        match std::fs::read(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                Err(CheckpointError::Missing(path.into()).into())
            }
            other => other.map_err(Error::io(path)),
        }
    }

    /// As `load`, of the bytes that `path` held.
    pub(super) fn parse(
        bytes: &[u8],
        path: &Path,
        identity: &BTreeMap<String, String>,
    ) -> Result<Self, Error> {
        let corrupt = |reason: String| CheckpointError::Corrupt {
            path: path.into(),
            reason,
        };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| corrupt(e.to_string()))?;
        let json = header
            .metadata()
            .as_ref()
            .and_then(|metadata| metadata.get(METADATA));
        let mut facts: BTreeMap<String, String> = json
            .and_then(|json| serde_json::from_str(json).ok())
            .ok_or_else(|| corrupt("it lacks LRMoE's metadata".into()))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| corrupt(e.to_string()))?;
        let written = facts.remove(CHECKSUM);
        let contents = tensors.iter().map(|(name, tensor)| (name, tensor.data()));
        if written != Some(checksum(&facts, contents)) {
            return Err(corrupt("its checksum does not match its contents".into()).into());
        }
        let expected = BTreeMap::from([("format".to_owned(), FORMAT.to_owned())]);
        for (key, expected) in expected.iter().chain(identity) {
            let found = facts.get(key).map_or("nothing", String::as_str);
            if found != expected {
                return Err(CheckpointError::Mismatch {
                    path: path.into(),
                    key: key.clone(),
                    found: found.to_owned(),
                    expected: expected.clone(),
                }
                .into());
            }
        }
        let step = facts
            .get("step")
            .and_then(|step| step.parse().ok())
            .ok_or_else(|| corrupt("no number of steps".into()))?;
        Ok(Self::from_tensors(step, &Reader { tensors }).map_err(corrupt)?)
    }

    /// Name, type and bytes of every tensor; all are vectors of four-byte numbers.
    fn tensors(&self) -> Vec<(String, Dtype, Vec<u8>)> {
        let floats = |name: String, values: &[f32]| {
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            (name, Dtype::F32, bytes)
        };
        let words = |name: String, values: Vec<u32>| {
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            (name, Dtype::U32, bytes)
        };
        let mut tensors = vec![
            floats("dense.parameters".into(), &self.dense),
            floats("dense.first".into(), &self.moments.first),
            floats("dense.second".into(), &self.moments.second),
        ];
        if !self.retention_noise.is_empty() {
            tensors.push(floats(NOISE.into(), &self.retention_noise));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let name = |what: &str| format!("layer.{index}.{what}");
            tensors.push(floats(name("parameters"), &layer.parameters));
            tensors.push(floats(name("first"), &layer.moments.first));
            tensors.push(floats(name("second"), &layer.moments.second));
            tensors.push(floats(name("profile"), &layer.profile));
            let instances = layer.placement.iter().map(|here| here.len() as u32);
            tensors.push(words(name("instances"), instances.collect()));
            tensors.push(words(name("placement"), layer.placement.concat()));
            tensors.push(words(name("replicas"), layer.replicas.clone()));
        }
        tensors
    }

    fn from_tensors(step: u32, reader: &Reader<'_>) -> Result<Self, String> {
        let mut layers = Vec::new();
        while reader.has(&format!("layer.{}.parameters", layers.len())) {
            let name = |what: &str| format!("layer.{}.{what}", layers.len());
            let (parameters, moments) = reader.parameters(&name(""))?;
            layers.push(LayerState {
                parameters,
                moments,
                placement: reader.placement(&name("placement"), &name("instances"))?,
                profile: reader.floats(&name("profile"))?,
                replicas: reader.words(&name("replicas"))?,
            });
        }
        let (dense, moments) = reader.parameters("dense.")?;
        let retention_noise = match reader.has(NOISE) {
            true => reader.floats(NOISE)?,
            false => Vec::new(),
        };
        Ok(Self {
            step,
            dense,
            moments,
            layers,
            retention_noise,
        })
    }
}

const NOISE: &str = "retention.noise";
const CHECKSUM: &str = "checksum";

/// CRC-32 of the facts and of the tensors in the order of their names.
fn checksum<'a>(
    facts: &BTreeMap<String, String>,
    tensors: impl Iterator<Item = (&'a str, &'a [u8])>,
) -> String {
    let mut tensors: Vec<_> = tensors.collect();
    tensors.sort_unstable();
    let mut hasher = crc32fast::Hasher::new();
    for (name, value) in facts {
        hasher.update(name.as_bytes());
        hasher.update(value.as_bytes());
    }
    for (name, bytes) in tensors {
        hasher.update(name.as_bytes());
        hasher.update(bytes);
    }
    format!("{:08x}", hasher.finalize())
}

/// Typed access to the tensors of a file.
struct Reader<'a> {
    tensors: SafeTensors<'a>,
}

impl Reader<'_> {
    fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }

    /// Parameters and their moments, all of one length.
    fn parameters(&self, prefix: &str) -> Result<(Vec<f32>, Moments), String> {
        let vector = |what: &str| self.floats(&format!("{prefix}{what}"));
        let parameters = vector("parameters")?;
        let moments = Moments {
            first: vector("first")?,
            second: vector("second")?,
        };
        if moments.first.len() != parameters.len() || moments.second.len() != parameters.len() {
            return Err(format!(
                "{prefix}parameters, first and second have lengths {}, {} and {}",
                parameters.len(),
                moments.first.len(),
                moments.second.len()
            ));
        }
        Ok((parameters, moments))
    }

    /// The experts of each rank, of which `instances` says how many there are.
    fn placement(&self, name: &str, instances: &str) -> Result<Vec<Vec<u32>>, String> {
        let (experts, counts) = (self.words(name)?, self.words(instances)?);
        let sum: u64 = counts.iter().map(|&count| u64::from(count)).sum();
        if sum != experts.len() as u64 {
            let found = experts.len();
            return Err(format!(
                "{name} has {found} experts, {instances} adds up to {sum}"
            ));
        }
        let mut experts = experts.into_iter();
        Ok(counts
            .into_iter()
            .map(|count| experts.by_ref().take(count as usize).collect())
            .collect())
    }

    fn floats(&self, name: &str) -> Result<Vec<f32>, String> {
        Ok(self
            .chunks(name, Dtype::F32)?
            .map(f32::from_le_bytes)
            .collect())
    }

    fn words(&self, name: &str) -> Result<Vec<u32>, String> {
        Ok(self
            .chunks(name, Dtype::U32)?
            .map(u32::from_le_bytes)
            .collect())
    }

    fn chunks(&self, name: &str, dtype: Dtype) -> Result<impl Iterator<Item = [u8; 4]>, String> {
        let tensor = self
            .tensors
            .tensor(name)
            .map_err(|e| format!("{name}: {e}"))?;
        if tensor.dtype() != dtype {
            return Err(format!("{name} is {:?}, not {dtype:?}", tensor.dtype()));
        }
        Ok(tensor.data().as_chunks().0.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_back_as_it_was_saved() {
        let moments = |len: usize| Moments {
            first: vec![0.5; len],
            second: vec![0.25; len],
        };
        let checkpoint = Checkpoint {
            step: 7,
            dense: vec![1.0, -0.0, f32::MIN_POSITIVE],
            moments: moments(3),
            layers: vec![LayerState {
                parameters: vec![3.0; 4],
                moments: moments(4),
                // The first and the last rank hold nothing.
                placement: vec![vec![], vec![0, 2], vec![1], vec![]],
                profile: vec![0.0, 2.5],
                replicas: vec![],
            }],
            retention_noise: vec![0.5],
        };
        let identity = BTreeMap::from([("seed".to_owned(), "1".to_owned())]);
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("checkpoint.safetensors");
        checkpoint.save(&path, &identity).expect("saved");
        assert_eq!(
            Checkpoint::load(&path, &identity).expect("loaded"),
            checkpoint
        );

        let damaged = Checkpoint {
            moments: moments(2),
            ..checkpoint
        };
        damaged.save(&path, &identity).expect("saved");
        let error = Checkpoint::load(&path, &identity).expect_err("refused");
        assert!(error.to_string().contains("lengths 3, 2 and 2"), "{error}");
    }
}
