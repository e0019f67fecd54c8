//! A replay as text.

use std::fmt;

use comfy_table::Table;

use super::report::{Header, PolicyReport, Report};
use super::traffic::LinkBytes;
use crate::page::table::{percent, table};

const GIB: f64 = (1u64 << 30) as f64;

impl Header {
    /// What it says, a name and a line each.
    pub(super) fn facts(&self) -> Vec<(&'static str, String)> {
        let mut facts = vec![
            (
                "trace",
                format!(
                    "{}: steps {} to {} ({}), {} layers, {} experts, {} per token, {} ranks",
                    self.traces.join(", "),
                    self.first_step,
                    self.last_step,
                    self.steps,
                    self.layers,
                    self.experts,
                    self.top_k,
                    self.trace_ranks
                ),
            ),
            (
                "model",
                format!(
                    "{}: D {}, F {}, {}, {} bytes an element, {} MoE layers",
                    self.model,
                    self.width,
                    self.hidden,
                    if self.gated { "gated" } else { "plain" },
                    self.element_bytes,
                    self.model_layers
                ),
            ),
            (
                "cluster",
                format!(
                    "{}: {} ranks, {} to a node, {} tokens a rank, budget {:.1} GiB a rank, chunks of {} rows",
                    self.cluster.name,
                    self.ranks,
                    self.cluster.ranks_per_node,
                    self.tokens_per_rank,
                    self.budget_bytes as f64 / GIB,
                    self.chunk_rows
                ),
            ),
        ];
        facts.extend(self.notes.iter().map(|note| ("note", note.clone())));
        facts
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self
            .facts()
            .into_iter()
            .map(|(name, fact)| format!("{name:<9} {fact}"));
        f.write_str(&lines.collect::<Vec<_>>().join("\n"))
    }
}

impl fmt::Display for Report {
    /// Header, two Markdown tables, what they count.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.header)?;
        writeln!(
            f,
            "Memory of the rank that holds most, GiB, peak over the steps\n\n{}\n",
            self.memory()
        )?;
        writeln!(
            f,
            "Work and traffic of a step, mean over the steps\n\n{}\n",
            self.work()
        )?;
        for assumption in &self.header.assumptions {
            writeln!(f, "- {assumption}")?;
        }
        Ok(())
    }
}

impl Report {
    pub(super) fn memory(&self) -> Table {
        let mut table = table(&[
            "policy",
            "placement",
            "replicas",
            "buffers forward",
            "buffers backward",
            "stash",
            "total",
            "without stash",
            "mean total",
            "optimizer",
        ]);
        for policy in &self.policies {
            let (peak, memory) = (&policy.memory.peak_bytes, &policy.memory);
            let over = if memory.over_budget {
                " over budget"
            } else {
                ""
            };
            let mut row = vec![format!("{}{over}", policy.name)];
            row.extend(
                [
                    peak.placement,
                    peak.replicas,
                    peak.forward_buffers,
                    peak.backward_buffers,
                    peak.stash,
                    peak.total,
                    memory.peak_without_stash_bytes,
                    memory.mean_bytes.total,
                    memory.optimizer_bytes,
                ]
                .map(gib),
            );
            table.add_row(row);
        }
        table
    }

    pub(super) fn work(&self) -> Table {
        let mut table = table(&[
            "policy",
            "GB forward (inter)",
            "GB backward (inter)",
            "GB update (inter)",
            "load max/mean (worst)",
            "step ms, modelled",
            "of balanced",
            "dropped",
            "left out of backward",
            "contribution kept",
            "planning us/layer, measured",
        ]);
        for policy in &self.policies {
            table.add_row(work_row(policy));
        }
        table
    }
}

fn work_row(policy: &PolicyReport) -> [String; 11] {
    let links = |bytes: &LinkBytes| {
        format!(
            "{:.3} ({:.3})",
            bytes.total() as f64 / 1e9,
            bytes.inter as f64 / 1e9
        )
    };
    [
        policy.name.clone(),
        links(&policy.forward_links),
        links(&policy.backward_links),
        links(&policy.update_links),
        format!(
            "{:.3} ({:.3})",
            policy.load_max_over_mean, policy.worst_load_max_over_mean
        ),
        format!("{:.3}", policy.modelled_step_seconds * 1e3),
        percent(policy.share_of_balanced),
        percent(policy.dropped),
        percent(policy.left_out),
        policy
            .contribution_kept
            .map_or_else(|| "-".to_owned(), percent),
        format!("{:.1}", policy.measured_planning_seconds * 1e6),
    ]
}

/// GiB to three figures or to a thousandth.
fn gib(bytes: u64) -> String {
    format!("{:.3}", bytes as f64 / GIB)
}
