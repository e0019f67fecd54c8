//! How near the gradients of a group are to those of all pairs, beside its loss.

use comfy_table::Table;

use super::curve::Curve;
use super::report::{Report, SectionReport};
use crate::page::table::table;
use crate::train::{Agreement, LayerSummary};

/// Means over the runs, layer by layer; empty if the oracle was asked in none.
pub(super) fn mean_over(runs: &[(u64, &Curve)]) -> Vec<LayerSummary> {
    let layers = runs.iter().map(|(_, curve)| curve.quality.len()).max();
    let of_layer = |layer: usize| {
        let there: Vec<&LayerSummary> = (runs.iter())
            .filter_map(|(_, curve)| curve.quality.get(layer))
            .collect();
        let agreement = |of: fn(&LayerSummary) -> Agreement| {
            let mean = |what: fn(Agreement) -> Option<f64>| {
                mean(there.iter().filter_map(|summary| what(of(summary))))
            };
            Agreement {
                cosine: mean(|one| one.cosine),
                error: mean(|one| one.error),
                mean_error: mean(|one| one.mean_error),
                standard_error: mean(|one| one.standard_error),
            }
        };
        LayerSummary {
            dw: agreement(|summary| summary.dw),
            dx: agreement(|summary| summary.dx),
            dp: agreement(|summary| summary.dp),
            share_kept: mean(there.iter().filter_map(|summary| summary.share_kept)),
        }
    };
    (0..layers.unwrap_or(0)).map(of_layer).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

impl Report {
    /// The groups of a section whose gradients were compared with those of all pairs; `None` without any.
    pub(super) fn gradients(&self, section: &SectionReport) -> Option<Table> {
        let groups = section.groups.iter().map(|&index| &self.groups[index]);
        let groups: Vec<_> = groups.filter(|group| !group.quality.is_empty()).collect();
        if groups.is_empty() {
            return None;
        }
        let summaries = || groups.iter().flat_map(|group| &group.quality);
        let repeated = summaries().any(|summary| bias(summary.dw).is_some());
        let mut header = vec!["runs", "held-out loss"];
        header.extend(["cosine dW", "cosine dx", "cosine dp"]);
        header.extend(["error dW", "error dx", "error dp"]);
        if repeated {
            header.extend(["bias dW", "bias dx", "bias dp"]);
        }
        let mut table = table(&header);
        for group in groups {
            let layers = |of: &dyn Fn(&LayerSummary) -> Option<f64>| {
                let number = |summary| match of(summary) {
                    Some(value) => format!("{value:.2}"),
                    None => "-".to_owned(),
                };
                let numbers: Vec<String> = group.quality.iter().map(number).collect();
                numbers.join(" / ")
            };
            let of: [fn(&LayerSummary) -> Agreement; 3] = [|l| l.dw, |l| l.dx, |l| l.dp];
            let mut row = vec![group.name.clone(), format!("{:.4}", group.end.loss)];
            row.extend(of.map(|of| layers(&|l| of(l).cosine)));
            row.extend(of.map(|of| layers(&|l| of(l).error)));
            if repeated {
                row.extend(of.map(|of| layers(&|l| bias(of(l)))));
            }
            table.add_row(row);
        }
        Some(table)
    }
}

/// What of the error of the mean over draws is more than chance makes of it; `None` where nothing was drawn again.
fn bias(of: Agreement) -> Option<f64> {
    let (error, chance) = of.mean_error.zip(of.standard_error)?;
    Some((error * error - chance * chance).max(0.0).sqrt())
}
