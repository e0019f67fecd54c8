//! Where the tensors of a native trace lie, and the sizes they give.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;

use safetensors::tensor::{Dtype, Metadata};

use super::error::Fault;

/// Bytes of the header's length at the start of a file.
pub(super) const LENGTH_BYTES: u64 = 8;
/// Longest header that safetensors allow.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// The header of a safetensors file whose length fits it.
pub(super) struct Tensors {
    header: Metadata,
    data_start: u64,
}

impl Tensors {
    /// Reads the header alone. The outer error is the system's.
    pub(super) fn read(file: &mut File) -> std::io::Result<Result<Self, Fault>> {
        let found = file.metadata()?.len();
        if found < LENGTH_BYTES {
            return Ok(Err(Fault::HeaderLength { header: 0, found }));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut length)?;
        let header = u64::from_le_bytes(length);
        if header > MOST_HEADER_BYTES || header > found - LENGTH_BYTES {
            return Ok(Err(Fault::HeaderLength { header, found }));
        }
        let mut json = vec![0; header as usize];
        file.read_exact(&mut json)?;
        let data_start = LENGTH_BYTES + header;
        let header: Metadata = match serde_json::from_slice(&json) {
            Ok(header) => header,
            Err(error) => return Ok(Err(Fault::Header(error))),
        };
        let expected = data_start.saturating_add(header.data_len() as u64);
        Ok(if expected == found {
            Ok(Self { header, data_start })
        } else {
            Err(Fault::Length { expected, found })
        })
    }

    /// A tensor of one of the types, if there is one of that name.
    pub(super) fn find(
        &self,
        name: &'static str,
        dtypes: &[Dtype],
        expected: &'static str,
    ) -> Result<Option<Tensor>, Fault> {
        let Some(info) = self.header.info(name) else {
            return Ok(None);
        };
        if !dtypes.contains(&info.dtype) {
            return Err(Fault::Dtype {
                tensor: name,
                found: info.dtype.to_string(),
                expected,
            });
        }
        Ok(Some(Tensor {
            name,
            dtype: info.dtype,
            shape: info.shape.clone(),
            start: self.data_start + info.data_offsets.0 as u64,
        }))
    }

    /// An f32 tensor.
    pub(super) fn floats(&self, name: &'static str) -> Result<Option<Tensor>, Fault> {
        self.find(name, &[Dtype::F32], "F32")
    }

    pub(super) fn metadata(&self) -> BTreeMap<String, String> {
        let none = HashMap::new();
        let metadata = self.header.metadata().as_ref().unwrap_or(&none);
        metadata.clone().into_iter().collect()
    }
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: &'static str,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Its first byte in the file.
    pub(super) start: u64,
}

impl Tensor {
    /// The sizes of all axes, none of them 0.
    pub(super) fn axes<const N: usize>(
        &self,
        names: [&'static str; N],
    ) -> Result<[usize; N], Fault> {
        let (tensor, found) = (self.name, self.shape.clone());
        let Ok(sizes) = <[usize; N]>::try_from(found.as_slice()) else {
            let expected = format!("[{}]", names.join(", "));
            return Err(Fault::Shape {
                tensor,
                found,
                expected,
            });
        };
        match sizes.iter().position(|size| *size == 0) {
            None => Ok(sizes),
            Some(axis) => Err(Fault::Empty {
                tensor,
                found,
                axis: names[axis],
            }),
        }
    }

    /// Its shape is `expected`.
    pub(super) fn require(&self, expected: &[usize]) -> Result<(), Fault> {
        if self.shape == expected {
            return Ok(());
        }
        Err(Fault::Shape {
            tensor: self.name,
            found: self.shape.clone(),
            expected: format!("{expected:?}"),
        })
    }
}

/// A number in the metadata under the first of the keys that is there.
pub(super) fn number(
    metadata: &BTreeMap<String, String>,
    keys: &[&'static str],
) -> Result<Option<(&'static str, u64)>, Fault> {
    let Some((key, value)) = keys
        .iter()
        .find_map(|key| Some((*key, metadata.get(*key)?)))
    else {
        return Ok(None);
    };
    match value.parse() {
        Ok(number) => Ok(Some((key, number))),
        Err(_) => Err(Fault::Metadata {
            key,
            value: value.clone(),
            expected: "a number of at least 0".into(),
        }),
    }
}

/// What the metadata say about a size, which must be `known` where that is given.
pub(super) fn size(
    metadata: &BTreeMap<String, String>,
    keys: &[&'static str],
    known: Option<usize>,
    limit: usize,
) -> Result<Option<usize>, Fault> {
    let Some((key, value)) = number(metadata, keys)? else {
        return Ok(known);
    };
    let expected = match known {
        Some(known) if value != known as u64 => format!("{known} by the shapes"),
        None if !(1..=limit as u64).contains(&value) => format!("1 to {limit}"),
        _ => return Ok(Some(value as usize)),
    };
    Err(Fault::Metadata {
        key,
        value: value.to_string(),
        expected,
    })
}
