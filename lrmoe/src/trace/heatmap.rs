//! A heat map as SVG: experts by steps.

use ndarray::Array2;
use plotters::coord::Shift;
use plotters::prelude::*;

/// Loads of one layer's experts over time.
#[derive(Clone, Debug, PartialEq)]
pub struct HeatMap {
    /// Load over the mean of the part, `[experts, parts]`; 0 in a part without pairs.
    loads: Array2<f64>,
    layer: usize,
    /// Numbers of the first and last step of each part.
    parts: Vec<(u32, u32)>,
}

type Drawn = Result<(), Box<dyn std::error::Error>>;

const WIDTH: u32 = 1000;
/// Font of the numbers on the axes.
const LABELS: (&str, i32) = ("sans-serif", 16);
/// Colours of the scale.
const SHADES: usize = 48;
/// Viridis, dark to bright, at equal distances.
const SCALE: [RGBColor; 6] = [
    RGBColor(68, 1, 84),
    RGBColor(65, 68, 135),
    RGBColor(42, 120, 142),
    RGBColor(34, 168, 132),
    RGBColor(122, 209, 81),
    RGBColor(253, 231, 37),
];

impl HeatMap {
    /// `pairs`: `[experts, parts]`, the pairs of each expert in each part of the run, whose first and last steps are `parts`.
    pub(super) fn new(pairs: Array2<f64>, layer: usize, parts: Vec<(u32, u32)>) -> Self {
        let mut loads = pairs;
        for mut column in loads.columns_mut() {
            let mean = column.sum() / column.len() as f64;
            if mean > 0.0 {
                column /= mean;
            }
        }
        Self {
            loads,
            layer,
            parts,
        }
    }

    /// The picture, with axes and a legend of its colours.
    pub fn to_svg(&self) -> String {
        let height = (120 + 6 * self.loads.nrows() as u32).clamp(320, 1200);
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
            self.draw(&area)
                .expect("drawing into a string does not fail");
        }
        svg
    }

    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Drawn {
        area.fill(&WHITE)?;
        let (map, legend) = area.split_horizontally(WIDTH - 110);
        // Above the load that all but one in a hundred stay below, colours no longer differ.
        let mut sorted: Vec<f64> = self.loads.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let most = sorted[(sorted.len() - 1) * 99 / 100].max(2.0);
        self.draw_map(&map, most)?;
        draw_legend(&legend, most, sorted[sorted.len() - 1])?;
        area.present()?;
        Ok(())
    }

    fn draw_map(&self, area: &DrawingArea<SVGBackend<'_>, Shift>, most: f64) -> Drawn {
        let (experts, parts) = self.loads.dim();
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .caption(
                format!("Layer {}: load of each expert over the mean", self.layer),
                ("sans-serif", 24),
            )
            .x_label_area_size(44)
            .y_label_area_size(58)
            .build_cartesian_2d(0..parts, 0..experts)?;
        let step = |part: &usize| {
            let last = self.parts.last().map_or(0, |(_, last)| last + 1);
            self.parts
                .get(*part)
                .map_or(last, |(first, _)| *first)
                .to_string()
        };
        chart
            .configure_mesh()
            .disable_mesh()
            .label_style(LABELS)
            .axis_desc_style(("sans-serif", 18))
            .x_desc("step")
            .y_desc("expert")
            .x_label_formatter(&step)
            .draw()?;
        for (expert, loads) in self.loads.outer_iter().enumerate() {
            let mut start = 0;
            // Neighbours of one colour are one rectangle.
            for part in 1..=parts {
                let here = shade(loads[start], most);
                if part == parts || shade(loads[part], most) != here {
                    let corners = [(start, expert), (part, expert + 1)];
                    chart.draw_series([Rectangle::new(corners, colour(here).filled())])?;
                    start = part;
                }
            }
        }
        Ok(())
    }
}

fn draw_legend(area: &DrawingArea<SVGBackend<'_>, Shift>, most: f64, largest: f64) -> Drawn {
    let mut chart = ChartBuilder::on(area)
        .margin_top(44)
        .margin_bottom(56)
        .margin_left(8)
        .margin_right(48)
        .right_y_label_area_size(40)
        .build_cartesian_2d(0.0..1.0, 0.0..most)?;
    let ends_here = largest <= most;
    chart
        .configure_mesh()
        .disable_mesh()
        .disable_x_axis()
        .y_labels(6)
        .label_style(LABELS)
        .y_label_formatter(&|load: &f64| {
            let more = if ends_here || *load < most { "" } else { "+" };
            format!("{load:.1}{more}")
        })
        .draw()?;
    for index in 0..SHADES {
        let at = |index: usize| most * index as f64 / SHADES as f64;
        let corners = [(0.0, at(index)), (1.0, at(index + 1))];
        chart.draw_series([Rectangle::new(corners, colour(index).filled())])?;
    }
    Ok(())
}

fn shade(load: f64, most: f64) -> usize {
    ((load / most * SHADES as f64) as usize).min(SHADES - 1)
}

fn colour(shade: usize) -> RGBColor {
    let at = shade as f64 / (SHADES - 1) as f64 * (SCALE.len() - 1) as f64;
    let below = (at as usize).min(SCALE.len() - 2);
    let (from, to) = (SCALE[below], SCALE[below + 1]);
    let mix = |a: u8, b: u8| {
        (f64::from(a) + (f64::from(b) - f64::from(a)) * (at - below as f64)).round() as u8
    };
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}
