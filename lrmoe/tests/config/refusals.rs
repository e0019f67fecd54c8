//! Options that are refused, with their values.

use lrmoe::config::ConfigError;

use super::{parse, resolve, resolve_file};

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
            "--retention 0.5,0.25,0.1",
            "retention has 3 values for 2 layers, must have 1 or 2",
        ),
        (
            "--retention-schedule warmup:301",
            "warm-up of retention-schedule 301 is out of range, must be 1 to 300",
        ),
        (
            "--retention-schedule linear:1:0.1 --retention 0.5",
            "schedule linear:1:0.1 says what the retention is in every step; leave retention out, or use warmup or adaptive, which take it up",
        ),
        (
            "--retention-schedule linear:1:0.1 --compare lrmoe,lrmoe@0.5",
            "schedule linear:1:0.1 says what the retention is in every step; leave retention out, or use warmup or adaptive, which take it up",
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
            "--select top --rescale mass --compensation moments",
            "compensation moments puts means in the place of the pairs left out, for which rescale mass makes up too; leave one of them out",
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
            "--stash stash --oracle-every 5",
            "oracle-every takes a step's gradients again, which stash mode stash keeps rows for once only; take stash mode recompute",
        ),
        (
            "--stash forward-select --score forward --retention-schedule adaptive:1",
            "retention-schedule adaptive takes a step's gradients again, which stash mode forward-select keeps rows for once only; take stash mode recompute",
        ),
        (
            "--stash forward-select --score full-grad",
            "stash mode forward-select chooses pairs in the forward pass, where score full-grad is not known, as it needs dy; take score forward, out-norm, gate or random, or stash mode recompute or stash",
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
