use std::path::PathBuf;

use crate::config::ConfigError;
use crate::text::TextError;

/// What makes a sweep impossible.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// The grid cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The grid is not valid TOML, or has an unknown key or a value of the wrong kind.
    #[error("grid {}, line {line}: {}", path.display(), source.message())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong there.
        source: Box<toml::de::Error>,
    },
    /// A grid without seeds, tables or values.
    #[error("the grid has no {what}: {hint}")]
    Nothing {
        /// What is missing.
        what: String,
        /// How to say it.
        hint: &'static str,
    },
    /// More runs than anybody waits for.
    #[error("the grid has more than {limit} groups of runs")]
    TooMany {
        /// Most groups.
        limit: usize,
    },
    /// The same seed twice.
    #[error("seed {seed} stands twice in seeds")]
    RepeatedSeed {
        /// The seed.
        seed: u64,
    },
    /// An option of `lrmoe train` that a sweep settles itself.
    #[error("option {key} cannot stand in a grid: {reason}")]
    Option {
        /// The option.
        key: &'static str,
        /// Why not, and what to do instead.
        reason: &'static str,
    },
    /// Options that `lrmoe train` does not have, or of the wrong kind.
    #[error("{group}: {}", source.to_string().trim_end().replace('\n', " "))]
    Options {
        /// The group of runs.
        group: String,
        /// What is wrong.
        source: Box<toml::de::Error>,
    },
    /// Options that `lrmoe train` refuses.
    #[error("{group}: {source}")]
    Config {
        /// The group of runs.
        group: String,
        /// Why.
        source: Box<ConfigError>,
    },
    /// A text that cannot be trained on.
    #[error("{group}: {source}")]
    Text {
        /// The group of runs.
        group: String,
        /// Why.
        source: Box<TextError>,
    },
    /// A name that is no name of a folder.
    #[error(
        "`{name}` is no name of runs: it must be letters, digits and any of . , : @ + = _ - and not start with a dot"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// A key in a name that the options do not have.
    #[error("name `{template}`: there is no option {key} in this table or in [common]")]
    Template {
        /// The name as given.
        template: String,
        /// The key in braces.
        key: String,
    },
    /// Two groups of one name with different options.
    #[error(
        "two groups with different options are called {name}; give one of their tables another name"
    )]
    SameName {
        /// The name.
        name: String,
    },
    /// More than one ceiling or floor.
    #[error("both {first} and {second} are the {control}; a sweep has one, of one group of runs")]
    TwoControls {
        /// `ceiling` or `floor`.
        control: &'static str,
        /// A group.
        first: String,
        /// Another.
        second: String,
    },
    /// A loss that is no target.
    #[error("target {target} is out of range, must be above 0")]
    Target {
        /// The target.
        target: f64,
    },
    /// Several runs at once, whose times are to be compared.
    #[error(
        "runs that share the machine have no times to compare: leave --jobs out, or set `timed = false` in the grid"
    )]
    TimedJobs,
    /// A run in the folder that was started with other options.
    #[error(
        "{run} was started with another {keys}; run it again with --rerun-changed, or choose another --out"
    )]
    Changed {
        /// The run.
        run: String,
        /// The options that differ.
        keys: String,
    },
    /// A folder that holds something else than the run.
    #[error("{} is not the run of a sweep: {reason}", path.display())]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A line of the file of finished runs that is none.
    #[error("{}, line {line} is no finished run: {source}", path.display())]
    FinishedLine {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong there.
        source: serde_json::Error,
    },
    /// Runs that did not come to their end. The others did, and are in the report.
    #[error("{} ended early: {first}", runs.join(", "))]
    Failed {
        /// The runs.
        runs: Vec<String>,
        /// Why the first did.
        first: Box<crate::error::Error>,
    },
}
