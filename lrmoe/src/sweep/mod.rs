//! Many runs from one file: every combination of the values it lists, with every seed, and a report that compares them.
//!
//! [`Grid::read`] makes groups of runs, which differ in their seeds alone, from a TOML file:
//!
//! ```toml
//! title = "Retention"
//! seeds = [1, 2, 3]
//! timed = true              # false: measured seconds are left out of the report
//! targets = [2.3, 2.2]      # held-out losses; by default three that the ceiling passes
//!
//! [common]                  # options of `lrmoe train`, by their names
//! text = "book.txt"
//! steps = 1000
//!
//! [[grid]]
//! policy = "dropless"
//! control = "ceiling"
//!
//! [[grid]]
//! retention = 0.0
//! control = "floor"
//!
//! [[grid]]
//! title = "Scores"
//! score = ["down-grad", "forward"]
//! retention = [0.5, 0.25]
//! ```
//!
//! A group is called after what its table changes (`lrmoe@0.25+score=forward`), or as `name = "{score}-{retention}"` says. [`Sweep`] runs what is
//! not finished yet, each run in `OUT/runs/GROUP/seed-N`, and [`Report`] says for every group what of the gap between floor
//! and ceiling it keeps, and how soon it reached each loss. `OUT/finished.jsonl` has what the report needs of the finished runs, a line each: with
//! that file alone a sweep is reported, and gone on with, elsewhere.

mod curve;
mod error;
mod finished;
mod grid;
mod header;
mod left;
mod page;
mod quality;
mod report;
mod run;
mod spread;
mod table;
mod target;

pub use curve::Curve;
pub use error::SweepError;
pub use grid::{Grid, Group, Section};
pub use header::Header;
pub use left::Left;
pub use page::page;
pub use report::{Figures, Gap, GroupReport, Point, Report, SectionReport};
pub use run::{Run, State, Sweep};
pub use spread::Spread;
pub use target::{Reached, TargetReport};
