//! A replay as one page that needs nothing else.

use std::fmt::Write;

use comfy_table::Table;

use super::ReplayError;
use super::chart::{Bar, GRID, INK, Line, bars, colour, lines};
use super::report::{PolicyReport, Report};

const TEMPLATE: &str = include_str!("page.html");
const GIB: f64 = (1u64 << 30) as f64;

/// The page: plots, tables, what is counted. No script, nothing from elsewhere; light or dark as the reader has it.
///
/// # Errors
///
/// [`ReplayError::Plot`] if a plot cannot be drawn.
pub fn page(report: &Report) -> Result<String, ReplayError> {
    let hex = |colour: plotters::style::RGBColor| {
        format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2)
    };
    let header = report.header.facts();
    let facts = header.iter().filter(|(name, _)| *name != "note");
    let notes = header.iter().filter(|(name, _)| *name == "note");
    let title = format!("{} on {}", report.header.model, report.header.cluster.name);
    let mut page = TEMPLATE.to_owned();
    for (place, with) in [
        ("{{title}}", escape(&title)),
        ("{{ink}}", hex(INK)),
        ("{{grid}}", hex(GRID)),
        (
            "{{header}}",
            facts
                .map(|(name, fact)| format!("<dt>{name}</dt><dd>{}</dd>\n", escape(fact)))
                .collect(),
        ),
        ("{{notes}}", list(notes.map(|(_, note)| note.as_str()))),
        (
            "{{assumptions}}",
            items(report.header.assumptions.iter().map(String::as_str)),
        ),
        ("{{body}}", body(report)?),
    ] {
        page = page.replacen(place, &with, 1);
    }
    Ok(page)
}

/// A plot or table with what it shows.
struct Section {
    title: &'static str,
    words: &'static str,
    legend: String,
    content: String,
}

fn body(report: &Report) -> Result<String, ReplayError> {
    let figures = |title, words, table: &Table| Section {
        title,
        words,
        legend: String::new(),
        content: table_of(table),
    };
    let sections = [
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
    ];
    let mut body = String::new();
    for section in sections {
        let _ = writeln!(
            body,
            "<h2>{}</h2>\n<p>{}</p>\n{}<figure class=\"wide\">\n{}</figure>",
            section.title, section.words, section.legend, section.content
        );
    }
    Ok(body)
}

fn memory(report: &Report) -> Result<Section, ReplayError> {
    let parts = [
        "placement",
        "replicas",
        "token buffers forward",
        "token buffers backward",
        "stash",
    ];
    Ok(Section {
        title: "Memory",
        words: "Peak over the steps, of the rank that holds most; the optimizer's state is apart.",
        legend: legend(parts.into_iter().enumerate()),
        content: bars("memory", "GiB", &bars_of(report, memory_parts))?,
    })
}

fn load(report: &Report) -> Result<Section, ReplayError> {
    let (names, drawn) = lines_of(report, |point| point.load_max_over_mean);
    Ok(Section {
        title: "Load",
        words: "Rows that a rank runs forward and backward, largest over mean of the ranks, mean over layers.",
        legend: names,
        content: lines("load", "largest / mean", 1.0, &drawn)?,
    })
}

fn time(report: &Report) -> Result<Section, ReplayError> {
    let (names, drawn) = lines_of(report, |point| point.modelled_seconds * 1e3);
    Ok(Section {
        title: "Time",
        words: "Modelled time of the MoE layers in a step.",
        legend: names,
        content: lines("time", "ms, modelled", 0.0, &drawn)?,
    })
}

fn traffic(report: &Report) -> Result<Section, ReplayError> {
    let parts = [
        "forward, inside nodes",
        "forward, between nodes",
        "backward, inside nodes",
        "backward, between nodes",
        "update, inside nodes",
        "update, between nodes",
    ];
    Ok(Section {
        title: "Traffic",
        words: "Bytes between ranks in a step, all ranks together, mean over the steps; update is gradients to the optimizer's shards and weights back.",
        legend: legend(parts.into_iter().enumerate()),
        content: bars("traffic", "GB", &bars_of(report, traffic_parts))?,
    })
}

fn planning(report: &Report) -> Result<Section, ReplayError> {
    let microseconds = |policy: &PolicyReport| vec![policy.measured_planning_seconds * 1e6];
    Ok(Section {
        title: "Planning",
        words: "Time to plan quotas and the next placement of a layer, measured on one thread of the machine that replayed.",
        legend: String::new(),
        content: bars("planning", "us, measured", &bars_of(report, microseconds))?,
    })
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

/// Names beside their colours.
fn legend<'a>(names: impl Iterator<Item = (usize, &'a str)>) -> String {
    let item = |(index, name)| {
        let colour = colour(index);
        let (r, g, b) = (colour.0, colour.1, colour.2);
        let mark = format!("<span style=\"background: rgb({r}, {g}, {b})\"></span>");
        format!("<li>{mark}{}</li>\n", escape(name))
    };
    let items: String = names.map(item).collect();
    format!("<ul class=\"legend\">\n{items}</ul>\n")
}

fn table_of(table: &Table) -> String {
    let row = |cells: Vec<String>, tag: &str| {
        let cell = |cell: &String| format!("<{tag}>{}</{tag}>", escape(cell));
        format!("<tr>{}</tr>\n", cells.iter().map(cell).collect::<String>())
    };
    let content = |row: &comfy_table::Row| row.cell_iter().map(|cell| cell.content()).collect();
    let head = table.header().map(|header| row(content(header), "th"));
    let rows = table.row_iter().map(|cells| row(content(cells), "td"));
    format!(
        "<table>\n{}{}</table>\n",
        head.unwrap_or_default(),
        rows.collect::<String>()
    )
}

/// A list, or nothing if there is nothing to list.
fn list<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    match items(lines) {
        items if items.is_empty() => items,
        items => format!("<ul>\n{items}</ul>"),
    }
}

fn items<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    lines
        .map(|line| format!("<li>{}</li>\n", escape(line)))
        .collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
