//! Plots as SVG, to stand inside a page: text and lines in [`INK`] and [`GRID`] take the page's colours, which differ between light and dark.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::error::PlotError;

/// Colour that stands for that of text.
pub(crate) const INK: RGBColor = RGBColor(1, 1, 1);
/// Colour that stands for that of grid lines.
pub(crate) const GRID: RGBColor = RGBColor(2, 2, 2);
/// Colours of parts and series, legible on light and dark ground.
pub(crate) const PALETTE: [RGBColor; 10] = [
    RGBColor(0x4e, 0x79, 0xa7),
    RGBColor(0xf2, 0x8e, 0x2b),
    RGBColor(0x59, 0xa1, 0x4f),
    RGBColor(0xe1, 0x57, 0x59),
    RGBColor(0xb0, 0x7a, 0xa1),
    RGBColor(0x76, 0xb7, 0xb2),
    RGBColor(0xd4, 0xae, 0x2c),
    RGBColor(0xff, 0x9d, 0xa7),
    RGBColor(0x9c, 0x75, 0x5f),
    RGBColor(0x8f, 0x8f, 0x8f),
];

const WIDTH: u32 = 900;
const BAR: u32 = 30;
const LINES_HEIGHT: u32 = 300;
/// Points of a line; more are averaged.
const POINTS: usize = 300;
/// Up to so many points are marked.
const MARKED: usize = 40;

/// One bar of parts, side by side.
#[derive(Debug)]
pub(crate) struct Bar<'a> {
    pub(crate) name: &'a str,
    pub(crate) parts: Vec<f64>,
}

impl Bar<'_> {
    fn total(&self) -> f64 {
        self.parts.iter().sum()
    }
}

/// One line, and the band that it runs in.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Index of its colour.
    pub(crate) colour: usize,
    pub(crate) points: Vec<(f64, f64)>,
    /// Lower and upper end of the band at each point; empty for none.
    pub(crate) band: Vec<(f64, f64)>,
}

/// What the axes of a plot of lines say.
#[derive(Debug)]
pub(crate) struct Axes<'a> {
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    /// Where the y axis starts; `None` for the smallest value.
    pub(crate) from: Option<f64>,
}

/// The colour of a part or series.
pub(crate) fn colour(index: usize) -> RGBColor {
    PALETTE[index % PALETTE.len()]
}

/// Horizontal bars, the first on top, each with its total behind it.
pub(crate) fn bars(plot: &'static str, unit: &str, bars: &[Bar<'_>]) -> Result<String, PlotError> {
    let height = bars.len() as u32 * BAR + 60;
    draw(plot, height, |area| {
        let longest = bars.iter().map(|bar| bar.name.len()).max().unwrap_or(0) as u32;
        let most = bars.iter().map(Bar::total).fold(0.0, f64::max);
        let most = if most > 0.0 { most } else { 1.0 };
        let rows = bars.len() as f64;
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .margin_right(70)
            .set_label_area_size(LabelAreaPosition::Left, longest * 8 + 16)
            .set_label_area_size(LabelAreaPosition::Bottom, 44)
            .build_cartesian_2d(0.0..most, 0.0..rows)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(GRID)
            .label_style(text(14))
            .x_labels(8)
            .x_label_formatter(&|x| number(*x))
            .x_desc(unit)
            .draw()?;
        for (row, bar) in bars.iter().enumerate() {
            let middle = rows - row as f64 - 0.5;
            let mut start = 0.0;
            for (part, &value) in bar.parts.iter().enumerate() {
                let corners = [(start, middle - 0.34), (start + value, middle + 0.34)];
                chart.draw_series([Rectangle::new(corners, colour(part).filled())])?;
                start += value;
            }
            let label = |at: (f64, f64), shift: i32, words: String, side: HPos| {
                EmptyElement::at(at)
                    + Text::new(
                        words,
                        (shift, 0),
                        text(14).pos(Pos::new(side, VPos::Center)),
                    )
            };
            chart.draw_series([
                label((0.0, middle), -8, bar.name.to_owned(), HPos::Right),
                label((start, middle), 6, number(start), HPos::Left),
            ])?;
        }
        Ok(())
    })
}

/// Lines, each in its band.
pub(crate) fn lines(
    plot: &'static str,
    axes: &Axes<'_>,
    lines: &[Line],
) -> Result<String, PlotError> {
    draw(plot, LINES_HEIGHT, |area| {
        let [left, right] = limits(
            lines
                .iter()
                .flat_map(|line| line.points.iter().map(|p| p.0)),
        );
        let ends = lines.iter().flat_map(|line| &line.band);
        let values = lines
            .iter()
            .flat_map(|line| line.points.iter().map(|p| p.1));
        let values = values.chain(ends.flat_map(|&(low, high)| [low, high]));
        let [bottom, top] = limits(values.chain(axes.from));
        let bottom = axes.from.unwrap_or(bottom - (top - bottom) * 0.05);
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .margin_right(24)
            .set_label_area_size(LabelAreaPosition::Left, 70)
            .set_label_area_size(LabelAreaPosition::Bottom, 44)
            .build_cartesian_2d(left..right, bottom..top + (top - bottom) * 0.05)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(GRID)
            .label_style(text(14))
            .x_labels(10)
            .y_labels(6)
            .x_label_formatter(&|x| number(*x))
            .y_label_formatter(&|y| number(*y))
            .x_desc(axes.x)
            .y_desc(axes.y)
            .draw()?;
        for line in lines {
            let there = line.points.iter().zip(&line.band);
            let back = line.points.iter().zip(&line.band).rev();
            let outline = there.map(|(point, band)| (point.0, band.1));
            let outline = outline.chain(back.map(|(point, band)| (point.0, band.0)));
            let fill = colour(line.colour).mix(0.18).filled();
            chart.draw_series([Polygon::new(outline.collect::<Vec<_>>(), fill)])?;
        }
        for line in lines {
            let (colour, line) = (colour(line.colour), thin(&line.points));
            chart.draw_series([PathElement::new(line.clone(), colour.stroke_width(2))])?;
            if line.len() <= MARKED {
                let mark = |&point: &(f64, f64)| Circle::new(point, 3, colour.filled());
                chart.draw_series(line.iter().map(mark))?;
            }
        }
        Ok(())
    })
}

/// Smallest and largest value, apart.
fn limits(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let start = [f64::INFINITY, f64::NEG_INFINITY];
    let found = values.fold(start, |[low, high], value| {
        [low.min(value), high.max(value)]
    });
    match found {
        [low, high] if low < high => found,
        [low, _] if low.is_finite() => [low, low + 1.0],
        _ => [0.0, 1.0],
    }
}

type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

/// The elements of a plot without the namespace, which a page does not need.
fn draw(
    plot: &'static str,
    height: u32,
    into: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Drawn<'static>,
) -> Result<String, PlotError> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let drawn = into(&area).and_then(|()| area.present());
        drawn.map_err(|source| PlotError {
            plot,
            source: source.to_string().into(),
        })?;
    }
    Ok(svg.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", " role=\"img\"", 1))
}

fn text(size: u32) -> TextStyle<'static> {
    // The backend draws a font a quarter smaller than it is told.
    ("sans-serif", f64::from(size) * 1.24)
        .into_font()
        .color(&INK)
}

/// At most [`POINTS`] points, each the mean of as many.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let together = points.len().div_ceil(POINTS).max(1);
    let mean = |points: &[(f64, f64)]| {
        let sum = points
            .iter()
            .fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / points.len() as f64, sum.1 / points.len() as f64)
    };
    points.chunks(together).map(mean).collect()
}

/// Three or four figures, no more than it takes.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        x if x >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}
