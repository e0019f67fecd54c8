//! How far a sweep has come.

use super::run::{Run, State};

/// What is left of a sweep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Left {
    /// Runs that are finished.
    pub finished: usize,
    /// Runs of the grid.
    pub runs: usize,
    /// Steps still to be done.
    pub steps: u64,
    /// Seconds that these take on one job at the pace of the finished runs of the same group, or of all; `None` while none is finished.
    pub seconds: Option<f64>,
}

impl Left {
    pub(super) fn of(runs: &[Run]) -> Self {
        // Steps and seconds of what is finished, of the group or of all.
        let pace = |of: &dyn Fn(&Run) -> bool| {
            let finished = runs.iter().filter(|run| of(run));
            let sums = finished.filter_map(|run| match &run.state {
                State::Finished(curve) => Some((f64::from(run.config().steps), curve.seconds)),
                _ => None,
            });
            let (steps, seconds) = sums.fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
            (steps > 0.0).then_some(seconds / steps)
        };
        let of_all = pace(&|_| true);
        let mut left = Self {
            finished: 0,
            runs: runs.len(),
            steps: 0,
            seconds: of_all.map(|_| 0.0),
        };
        for run in runs {
            let steps = match run.state {
                State::Finished(_) => {
                    left.finished += 1;
                    continue;
                }
                State::Interrupted(done) => run.config().steps - done,
                State::Missing => run.config().steps,
            };
            left.steps += u64::from(steps);
            let pace = pace(&|other| other.group == run.group).or(of_all);
            left.seconds = left
                .seconds
                .zip(pace)
                .map(|(sum, pace)| sum + pace * f64::from(steps));
        }
        left
    }
}
