use clap::Parser;
use lrmoe::config::{ConfigError, TrainConfig, TrainOptions};
use toml::{Table, Value};

use super::{looks_around, text};

/// Options that are kept in 32 bits.
const SINGLE: [&str; 4] = ["learning-rate", "weight-decay", "clip", "target-loss"];

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    options: TrainOptions,
}

/// Files of `lrmoe train`: the same options from the file's own table written anew and from a command line that says the same; and what is complete
/// keeps the bounds that a run relies on.
pub fn train_toml(data: &[u8]) {
    let Some(text) = text(data) else {
        return;
    };
    let options = match TrainOptions::from_toml(text) {
        Ok(options) => options,
        Err(error) => {
            assert!(!error.message().is_empty());
            let within = |span: std::ops::Range<usize>| text.get(span).is_some();
            assert!(error.span().is_none_or(within), "{error}");
            return;
        }
    };
    let mut table: Table = text.parse().expect("it is TOML");
    // NaN is not itself, but prints itself.
    let said = format!("{options:?}");
    let written = toml::to_string(&table).expect("it was TOML");
    let again = TrainOptions::from_toml(&written).expect("what has just been written");
    assert_eq!(format!("{again:?}"), said);
    if let Some(arguments) = arguments(&table) {
        let line = Line::try_parse_from(&arguments);
        let line = line.unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
        assert_eq!(format!("{:?}", line.options), said, "{arguments:?}");
    }

    if looks_around(&table) {
        return;
    }
    let options = if table.contains_key("text") {
        options
    } else {
        assert!(matches!(options.resolve(), Err(ConfigError::NoText)));
        table.insert("text".into(), Value::String("book.txt".into()));
        let written = toml::to_string(&table).expect("it was TOML");
        TrainOptions::from_toml(&written).expect("options with a text")
    };
    match options.resolve() {
        Ok(config) => check(&config),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A command line that says the same; none where a command line cannot: empty values, lists of text, and spaces in lists, and options that
/// exclude each other there.
fn arguments(table: &Table) -> Option<Vec<String>> {
    let flag = |key: &str| table.get(key).and_then(Value::as_bool) == Some(true);
    if flag("resume") && flag("overwrite") {
        return None;
    }
    let mut arguments = vec!["train".to_owned()];
    for (key, value) in table {
        let plain = |value: &Value| match value {
            Value::Float(number) if SINGLE.contains(&key.as_str()) => (*number as f32).to_string(),
            Value::String(text) => text.clone(),
            other => match other.as_float() {
                Some(number) => number.to_string(),
                None => other.to_string(),
            },
        };
        let values = match value {
            Value::Boolean(set) => {
                arguments.extend(set.then(|| format!("--{key}")));
                continue;
            }
            Value::Array(values) => values.iter().map(plain).collect(),
            one => vec![plain(one)],
        };
        let said = |text: &String| !text.is_empty() && !(key == "retention" && text.contains(' '));
        if values.is_empty() || !values.iter().all(said) {
            return None;
        }
        arguments.extend(values.iter().map(|value| format!("--{key}={value}")));
    }
    Some(arguments)
}

/// What the parts of a run take for granted.
fn check(config: &TrainConfig) {
    let model = &config.model;
    assert!((1..=1024).contains(&config.ranks) && config.ranks_per_node > 0);
    assert!((1..=model.experts).contains(&model.top_k));
    assert_eq!(model.width % (2 * model.heads), 0);
    let slots = config.slots as usize;
    assert!(slots <= model.experts && slots * config.ranks >= model.experts);
    assert!(config.batch > 0 && config.batch.is_multiple_of(config.ranks));
    let pairs = [config.batch, model.context, model.top_k];
    let pairs: u128 = pairs.into_iter().map(|n| n as u128).product();
    assert!(pairs <= u32::MAX.into());
    assert!(config.steps > 0 && config.warmup <= config.steps);
    assert!(config.learning_rate > 0.0 && config.learning_rate.is_finite());
    assert!(config.clip >= 0.0 && config.weight_decay >= 0.0 && config.balance_loss >= 0.0);
    assert!(
        config
            .target_loss
            .is_none_or(|loss| loss > 0.0 && loss.is_finite())
    );
    for share in config.layer_retention.iter().flatten() {
        assert!((0.0..=1.0).contains(share));
    }
    let layers = config
        .layer_retention
        .as_ref()
        .map_or(model.layers, Vec::len);
    assert_eq!(layers, model.layers);
    let schedule = config.retention_schedule;
    assert_eq!(schedule.to_string().parse().ok(), Some(schedule));
    assert!(!(config.resume && config.overwrite));
}
