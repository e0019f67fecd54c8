//! Settings from the command line.

use std::{collections::HashMap, error::Error, str::FromStr};

/// Values by name, from `--name value`.
#[derive(Debug, Default)]
pub(super) struct Arguments(HashMap<String, String>);

impl Arguments {
    pub(super) fn parse() -> Result<Self, Box<dyn Error + Send + Sync>> {
        let arguments: Vec<_> = std::env::args()
            .skip(1)
            .filter(|a| a != "--bench")
            .collect();
        let given = arguments.chunks(2).map(|pair| match pair {
            [name, value] => Ok((name.trim_start_matches("--").to_owned(), value.clone())),
            _ => Err(format!("{} has no value", pair[0])),
        });
        Ok(Self(given.collect::<Result<_, _>>()?))
    }

    pub(super) fn text<'a>(&'a self, name: &str, default: &'a str) -> &'a str {
        self.0.get(name).map_or(default, String::as_str)
    }

    pub(super) fn value<T: FromStr>(&self, name: &str, default: &str) -> Result<T, T::Err> {
        self.text(name, default).parse()
    }
}
