//! The golden files: one trial for each that is found in the folder `LRMOE_GOLDEN`, by default the repository's.

mod common;

use std::path::{Path, PathBuf};

use libtest_mimic::{Arguments, Failed, Trial};
use lrmoe_metric::{
    Draw, Method, Pairs, Score, SquaredNorm, keys_from_scores, score, select, select_keys,
    squared_norms,
};
use ndarray::{Array2, ArrayView2, s};
use safetensors::SafeTensors;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const RANKS: [usize; 4] = [1, 2, 4, 8];

fn main() {
    let arguments = Arguments::from_args();
    let folder = std::env::var_os("LRMOE_GOLDEN").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden"),
        PathBuf::from,
    );
    let trials = match files(&folder) {
        Ok(files) if !files.is_empty() => files.into_iter().map(trial).collect(),
        found => {
            let reason = match found {
                Ok(_) => format!("no golden files in {}", folder.display()),
                Err(error) => format!("{}: {error}", folder.display()),
            };
            vec![Trial::test("golden", move || Err(reason.into()))]
        }
    };
    libtest_mimic::run(&arguments, trials).exit();
}

fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries: std::io::Result<Vec<_>> = folder.read_dir()?.collect();
    let mut files: Vec<_> = entries?.into_iter().map(|entry| entry.path()).collect();
    files.retain(|file| {
        file.extension()
            .is_some_and(|extension| extension == "safetensors")
    });
    files.sort();
    Ok(files)
}

fn trial(file: PathBuf) -> Trial {
    let name = file
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let selection = name.starts_with("selection_");
    Trial::test(format!("golden::{name}"), move || {
        let case = Case::read(&file).map_err(|error| Failed::from(error.to_string()))?;
        let outcome = if selection {
            case.check_selection()
        } else {
            case.check_layer()
        };
        outcome.map_err(|error| Failed::from(error.to_string()))
    })
}

struct Case {
    bytes: Vec<u8>,
    ids: Array2<i32>,
    quotas: Vec<u32>,
}

impl Case {
    fn read(file: &Path) -> Outcome<Self> {
        let mut case = Self {
            bytes: std::fs::read(file)?,
            ids: Array2::zeros((0, 1)),
            quotas: Vec::new(),
        };
        case.ids = case.tensor("topk_ids", i32::from_le_bytes)?;
        let quotas = SafeTensors::deserialize(&case.bytes)?;
        case.quotas = words(quotas.tensor("quotas")?.data(), u32::from_le_bytes);
        Ok(case)
    }

    fn tensor<T>(&self, name: &str, word: fn([u8; 4]) -> T) -> Outcome<Array2<T>> {
        let file = SafeTensors::deserialize(&self.bytes)?;
        let tensor = file.tensor(name)?;
        let &[rows, columns] = tensor.shape() else {
            return Err(format!("{name} is not a matrix").into());
        };
        Ok(Array2::from_shape_vec(
            (rows, columns),
            words(tensor.data(), word),
        )?)
    }

    fn floats(&self, name: &str) -> Outcome<Array2<f32>> {
        self.tensor(name, f32::from_le_bytes)
    }

    fn mask(&self, name: &str) -> Outcome<Vec<bool>> {
        let file = SafeTensors::deserialize(&self.bytes)?;
        Ok(file
            .tensor(name)?
            .data()
            .iter()
            .map(|&byte| byte != 0)
            .collect())
    }

    /// Global pair ids that `choose` keeps over all ranks, as a mask.
    fn split(
        &self,
        ranks: usize,
        gates: ArrayView2<'_, f32>,
        choose: impl Fn(&Pairs<'_>, std::ops::Range<usize>, &mut common::Rank<'_>) -> Vec<u32> + Sync,
    ) -> Vec<bool> {
        let (tokens, top_k) = self.ids.dim();
        let rows = common::even(tokens, ranks);
        let kept = common::run(ranks, |exchange| {
            let rows = rows[lrmoe_metric::Exchange::rank(exchange)].clone();
            let first = (rows.start * top_k) as u64;
            let ids = self.ids.slice(s![rows.clone(), ..]);
            let gates = gates.slice_move(s![rows.clone(), ..]);
            let pairs = Pairs::new(ids, gates, self.quotas.len(), first).unwrap();
            (first as usize, choose(&pairs, rows, exchange))
        });
        let mut mask = vec![false; tokens * top_k];
        for (first, pairs) in kept {
            pairs
                .into_iter()
                .for_each(|pair| mask[first + pair as usize] = true);
        }
        mask
    }

    fn check_keys(&self, scores: &Array2<f32>, expected: &[bool]) -> Outcome<()> {
        for ranks in RANKS {
            let mask = self.split(ranks, scores.view(), |pairs, _, exchange| {
                let keys = keys_from_scores(pairs, pairs.gate_weights()).unwrap();
                select_keys(pairs, &keys, &self.quotas, exchange)
                    .unwrap()
                    .pairs
            });
            compare(&format!("keys over {ranks} ranks"), &mask, expected)?;
        }
        Ok(())
    }

    fn check_selection(&self) -> Outcome<()> {
        let scores = self.tensor("score_bits", |bytes| {
            f32::from_bits(u32::from_le_bytes(bytes))
        })?;
        self.check_keys(&scores, &self.mask("mask")?)
    }

    fn check_layer(&self) -> Outcome<()> {
        let expected = self.mask("retained_mask")?;
        self.check_keys(&self.floats("score")?, &expected)?;

        let dy = self.floats("dy")?;
        let mut dy_norms = vec![SquaredNorm::default(); dy.nrows()];
        squared_norms(dy.view(), &mut dy_norms)?;
        for (((token, slot), &norm), id) in self.floats("norm_dy")?.indexed_iter().zip(&self.ids) {
            let found = dy_norms[token].value().sqrt();
            let tolerance = 1e-5 * f64::from(norm);
            if *id >= 0 && (found - f64::from(norm)).abs() > tolerance {
                return Err(format!(
                    "|dy| of token {token}, slot {slot}: {found}, expected {norm}"
                )
                .into());
            }
        }

        let norm_h = self.floats("norm_h")?;
        let h_norms: Vec<_> = norm_h
            .iter()
            .map(|&norm| SquaredNorm::of(&[norm]))
            .collect();
        let gates = self.floats("topk_weights")?;
        for ranks in RANKS {
            let mask = self.split(ranks, gates.view(), |pairs, rows, exchange| {
                let h = &h_norms[rows.start * pairs.top_k()..rows.end * pairs.top_k()];
                let scores = score(
                    Score::DownGrad,
                    pairs,
                    Some(&dy_norms[rows]),
                    Some(h),
                    exchange,
                )
                .unwrap();
                let draw = Draw {
                    seed: 0,
                    step: 0,
                    layer: 0,
                };
                select(Method::Top, pairs, &scores, &self.quotas, draw, exchange)
                    .unwrap()
                    .pairs
            });
            compare(&format!("scores over {ranks} ranks"), &mask, &expected)?;
        }
        Ok(())
    }
}

fn words<T>(bytes: &[u8], word: fn([u8; 4]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().copied().map(word).collect()
}

fn compare(what: &str, found: &[bool], expected: &[bool]) -> Outcome<()> {
    if found.len() != expected.len() {
        return Err(format!("{what}: {} pairs, expected {}", found.len(), expected.len()).into());
    }
    match found
        .iter()
        .zip(expected)
        .position(|(found, expected)| found != expected)
    {
        Some(pair) => Err(format!(
            "{what}: pair {pair} kept {}, expected {}",
            found[pair], expected[pair]
        )
        .into()),
        None => Ok(()),
    }
}
