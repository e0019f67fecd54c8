//! The golden files (`LRMOE_GOLDEN`, or the repository's copy): selections to the bit; layers forward, backward through all pairs and through
//! the retained ones, and norms, against PyTorch autograd in f64.

use std::{env, error::Error, ffi::OsStr, fs, path::PathBuf};

use libtest_mimic::Trial;
use lrmoe_kernels::{
    ExpertBuffers, FfnShape, RowBuffers, SquaredNorm,
    lrmoe_metric::{Draw, Method, Pairs, Score, Solo},
    ndarray::{Array2, s},
};
use safetensors::SafeTensors;

use crate::{Backend, Candidate};

/// A trial for each file.
pub(crate) fn trials<B: Backend>(candidate: &Candidate<B>) -> Vec<Trial> {
    let paths = match paths() {
        Ok(paths) => paths,
        Err(error) => {
            let reason = error.to_string();
            return vec![candidate.trial("golden", move |_| panic!("{reason}"))];
        }
    };
    let trial = |path: PathBuf| {
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let selection = name.starts_with("selection_");
        // Every pair alone is many small passes.
        let pair_by_pair = candidate.name == "cpu";
        candidate.trial(format!("golden::{name}"), move |backend| {
            let case = Case::read(&path).unwrap();
            if selection {
                case.check_keys(backend, "score_bits", "mask").unwrap();
            } else {
                case.check_keys(backend, "score", "retained_mask").unwrap();
                case.check_scores(backend).unwrap();
                check(backend, &case, pair_by_pair).unwrap();
            }
        })
    };
    paths.into_iter().map(trial).collect()
}

fn paths() -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let own = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
    let folder = env::var_os("LRMOE_GOLDEN").map_or_else(own, PathBuf::from);
    let entries = fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut paths = paths.collect::<Result<Vec<_>, std::io::Error>>()?;
    paths.retain(|path| path.extension() == Some(OsStr::new("safetensors")));
    paths.sort();
    if paths.is_empty() {
        return Err(format!("{}: no golden files", folder.display()).into());
    }
    Ok(paths)
}

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Case {
    ids: Array2<i32>,
    quotas: Vec<u32>,
    /// Of layer files.
    shape: Option<FfnShape>,
    bytes: Vec<u8>,
}

impl Case {
    fn read(path: &PathBuf) -> Outcome<Self> {
        let bytes = fs::read(path)?;
        let (_, header) = SafeTensors::read_metadata(&bytes)?;
        let metadata = header.metadata().as_ref();
        let text = |key: &str| metadata.and_then(|metadata| metadata.get(key));
        let shape = match [text("D"), text("F"), text("activation")] {
            [Some(width), Some(hidden), Some(activation)] => Some(FfnShape {
                width: width.parse()?,
                hidden: hidden.parse()?,
                activation: activation.parse()?,
            }),
            _ => None,
        };
        let tensors = SafeTensors::deserialize(&bytes)?;
        let ids = tensors.tensor("topk_ids")?;
        let &[tokens, top_k] = ids.shape() else {
            return Err("topk_ids is not a matrix".into());
        };
        let words = ids.data().as_chunks().0.iter();
        let values = words.map(|&four| i32::from_le_bytes(four)).collect();
        let quotas = tensors.tensor("quotas")?.data().as_chunks().0.iter();
        Ok(Self {
            ids: Array2::from_shape_vec((tokens, top_k), values)?,
            quotas: quotas.map(|&four| u32::from_le_bytes(four)).collect(),
            shape,
            bytes,
        })
    }

    fn tensor(&self, name: &str) -> Outcome<Vec<f32>> {
        let tensors = SafeTensors::deserialize(&self.bytes)?;
        let data = tensors.tensor(name)?.data().as_chunks().0.iter();
        Ok(data.map(|&four| f32::from_le_bytes(four)).collect())
    }

    fn mask(&self, name: &str) -> Outcome<Vec<bool>> {
        let tensors = SafeTensors::deserialize(&self.bytes)?;
        Ok(tensors
            .tensor(name)?
            .data()
            .iter()
            .map(|&m| m == 1)
            .collect())
    }

    /// Pairs that a backend keeps by the bits of the file's scores.
    fn check_keys<B: Backend>(&self, backend: &B, scores: &str, mask: &str) -> Outcome<()> {
        let gates = Array2::zeros(self.ids.dim());
        let pairs = Pairs::new(self.ids.view(), gates.view(), self.quotas.len(), 0)?;
        let on = backend.pairs(&pairs)?;
        let scores = backend.upload(&self.tensor(scores)?)?;
        let keys = backend.keys_from_scores(&on, &scores)?;
        let kept = backend.select_keys(&on, &keys, &self.quotas, &mut Solo)?;
        self.check_kept("keys", &backend.download(&kept.pairs)?, mask)
    }

    /// Pairs that a backend keeps by its own scores, from dy and the file's norms of h.
    fn check_scores<B: Backend>(&self, backend: &B) -> Outcome<()> {
        let gates = Array2::from_shape_vec(self.ids.raw_dim(), self.tensor("topk_weights")?)?;
        let pairs = Pairs::new(self.ids.view(), gates.view(), self.quotas.len(), 0)?;
        let on = backend.pairs(&pairs)?;
        let dy = self.tensor("dy")?;
        let shape = [
            pairs.tokens(),
            dy.len().checked_div(pairs.tokens()).unwrap_or(1),
        ];
        let mut dy_norms = Default::default();
        backend.squared_norms(&backend.upload(&dy)?, shape, &mut dy_norms)?;
        let norms = self.tensor("norm_h")?;
        let h: Vec<_> = norms.iter().map(|&norm| SquaredNorm::of(&[norm])).collect();
        let (dy, h) = (Some(&dy_norms), backend.upload(&h)?);
        let scores = backend.score(Score::DownGrad, &on, dy, Some(&h), &mut Solo)?;
        let draw = Draw {
            seed: 0,
            step: 0,
            layer: 0,
        };
        let kept = backend.select(Method::Top, &on, &scores, &self.quotas, draw, &mut Solo)?;
        self.check_kept("scores", &backend.download(&kept.pairs)?, "retained_mask")
    }

    fn check_kept(&self, what: &str, kept: &[u32], mask: &str) -> Outcome<()> {
        let expected: Vec<_> = self.mask(mask)?;
        let expected = (0..).zip(expected).filter(|(_, kept)| *kept);
        let expected: Vec<u32> = expected.map(|(pair, _)| pair).collect();
        if kept == expected {
            return Ok(());
        }
        Err(format!("{what}: kept {kept:?}, expected {expected:?}").into())
    }

    fn rows(&self, name: &str) -> Outcome<Array2<f32>> {
        let (tokens, values) = (self.ids.nrows(), self.tensor(name)?);
        let width = values.len().checked_div(tokens).unwrap_or(0);
        Ok(Array2::from_shape_vec((tokens, width), values)?)
    }
}

/// What a layer makes of the pairs in `kept`, laid out as in the files.
struct Layer {
    y: Array2<f32>,
    norm_h: Vec<f32>,
    dx: Array2<f32>,
    dp: Vec<f32>,
    dgate: Option<Vec<f32>>,
    dup: Vec<f32>,
    ddown: Vec<f32>,
}

fn run<B: Backend>(backend: &B, case: &Case, kept: impl Fn(usize) -> bool) -> Outcome<Layer> {
    let shape = case.shape.ok_or("no shape in metadata")?;
    let (x, p) = (case.rows("x")?, case.tensor("topk_weights")?);
    let ids = case.ids.as_slice().ok_or("not contiguous")?;
    let top_k = case.ids.ncols();
    let expert = |pair: usize| usize::try_from(ids[pair]).ok().filter(|_| kept(pair));
    let mut pairs: Vec<_> = (0..ids.len())
        .filter(|&pair| expert(pair).is_some())
        .collect();
    pairs.sort_by_key(|&pair| expert(pair));
    let before = |e| pairs.iter().filter(|&&pair| expert(pair) < Some(e)).count();
    let offsets: Vec<_> = (0..=case.quotas.len()).map(before).collect();

    let upload = |name: &str| Ok::<_, Box<dyn Error>>(backend.upload(&case.tensor(name)?)?);
    let gated = shape.activation.is_gated();
    let weights = ExpertBuffers::<B> {
        gate: gated.then(|| upload("w_gate")).transpose()?,
        up: upload("w_up")?,
        down: upload("w_down")?,
    };
    let tokens: Vec<_> = pairs.iter().map(|&pair| (pair / top_k) as u32).collect();
    let index = backend.row_index(&tokens, x.nrows())?;
    let (mut pair_x, mut pair_dy) = Default::default();
    backend.gather(&upload("x")?, shape.width, &index, &mut pair_x)?;
    backend.gather(&upload("dy")?, shape.width, &index, &mut pair_dy)?;
    let pair_p: Vec<_> = pairs.iter().map(|&pair| p[pair]).collect();
    let (mut out, mut norms, mut dx, mut dp) = Default::default();
    let mut gradients = ExpertBuffers::<B> {
        gate: gated.then(Default::default),
        up: Default::default(),
        down: Default::default(),
    };
    let mut scratch = B::Scratch::default();
    let h_norms = Some(&mut norms);
    backend.forward(
        &shape,
        &weights,
        &offsets,
        &pair_x,
        &mut scratch,
        &mut out,
        h_norms,
        None,
    )?;
    let inputs = RowBuffers::<B> {
        x: &pair_x,
        dy: &pair_dy,
        gate_weights: &backend.upload(&pair_p)?,
        weights: &backend.upload(&vec![1.0; pairs.len()])?,
    };
    let (dx_to, dp_to) = (&mut dx, &mut dp);
    backend.backward(
        &shape,
        &weights,
        &offsets,
        &inputs,
        None,
        &mut scratch,
        dx_to,
        dp_to,
        &mut gradients,
        &vec![false; offsets.len() - 1],
    )?;

    let numbers: Vec<_> = pairs.iter().map(|&pair| pair as u32).collect();
    let numbers = backend.pair_rows(&numbers, x.nrows(), top_k)?;
    let sum = |rows: &B::Buffer<f32>, weights| {
        let mut sums = backend.upload(&vec![0.0; x.len()])?;
        backend.scatter_add(rows, shape.width, &numbers, weights, &mut sums)?;
        Ok::<_, Box<dyn Error>>(Array2::from_shape_vec(x.dim(), backend.download(&sums)?)?)
    };
    let mut layer = Layer {
        y: sum(&out, Some(inputs.gate_weights))?,
        norm_h: vec![0.0; ids.len()],
        dx: sum(&dx, None)?,
        dp: vec![0.0; ids.len()],
        dgate: gradients
            .gate
            .as_ref()
            .map(|gate| backend.download(gate))
            .transpose()?,
        dup: backend.download(&gradients.up)?,
        ddown: backend.download(&gradients.down)?,
    };
    let (norms, dp) = (backend.download(&norms)?, backend.download(&dp)?);
    for (row, &pair) in pairs.iter().enumerate() {
        layer.norm_h[pair] = norms[row].value().sqrt() as f32;
        layer.dp[pair] = dp[row];
    }
    Ok(layer)
}

fn check<B: Backend>(backend: &B, case: &Case, pair_by_pair: bool) -> Outcome<()> {
    let all = run(backend, case, |_| true)?;
    compare("y", all.y.as_slice(), case.tensor("y")?)?;
    compare("norm_h", Some(&all.norm_h), case.tensor("norm_h")?)?;
    check_gradients(case, &all, "")?;
    if pair_by_pair {
        check_pair_norms(backend, case)?;
    }
    let retained = case.mask("retained_mask")?;
    let some = run(backend, case, |pair| retained[pair])?;
    check_gradients(case, &some, "retained_")
}

/// Each pair alone: its output, and what it adds to the gradients. They may differ by many orders of magnitude, so each is compared alone.
fn check_pair_norms<B: Backend>(backend: &B, case: &Case) -> Outcome<()> {
    let p = case.tensor("topk_weights")?;
    let names = ["out_norm", "dw_down_norm", "dw_full_norm"];
    let expected = names.map(|name| case.tensor(name));
    let [out_norm, down_norm, full_norm] = expected;
    let (out_norm, down_norm, full_norm) = (out_norm?, down_norm?, full_norm?);
    let ids = case.ids.as_slice().ok_or("not contiguous")?;
    for pair in 0..ids.len() {
        let alone = run(backend, case, |other| other == pair)?;
        let norm = |values: &mut dyn Iterator<Item = &f32>| {
            values.map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt() as f32
        };
        let inward = alone.dgate.iter().flatten().chain(&alone.dup);
        let masked = ids[pair] < 0;
        let out = norm(&mut alone.y.iter()) / if masked { 1.0 } else { p[pair] };
        let full = norm(&mut inward.chain(&alone.ddown));
        compare("out_norm", Some(&[out]), vec![out_norm[pair]])?;
        let down = norm(&mut alone.ddown.iter());
        compare("dw_down_norm", Some(&[down]), vec![down_norm[pair]])?;
        compare("dw_full_norm", Some(&[full]), vec![full_norm[pair]])?;
    }
    Ok(())
}

fn check_gradients(case: &Case, layer: &Layer, prefix: &str) -> Outcome<()> {
    let expected = |name: &str| case.tensor(&format!("{prefix}{name}"));
    compare("dw_up", Some(&layer.dup), expected("dw_up")?)?;
    compare("dw_down", Some(&layer.ddown), expected("dw_down")?)?;
    if let Some(dgate) = &layer.dgate {
        compare("dw_gate", Some(dgate), expected("dw_gate")?)?;
    }
    // Even and odd tokens apart, as they may differ by many orders of magnitude.
    let dp = Array2::from_shape_vec(case.ids.raw_dim(), layer.dp.clone())?;
    for (name, got) in [("dx", &layer.dx), ("dtopk_weights", &dp)] {
        let expected = Array2::from_shape_vec(got.raw_dim(), expected(name)?)?;
        for parity in [0, 1] {
            let half = |rows: &Array2<f32>| -> Vec<f32> {
                rows.slice(s![parity.min(case.ids.nrows())..;2, ..])
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
fn compare(what: &str, got: Option<&[f32]>, expected: Vec<f32>) -> Outcome<()> {
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
