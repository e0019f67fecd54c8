//! Options of a training run: sources, defaults, and what is refused.

mod refusals;
mod where_it_runs;

use std::fs;

use clap::Parser;
use lrmoe::config::{ConfigError, TrainConfig, TrainOptions};
use lrmoe::policy::{Policy, Selecting};
use lrmoe_metric::{Method, Score};
use lrmoe_plan::{ClusterSpec, QuotaPolicy};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: TrainOptions,
}

fn parse(line: &str) -> Result<TrainOptions, clap::Error> {
    Cli::try_parse_from(["train"].into_iter().chain(line.split_whitespace())).map(|cli| cli.options)
}

/// The configuration of a command line that has a text.
fn resolve(line: &str) -> Result<TrainConfig, ConfigError> {
    parse(&format!("--text a.txt {line}")).unwrap().resolve()
}

/// The configuration of a TOML file below a command line.
fn resolve_file(toml: &str, line: &str) -> Result<TrainConfig, ConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    fs::write(&path, toml).unwrap();
    let mut options = vec!["train", "--config", path.to_str().unwrap()];
    options.extend(line.split_whitespace());
    Cli::try_parse_from(options).unwrap().options.resolve()
}

#[test]
fn a_text_is_enough() {
    let config = resolve("").unwrap();
    assert_eq!(config.text, ["a.txt".into()] as [std::path::PathBuf; 1]);
    let model = &config.model;
    assert_eq!((model.width, model.heads, model.layers), (128, 4, 2));
    assert_eq!((model.experts, model.top_k, model.hidden), (16, 2, 128));
    assert_eq!(
        (config.ranks, config.ranks_per_node, config.slots),
        (4, 4, 5)
    );
    assert_eq!((config.batch, model.context, config.steps), (8, 256, 300));
    assert_eq!((config.warmup, config.learning_rate), (20, 3e-3));
    assert_eq!(config.policy, Policy::Lrmoe(Selecting::default()));
    assert_eq!(config.cluster, ClusterSpec::preset("8xA100").unwrap());
    assert_eq!(
        (config.threads, config.budget_bytes, config.target_loss),
        (None, None, None)
    );
    assert!(config.compare.is_empty() && !config.resume && !config.overwrite);
}

/// Every option with a value that is not its default, as on the command line and in TOML.
const OPTIONS: [(&str, &str, &str); 52] = [
    ("text", "b.txt", "['b.txt']"),
    ("out", "there", "'there'"),
    ("record-trace", "t", "'t'"),
    ("record-pairs-every", "3", "3"),
    ("oracle-every", "5", "5"),
    ("oracle-draws", "3", "3"),
    ("policy", "symi", "'symi'"),
    ("retention", "0.25", "0.25"),
    ("retention-schedule", "warmup:9", "'warmup:9'"),
    ("score", "full-grad", "'full-grad'"),
    ("select", "top", "'top'"),
    ("quota-policy", "value", "'value'"),
    ("recalibration", "0.5", "0.5"),
    ("rescale", "mass", "'mass'"),
    ("scope", "wgrad", "'wgrad'"),
    ("dx-weight", "1", "'1'"),
    ("router-gradient", "all", "'all'"),
    ("compensation", "moments", "'moments'"),
    ("capacity-factor", "1.5", "1.5"),
    (
        "compare",
        "dropless,lrmoe@0.25",
        "['dropless', 'lrmoe@0.25']",
    ),
    ("target-loss", "2.5", "2.5"),
    ("ranks", "2", "2"),
    ("ranks-per-node", "2", "2"),
    ("all-to-all", "auto", "'auto'"),
    ("threads", "3", "3"),
    ("slots", "7", "7"),
    ("stash", "stash", "'stash'"),
    ("chunk-rows", "128", "128"),
    ("overlap", "on", "'on'"),
    ("budget-mib", "64", "64"),
    ("cluster", "8xH200", "'8xH200'"),
    ("deadline-seconds", "5", "5"),
    ("layers", "3", "3"),
    ("width", "64", "64"),
    ("heads", "8", "8"),
    ("context", "100", "100"),
    ("experts", "12", "12"),
    ("top-k", "3", "3"),
    ("hidden", "48", "48"),
    ("activation", "relu2", "'relu2'"),
    ("steps", "200", "200"),
    ("batch", "16", "16"),
    ("seed", "9", "9"),
    ("learning-rate", "0.01", "0.01"),
    ("warmup", "7", "7"),
    ("weight-decay", "0", "0.0"),
    ("clip", "0", "0.0"),
    ("balance-loss", "0.5", "0.5"),
    ("eval-every", "0", "0"),
    ("eval-sequences", "3", "3"),
    ("checkpoint-every", "0", "0"),
    // Last, as it is the one without a value on the command line.
    ("resume", "", "true"),
];

#[test]
fn every_option_works_in_both_places() {
    // What an option needs beside it to have an effect.
    let beside = |key: &str| match key {
        "capacity-factor" => Some(("policy", "symi")),
        "rescale" => Some(("select", "top")),
        "record-pairs-every" => Some(("record-trace", "t")),
        "oracle-draws" => Some(("oracle-every", "5")),
        _ => None,
    };
    for (key, value, toml) in OPTIONS {
        let other = beside(key);
        let extra = other.map_or(String::new(), |(key, value)| format!("--{key} {value}"));
        let plain = format!("{:?}", resolve(&extra).unwrap());
        let line = format!("{:?}", resolve_last(&format!("{extra} --{key} {value}")));
        let text = if key == "text" {
            ""
        } else {
            "text = ['a.txt']\n"
        };
        let extra = other.map_or(String::new(), |(key, value)| {
            let number = value.parse::<u32>().is_ok();
            let quote = if number { "" } else { "'" };
            format!("{key} = {quote}{value}{quote}\n")
        });
        let file = resolve_file(&format!("{text}{extra}{key} = {toml}\n"), "").unwrap();
        assert_ne!(plain, line, "--{key} has no effect");
        assert_eq!(line, format!("{file:?}"), "{key} differs in the file");
    }
    assert!(resolve("--overwrite").unwrap().overwrite);
    assert!(
        resolve_file("text = ['a']\noverwrite = true", "")
            .unwrap()
            .overwrite
    );
}

/// Like [`resolve`], with the text first only where the line has none.
fn resolve_last(line: &str) -> TrainConfig {
    if line.contains("--text") {
        parse(line).unwrap().resolve().unwrap()
    } else {
        resolve(line).unwrap()
    }
}

#[test]
fn the_command_line_wins() {
    let file = "text = ['a.txt']\nsteps = 7\nretention = 0.1\nscore = 'gate'\nresume = true";
    let config = resolve_file(file, "--steps 9 --retention 0.9 --text b.txt c.txt").unwrap();
    assert_eq!((config.steps, config.warmup, config.resume), (9, 1, true));
    assert_eq!(config.text.len(), 2);
    let Policy::Lrmoe(selecting) = config.policy else {
        panic!("{:?}", config.policy);
    };
    assert_eq!((selecting.retention, selecting.score), (0.9, Score::Gate));
    assert_eq!(selecting.method, Method::Priority);
    assert_eq!(selecting.quotas, QuotaPolicy::Proportional);
}

/// Where no quota policy is named, that which suits the selection.
#[test]
fn quotas_follow_the_selection() {
    for (line, expected) in [
        ("", QuotaPolicy::Proportional),
        ("--select priority", QuotaPolicy::Proportional),
        ("--select top", QuotaPolicy::Blend),
        (
            "--select top --quota-policy proportional",
            QuotaPolicy::Proportional,
        ),
        ("--quota-policy blend", QuotaPolicy::Blend),
        ("--quota-policy value", QuotaPolicy::Value),
        ("--quota-policy neyman", QuotaPolicy::Neyman),
    ] {
        let Policy::Lrmoe(selecting) = resolve(line).unwrap().policy else {
            panic!("{line}");
        };
        assert_eq!(selecting.quotas, expected, "{line}");
    }
}

#[test]
fn contenders_differ_in_policy_and_retention_alone() {
    let line =
        "--compare dropless,symi,lrmoe,lrmoe@0 --retention 0.3 --score gate --capacity-factor 2";
    let contenders = resolve(line).unwrap().compare;
    let names: Vec<_> = contenders.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["dropless", "symi", "lrmoe", "lrmoe@0"]);
    assert_eq!(contenders[0].policy, Policy::Dropless);
    assert_eq!(
        contenders[1].policy,
        Policy::Symi {
            capacity_factor: 2.0
        }
    );
    for (contender, expected) in contenders[2..].iter().zip([0.3, 0.0]) {
        let Policy::Lrmoe(selecting) = &contender.policy else {
            panic!("{contender:?}");
        };
        assert_eq!(
            (selecting.retention, selecting.score),
            (expected, Score::Gate)
        );
    }
}

#[test]
fn slots_leave_a_quarter_for_replicas() {
    for (experts, ranks, slots) in [
        (16, 4, 5),
        (16, 1, 16),
        (16, 16, 2),
        (5, 4, 3),
        (1, 2, 1),
        (3, 8, 2),
    ] {
        let line = format!("--experts {experts} --ranks {ranks} --top-k 1 --batch {ranks}");
        assert_eq!(resolve(&line).unwrap().slots, slots, "{line}");
    }
}

#[test]
fn clusters_come_from_files_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    let description = "name = 'mine'\nranks_per_node = 2\nflops = 1e12\nlaunch_seconds = 0.0\nmemory_bytes = 1000\n\
        intra = { latency_seconds = 1e-6, bytes_per_second = 1e9 }\ninter = { latency_seconds = 1e-5, bytes_per_second = 1e8 }\n";
    let line = format!("--cluster {}", path.display());
    assert!(matches!(resolve(&line), Err(ConfigError::File { .. })));
    fs::write(&path, description).unwrap();
    assert_eq!(resolve(&line).unwrap().cluster.name, "mine");
    fs::write(&path, "name = 'mine'").unwrap();
    let error = resolve(&line).unwrap_err();
    assert!(matches!(error, ConfigError::Cluster { .. }), "{error}");
}

#[test]
fn the_help_names_every_option_and_default() {
    let help = <Cli as clap::CommandFactory>::command()
        .render_long_help()
        .to_string();
    // Lines may break anywhere.
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for (key, ..) in OPTIONS {
        assert!(help.contains(&format!("--{key}")), "{key}");
    }
    let undefaulted = [
        "--config",
        "--text",
        "--resume",
        "--overwrite",
        "--record-trace",
        "--compare",
        "--target-loss",
    ];
    // --config, --device and --overwrite are not among them; --resume has no default either.
    let options = OPTIONS.len() + 3;
    assert_eq!(
        help.matches("[default: ").count(),
        options - undefaulted.len()
    );
}
