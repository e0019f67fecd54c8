//! From a TOML file to the runs it asks for.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::{Table, Value};

use super::SweepError;
use crate::config::{TrainConfig, TrainOptions};
use crate::policy::Policy;

/// Most groups of runs.
const MOST_GROUPS: usize = 10_000;

/// Options of `lrmoe train` that a sweep settles itself.
const SETTLED: [(&str, &str); 9] = [
    ("seed", "list seeds under `seeds`"),
    ("out", "runs lie in the folder of the sweep, see --out"),
    ("resume", "interrupted runs go on by themselves"),
    ("overwrite", "see --rerun-changed"),
    ("threads", "all runs share them, see --threads"),
    ("compare", "write the policies as values of `policy`"),
    (
        "target-loss",
        "runs of a sweep have equal steps; list losses under `targets`",
    ),
    ("record-trace", "runs would share the file"),
    (
        "record-pairs-every",
        "it belongs to record-trace, which a grid cannot have",
    ),
];

/// A grid of runs, each complete and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// What it is about.
    pub title: String,
    /// Seeds of every group.
    pub seeds: Vec<u64>,
    /// Whether measured seconds are to be compared.
    pub timed: bool,
    /// Held-out losses, nats per byte; `None` to derive them from the ceiling.
    pub targets: Option<Vec<f64>>,
    /// Groups of runs that differ in their seeds alone, each once.
    pub groups: Vec<Group>,
    /// The tables of the file.
    pub sections: Vec<Section>,
    /// Group of the least loss that can be had: all pairs run backward.
    pub ceiling: Option<usize>,
    /// Group without training of experts.
    pub floor: Option<usize>,
}

/// Runs that differ in their seeds alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Name of its folder and in tables.
    pub name: String,
    /// Options as given, those of `[common]` included.
    pub options: Table,
    /// The same, complete, with the first seed.
    pub config: TrainConfig,
}

/// The `[[grid]]` tables of one title.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// What it compares; may be empty.
    pub title: String,
    /// Its groups, by their indices.
    pub groups: Vec<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    title: String,
    #[serde(default)]
    seeds: Vec<u64>,
    timed: Option<bool>,
    targets: Option<Vec<f64>>,
    #[serde(default)]
    common: Table,
    #[serde(default)]
    grid: Vec<Table>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Control {
    Ceiling,
    Floor,
}

impl Grid {
    /// Reads a grid; `text`, unless empty, stands for that of all its runs.
    ///
    /// # Errors
    /// [`SweepError`]: a file that cannot be read or is no grid, options that `lrmoe train` refuses.
    pub fn read(path: &Path, text: &[PathBuf]) -> Result<Self, SweepError> {
        let content = std::fs::read_to_string(path).map_err(|source| SweepError::File {
            path: path.into(),
            source,
        })?;
        let mut file: File = toml::from_str(&content).map_err(|source| {
            let start = source.span().map_or(0, |span| span.start);
            SweepError::Toml {
                path: path.into(),
                line: 1 + content[..start].matches('\n').count(),
                source: Box::new(source),
            }
        })?;
        if !text.is_empty() {
            let paths = text.iter().map(|path| path.to_string_lossy().into_owned());
            let paths: Vec<Value> = paths.map(Value::String).collect();
            file.common.insert("text".to_owned(), Value::Array(paths));
            for table in &mut file.grid {
                table.remove("text");
            }
        }
        Self::of(file)
    }

    fn of(file: File) -> Result<Self, SweepError> {
        let nothing = |what: &str, hint| SweepError::Nothing {
            what: what.to_owned(),
            hint,
        };
        if file.seeds.is_empty() {
            return Err(nothing("seeds", "write `seeds = [1, 2, 3]`"));
        }
        if file.grid.is_empty() {
            return Err(nothing(
                "[[grid]] table",
                "each names options, whose values may be lists",
            ));
        }
        for (index, &seed) in file.seeds.iter().enumerate() {
            if file.seeds[..index].contains(&seed) {
                return Err(SweepError::RepeatedSeed { seed });
            }
        }
        let mut grid = Self {
            title: file.title,
            seeds: file.seeds,
            timed: file.timed.unwrap_or(true),
            targets: file.targets.map(targets).transpose()?,
            groups: Vec::new(),
            sections: Vec::new(),
            ceiling: None,
            floor: None,
        };
        for table in file.grid {
            grid.add(&file.common, table)?;
        }
        Ok(grid)
    }

    /// Takes in the groups of one table.
    fn add(&mut self, common: &Table, mut table: Table) -> Result<(), SweepError> {
        let title: String = take(&mut table, "title")?.unwrap_or_default();
        let template: Option<String> = take(&mut table, "name")?;
        let control: Option<Control> = take(&mut table, "control")?;
        for (key, reason) in SETTLED {
            if common.contains_key(key) || table.contains_key(key) {
                return Err(SweepError::Option { key, reason });
            }
        }
        let mut groups = Vec::new();
        for cell in product(&table)? {
            let mut options = common.clone();
            options.extend(cell.clone());
            let config = complete(&options, self.seeds[0])?;
            let name = match &template {
                Some(template) => fill(template, &options)?,
                None => name(&config, common, &cell),
            };
            let index = self.group(Group {
                name: checked(name)?,
                options,
                config,
            })?;
            if let Some(control) = control {
                self.mark(control, index)?;
            }
            if !groups.contains(&index) {
                groups.push(index);
            }
        }
        // Tables of one title are one section, as are those without.
        let known = self.sections.iter_mut().find(|known| known.title == title);
        match known {
            Some(known) => {
                groups.retain(|index| !known.groups.contains(index));
                known.groups.append(&mut groups);
            }
            None => self.sections.push(Section { title, groups }),
        }
        Ok(())
    }

    /// Index of the group, which may be there already.
    fn group(&mut self, group: Group) -> Result<usize, SweepError> {
        let known = self
            .groups
            .iter()
            .position(|known| known.name == group.name);
        match known {
            Some(index) if self.groups[index].config == group.config => Ok(index),
            Some(_) => Err(SweepError::SameName { name: group.name }),
            None if self.groups.len() == MOST_GROUPS => {
                Err(SweepError::TooMany { limit: MOST_GROUPS })
            }
            None => {
                self.groups.push(group);
                Ok(self.groups.len() - 1)
            }
        }
    }

    fn mark(&mut self, control: Control, index: usize) -> Result<(), SweepError> {
        let (place, control) = match control {
            Control::Ceiling => (&mut self.ceiling, "ceiling"),
            Control::Floor => (&mut self.floor, "floor"),
        };
        match place.replace(index) {
            Some(first) if first != index => Err(SweepError::TwoControls {
                control,
                first: self.groups[first].name.clone(),
                second: self.groups[index].name.clone(),
            }),
            _ => Ok(()),
        }
    }
}

fn targets(mut targets: Vec<f64>) -> Result<Vec<f64>, SweepError> {
    if let Some(&target) = targets.iter().find(|t| !(**t > 0.0 && t.is_finite())) {
        return Err(SweepError::Target { target });
    }
    targets.sort_by(|a, b| b.total_cmp(a));
    targets.dedup();
    Ok(targets)
}

/// Takes what is no option of a run out of a table.
fn take<'de, T: Deserialize<'de>>(table: &mut Table, key: &str) -> Result<Option<T>, SweepError> {
    let value = table.remove(key).map(Value::try_into);
    value.transpose().map_err(|source| SweepError::Options {
        group: format!("[[grid]], {key}"),
        source: Box::new(source),
    })
}

/// Every combination of the values of a table, the last key changing fastest.
fn product(table: &Table) -> Result<Vec<Table>, SweepError> {
    let mut cells = vec![Table::new()];
    for (key, value) in table {
        let values = match value {
            // A text may be several files.
            Value::Array(values) if key != "text" => values.as_slice(),
            one => std::slice::from_ref(one),
        };
        if values.is_empty() {
            return Err(SweepError::Nothing {
                what: format!("value for {key}"),
                hint: "its list is empty",
            });
        }
        if cells.len() * values.len() > MOST_GROUPS {
            return Err(SweepError::TooMany { limit: MOST_GROUPS });
        }
        let extended = cells.iter().flat_map(|cell| {
            values.iter().map(move |value| {
                let mut cell = cell.clone();
                cell.insert(key.clone(), value.clone());
                cell
            })
        });
        cells = extended.collect();
    }
    Ok(cells)
}

/// The options of a run, complete.
pub(super) fn complete(options: &Table, seed: u64) -> Result<TrainConfig, SweepError> {
    let group = || options_of(options);
    if options.get("cluster").and_then(Value::as_str) == Some("local") {
        return Err(SweepError::Option {
            key: "cluster",
            reason: "`local` is measured anew by every run; name a preset or a file",
        });
    }
    let mut all = options.clone();
    // TOML has signed integers alone; a seed that is none cannot have come from a grid.
    all.insert("seed".to_owned(), Value::Integer(seed as i64));
    let parsed: Result<TrainOptions, _> = Value::Table(all).try_into();
    let parsed = parsed.map_err(|source| SweepError::Options {
        group: group(),
        source: Box::new(source),
    })?;
    parsed.resolve().map_err(|source| SweepError::Config {
        group: group(),
        source: Box::new(source),
    })
}

/// How an error calls options that have no name yet.
fn options_of(options: &Table) -> String {
    let text = |key: &str| options.get(key).map(plain);
    let policy = text("policy").unwrap_or_else(|| "lrmoe".to_owned());
    match text("retention") {
        Some(retention) => format!("{policy}@{retention}"),
        None => policy,
    }
}

/// A name from what a cell changes: `lrmoe@0.25+score=gate`.
fn name(config: &TrainConfig, common: &Table, cell: &Table) -> String {
    let mut name = config.policy.name().to_owned();
    if let Policy::Lrmoe(selecting) = &config.policy {
        name += &match cell.get("retention") {
            Some(given) => format!("@{}", plain(given)),
            None => format!("@{}", selecting.retention),
        };
    }
    for (key, value) in cell {
        let said = key == "policy" || key == "retention";
        if !said && common.get(key) != Some(value) {
            name += &format!("+{key}={}", plain(value));
        }
    }
    name
}

/// A template with the values of the options in the place of their keys in braces.
fn fill(template: &str, options: &Table) -> Result<String, SweepError> {
    let mut name = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        let (key, after) = after.split_once('}').unwrap_or((after, ""));
        let value = options.get(key).ok_or_else(|| SweepError::Template {
            template: template.to_owned(),
            key: key.to_owned(),
        })?;
        name += before;
        name += &plain(value);
        rest = after;
    }
    Ok(name + rest)
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// A name that can be that of a folder.
fn checked(name: String) -> Result<String, SweepError> {
    let usable = |c: char| c.is_ascii_alphanumeric() || ".,:@+=_-".contains(c);
    match name.chars().all(usable) && !name.is_empty() && !name.starts_with('.') {
        true => Ok(name),
        false => Err(SweepError::Name { name }),
    }
}
