//! The composed layer against PyTorch autograd: every layer file of the golden folder (`LRMOE_GOLDEN`, or the repository's copy), on 1, 2 and 4 ranks.

mod common;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use common::{Batch, Stepped, lrmoe, relative_error, step};
use libtest_mimic::{Arguments, Failed, Trial};
use lrmoe::policy::Policy;
use ndarray::{Array2, Array3, s};
use safetensors::SafeTensors;

const TOLERANCE: f64 = 1e-5;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let own = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
    let folder = std::env::var_os("LRMOE_GOLDEN").map_or_else(own, PathBuf::from);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) => {
            eprintln!("golden files: {}: {error}", folder.display());
            return ExitCode::FAILURE;
        }
    };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| is_layer(path))
        .collect();
    files.sort();
    if files.is_empty() {
        eprintln!("golden files: {}: no layer files", folder.display());
        return ExitCode::FAILURE;
    }
    let trials = files
        .iter()
        .flat_map(|file| [1, 2, 4].map(|ranks| trial(file.clone(), ranks)))
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn is_layer(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    path.extension()
        .is_some_and(|extension| extension == "safetensors")
        && !name.starts_with("selection_")
}

fn trial(file: PathBuf, ranks: usize) -> Trial {
    let name = file
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    Trial::test(format!("golden::{name}::{ranks}_ranks"), move || {
        let case = Case::read(&file)?;
        for policy in [Policy::Dropless, lrmoe(1.0)] {
            let stepped = step(&case.batch, &case.batch.config(ranks, policy));
            case.check(&stepped, name == "mixed_dy")?;
        }
        Ok(())
    })
}

/// A file's inputs, and what must come out.
struct Case {
    batch: Batch,
    y: Array2<f32>,
    dx: Array2<f32>,
    dp: Array2<f32>,
    gradient: Vec<f32>,
}

impl Case {
    fn read(path: &Path) -> Result<Self, Failed> {
        let bytes = std::fs::read(path)?;
        let (_, header) = SafeTensors::read_metadata(&bytes)?;
        let metadata = header.metadata().clone().ok_or("no metadata")?;
        let size =
            |key: &str| Ok::<usize, Failed>(metadata.get(key).ok_or("a size is missing")?.parse()?);
        let (tokens, top_k, experts, width, hidden) =
            (size("T")?, size("K")?, size("E")?, size("D")?, size("F")?);
        let tensors = SafeTensors::deserialize(&bytes)?;
        let words = |name: &str| {
            Ok::<Vec<[u8; 4]>, Failed>(tensors.tensor(name)?.data().as_chunks().0.to_vec())
        };
        let floats = |name: &str| {
            Ok::<Vec<f32>, Failed>(words(name)?.into_iter().map(f32::from_le_bytes).collect())
        };
        let rows = |name: &str, columns| {
            Ok::<_, Failed>(Array2::from_shape_vec((tokens, columns), floats(name)?)?)
        };
        let cube = |name: &str, a, b| {
            Ok::<_, Failed>(Array3::from_shape_vec((experts, a, b), floats(name)?)?)
        };
        let gated = tensors.tensor("w_gate").is_ok();
        let ids = words("topk_ids")?
            .into_iter()
            .map(i32::from_le_bytes)
            .collect();
        let mut gradient = if gated {
            floats("dw_gate")?
        } else {
            Vec::new()
        };
        gradient.extend(floats("dw_up")?);
        gradient.extend(floats("dw_down")?);
        Ok(Self {
            batch: Batch {
                x: rows("x", width)?,
                dy: rows("dy", width)?,
                expert_ids: Array2::from_shape_vec((tokens, top_k), ids)?,
                gate_weights: rows("topk_weights", top_k)?,
                gate: gated.then(|| cube("w_gate", hidden, width)).transpose()?,
                up: cube("w_up", hidden, width)?,
                down: cube("w_down", width, hidden)?,
                activation: metadata.get("activation").ok_or("no activation")?.parse()?,
            },
            y: rows("y", width)?,
            dx: rows("dx", width)?,
            dp: rows("dtopk_weights", top_k)?,
            gradient,
        })
    }

    /// `apart`: even and odd rows of dx and dp differ too much in size to be compared together.
    fn check(&self, stepped: &Stepped, apart: bool) -> Result<(), Failed> {
        let mut errors = vec![
            ("y", relative_error(&stepped.y, &self.y)),
            ("dw", relative_error(&stepped.gradient, &self.gradient)),
        ];
        for start in if apart { 0..2 } else { 0..1 } {
            let rows = s![start..; if apart { 2 } else { 1 }, ..];
            errors.push((
                "dx",
                relative_error(stepped.dx.slice(rows), self.dx.slice(rows)),
            ));
            errors.push((
                "dp",
                relative_error(stepped.dp.slice(rows), self.dp.slice(rows)),
            ));
        }
        match errors
            .iter()
            .find(|(_, error)| error.is_nan() || *error >= TOLERANCE)
        {
            Some((what, error)) => Err(format!("{what} is off by {error:e}").into()),
            None => Ok(()),
        }
    }
}
