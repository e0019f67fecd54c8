//! Every layer file of the golden folder (`LRMOE_GOLDEN`, or the repository's copy): forward, backward through all
//! pairs and through the retained ones, and norms, against PyTorch autograd in f64.

use std::{env, error::Error, ffi::OsStr, fs, path::PathBuf, process::ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};
use lrmoe_kernels::{
    BackwardRows, Cpu, ExpertFfn, FfnShape, SquaredNorm, WeightGradients, Weights, Workspace,
    ndarray::{Array2, Array3, s},
};
use safetensors::SafeTensors;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    match trials() {
        Ok(trials) => libtest_mimic::run(&arguments, trials).exit_code(),
        Err(error) => {
            eprintln!("golden files: {error}");
            ExitCode::FAILURE
        }
    }
}

fn trials() -> Result<Vec<Trial>, Box<dyn Error>> {
    let own = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
    let folder = env::var_os("LRMOE_GOLDEN").map_or_else(own, PathBuf::from);
    let entries = fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let paths = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>, std::io::Error>>()?;
    let mut trials: Vec<_> = paths
        .into_iter()
        .filter(|path| path.extension() == Some(OsStr::new("safetensors")))
        .filter_map(|path| {
            let name = path.file_stem()?.to_string_lossy().into_owned();
            let layer = !name.starts_with("selection_");
            layer.then(|| {
                Trial::test(format!("golden::{name}"), move || {
                    check(&Case::read(&path)?)
                })
            })
        })
        .collect();
    trials.sort_by(|a, b| a.name().cmp(b.name()));
    if trials.is_empty() {
        return Err(format!("{}: no layer files", folder.display()).into());
    }
    Ok(trials)
}

struct Case {
    shape: FfnShape,
    experts: usize,
    tokens: usize,
    top_k: usize,
    ids: Vec<i32>,
    retained: Vec<bool>,
    bytes: Vec<u8>,
}

impl Case {
    fn read(path: &PathBuf) -> Result<Self, Failed> {
        let bytes = fs::read(path)?;
        let (_, header) = SafeTensors::read_metadata(&bytes)?;
        let metadata = header.metadata().as_ref().ok_or("no metadata")?;
        let text = |key: &str| {
            metadata
                .get(key)
                .ok_or_else(|| format!("no {key} in metadata"))
        };
        let size = |key| Ok::<usize, Failed>(text(key)?.parse()?);
        let tensors = SafeTensors::deserialize(&bytes)?;
        let ids = tensors.tensor("topk_ids")?.data().as_chunks().0.iter();
        let retained = tensors
            .tensor("retained_mask")?
            .data()
            .iter()
            .map(|&m| m == 1)
            .collect();
        Ok(Self {
            shape: FfnShape {
                width: size("D")?,
                hidden: size("F")?,
                activation: text("activation")?.parse()?,
            },
            experts: size("E")?,
            tokens: size("T")?,
            top_k: size("K")?,
            ids: ids.map(|&four| i32::from_le_bytes(four)).collect(),
            retained,
            bytes,
        })
    }

    fn tensor(&self, name: &str) -> Result<Vec<f32>, Failed> {
        let tensors = SafeTensors::deserialize(&self.bytes)?;
        let data = tensors.tensor(name)?.data().as_chunks().0.iter();
        Ok(data.map(|&four| f32::from_le_bytes(four)).collect())
    }

    fn rows(&self, name: &str) -> Result<Array2<f32>, Failed> {
        Ok(Array2::from_shape_vec(
            (self.tokens, self.shape.width),
            self.tensor(name)?,
        )?)
    }

    fn matrices(&self, name: &str, outputs: usize, inputs: usize) -> Result<Array3<f32>, Failed> {
        Ok(Array3::from_shape_vec(
            (self.experts, outputs, inputs),
            self.tensor(name)?,
        )?)
    }
}

/// What a layer makes of the pairs in `kept`, laid out as in the files.
struct Layer {
    y: Array2<f32>,
    norm_h: Vec<f32>,
    dx: Array2<f32>,
    dp: Vec<f32>,
    dgate: Option<Array3<f32>>,
    dup: Array3<f32>,
    ddown: Array3<f32>,
}

fn run(case: &Case, kept: impl Fn(usize) -> bool) -> Result<Layer, Failed> {
    let FfnShape {
        width,
        hidden,
        activation,
    } = case.shape;
    let (x, dy, p) = (
        case.rows("x")?,
        case.rows("dy")?,
        case.tensor("topk_weights")?,
    );
    let gated = activation.is_gated();
    let gate = gated
        .then(|| case.matrices("w_gate", hidden, width))
        .transpose()?;
    let up = case.matrices("w_up", hidden, width)?;
    let down = case.matrices("w_down", width, hidden)?;

    let expert = |pair: usize| usize::try_from(case.ids[pair]).ok().filter(|_| kept(pair));
    let mut pairs: Vec<_> = (0..case.ids.len())
        .filter(|&pair| expert(pair).is_some())
        .collect();
    pairs.sort_by_key(|&pair| expert(pair));
    let before = |e| pairs.iter().filter(|&&pair| expert(pair) < Some(e)).count();
    let offsets: Vec<_> = (0..=case.experts).map(before).collect();

    let gather = |rows: &Array2<f32>| {
        Array2::from_shape_fn((pairs.len(), width), |(i, d)| {
            rows[[pairs[i] / case.top_k, d]]
        })
    };
    let (pair_x, pair_dy) = (gather(&x), gather(&dy));
    let pair_p: Vec<_> = pairs.iter().map(|&pair| p[pair]).collect();
    let weights = Weights {
        gate: gate.as_ref().map(|gate| gate.view()),
        up: up.view(),
        down: down.view(),
    };

    let (mut out, mut dx) = (pair_x.clone() * f32::NAN, pair_x.clone() * f32::NAN);
    let (mut norms, mut dp) = (
        vec![SquaredNorm::default(); pairs.len()],
        vec![f32::NAN; pairs.len()],
    );
    let nan = |like: &Array3<f32>| Array3::from_elem(like.raw_dim(), f32::NAN);
    let (mut dgate, mut dup, mut ddown) = (gate.as_ref().map(nan), nan(&up), nan(&down));
    let workspace = &mut Workspace::new();
    let (view, h_norms) = (out.view_mut(), Some(&mut norms[..]));
    Cpu.forward(
        &case.shape,
        &weights,
        &offsets,
        pair_x.view(),
        workspace,
        view,
        h_norms,
    )?;
    let rows = BackwardRows {
        x: pair_x.view(),
        dy: pair_dy.view(),
        gate_weights: &pair_p,
        weights: &vec![1.0; pairs.len()],
    };
    let mut gradients = WeightGradients {
        gate: dgate.as_mut().map(|gate| gate.view_mut()),
        up: dup.view_mut(),
        down: ddown.view_mut(),
    };
    let view = dx.view_mut();
    Cpu.backward(
        &case.shape,
        &weights,
        &offsets,
        &rows,
        workspace,
        view,
        &mut dp,
        &mut gradients,
    )?;

    let mut layer = Layer {
        y: Array2::zeros(x.raw_dim()),
        norm_h: vec![0.0; case.ids.len()],
        dx: Array2::zeros(x.raw_dim()),
        dp: vec![0.0; case.ids.len()],
        dgate,
        dup,
        ddown,
    };
    for (row, &pair) in pairs.iter().enumerate() {
        let token = pair / case.top_k;
        layer.y.row_mut(token).scaled_add(p[pair], &out.row(row));
        layer.dx.row_mut(token).scaled_add(1.0, &dx.row(row));
        layer.norm_h[pair] = norms[row].value().sqrt() as f32;
        layer.dp[pair] = dp[row];
    }
    Ok(layer)
}

fn check(case: &Case) -> Result<(), Failed> {
    let all = run(case, |_| true)?;
    compare("y", all.y.as_slice(), case.tensor("y")?)?;
    compare("norm_h", Some(&all.norm_h), case.tensor("norm_h")?)?;
    check_gradients(case, &all, "")?;
    check_pair_norms(case)?;
    check_gradients(case, &run(case, |pair| case.retained[pair])?, "retained_")
}

/// Each pair alone: its output, and what it adds to the gradients. They may differ by many orders of magnitude, so each is compared alone.
fn check_pair_norms(case: &Case) -> Result<(), Failed> {
    let p = case.tensor("topk_weights")?;
    let names = ["out_norm", "dw_down_norm", "dw_full_norm"];
    let expected = names.map(|name| case.tensor(name));
    let [out_norm, down_norm, full_norm] = expected;
    let (out_norm, down_norm, full_norm) = (out_norm?, down_norm?, full_norm?);
    for pair in 0..case.ids.len() {
        let alone = run(case, |other| other == pair)?;
        let norm = |values: &mut dyn Iterator<Item = &f32>| {
            values.map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt() as f32
        };
        let inward = alone.dgate.iter().flatten().chain(&alone.dup);
        let masked = case.ids[pair] < 0;
        let out = norm(&mut alone.y.iter()) / if masked { 1.0 } else { p[pair] };
        let full = norm(&mut inward.chain(&alone.ddown));
        compare("out_norm", Some(&[out]), vec![out_norm[pair]])?;
        let down = norm(&mut alone.ddown.iter());
        compare("dw_down_norm", Some(&[down]), vec![down_norm[pair]])?;
        compare("dw_full_norm", Some(&[full]), vec![full_norm[pair]])?;
    }
    Ok(())
}

fn check_gradients(case: &Case, layer: &Layer, prefix: &str) -> Result<(), Failed> {
    let expected = |name: &str| case.tensor(&format!("{prefix}{name}"));
    compare("dw_up", layer.dup.as_slice(), expected("dw_up")?)?;
    compare("dw_down", layer.ddown.as_slice(), expected("dw_down")?)?;
    if let Some(dgate) = &layer.dgate {
        compare("dw_gate", dgate.as_slice(), expected("dw_gate")?)?;
    }
    // Even and odd tokens apart, as they may differ by many orders of magnitude.
    let dp = Array2::from_shape_vec((case.tokens, case.top_k), layer.dp.clone())?;
    for (name, got) in [("dx", &layer.dx), ("dtopk_weights", &dp)] {
        let expected = Array2::from_shape_vec(got.raw_dim(), expected(name)?)?;
        for parity in [0, 1] {
            let half = |rows: &Array2<f32>| -> Vec<f32> {
                rows.slice(s![parity.min(case.tokens)..;2, ..])
                    .iter()
                    .copied()
                    .collect()
            };
            compare(name, Some(&half(got)), half(&expected))?;
        }
    }
    Ok(())
}

/// `|got - expected| < 1e-5 |expected|`, the bound that the files are made for; exactly 0 where all of `expected` is.
fn compare(what: &str, got: Option<&[f32]>, expected: Vec<f32>) -> Result<(), Failed> {
    let got = got.ok_or("not contiguous")?;
    if got.len() != expected.len() {
        return Err(format!("{what}: {} values, expected {}", got.len(), expected.len()).into());
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let size = norm(&mut expected.iter().map(|&e| f64::from(e)));
    let error = norm(
        &mut got
            .iter()
            .zip(&expected)
            .map(|(&g, &e)| f64::from(g) - f64::from(e)),
    );
    if error < 1e-5 * size || (size == 0.0 && got.iter().all(|&g| g == 0.0)) {
        return Ok(());
    }
    Err(format!("{what}: error {error:e} of {size:e}").into())
}
