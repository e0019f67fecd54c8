use std::collections::{BTreeMap, HashMap};

use lrmoe::error::Error;
use lrmoe::train::{Checkpoint, CheckpointError};
use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};

use crate::files;

const FILE: &str = "checkpoint.safetensors";

/// Checkpoints, as the bytes are and with a checksum that fits them: what is loaded is every number in the file, and saved again it loads the same.
/// Anything else is refused with the name of the file.
pub fn checkpoint(data: &[u8]) {
    load(data);
    if let Some(sealed) = sealed(data) {
        load(&sealed);
    }
}

fn load(bytes: &[u8]) {
    let path = files::write(FILE, bytes);
    let identity = BTreeMap::new();
    let loaded = match Checkpoint::load(&path, &identity) {
        Ok(loaded) => loaded,
        Err(error) => {
            let refused = matches!(
                &error,
                Error::Checkpoint(
                    CheckpointError::Corrupt { .. } | CheckpointError::Mismatch { .. }
                )
            );
            assert!(refused && error.to_string().contains(FILE), "{error}");
            return;
        }
    };
    let tensors = SafeTensors::deserialize(bytes).expect("a checkpoint is a safetensors file");
    check(&loaded, &tensors);
    let again = files::path("again.safetensors");
    loaded
        .save(&again, &identity)
        .expect("a checkpoint that can be written");
    let again = Checkpoint::load(&again, &identity).expect("what has just been written");
    check(&again, &tensors);
}

/// The checkpoint holds the numbers of the file.
fn check(loaded: &Checkpoint, tensors: &SafeTensors<'_>) {
    let words = |name: &str| -> Vec<u32> {
        let tensor = tensors.tensor(name).expect("a tensor of every checkpoint");
        let words = tensor.data().as_chunks().0.iter();
        words.map(|word| u32::from_le_bytes(*word)).collect()
    };
    let bits =
        |values: &[f32]| -> Vec<u32> { values.iter().map(|value| value.to_bits()).collect() };
    assert_eq!(bits(&loaded.dense), words("dense.parameters"));
    assert_eq!(bits(&loaded.moments.first), words("dense.first"));
    assert_eq!(bits(&loaded.moments.second), words("dense.second"));
    if tensors.tensor("retention.noise").is_ok() {
        assert_eq!(bits(&loaded.retention_noise), words("retention.noise"));
    }
    let name = |index: usize, what: &str| format!("layer.{index}.{what}");
    assert!(
        tensors
            .tensor(&name(loaded.layers.len(), "parameters"))
            .is_err()
    );
    for (index, layer) in loaded.layers.iter().enumerate() {
        let words = |what: &str| words(&name(index, what));
        assert_eq!(bits(&layer.parameters), words("parameters"));
        assert_eq!(bits(&layer.moments.first), words("first"));
        assert_eq!(bits(&layer.moments.second), words("second"));
        assert_eq!(bits(&layer.profile), words("profile"));
        assert_eq!(layer.replicas, words("replicas"));
        assert_eq!(layer.placement.concat(), words("placement"));
        let lengths: Vec<u32> = layer
            .placement
            .iter()
            .map(|here| here.len() as u32)
            .collect();
        assert_eq!(lengths, words("instances"));
    }
}

/// The same tensors with what makes a checkpoint of them: format, step and checksum.
fn sealed(data: &[u8]) -> Option<Vec<u8>> {
    let tensors = SafeTensors::deserialize(data).ok()?;
    let (_, header) = SafeTensors::read_metadata(data).ok()?;
    let json = header.metadata().as_ref()?.get("lrmoe")?;
    let mut facts: BTreeMap<String, String> = serde_json::from_str(json).ok()?;
    facts.remove("checksum");
    let mut contents: Vec<(String, &[u8], Dtype, Vec<usize>)> = tensors
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.data(), view.dtype(), view.shape().to_vec()))
        .collect();
    contents.sort_by(|a, b| a.0.cmp(&b.0));
    let mut crc = crc32fast::Hasher::new();
    for (name, value) in &facts {
        crc.update(name.as_bytes());
        crc.update(value.as_bytes());
    }
    for (name, bytes, ..) in &contents {
        crc.update(name.as_bytes());
        crc.update(bytes);
    }
    facts.insert("checksum".into(), format!("{:08x}", crc.finalize()));
    let views = contents.iter().map(|(name, bytes, dtype, shape)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).expect("as it was");
        (name.as_str(), view)
    });
    let json = serde_json::to_string(&facts).expect("a map of strings");
    serialize(views, Some(HashMap::from([("lrmoe".to_owned(), json)]))).ok()
}
