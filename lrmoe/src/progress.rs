//! A run on the terminal: a bar with loss, speed, retention and imbalance.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::train::{Observer, StepRecord};

/// Draws a progress bar on standard error; without a terminal it prints a line now and then instead.
#[derive(Debug)]
pub struct Progress {
    name: String,
    bar: ProgressBar,
    /// The bars of other runs that it stands among, to leave them when the run ends.
    among: Option<MultiProgress>,
    held_out: Option<f32>,
}

/// Without a terminal, steps between two lines.
const LINE_EVERY: u32 = 25;

impl Progress {
    /// A bar for the run `name`.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            bar: ProgressBar::hidden(),
            among: None,
            held_out: None,
        }
    }

    /// A bar for the run `name` among those of other runs, for as long as it goes on.
    pub fn among(bars: &MultiProgress, name: impl Into<String>) -> Self {
        let mut progress = Self::new(name);
        progress.among = Some(bars.clone());
        progress
    }
}

impl Observer for Progress {
    fn start(&mut self, done: u32, steps: u32) {
        let style =
            ProgressStyle::with_template("{prefix} {bar:24} {pos}/{len} {elapsed}<{eta} {msg}")
                .expect("a fixed template");
        let bar = ProgressBar::new(u64::from(steps));
        self.bar = match &self.among {
            Some(bars) => bars.add(bar),
            None => bar,
        };
        self.bar.set_style(style);
        self.bar.set_prefix(self.name.clone());
        self.bar.set_position(u64::from(done));
    }

    fn step(&mut self, record: &StepRecord) {
        self.held_out = record.held_out_loss.or(self.held_out);
        let held_out = self
            .held_out
            .map_or_else(String::new, |loss| format!(" held-out {loss:.3}"));
        let worst = |of: fn(&crate::train::LayerRecord) -> f64| {
            record.layers.iter().map(of).fold(1.0, f64::max)
        };
        let message = format!(
            "loss {:.3}{held_out}  {:.0} tok/s  retention {:.2}  imbalance {:.2} -> {:.2}",
            record.loss,
            record.tokens_per_second,
            record.retention,
            worst(|layer| layer.imbalance_before),
            worst(|layer| layer.imbalance_after),
        );
        if self.bar.is_hidden() && record.step.is_multiple_of(LINE_EVERY) {
            eprintln!("{} step {}  {message}", self.name, record.step);
        }
        self.bar.set_position(u64::from(record.step));
        self.bar.set_message(message);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        match self.among {
            Some(_) => self.bar.finish_and_clear(),
            None => self.bar.abandon(),
        }
    }
}
