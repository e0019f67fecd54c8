//! A report as text.

use std::fmt;

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};

use super::report::{ContenderReport, Pass, Report, Timing};
use crate::layer::Stage;

impl fmt::Display for Report {
    /// What was timed, a table of stages, a table of contenders, what they count.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let load = self
            .contenders
            .last()
            .map_or(1.0, |full| full.forward.load_max_over_mean);
        writeln!(
            f,
            "{}: {} experts, {} per token, D {}, F {}, {}, {}; {} tokens, zipf {} (busiest expert {load:.2} times the mean); score {}; {} threads on {}",
            self.model,
            self.experts,
            self.top_k,
            self.width,
            self.hidden,
            self.activation,
            self.dtype,
            self.tokens,
            self.zipf,
            self.score,
            self.threads,
            self.device
        )?;
        writeln!(
            f,
            "\nmilliseconds, median (best) of {} steps each, in turns; backward with the share of the backward pass of dropless\n\n{}\n\n{}\n",
            self.steps,
            self.stages(),
            self.outcome()
        )?;
        writeln!(
            f,
            "- dropless runs every pair backward; lrmoe@R the share R, everything it takes to select them included"
        )?;
        writeln!(
            f,
            "- experts, GFLOP/s: products of rows and matrices that were computed, those recomputed included, in the stages `forward` and `backward`"
        )?;
        writeln!(
            f,
            "- selection: score, select, route and compact of the backward pass, as a share of the backward pass of dropless"
        )?;
        writeln!(
            f,
            "- peak: memory of a step above weights, gradients and input, y and dx included"
        )?;
        if self.device != "cpu" {
            writeln!(
                f,
                "- stages of a device: until it has been given the work; waiting for it counts in the stage that reads, or in `other`"
            )?;
        }
        write!(f, "- {}", self.machine())
    }
}

impl Report {
    /// A line for each stage, a column for each contender.
    fn stages(&self) -> Table {
        let names = self
            .contenders
            .iter()
            .map(|contender| contender.name.as_str());
        let mut table = table(["pass", "stage"].into_iter().chain(names), 2);
        let full = self
            .contenders
            .last()
            .map_or(1.0, |full| full.backward.seconds.median);
        for (name, of) in [
            ("forward", forward as fn(&ContenderReport) -> &Pass),
            ("backward", backward),
        ] {
            for stage in Stage::ALL.map(Stage::name).into_iter().chain(["other"]) {
                let timings: Vec<_> = self
                    .contenders
                    .iter()
                    .map(|c| of(c).stages.get(stage))
                    .collect();
                if timings.iter().any(Option::is_some) {
                    let cells = timings.into_iter().map(|timing| {
                        timing.map_or_else(
                            || "-".to_owned(),
                            |timing| cell(timing, (name == "backward").then_some(full)),
                        )
                    });
                    table.add_row([name, stage].map(str::to_owned).into_iter().chain(cells));
                }
            }
            let totals = self
                .contenders
                .iter()
                .map(|c| cell(&of(c).seconds, (name == "backward").then_some(full)));
            table.add_row([name, "all"].map(str::to_owned).into_iter().chain(totals));
        }
        table
    }

    /// A line for each contender.
    fn outcome(&self) -> Table {
        let header = [
            "policy",
            "backward of dropless (best)",
            "step of dropless (best)",
            "selection",
            "experts, GFLOP/s forward",
            "backward",
            "rows backward",
            "busiest expert / mean",
            "peak, MiB",
        ];
        let mut table = table(header, 1);
        for contender in &self.contenders {
            let ratio = |timing: &Timing| format!("{:.3} ({:.3})", timing.median, timing.best);
            let peak = contender.peak_bytes;
            table.add_row([
                contender.name.clone(),
                ratio(&contender.backward_over_dropless),
                ratio(&contender.step_over_dropless),
                format!("{:.2} %", 100.0 * contender.selection_over_dropless),
                format!("{:.0}", contender.forward.gflops),
                format!("{:.0}", contender.backward.gflops),
                contender.backward.rows.to_string(),
                format!("{:.2}", contender.backward.load_max_over_mean),
                peak.map_or_else(|| "-".to_owned(), |bytes| (bytes >> 20).to_string()),
            ]);
        }
        table
    }

    /// Whether the threads had their cores.
    fn machine(&self) -> String {
        let least = self.cores.iter().copied().fold(f64::INFINITY, f64::min);
        let seen = format!(
            "a canary beside each step saw {least:.2} cores or more for {} threads",
            self.threads
        );
        match (self.repeated_rounds, self.short_rounds) {
            (0, 0) => seen,
            (repeated, 0) => format!("{seen}; rounds repeated because they had fewer: {repeated}"),
            (repeated, short) => format!(
                "{seen}: too few in {short} of {} rounds after {repeated} were repeated; take these times with care",
                self.steps
            ),
        }
    }
}

fn forward(contender: &ContenderReport) -> &Pass {
    &contender.forward
}

fn backward(contender: &ContenderReport) -> &Pass {
    &contender.backward
}

/// Milliseconds, and what share they are of `full` seconds.
fn cell(timing: &Timing, full: Option<f64>) -> String {
    let share = full.map_or_else(String::new, |full| {
        format!(" {:5.1} %", 100.0 * timing.median / full)
    });
    format!(
        "{:.2} ({:.2}){share}",
        1e3 * timing.median,
        1e3 * timing.best
    )
}

/// Columns of numbers behind the first `names` of names.
fn table<'a>(header: impl IntoIterator<Item = &'a str>, names: usize) -> Table {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header(header);
    for column in table.column_iter_mut().skip(names) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
