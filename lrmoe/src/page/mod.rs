//! A report as one page that needs nothing else: plots, tables, what is counted. No script, nothing from elsewhere; light or dark as the reader
//! has it.

pub(crate) mod chart;
pub(crate) mod table;

use std::fmt::Write;

use comfy_table::Table;
use plotters::style::RGBColor;

use chart::{GRID, INK, colour};

const TEMPLATE: &str = include_str!("page.html");

/// What a page says; text without markup but for `content`.
pub(crate) struct Page<'a> {
    /// What kind of report it is.
    pub(crate) heading: &'a str,
    /// What it is about, for the window.
    pub(crate) title: &'a str,
    /// Names and facts, in a box on top.
    pub(crate) facts: Vec<(&'a str, &'a str)>,
    /// What to be wary of.
    pub(crate) notes: Vec<&'a str>,
    pub(crate) sections: Vec<Section>,
    /// What is counted, and how.
    pub(crate) counted: Vec<&'a str>,
}

/// A plot or table with what it shows.
pub(crate) struct Section {
    pub(crate) title: String,
    pub(crate) words: String,
    /// Markup of names beside their colours, see [`legend`]; may be empty.
    pub(crate) legend: String,
    /// Markup of a plot or table.
    pub(crate) content: String,
}

impl Page<'_> {
    /// The page as HTML.
    pub(crate) fn render(&self) -> String {
        let hex = |RGBColor(r, g, b)| format!("#{r:02X}{g:02X}{b:02X}");
        let fact = |(name, fact): &(&str, &str)| {
            format!("<dt>{}</dt><dd>{}</dd>\n", escape(name), escape(fact))
        };
        let mut page = TEMPLATE.to_owned();
        for (place, with) in [
            ("{{heading}}", escape(self.heading)),
            ("{{title}}", escape(self.title)),
            ("{{ink}}", hex(INK)),
            ("{{grid}}", hex(GRID)),
            ("{{heading}}", escape(self.heading)),
            ("{{header}}", self.facts.iter().map(fact).collect()),
            ("{{notes}}", list(&self.notes)),
            ("{{body}}", self.body()),
            ("{{counted}}", items(&self.counted)),
        ] {
            page = page.replacen(place, &with, 1);
        }
        page
    }

    fn body(&self) -> String {
        let mut body = String::new();
        for section in &self.sections {
            let _ = writeln!(
                body,
                "<h2>{}</h2>\n<p>{}</p>\n{}<figure class=\"wide\">\n{}</figure>",
                escape(&section.title),
                escape(&section.words),
                section.legend,
                section.content
            );
        }
        body
    }
}

/// Names beside their colours.
pub(crate) fn legend<'a>(names: impl Iterator<Item = (usize, &'a str)>) -> String {
    let item = |(index, name)| {
        let colour = colour(index);
        let (r, g, b) = (colour.0, colour.1, colour.2);
        let mark = format!("<span style=\"background: rgb({r}, {g}, {b})\"></span>");
        format!("<li>{mark}{}</li>\n", escape(name))
    };
    let items: String = names.map(item).collect();
    format!("<ul class=\"legend\">\n{items}</ul>\n")
}

/// A table's markup.
pub(crate) fn table_of(table: &Table) -> String {
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
fn list(lines: &[&str]) -> String {
    match items(lines) {
        items if items.is_empty() => items,
        items => format!("<ul>\n{items}</ul>"),
    }
}

fn items(lines: &[&str]) -> String {
    lines
        .iter()
        .map(|line| format!("<li>{}</li>\n", escape(line)))
        .collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
