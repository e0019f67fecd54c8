//! The language model once more, in f64 and plain loops, forward only.

use lrmoe::model::{DenseParameters, ModelConfig, VOCABULARY};

use crate::double::expert_weights;

type Rows = Vec<Vec<f64>>;

pub(crate) struct Oracle {
    pub(crate) config: ModelConfig,
    /// Name and values of each dense parameter.
    pub(crate) parameters: Vec<(String, Vec<f64>)>,
    pub(crate) balance_weight: f64,
}

pub(crate) struct Outcome {
    pub(crate) logits: Rows,
    pub(crate) cross_entropy: f64,
    pub(crate) total: f64,
    /// Experts of each token, layer after layer.
    pub(crate) choices: Vec<usize>,
}

impl Oracle {
    pub(crate) fn new(
        config: &ModelConfig,
        parameters: &DenseParameters,
        balance_weight: f64,
    ) -> Self {
        let flat = parameters.flatten().unwrap();
        let mut rest = flat.as_slice();
        let parameters = parameters
            .names()
            .zip(parameters.shapes())
            .map(|(name, shape)| {
                let (values, after) = rest.split_at(shape.iter().product());
                rest = after;
                (
                    name.to_owned(),
                    values.iter().map(|&v| f64::from(v)).collect(),
                )
            })
            .collect();
        Self {
            config: config.clone(),
            parameters,
            balance_weight,
        }
    }

    fn parameter(&self, name: &str) -> &[f64] {
        let found = self.parameters.iter().find(|(known, _)| known == name);
        &found.unwrap_or_else(|| panic!("no parameter {name}")).1
    }

    pub(crate) fn run(&self, inputs: &[Vec<u8>], targets: &[Vec<u8>]) -> Outcome {
        let width = self.config.width;
        let token = self.parameter("token.weight");
        let length = inputs[0].len();
        let mut x: Rows = inputs
            .concat()
            .iter()
            .map(|&byte| token[usize::from(byte) * width..][..width].to_vec())
            .collect();
        let (mut choices, mut balance) = (Vec::new(), 0.0);
        for layer in 0..self.config.layers {
            let get = |part: &str| self.parameter(&format!("blocks.{layer}.{part}"));
            let normed = norm(&x, get("norm_attention.scale"));
            let qkv = linear(&normed, get("attention.qkv.weight"));
            let mixed = self.attention(&qkv, length);
            add(&mut x, &linear(&mixed, get("attention.out.weight")));
            let normed = norm(&x, get("norm_moe.scale"));
            let probabilities: Rows = linear(&normed, get("moe.router.weight"))
                .iter()
                .map(|row| softmax(row))
                .collect();
            let (y, chosen) = self.sparse(layer, &normed, &probabilities);
            balance += self.balance(&probabilities, &chosen);
            add(&mut x, &y);
            choices.extend(chosen);
        }
        let logits = linear(
            &norm(&x, self.parameter("norm.scale")),
            self.parameter("head.weight"),
        );
        let losses = logits
            .iter()
            .zip(targets.concat())
            .map(|(row, target)| -softmax(row)[usize::from(target)].ln());
        let cross_entropy = losses.sum::<f64>() / logits.len() as f64;
        assert_eq!(logits[0].len(), VOCABULARY);
        Outcome {
            logits,
            cross_entropy,
            total: cross_entropy + self.balance_weight * balance,
            choices,
        }
    }

    fn attention(&self, qkv: &Rows, length: usize) -> Rows {
        let (width, heads) = (self.config.width, self.config.heads);
        let size = width / heads;
        let mut mixed = vec![vec![0.0; width]; qkv.len()];
        for (t, mixed) in mixed.iter_mut().enumerate() {
            let start = t / length * length;
            for head in 0..heads {
                let part = |row: usize, which: usize| {
                    let values = &qkv[row][which * width + head * size..][..size];
                    if which == 2 {
                        values.to_vec()
                    } else {
                        turn(values, row % length)
                    }
                };
                let q = part(t, 0);
                let scores: Vec<f64> = (start..=t)
                    .map(|s| dot(&q, &part(s, 1)) / (size as f64).sqrt())
                    .collect();
                for (s, weight) in (start..=t).zip(softmax(&scores)) {
                    for (i, v) in part(s, 2).iter().enumerate() {
                        mixed[head * size + i] += weight * v;
                    }
                }
            }
        }
        mixed
    }

    fn sparse(&self, layer: usize, x: &Rows, probabilities: &Rows) -> (Rows, Vec<usize>) {
        let width = self.config.width;
        let weights = expert_weights(&self.config, layer);
        let mut chosen = Vec::new();
        let mut y = vec![vec![0.0; width]; x.len()];
        for (t, row) in probabilities.iter().enumerate() {
            let mut order: Vec<usize> = (0..row.len()).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            order.truncate(self.config.top_k);
            let sum: f64 = order.iter().map(|&e| row[e]).sum();
            for &e in &order {
                for out in 0..width {
                    let w = &weights[(e * width + out) * width..][..width];
                    let w: Vec<f64> = w.iter().map(|&w| f64::from(w)).collect();
                    y[t][out] += row[e] / sum * dot(&w, &x[t]);
                }
            }
            chosen.extend(order);
        }
        (y, chosen)
    }

    fn balance(&self, probabilities: &Rows, chosen: &[usize]) -> f64 {
        let experts = self.config.experts;
        (0..experts)
            .map(|e| {
                let load = chosen.iter().filter(|&&c| c == e).count() as f64;
                let sum: f64 = probabilities.iter().map(|row| row[e]).sum();
                experts as f64 * load / chosen.len() as f64 * sum / probabilities.len() as f64
            })
            .sum()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(into: &mut Rows, rows: &Rows) {
    for (into, row) in into.iter_mut().zip(rows) {
        for (into, value) in into.iter_mut().zip(row) {
            *into += value;
        }
    }
}

fn linear(x: &Rows, weight: &[f64]) -> Rows {
    x.iter()
        .map(|x| weight.chunks(x.len()).map(|w| dot(w, x)).collect())
        .collect()
}

fn norm(x: &Rows, scale: &[f64]) -> Rows {
    x.iter()
        .map(|x| {
            let size = (dot(x, x) / x.len() as f64 + 1e-6).sqrt();
            x.iter().zip(scale).map(|(x, s)| x / size * s).collect()
        })
        .collect()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let sum: f64 = x.iter().map(|x| x.exp()).sum();
    x.iter().map(|x| x.exp() / sum).collect()
}

fn turn(x: &[f64], position: usize) -> Vec<f64> {
    let half = x.len() / 2;
    (0..x.len())
        .map(|i| {
            let pair = i % half;
            let angle = position as f64 * 10_000_f64.powf(-(pair as f64) / half as f64);
            let (a, b) = (x[pair], x[pair + half]);
            if i < half {
                a * angle.cos() - b * angle.sin()
            } else {
                a * angle.sin() + b * angle.cos()
            }
        })
        .collect()
}
