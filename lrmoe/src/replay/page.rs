//! A replay as a page.

use comfy_table::Table;

use super::report::{PolicyReport, Report};
use crate::error::PlotError;
use crate::page::chart::{Axes, Bar, Line, bars, lines};
use crate::page::{Page, Section, legend, table_of};

const GIB: f64 = (1u64 << 30) as f64;

/// The page: plots, tables, what is counted. No script, nothing from elsewhere; light or dark as the reader has it.
///
/// # Errors
///
/// A plot that cannot be drawn.
pub fn page(report: &Report) -> Result<String, PlotError> {
    let facts = report.header.facts();
    let (notes, facts): (Vec<_>, Vec<_>) = facts
        .iter()
        .map(|(name, fact)| (*name, fact.as_str()))
        .partition(|(name, _)| *name == "note");
    let page = Page {
        heading: "LRMoE replay",
        title: &format!("{} on {}", report.header.model, report.header.cluster.name),
        facts,
        notes: notes.into_iter().map(|(_, note)| note).collect(),
        sections: sections(report)?,
        counted: report
            .header
            .assumptions
            .iter()
            .map(String::as_str)
            .collect(),
    };
    Ok(page.render())
}

fn sections(report: &Report) -> Result<Vec<Section>, PlotError> {
    let figures = |title: &str, words: &str, table: &Table| Section {
        title: title.to_owned(),
        words: words.to_owned(),
        legend: String::new(),
        content: table_of(table),
    };
    Ok(vec![
        memory(report)?,
        load(report)?,
        time(report)?,
        traffic(report)?,
        planning(report)?,
        figures("Figures: memory", "GiB.", &report.memory()),
        figures(
            "Figures: work and traffic",
            "Mean over the steps.",
            &report.work(),
        ),
    ])
}

fn memory(report: &Report) -> Result<Section, PlotError> {
    let parts = [
        "placement",
        "replicas",
        "token buffers forward",
        "token buffers backward",
        "stash",
    ];
    Ok(Section {
        title: "Memory".to_owned(),
        words: "Peak over the steps, of the rank that holds most; the optimizer's state is apart."
            .to_owned(),
        legend: legend(parts.into_iter().enumerate()),
        content: bars("memory", "GiB", &bars_of(report, memory_parts))?,
    })
}

fn load(report: &Report) -> Result<Section, PlotError> {
    let (names, drawn) = lines_of(report, |point| point.load_max_over_mean);
    Ok(Section {
        title: "Load".to_owned(),
        words: "Rows that a rank runs forward and backward, largest over mean of the ranks, mean over layers.".to_owned(),
        legend: names,
        content: lines("load", &axes("largest / mean", 1.0), &drawn)?,
    })
}

fn time(report: &Report) -> Result<Section, PlotError> {
    let (names, drawn) = lines_of(report, |point| point.modelled_seconds * 1e3);
    Ok(Section {
        title: "Time".to_owned(),
        words: "Modelled time of the MoE layers in a step.".to_owned(),
        legend: names,
        content: lines("time", &axes("ms, modelled", 0.0), &drawn)?,
    })
}

fn traffic(report: &Report) -> Result<Section, PlotError> {
    let parts = [
        "forward, inside nodes",
        "forward, between nodes",
        "backward, inside nodes",
        "backward, between nodes",
        "update, inside nodes",
        "update, between nodes",
    ];
    Ok(Section {
        title: "Traffic".to_owned(),
        words: "Bytes between ranks in a step, all ranks together, mean over the steps; update is gradients to the optimizer's shards and weights back.".to_owned(),
        legend: legend(parts.into_iter().enumerate()),
        content: bars("traffic", "GB", &bars_of(report, traffic_parts))?,
    })
}

fn planning(report: &Report) -> Result<Section, PlotError> {
    let microseconds = |policy: &PolicyReport| vec![policy.measured_planning_seconds * 1e6];
    Ok(Section {
        title: "Planning".to_owned(),
        words: "Time to plan quotas and the next placement of a layer, measured on one thread of the machine that replayed.".to_owned(),
        legend: String::new(),
        content: bars("planning", "us, measured", &bars_of(report, microseconds))?,
    })
}

fn axes(y: &str, from: f64) -> Axes<'_> {
    Axes {
        x: "step",
        y,
        from: Some(from),
    }
}

fn bars_of(report: &Report, parts: fn(&PolicyReport) -> Vec<f64>) -> Vec<Bar<'_>> {
    let bars = report.policies.iter().map(|policy| Bar {
        name: &policy.name,
        parts: parts(policy),
    });
    bars.collect()
}

/// Legend and lines; contenders that go together all the way share one.
fn lines_of(report: &Report, value: fn(&super::Point) -> f64) -> (String, Vec<Line>) {
    let (mut names, mut lines): (Vec<String>, Vec<Line>) = (Vec::new(), Vec::new());
    for (index, policy) in report.policies.iter().enumerate() {
        let points = policy.points.iter();
        let points = points.map(|point| (f64::from(point.step), value(point)));
        let points: Vec<(f64, f64)> = points.collect();
        match lines.iter().position(|line| line.points == points) {
            Some(known) => {
                names[known].push_str(", ");
                names[known].push_str(&policy.name);
            }
            None => {
                names.push(policy.name.clone());
                lines.push(Line {
                    colour: index,
                    points,
                    ..Line::default()
                });
            }
        }
    }
    let names = lines
        .iter()
        .map(|line| line.colour)
        .zip(names.iter().map(String::as_str));
    (legend(names), lines)
}

fn memory_parts(policy: &PolicyReport) -> Vec<f64> {
    let peak = &policy.memory.peak_bytes;
    let parts = [
        peak.placement,
        peak.replicas,
        peak.forward_buffers,
        peak.backward_buffers,
        peak.stash,
    ];
    parts.map(|bytes| bytes as f64 / GIB).to_vec()
}

fn traffic_parts(policy: &PolicyReport) -> Vec<f64> {
    let links = [
        policy.forward_links,
        policy.backward_links,
        policy.update_links,
    ];
    let bytes = links.iter().flat_map(|links| [links.intra, links.inter]);
    bytes.map(|bytes| bytes as f64 / 1e9).collect()
}
