//! A step's work on the modelled cluster.

use lrmoe_plan::{ExpertShape, ModelSpec, Stash, StepWork, modelled_seconds};
use ndarray::Array2;

use super::setup::expert_shape;
use crate::config::TrainConfig;
use crate::error::Error;
use crate::layer::LayerStats;

/// Models at whose sizes the time of a step is modelled besides at its own.
pub const MODELLED_AT: [&str; 2] = ["qwen3-30b-a3b", "glm-4.5-air"];

/// Tokens of a rank at another model's sizes.
const TOKENS: u64 = 4096;

/// Bytes of a bf16.
const BF16: usize = 2;

/// At which sizes the work of a step is modelled.
pub(super) struct Modelling {
    shape: ExpertShape,
    /// Rows there for so many rows of the run.
    rows: [u64; 2],
    /// Bytes of weights there for so many of the run.
    weights: [u64; 2],
}

impl Modelling {
    /// The run's own.
    pub(super) fn of_run(config: &TrainConfig) -> Self {
        Self {
            shape: expert_shape(config),
            rows: [1; 2],
            weights: [1; 2],
        }
    }

    /// Width and hidden width of the model called `name`, whose rows spread over experts and ranks as the run's do.
    pub(super) fn at_sizes_of(name: &str, config: &TrainConfig) -> Result<Self, Error> {
        let model = ModelSpec::preset(name)?;
        let shape = ExpertShape {
            width: model.width,
            hidden: model.hidden,
            gated: model.gated,
            bytes: BF16,
        };
        let tokens = (config.batch * config.model.context) as u64;
        Ok(Self {
            shape,
            rows: [TOKENS * config.ranks as u64, tokens],
            weights: [shape.weight_bytes(), expert_shape(config).weight_bytes()],
        })
    }

    /// Seconds of a layer's step on the cluster of the options. `reduction` and `delivery`: bytes of weights that went from rank to rank, `[from, to]`.
    pub(super) fn seconds(
        &self,
        config: &TrainConfig,
        stats: &LayerStats,
        [reduction, delivery]: &[Array2<u64>; 2],
    ) -> Result<f64, Error> {
        let scaled = |numbers: &Array2<u64>, [there, here]: [u64; 2]| {
            numbers.mapv(|n| (u128::from(n) * u128::from(there) / u128::from(here)) as u64)
        };
        let [forward, backward] =
            [&stats.forward_rows, &stats.backward_rows].map(|rows| scaled(rows, self.rows));
        let received = |rows: &Array2<u64>| rows.columns().into_iter().map(|to| to.sum()).collect();
        let row = (self.shape.width * self.shape.bytes) as u64;
        // Without the rows that stay at their instances, x travels again.
        let sent = match config.stash {
            Stash::Recompute => 2,
            _ => 1,
        };
        let work = StepWork {
            stash: config.stash,
            instances: stats.instances.clone(),
            forward_rows: received(&forward),
            backward_rows: received(&backward),
            exchanges: vec![
                &forward * row,
                &forward.t() * row,
                &backward * (sent * row),
                &backward.t() * row,
                scaled(reduction, self.weights),
            ],
            delivery: scaled(delivery, self.weights),
        };
        Ok(modelled_seconds(&config.cluster, &self.shape, &work)?.total())
    }
}

#[cfg(test)]
mod tests {
    use lrmoe_plan::ClusterSpec;
    use ndarray::array;

    use super::*;
    use crate::config::TrainOptions;

    /// Two ranks of 1,024 tokens each.
    fn config() -> TrainConfig {
        let options = "text = ['text']\nranks = 2\nbatch = 16\ncontext = 128";
        let options = TrainOptions::from_toml(options).expect("options");
        options.resolve().expect("options")
    }

    #[test]
    fn loads_are_those_of_the_run_at_other_sizes() {
        let config = config();
        let stats = LayerStats {
            forward_rows: array![[600, 424], [500, 524]],
            backward_rows: array![[300, 212], [256, 256]],
            instances: vec![8, 9],
            ..LayerStats::default()
        };
        let of_own = expert_shape(&config).weight_bytes();
        let weights = [
            array![[0, 3 * of_own], [2 * of_own, 0]],
            array![[0, of_own], [0, 0]],
        ];
        for name in MODELLED_AT {
            let modelling = Modelling::at_sizes_of(name, &config).expect("a preset");
            let found = modelling
                .seconds(&config, &stats, &weights)
                .expect("seconds");
            // By hand: four times the rows, bf16, two bytes an element.
            let model = ModelSpec::preset(name).expect("a preset");
            let (width, hidden) = (model.width as f64, model.hidden as f64);
            let cluster = ClusterSpec::preset("8xA100").expect("a preset");
            let pass = |rows: [f64; 2], of_row: f64| {
                let of = |rows: f64, instances: f64| {
                    4.0 * rows * of_row * width * hidden / cluster.flops
                        + instances * cluster.launch_seconds
                };
                of(rows[0], 8.0).max(of(rows[1], 9.0))
            };
            let link = cluster.intra;
            let sent = |bytes: f64| link.latency_seconds + bytes / link.bytes_per_second;
            let (row, weight) = (4.0 * width * 2.0, 3.0 * width * hidden * 2.0);
            let expected = pass([1100.0, 948.0], 6.0)
                + pass([556.0, 468.0], 16.0)
                + 2.0 * sent(500.0 * row)
                + sent(2.0 * 256.0 * row)
                + sent(256.0 * row)
                + sent(3.0 * weight)
                + sent(weight);
            assert!(
                (found - expected).abs() < 1e-9 * expected,
                "{name}: {found}, by hand {expected}"
            );
        }
    }
}
