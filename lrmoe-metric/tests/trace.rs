//! What local quotas lose against global ones on a routing trace.
//!
//! `LRMOE_TRACE` is the path of a safetensors file of pairs, or of a folder with `*-pairs.safetensors` in it: `expert` u8, `gate_weight`, `norm_h` f32 `[steps, layers, tokens, k]` and
//! `norm_dy` f32 `[steps, layers, tokens]`. Without it the trial shows as ignored.

use std::ffi::OsString;
use std::path::Path;

use libtest_mimic::{Arguments, Failed, Trial};
use lrmoe_metric::{
    Draw, Method, Pairs, Score, Scores, Selection, Solo, SquaredNorm, local_quotas, score, select,
};
use ndarray::{Array2, Array4, ArrayView2, Axis, s};
use safetensors::SafeTensors;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const RANKS: usize = 8;
const DRAWS: u32 = 24;
const RETENTION: [f64; 3] = [0.5, 0.25, 0.1];

fn main() {
    let arguments = Arguments::from_args();
    let file = std::env::var_os("LRMOE_TRACE").and_then(pairs_file);
    let absent = file.is_none();
    let trial = Trial::test("trace::local_quotas_lose_little", move || {
        loss(&file.unwrap_or_default()).map_err(|error| Failed::from(error.to_string()))
    });
    libtest_mimic::run(&arguments, vec![trial.with_ignored_flag(absent)]).exit();
}

/// The file itself, or the first file of pairs in a folder.
fn pairs_file(path: OsString) -> Option<OsString> {
    let Ok(folder) = std::fs::read_dir(&path) else {
        return Some(path);
    };
    let files = folder.flatten().map(|entry| entry.path().into_os_string());
    files
        .filter(|file| file.to_string_lossy().ends_with("-pairs.safetensors"))
        .min()
}

/// The pairs of one layer in one step, over all ranks.
struct Layer {
    ids: Array2<i32>,
    gates: Array2<f32>,
    dy: Vec<f32>,
    h: Array2<f32>,
    experts: usize,
    draw: Draw,
}

/// The tokens of one rank, or of all.
struct Part<'a> {
    pairs: Pairs<'a>,
    scores: Scores,
    /// `p |dy| |h|` of each pair.
    values: Vec<f64>,
}

impl Layer {
    fn part(&self, tokens: std::ops::Range<usize>) -> Outcome<Part<'_>> {
        let rows = s![tokens.clone(), ..];
        let (gates, h) = (self.gates.slice(rows), self.h.slice(rows));
        let first = (tokens.start * self.ids.ncols()) as u64;
        let pairs = Pairs::new(self.ids.slice(rows), gates, self.experts, first)?;
        let dy = &self.dy[tokens];
        let norms = |values: &mut dyn Iterator<Item = &f32>| -> Vec<_> {
            values.map(|&value| SquaredNorm::of(&[value])).collect()
        };
        let (dy_norms, h_norms) = (norms(&mut dy.iter()), norms(&mut h.iter()));
        let scores = score(
            Score::DownGrad,
            &pairs,
            Some(&dy_norms),
            Some(&h_norms),
            &mut Solo,
        )?;
        let value = |((token, slot), &gate): ((usize, usize), &f32)| {
            f64::from(gate) * f64::from(dy[token]) * f64::from(h[[token, slot]])
        };
        Ok(Part {
            pairs,
            scores,
            values: gates.indexed_iter().map(value).collect(),
        })
    }
}

impl Part<'_> {
    fn select(&self, method: Method, quotas: &[u32], draw: Draw) -> Outcome<Selection> {
        Ok(select(
            method,
            &self.pairs,
            &self.scores,
            quotas,
            draw,
            &mut Solo,
        )?)
    }

    /// Sum of the values of the largest pairs.
    fn kept(&self, quotas: &[u32], draw: Draw) -> Outcome<f64> {
        let kept = self.select(Method::Top, quotas, draw)?;
        Ok(kept
            .pairs
            .iter()
            .map(|&pair| self.values[pair as usize])
            .sum())
    }

    /// Expected squared error of the weighted sum of values over each expert, summed over experts; the terms of an expert are
    /// uncorrelated, so that it is also that of the gradient of the down projection. A kept pair of score s and weight w > 1 estimates
    /// the variance by tau (tau - s) = s^2 w (w - 1).
    fn variance(&self, quotas: &[u32], draw: Draw) -> Outcome<f64> {
        let mut sum = 0.0;
        for step in 0..DRAWS {
            let draw = Draw {
                seed: step.into(),
                ..draw
            };
            let kept = self.select(Method::Priority, quotas, draw)?;
            for (&pair, &weight) in kept.pairs.iter().zip(&kept.weights) {
                let weight = f64::from(weight);
                sum += self.values[pair as usize].powi(2) * weight * (weight - 1.0);
            }
        }
        Ok(sum / f64::from(DRAWS))
    }
}

/// Sums over all layers and steps, with global and with local quotas.
#[derive(Default)]
struct Sums {
    all: f64,
    kept: [f64; 2],
    /// Sum over experts of the squared sum of values.
    squared: f64,
    variance: [f64; 2],
}

impl Sums {
    fn add(&mut self, layer: &Layer, retention: f64) -> Outcome<()> {
        let tokens = layer.ids.nrows();
        let whole = layer.part(0..tokens)?;
        let share = |&load: &u32| (retention * f64::from(load)).round() as u32;
        let quotas: Vec<_> = whole.pairs.loads().iter().map(share).collect();
        let mut per_expert = vec![0.0; layer.experts];
        for (&id, value) in whole.pairs.expert_ids().iter().zip(&whole.values) {
            per_expert[id as usize] += value;
        }
        self.all += per_expert.iter().sum::<f64>();
        self.squared += per_expert.iter().map(|sum| sum * sum).sum::<f64>();
        self.kept[0] += whole.kept(&quotas, layer.draw)?;
        self.variance[0] += whole.variance(&quotas, layer.draw)?;

        let parts =
            (0..RANKS).map(|rank| layer.part(rank * tokens / RANKS..(rank + 1) * tokens / RANKS));
        let parts = parts.collect::<Outcome<Vec<_>>>()?;
        let loads: Vec<_> = parts.iter().flat_map(|part| part.pairs.loads()).collect();
        let loads = ArrayView2::from_shape((RANKS, layer.experts), &loads)?;
        for (rank, part) in parts.iter().enumerate() {
            let mine = local_quotas(&quotas, loads, rank)?;
            self.kept[1] += part.kept(&mine, layer.draw)?;
            self.variance[1] += part.variance(&mine, layer.draw)?;
        }
        Ok(())
    }
}

fn loss(file: &OsString) -> Outcome<()> {
    let layers = read(Path::new(file))?;
    println!("retention  top: share of scores kept  priority: relative squared error of a sum");
    println!("           global  local   loss       global    local     ratio");
    for retention in RETENTION {
        let mut sums = Sums::default();
        for layer in &layers {
            sums.add(layer, retention)?;
        }
        let [global, local] = sums.kept.map(|kept| kept / sums.all);
        let [exact, alone] = sums.variance.map(|variance| variance / sums.squared);
        let ratio = alone / exact;
        println!(
            "{retention:<9}  {global:.4}  {local:.4}  {:.4}     {exact:.2e}  {alone:.2e}  {ratio:.3}",
            1.0 - local / global
        );
        if !(local <= global && local > 0.95 * global) {
            return Err(
                format!("local quotas keep {local} of the scores, global ones {global}").into(),
            );
        }
        if !(0.9..1.5).contains(&ratio) {
            return Err(format!(
                "squared error {alone} with local quotas, {exact} with global ones"
            )
            .into());
        }
    }
    Ok(())
}

fn read(file: &Path) -> Outcome<Vec<Layer>> {
    let bytes = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let floats = |name: &str| -> Outcome<Vec<f32>> {
        let words = file.tensor(name)?.data().as_chunks().0;
        Ok(words.iter().map(|&word| f32::from_le_bytes(word)).collect())
    };
    let expert = file.tensor("expert")?;
    let &[steps, layers, tokens, top_k] = expert.shape() else {
        return Err("expert has not four axes".into());
    };
    let shape = (steps, layers, tokens, top_k);
    let ids = expert.data().iter().map(|&id| i32::from(id)).collect();
    let ids = Array4::from_shape_vec(shape, ids)?;
    let experts = ids.iter().max().map_or(0, |&id| id as usize + 1);
    let gates = Array4::from_shape_vec(shape, floats("gate_weight")?)?;
    let h = Array4::from_shape_vec(shape, floats("norm_h")?)?;
    let dy = Array4::from_shape_vec((steps, layers, tokens, 1), floats("norm_dy")?)?;
    let layer = |(step, layer): (usize, usize)| {
        fn of<T: Clone>(all: &Array4<T>, step: usize, layer: usize) -> Array2<T> {
            all.index_axis(Axis(0), step)
                .index_axis(Axis(0), layer)
                .to_owned()
        }
        Layer {
            ids: of(&ids, step, layer),
            gates: of(&gates, step, layer),
            dy: of(&dy, step, layer).into_iter().collect(),
            h: of(&h, step, layer),
            experts,
            draw: Draw {
                seed: 0,
                step: step as u32,
                layer: layer as u32,
            },
        }
    };
    let each = (0..steps).flat_map(|step| (0..layers).map(move |layer| (step, layer)));
    Ok(each.map(layer).collect())
}
