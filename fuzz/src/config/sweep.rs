use std::collections::HashSet;

use lrmoe::config::{TrainConfig, TrainOptions};
use lrmoe::sweep::Grid;
use toml::{Table, Value};

use super::{looks_around, text};
use crate::files;

/// Most runs of a grid with which the target goes on.
const MOST: usize = 200;

/// Grids of `lrmoe sweep`: the groups are every combination of the values, no others, each complete as `lrmoe train` would make it of the same options.
pub fn sweep_toml(data: &[u8]) {
    let Some(text) = text(data) else {
        return;
    };
    let table: Option<Table> = text.parse().ok();
    let cells = table.as_ref().map(cells).unwrap_or_default();
    if cells.len() > MOST || cells.iter().any(looks_around) {
        return;
    }
    let path = files::write("grid.toml", text.as_bytes());
    let grid = match Grid::read(&path, &[]) {
        Ok(grid) => grid,
        Err(error) => {
            assert!(!error.to_string().trim_end().ends_with(':'), "{error}");
            return;
        }
    };
    let table = table.expect("a grid is TOML");
    let seeds: Vec<i64> = list(table.get("seeds"))
        .iter()
        .filter_map(Value::as_integer)
        .collect();
    let found: Vec<i64> = grid.seeds.iter().map(|seed| *seed as i64).collect();
    assert_eq!(found, seeds);

    for cell in &cells {
        let config = complete(cell, seeds[0]);
        let known = |group: &&lrmoe::sweep::Group| group.config == config;
        assert!(
            grid.groups.iter().any(|group| known(&group)),
            "{cell} is left out"
        );
    }
    let mut names = HashSet::new();
    for group in &grid.groups {
        assert!(
            cells.contains(&group.options),
            "{} is not in the grid",
            group.options
        );
        assert_eq!(group.config, complete(&group.options, seeds[0]));
        let usable = |c: char| !c.is_whitespace() && !c.is_control() && c != '/' && c != '\\';
        assert!(group.name.chars().all(usable) && !group.name.starts_with('.'));
        assert!(names.insert(&group.name), "{} is there twice", group.name);
    }
    let listed: HashSet<usize> = grid
        .sections
        .iter()
        .flat_map(|s| s.groups.clone())
        .collect();
    assert_eq!(listed, (0..grid.groups.len()).collect());
    for control in [grid.ceiling, grid.floor].into_iter().flatten() {
        assert!(control < grid.groups.len());
    }
}

fn list(value: Option<&Value>) -> &[Value] {
    value.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The options of every combination, with those of `[common]`; too many where there are more than `MOST`.
fn cells(table: &Table) -> Vec<Table> {
    let common = table.get("common").and_then(Value::as_table);
    let mut all = Vec::new();
    for grid in list(table.get("grid")).iter().filter_map(Value::as_table) {
        let mut cells = vec![common.cloned().unwrap_or_default()];
        for (key, value) in grid {
            if ["title", "name", "control"].contains(&key.as_str()) {
                continue;
            }
            let values = match value {
                Value::Array(values) if key != "text" => values.clone(),
                one => vec![one.clone()],
            };
            let with = |cell: &Table| {
                let cell = cell.clone();
                let of = |value: &Value| {
                    let mut cell = cell.clone();
                    cell.insert(key.clone(), value.clone());
                    cell
                };
                values.iter().map(of).collect::<Vec<_>>()
            };
            cells = cells.iter().flat_map(with).take(MOST + 1).collect();
        }
        all.append(&mut cells);
    }
    all
}

fn complete(options: &Table, seed: i64) -> TrainConfig {
    let mut options = options.clone();
    options.insert("seed".into(), Value::Integer(seed));
    let written = toml::to_string(&options).expect("it was TOML");
    let options = TrainOptions::from_toml(&written).expect("options of a grid");
    options.resolve().expect("a grid's options are complete")
}
