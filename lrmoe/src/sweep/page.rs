//! A sweep as a page.

use super::report::{Point, Report, SectionReport};
use crate::error::PlotError;
use crate::page::chart::{Axes, Line, lines};
use crate::page::{Page, Section, legend, table_of};

/// The page: loss against steps, seconds and bytes in bands over the seeds, tables, what is counted. No script, nothing from elsewhere.
///
/// # Errors
/// A plot that cannot be drawn.
pub fn page(report: &Report) -> Result<String, PlotError> {
    let mut sections = Vec::new();
    for section in report
        .sections
        .iter()
        .filter(|section| report.compares(section))
    {
        add(&mut sections, report, section)?;
    }
    let facts = report.facts();
    let page = Page {
        heading: "LRMoE sweep",
        title: &report.header.title,
        facts: facts
            .iter()
            .map(|(name, fact)| (*name, fact.as_str()))
            .collect(),
        notes: report.header.notes.iter().map(String::as_str).collect(),
        sections,
        counted: report.header.counted.iter().map(String::as_str).collect(),
    };
    Ok(page.render())
}

fn add(
    sections: &mut Vec<Section>,
    report: &Report,
    section: &SectionReport,
) -> Result<(), PlotError> {
    let names = section
        .groups
        .iter()
        .map(|&index| report.groups[index].name.as_str());
    let legend = legend(names.enumerate());
    let title = |what: &str| match section.title.is_empty() {
        true => what.to_owned(),
        false => format!("{}: {what}", section.title),
    };
    let table = |name: &str, table| Section {
        title: title(name),
        words: String::new(),
        legend: String::new(),
        content: table_of(&table),
    };
    sections.push(table("at the end", report.ends(section)));
    type Against = (&'static str, &'static str, fn(&Point) -> Option<f64>);
    let against: [Against; 4] = [
        ("loss against steps", "step", |at| Some(at.step)),
        (
            "loss against measured time",
            "s in MoE layers, measured",
            |at| at.moe_seconds,
        ),
        (
            "loss against modelled time",
            "s in MoE layers, modelled",
            |at| Some(at.modelled_moe_seconds),
        ),
        ("loss against traffic", "MB between ranks", |at| {
            Some(at.bytes / 1e6)
        }),
    ];
    for (plot, x, of) in against {
        let drawn = section.groups.iter().enumerate().map(|(colour, &index)| {
            let curve = &report.groups[index].curve;
            let points = curve.iter().filter_map(|at| Some((of(at)?, at.loss)));
            Line {
                colour,
                points: points.collect(),
                band: curve.iter().map(|at| (at.loss_min, at.loss_max)).collect(),
            }
        });
        let drawn: Vec<Line> = drawn.filter(|line| !line.points.is_empty()).collect();
        if drawn.is_empty() {
            continue;
        }
        let axes = Axes {
            x,
            y: "held-out loss",
            from: None,
        };
        sections.push(Section {
            title: title(plot),
            words: "Held-out loss in nats per byte, mean over the seeds; the band is from the least to the largest.".to_owned(),
            legend: legend.clone(),
            content: lines(plot, &axes, &drawn)?,
        });
    }
    if let Some(gradients) = report.gradients(section) {
        sections.push(table("gradients of the layers", gradients));
    }
    for (index, target) in report.header.targets.iter().enumerate() {
        let name = format!("to a held-out loss of {target}");
        sections.push(table(&name, report.target(section, index)));
    }
    sections.push(table(&report.modelled_title(), report.modelled(section)));
    Ok(())
}
