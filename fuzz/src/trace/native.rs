use indicatif::ProgressBar;
use lrmoe::trace::{ConvertOptions, Format, TraceReader, convert};
use safetensors::{Dtype, SafeTensors};

use super::{Contents, MOST_COUNTS, check_error, read_all};
use crate::files;

/// Native traces: what is read is what the safetensors crate finds in the same bytes, and written again it reads the same.
pub fn trace_native(data: &[u8]) {
    let path = files::write("in.safetensors", data);
    let mut reader = match TraceReader::open(&path) {
        Ok(reader) => reader,
        Err(error) => return check_error(&error, "in.safetensors"),
    };
    let header = reader.header();
    let sizes = [header.layers, header.ranks, header.experts];
    if sizes.into_iter().fold(1, usize::saturating_mul) > MOST_COUNTS {
        return;
    }
    let contents = match read_all(&mut reader) {
        Ok(contents) => contents,
        Err(error) => return check_error(&error, "in.safetensors"),
    };
    let tensors = SafeTensors::deserialize(data).expect("a trace is a safetensors file");
    check_counts(&contents, &tensors);
    check_pairs(&contents, &tensors);

    let out = files::path("out.safetensors");
    let options = ConvertOptions {
        from: Some(Format::Native),
        ..ConvertOptions::default()
    };
    let written = convert(&[path], &out, &options, &ProgressBar::hidden());
    written.expect("a trace that can be read can be written");
    let mut reader = TraceReader::open(&out).expect("what has just been written");
    let again = read_all(&mut reader).expect("what has just been written");
    assert_eq!(again.steps, contents.steps);
    let [header, again] = [&contents.header, &again.header];
    assert_eq!(again.top_k, header.top_k);
    assert_eq!(again.tokens_per_rank, header.tokens_per_rank);
}

/// The numbers of a tensor.
fn numbers<T>(tensors: &SafeTensors<'_>, name: &str, decode: fn([u8; 4]) -> T) -> Option<Vec<T>> {
    let tensor = tensors.tensor(name).ok()?;
    Some(
        tensor
            .data()
            .as_chunks()
            .0
            .iter()
            .map(|word| decode(*word))
            .collect(),
    )
}

/// Experts of all pairs.
fn expert_ids(tensors: &SafeTensors<'_>) -> Option<Vec<i32>> {
    let tensor = tensors.tensor("expert").ok()?;
    let bytes = tensor.data();
    Some(match tensor.dtype() {
        Dtype::U8 => bytes.iter().map(|&id| id.into()).collect(),
        Dtype::U16 => {
            let words = bytes.as_chunks().0.iter();
            words.map(|word| u16::from_le_bytes(*word).into()).collect()
        }
        _ => numbers(tensors, "expert", i32::from_le_bytes)?,
    })
}

fn check_counts(contents: &Contents, tensors: &SafeTensors<'_>) {
    let header = &contents.header;
    let found: Vec<u32> = contents.steps.counts.iter().flatten().copied().collect();
    if let Some(expected) = numbers(tensors, "counts", u32::from_le_bytes) {
        assert_eq!(found, expected);
        return;
    }
    // Without counts every step has its pairs.
    let ids = expert_ids(tensors).expect("counts or pairs");
    let mut expected = vec![0; found.len()];
    let per_rank = header.tokens_per_rank.expect("there are pairs") * header.top_k.expect("and k");
    for (pair, &id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
        // Pairs lie by (step, layer, rank).
        expected[pair / per_rank * header.experts + id as usize] += 1;
    }
    assert_eq!(found, expected);
}

fn check_pairs(contents: &Contents, tensors: &SafeTensors<'_>) {
    let pairs = &contents.steps.pairs;
    let ids: Vec<i32> = pairs
        .iter()
        .flat_map(|pairs| pairs.expert.iter().copied())
        .collect();
    if pairs.is_empty() {
        return;
    }
    assert_eq!(Some(&ids), expert_ids(tensors).as_ref());
    let masked = |values: Vec<f32>| -> Vec<f32> {
        let values = ids.iter().zip(values);
        values
            .map(|(id, value)| if *id == -1 { 0.0 } else { value })
            .collect()
    };
    let floats = |name: &str| numbers(tensors, name, f32::from_le_bytes);
    let weights = floats("gate_weight").expect("there are pairs");
    let found: Vec<f32> = pairs
        .iter()
        .flat_map(|pairs| pairs.gate_weight.iter().copied())
        .collect();
    assert_eq!(found, masked(weights));
    let norms = |(h, dy): (Vec<f32>, Vec<f32>)| -> Vec<f32> {
        let top_k = h.len() / dy.len();
        let scores = h.iter().zip(&found).enumerate();
        scores
            .map(|(pair, (h, weight))| weight * dy[pair / top_k] * h)
            .collect()
    };
    let scores = floats("score").or_else(|| floats("norm_h").zip(floats("norm_dy")).map(norms));
    let found: Vec<f32> = pairs
        .iter()
        .flat_map(|pairs| pairs.score.iter().flatten().copied())
        .collect();
    assert_eq!(found, scores.map(masked).unwrap_or_default());
}
