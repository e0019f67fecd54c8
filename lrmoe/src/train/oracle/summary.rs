//! What the oracle found over a run, on the terminal.

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use serde::{Deserialize, Serialize};

use super::{Agreement, OracleRecord};
use crate::train::StepRecord;

/// Means over the steps at which the oracle was asked, layer by layer; displayed as a Markdown table.
#[derive(Clone, Debug, PartialEq)]
pub struct OracleSummary {
    /// Steps at which it was asked.
    pub steps: usize,
    /// Layer by layer.
    pub layers: Vec<LayerSummary>,
}

/// Means of one layer; `None` where no step has the figure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerSummary {
    /// Of the weight gradients.
    pub dw: Agreement,
    /// Of the gradient of the layer's input.
    pub dx: Agreement,
    /// Of the gradient of the gate weights.
    pub dp: Agreement,
    /// Of the share of the scores that the retained pairs have.
    pub share_kept: Option<f64>,
}

impl OracleSummary {
    /// `None` if the oracle was asked at no step.
    pub fn new(records: &[StepRecord]) -> Option<Self> {
        let layers = records.iter().map(|record| record.layers.len()).max()?;
        let of_layer = |layer: usize| -> Vec<&OracleRecord> {
            let records = records.iter().filter_map(|record| record.layers.get(layer));
            records.filter_map(|layer| layer.oracle.as_ref()).collect()
        };
        let steps = of_layer(0).len();
        let summary = Self {
            steps,
            layers: (0..layers)
                .map(|l| LayerSummary::of(&of_layer(l)))
                .collect(),
        };
        (steps > 0).then_some(summary)
    }
}

impl LayerSummary {
    fn of(records: &[&OracleRecord]) -> Self {
        let agreement = |of: fn(&OracleRecord) -> Agreement| {
            let all = || records.iter().map(|record| of(record));
            Agreement {
                cosine: mean(all().map(|one| one.cosine)),
                error: mean(all().map(|one| one.error)),
                mean_error: mean(all().map(|one| one.mean_error)),
                standard_error: mean(all().map(|one| one.standard_error)),
            }
        };
        Self {
            dw: agreement(|record| record.dw),
            dx: agreement(|record| record.dx),
            dp: agreement(|record| record.dp),
            share_kept: mean(records.iter().map(|record| record.share_kept)),
        }
    }
}

/// Of those that are there.
fn mean(values: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let values: Vec<f64> = values.flatten().collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

impl std::fmt::Display for OracleSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let repeated = self.layers.iter().any(|layer| {
            let all = [layer.dw, layer.dx, layer.dp];
            all.iter().any(|one| one.mean_error.is_some())
        });
        let mut table = Table::new();
        let cosines = ["cosine dW", "cosine dx", "cosine dp"];
        let errors = ["error dW", "error dx", "error dp"];
        let biases = ["mean error dW", "mean error dx", "mean error dp"];
        let header = ["layer"].into_iter().chain(cosines).chain(errors);
        let header = header.chain(biases.into_iter().filter(|_| repeated));
        table
            .load_style(ASCII_MARKDOWN)
            .set_header(header.chain(["share kept"]));
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let number = |value: Option<f64>| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.4}"))
        };
        for (index, layer) in self.layers.iter().enumerate() {
            let all = [layer.dw, layer.dx, layer.dp];
            let mut row = vec![index.to_string()];
            row.extend(all.map(|one| number(one.cosine)));
            row.extend(all.map(|one| number(one.error)));
            if repeated {
                row.extend(all.map(|one| {
                    format!(
                        "{} ({})",
                        number(one.mean_error),
                        number(one.standard_error)
                    )
                }));
            }
            let share = layer
                .share_kept
                .map(|share| format!("{:.1} %", 100.0 * share));
            row.push(share.unwrap_or_else(|| "-".to_owned()));
            table.add_row(row);
        }
        writeln!(f, "{table}")?;
        let steps = self.steps;
        write!(
            f,
            "Means over {steps} steps against the gradients of all pairs; errors are relative; the share kept is that of the scores."
        )?;
        if repeated {
            write!(
                f,
                "\nMean errors are those of the mean over draws, in brackets what chance alone would make of them: more than that is bias."
            )?;
        }
        Ok(())
    }
}
