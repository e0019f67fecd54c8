//! Routing traces: what is written is read back, damage is named, other formats become native.

mod convert;
mod inspect;
mod malformed;
mod memory;
mod native;
mod synth;

use std::collections::HashMap;
use std::path::PathBuf;

use lrmoe::trace::{PairRecord, TraceError, TraceReader, TraceSettings};
use ndarray::Array3;
use safetensors::tensor::{Dtype, TensorView, serialize};
use tempfile::TempDir;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file and returns its path.
    fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, contents).expect("a file");
        path
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).expect("readable");
        let name = |entry: std::io::Result<std::fs::DirEntry>| {
            entry
                .expect("readable")
                .file_name()
                .to_string_lossy()
                .into_owned()
        };
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort();
        names
    }
}

/// A safetensors file, of tensors that need not make a trace.
#[derive(Clone)]
struct Raw {
    tensors: Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>,
    metadata: HashMap<String, String>,
}

impl Raw {
    fn new(metadata: &[(&str, &str)]) -> Self {
        let metadata = metadata
            .iter()
            .map(|(key, value)| (key.to_string(), value.to_string()));
        Self {
            tensors: Vec::new(),
            metadata: metadata.collect(),
        }
    }

    /// Adds a tensor, or puts it in the place of one of its name.
    fn tensor(mut self, name: &'static str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Self {
        self.tensors.retain(|(known, ..)| *known != name);
        self.tensors.push((name, dtype, shape.to_vec(), data));
        self
    }

    fn words(self, name: &'static str, shape: &[usize], words: &[u32]) -> Self {
        let data = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.tensor(name, Dtype::U32, shape, data)
    }

    fn ids(self, name: &'static str, shape: &[usize], ids: &[i32]) -> Self {
        let data = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.tensor(name, Dtype::I32, shape, data)
    }

    fn floats(self, name: &'static str, shape: &[usize], values: &[f32]) -> Self {
        let data = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.tensor(name, Dtype::F32, shape, data)
    }

    fn bytes(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, dtype, shape, data)| {
            let view = TensorView::new(*dtype, shape.clone(), data).expect("as many bytes");
            (*name, view)
        });
        serialize(views, Some(self.metadata.clone())).expect("a file")
    }
}

/// One layer, two ranks of one token each, two of four experts a token: two steps, pairs of the second.
fn small() -> Raw {
    Raw::new(&[("experts", "4"), ("ranks", "2"), ("first_step", "5")])
        .words(
            "counts",
            &[2, 1, 2, 4],
            &[1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 1],
        )
        .ids("steps", &[1], &[6])
        .ids("expert", &[1, 1, 2, 2], &[2, 0, 1, 3])
        .floats("gate_weight", &[1, 1, 2, 2], &[0.75, 0.25, 0.5, 0.5])
        .floats("score", &[1, 1, 2, 2], &[3.0, 1.0, 0.0, 2.0])
}

/// Opens a trace and reads all of it.
fn read_all(path: &std::path::Path) -> Result<(Vec<Array3<u32>>, Vec<PairRecord>), TraceError> {
    let mut reader = TraceReader::open(path)?;
    let (steps, recorded) = (reader.header().steps, reader.header().recorded.len());
    let counts = (0..steps)
        .map(|step| reader.step(step))
        .collect::<Result<_, _>>()?;
    let pairs = (0..recorded)
        .map(|index| reader.pairs(index))
        .collect::<Result<_, _>>()?;
    Ok((counts, pairs))
}

fn settings(layers: usize, ranks: usize, experts: usize) -> TraceSettings {
    TraceSettings {
        layers,
        ranks,
        experts,
        ..TraceSettings::default()
    }
}
