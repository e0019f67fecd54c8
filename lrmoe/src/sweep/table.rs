//! A sweep as text.

use std::fmt;

use comfy_table::Table;

use super::report::{Report, SectionReport};
use super::spread::Spread;
use crate::page::table::{percent, table};
use crate::train::MODELLED_AT;

impl Report {
    /// What it rests on, a name and a line each.
    pub(super) fn facts(&self) -> Vec<(&str, String)> {
        let header = &self.header;
        let settings = header.settings.iter();
        let mut facts: Vec<_> = settings
            .map(|(name, value)| (name.as_str(), value.clone()))
            .collect();
        let list = |values: Vec<String>| values.join(", ");
        let seeds = list(header.seeds.iter().map(u64::to_string).collect());
        let done = header.runs - header.missing.len();
        facts.push(("runs", format!("{done} of {}, seeds {seeds}", header.runs)));
        let loss = |name: &String| {
            let group = self.groups.iter().find(|group| group.name == *name);
            group.map_or_else(String::new, |group| format!("{:.4}", group.end.loss))
        };
        if let Some(gap) = &self.gap {
            facts.push((
                "gap",
                format!(
                    "{:.4} nats per byte, {} of the loss: {} {} to {} {}",
                    gap.nats,
                    percent(gap.share_of_loss),
                    gap.floor,
                    loss(&gap.floor),
                    gap.ceiling,
                    loss(&gap.ceiling)
                ),
            ));
        }
        facts
    }

    /// What [`modelled`](Self::modelled) is.
    pub(super) fn modelled_title(&self) -> String {
        let mut settings = self.header.settings.iter();
        let cluster = settings.find(|(name, _)| name == "cluster");
        let cluster = cluster.map_or("", |(_, cluster)| cluster);
        format!("Seconds in the MoE layers, modelled ({cluster})")
    }

    /// The groups of a section at the end of their runs.
    pub(super) fn ends(&self, section: &SectionReport) -> Table {
        let timed = self.header.timed;
        let mut header = vec![
            "runs",
            "seeds",
            "held-out loss",
            "of the gap",
            "retained",
            "dropped",
        ];
        let measured = format!("MoE s, measured ({} cores)", self.header.cores);
        header.extend(timed.then_some(measured.as_str()));
        header.extend(["MB backward", "MB in all", "buffers, MB"]);
        let mut table = table(&header);
        for group in section.groups.iter().map(|&index| &self.groups[index]) {
            let end = &group.end;
            let control = group
                .control
                .map_or_else(String::new, |name| format!(" ({name})"));
            let mut row = vec![
                format!("{}{control}", group.name),
                end.loss.runs.to_string(),
                format!("{:.4}", end.loss),
                group.gap_kept.map_or_else(dash, share),
                percent(group.retention),
                percent(group.dropped),
            ];
            row.extend(timed.then(|| end.moe_seconds.map_or_else(dash, |s| format!("{s:.1}"))));
            row.extend([
                mega(end.backward_bytes),
                mega(end.bytes),
                mega(group.peak_buffer_bytes),
            ]);
            table.add_row(row);
        }
        table
    }

    /// Seconds in the MoE layers of the modelled cluster, in all and to each loss, at several sizes. None of them is measured.
    pub(super) fn modelled(&self, section: &SectionReport) -> Table {
        let targets = &self.header.targets;
        let columns: Vec<String> = (["runs", "sizes of", "in all"].into_iter())
            .map(str::to_owned)
            .chain(
                targets
                    .iter()
                    .flat_map(|target| [format!("to {target}"), "saved".to_owned()]),
            )
            .collect();
        let mut table = table(&columns.iter().map(String::as_str).collect::<Vec<_>>());
        for group in section.groups.iter().map(|&index| &self.groups[index]) {
            for (size, model) in ["these runs"].into_iter().chain(MODELLED_AT).enumerate() {
                let seconds = |spread: Spread| format!("{spread:.3}");
                let mut row = vec![
                    group.name.clone(),
                    model.to_owned(),
                    seconds(group.end.modelled[size]),
                ];
                for target in &group.targets {
                    let reached = target.figures.as_ref();
                    row.push(reached.map_or_else(dash, |at| seconds(at.modelled[size])));
                    let saved = reached.and_then(|at| at.modelled_saved[size]);
                    row.push(saved.map_or_else(dash, share));
                }
                table.add_row(row);
            }
        }
        table
    }

    /// The groups of a section on their way to the target of index `target`.
    pub(super) fn target(&self, section: &SectionReport, target: usize) -> Table {
        let timed = self.header.timed;
        let mut header = vec!["runs", "reached", "steps"];
        if timed {
            header.extend(["MoE s, measured", "saved against SYMI policy"]);
        }
        header.push("MB backward");
        let mut table = table(&header);
        for group in section.groups.iter().map(|&index| &self.groups[index]) {
            let report = &group.targets[target];
            let of = |what: &dyn Fn(&super::Reached) -> String| {
                report.figures.as_ref().map_or_else(dash, what)
            };
            let seconds = |spread: Option<Spread>| spread.map_or_else(dash, |s| format!("{s:.1}"));
            let saved = |spread: Option<Spread>| spread.map_or_else(dash, share);
            let mut row = vec![
                group.name.clone(),
                format!("{} of {}", report.reached, report.runs),
                of(&|at| format!("{:.0}", at.steps)),
            ];
            if timed {
                row.push(of(&|at| seconds(at.moe_seconds)));
                row.push(of(&|at| saved(at.moe_seconds_saved)));
            }
            row.push(of(&|at| mega(at.backward_bytes)));
            table.add_row(row);
        }
        table
    }
}

impl fmt::Display for Report {
    /// Markdown: what it rests on, tables section by section, what they count.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, fact) in self.facts() {
            writeln!(f, "- {name}: {fact}")?;
        }
        for note in &self.header.notes {
            writeln!(f, "- **Note**: {note}")?;
        }
        for section in self
            .sections
            .iter()
            .filter(|section| self.compares(section))
        {
            if !section.title.is_empty() {
                writeln!(f, "\n### {}", section.title)?;
            }
            writeln!(f, "\n{}", self.ends(section))?;
            if let Some(gradients) = self.gradients(section) {
                writeln!(f, "\nGradients of the layers:\n\n{gradients}")?;
            }
            for (index, target) in self.header.targets.iter().enumerate() {
                writeln!(
                    f,
                    "\nTo a held-out loss of {target}:\n\n{}",
                    self.target(section, index)
                )?;
            }
            writeln!(
                f,
                "\n{}:\n\n{}",
                self.modelled_title(),
                self.modelled(section)
            )?;
        }
        writeln!(f)?;
        for line in &self.header.counted {
            writeln!(f, "- {line}")?;
        }
        Ok(())
    }
}

impl Report {
    /// Whether a section has more than the controls, which stand in every other; without such a section all count.
    pub(super) fn compares(&self, section: &SectionReport) -> bool {
        let has_others = |section: &SectionReport| {
            let mut groups = section.groups.iter().map(|&index| &self.groups[index]);
            groups.any(|group| group.control.is_none())
        };
        has_others(section) || !self.sections.iter().any(has_others)
    }
}

fn dash() -> String {
    "-".to_owned()
}

fn share(spread: Spread) -> String {
    format!("{:.1} %", spread.times(100.0))
}

/// Means of megabytes; their spread is that of routing and says nothing.
fn mega(bytes: Spread) -> String {
    format!("{:.1}", bytes.mean / 1e6)
}
