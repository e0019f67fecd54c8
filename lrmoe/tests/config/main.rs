//! Options of a training run: sources, defaults, and what is refused.

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
const OPTIONS: [(&str, &str, &str); 46] = [
    ("text", "b.txt", "['b.txt']"),
    ("out", "there", "'there'"),
    ("record-trace", "t", "'t'"),
    ("record-pairs-every", "3", "3"),
    ("oracle-every", "5", "5"),
    ("oracle-draws", "3", "3"),
    ("policy", "symi", "'symi'"),
    ("retention", "0.25", "0.25"),
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
    ("chunk-rows", "128", "128"),
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
fn contradictions_are_refused_with_their_values() {
    let refused = [
        (
            "--retention 1.5",
            "retention 1.5 is out of range, must be 0 to 1",
        ),
        (
            "--retention nan --policy dropless",
            "retention NaN is out of range, must be 0 to 1",
        ),
        (
            "--compare lrmoe@-1",
            "retention -1 is out of range, must be 0 to 1",
        ),
        (
            "--recalibration 1.5 --policy symi",
            "recalibration 1.5 is out of range, must be 0 to 1",
        ),
        (
            "--rescale count",
            "rescale count is for select top: the weights of priority already make up for the pairs left out",
        ),
        (
            "--scope wgrad --dx-weight w",
            "dx-weight w is for scope pair: with wgrad all pairs run backward and add to the input's gradient with weight 1",
        ),
        (
            "--compare symi,lrmoe@0.5,symi",
            "symi is compared with itself",
        ),
        (
            "--stash forward-select",
            "stash mode forward-select chooses pairs in the forward pass, where score down-grad is not known, as it needs dy; take score forward, out-norm, gate or random, or stash mode recompute or stash",
        ),
        (
            "--capacity-factor 0",
            "capacity-factor 0 is out of range, must be above 0",
        ),
        ("--top-k 17", "top-k 17 exceeds the number of experts, 16"),
        (
            "--experts 0",
            "experts 0 is out of range, must be between 1 and 65536",
        ),
        (
            "--heads 3",
            "3 heads do not divide width 128 into heads of an even size",
        ),
        ("--ranks 0", "ranks 0 is out of range, must be 1 to 1024"),
        (
            "--ranks 3",
            "batch of 8 sequences is not a multiple of 3 ranks",
        ),
        (
            "--batch 6",
            "batch of 6 sequences is not a multiple of 4 ranks",
        ),
        (
            "--ranks-per-node 0",
            "ranks-per-node 0 is out of range, must be 1 to 1024",
        ),
        (
            "--threads 0",
            "threads 0 is out of range, must be 1 to 1024",
        ),
        (
            "--slots 3",
            "3 slots on each of 4 ranks cannot hold 16 experts, must be 4 to 16",
        ),
        (
            "--slots 17",
            "17 slots on each of 4 ranks cannot hold 16 experts, must be 4 to 16",
        ),
        (
            "--chunk-rows 0",
            "chunk-rows 0 is out of range, must be 1 to 4294967295",
        ),
        (
            "--budget-mib 0",
            "budget-mib 0 is out of range, must be 1 to 17592186044415",
        ),
        (
            "--cluster abacus",
            "unknown cluster `abacus`, expected one of 8xA100, 8xH100, 8xH200",
        ),
        (
            "--steps 0",
            "steps 0 is out of range, must be 1 to 4294967295",
        ),
        (
            "--warmup 301",
            "warmup 301 is out of range, must be 0 to 300",
        ),
        (
            "--learning-rate 0",
            "learning-rate 0 is out of range, must be above 0",
        ),
        (
            "--learning-rate inf",
            "learning-rate inf is out of range, must be above 0",
        ),
        (
            "--eval-sequences 0",
            "eval-sequences 0 is out of range, must be 1 to 1048576",
        ),
        ("--oracle-draws 2", "oracle-draws needs oracle-every"),
        (
            "--oracle-every 0 --oracle-draws 2",
            "oracle-draws needs oracle-every",
        ),
        (
            "--oracle-every 5 --oracle-draws 0",
            "oracle-draws 0 is out of range, must be 1 to 1000",
        ),
        (
            "--oracle-every 5 --oracle-draws 2 --select top",
            "oracle-draws 2 repeats the draw of a selection, but nothing is drawn; select priority or score random is",
        ),
        (
            "--target-loss 0",
            "target-loss 0 is out of range, must be above 0",
        ),
        (
            "--deadline-seconds 0",
            "deadline-seconds 0 is out of range, must be 1 to 18446744073709551615",
        ),
        (
            "--batch 16777216",
            "a batch of 16777216 sequences of 256 bytes sent to 2 experts has 8589934592 pairs, the limit is 4294967295",
        ),
    ];
    for (line, message) in refused {
        assert_eq!(resolve(line).unwrap_err().to_string(), message, "{line}");
    }
    for line in [
        "--weight-decay=-1",
        "--clip=-1",
        "--balance-loss=-1",
        "--clip nan",
    ] {
        assert!(
            matches!(resolve(line), Err(ConfigError::OutOfRange { .. })),
            "{line}"
        );
    }
    let error = parse("").unwrap().resolve().unwrap_err();
    assert!(matches!(error, ConfigError::NoText), "{error}");
}

#[test]
fn words_that_mean_nothing_are_refused() {
    let refused = [
        (
            "--policy best",
            "unknown policy `best`, must be dropless, symi or lrmoe",
        ),
        (
            "--compare dropless,best",
            "unknown policy `best`, must be dropless, symi or lrmoe",
        ),
        (
            "--compare symi@0.5",
            "`symi@0.5` is not POLICY or lrmoe@RETENTION",
        ),
        (
            "--compare lrmoe@much",
            "`lrmoe@much` is not POLICY or lrmoe@RETENTION",
        ),
        ("--score best", "best"),
        ("--select best", "best"),
        ("--quota-policy best", "best"),
        ("--rescale best", "best"),
        (
            "--scope best",
            "unknown scope `best`, must be pair or wgrad",
        ),
        ("--dx-weight 2", "unknown dx weight `2`, must be 1 or w"),
        ("--router-gradient best", "best"),
        (
            "--compensation best",
            "unknown compensation `best`, must be none or moments",
        ),
        ("--activation best", "best"),
        ("--steps many", "many"),
        ("--seed -1", "-1"),
        ("--speed 3", "--speed"),
    ];
    for (line, part) in refused {
        let error = parse(&format!("--text a.txt {line}")).unwrap_err();
        assert!(error.to_string().contains(part), "{line}: {error}");
        assert_eq!(error.exit_code(), 2);
    }
}

#[test]
fn files_that_say_something_else_are_refused() {
    let refused = [
        ("speed = 3", "unknown field `speed`"),
        ("top_k = 3", "unknown field `top_k`"),
        ("config = 'other.toml'", "unknown field `config`"),
        ("steps = 'many'", "invalid type: string"),
        ("steps = -1", "invalid value: integer `-1`"),
        ("policy = 'best'", "unknown policy `best`"),
        ("score = 'best'", "best"),
        (
            "compare = ['symi@1']",
            "`symi@1` is not POLICY or lrmoe@RETENTION",
        ),
        ("compare = 'symi'", "invalid type: string"),
        ("steps = ", "line 1"),
    ];
    for (toml, part) in refused {
        let error = resolve_file(toml, "").unwrap_err();
        assert!(matches!(error, ConfigError::Toml { .. }), "{toml}: {error}");
        let message = error.to_string();
        assert!(
            message.contains(part) && message.contains("run.toml"),
            "{toml}: {message}"
        );
    }
    assert!(matches!(
        parse("--config no/such.toml").unwrap().resolve(),
        Err(ConfigError::File { .. })
    ));
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
