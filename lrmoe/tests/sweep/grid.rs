//! From a file to its runs.

use lrmoe::policy::Policy;
use lrmoe::sweep::Sweep;

use super::{Folder, config, names};

const CONTROLS: &str = r#"
[[grid]]
policy = "dropless"
control = "ceiling"

[[grid]]
retention = 0.0
control = "floor"
"#;

#[test]
fn lists_are_multiplied_and_equal_groups_run_once() {
    let folder = Folder::new();
    let tables = format!(
        r#"{CONTROLS}
[[grid]]
title = "Scores"
retention = [0.5, 0.25]
score = ["down-grad", "gate"]

[[grid]]
title = "Selections"
policy = "lrmoe"
retention = [0.5]
select = ["priority", "top"]
name = "{{select}}-{{retention}}"

[[grid]]
title = "Again"
retention = 0.5
score = "gate"
"#
    );
    let grid = folder
        .grid("seeds = [3, 1]\ntitle = \"All\"", &tables)
        .expect("a grid");
    assert_eq!(
        names(&grid),
        [
            "dropless",
            "lrmoe@0.0",
            "lrmoe@0.5+score=down-grad",
            "lrmoe@0.5+score=gate",
            "lrmoe@0.25+score=down-grad",
            "lrmoe@0.25+score=gate",
            "priority-0.5",
            "top-0.5",
        ]
    );
    assert_eq!((grid.ceiling, grid.floor), (Some(0), Some(1)));
    let sections: Vec<(&str, &[usize])> = (grid.sections.iter())
        .map(|section| (section.title.as_str(), section.groups.as_slice()))
        .collect();
    assert_eq!(
        sections,
        [
            ("", [0, 1].as_slice()),
            ("Scores", &[2, 3, 4, 5]),
            ("Selections", &[6, 7]),
            ("Again", &[3]),
        ]
    );
    let Policy::Lrmoe(selecting) = &config(&grid, "top-0.5").policy else {
        panic!("another policy");
    };
    assert_eq!(selecting.method.to_string(), "top");
    assert_eq!(config(&grid, "dropless").steps, 6);

    let sweep = Sweep::open(grid, &folder.out(), false).expect("a sweep");
    let first: Vec<(&str, u64)> = (sweep.runs().iter())
        .map(|run| (run.name.as_str(), run.config().seed))
        .collect();
    assert_eq!(first.len(), 16);
    assert_eq!(first[0], ("dropless/seed-3", 3));
    assert_eq!(first[8], ("dropless/seed-1", 1));
    assert!(!folder.out().exists());
}

#[test]
fn what_is_common_is_in_no_name() {
    let folder = Folder::new();
    let tables = r#"
[[grid]]
eval-every = [2, 3]
"#;
    let grid = folder.grid("seeds = [1]", tables).expect("a grid");
    assert_eq!(names(&grid), ["lrmoe@0.5", "lrmoe@0.5+eval-every=3"]);
}

#[test]
fn nonsense_is_refused() {
    let folder = Folder::new();
    let cases = [
        (
            "",
            "[[grid]]",
            "the grid has no seeds: write `seeds = [1, 2, 3]`",
        ),
        ("seeds = [1]", "", "the grid has no [[grid]] table"),
        ("seeds = [1, 2, 1]", "[[grid]]", "seed 1 stands twice"),
        ("seeds = [-1]", "[[grid]]", "grid.toml, line 1: "),
        (
            "seeds = [1]\nspeed = 2",
            "[[grid]]",
            "line 2: unknown field `speed`",
        ),
        (
            "seeds = [1]\ntargets = [2.0, 0.0]",
            "[[grid]]",
            "target 0 is out of range",
        ),
        (
            "seeds = [1]",
            "[[grid]]\nretention = []",
            "the grid has no value for retention",
        ),
        (
            "seeds = [1]",
            "[[grid]]\nretention = [0.5, 2.0]",
            "lrmoe@2.0: retention 2 is out of range",
        ),
        (
            "seeds = [1]",
            "[[grid]]\nretension = 0.5",
            "lrmoe: unknown field `retension`",
        ),
        (
            "seeds = [1]",
            "[[grid]]\nretention = true",
            "in `retention`",
        ),
        (
            "seeds = [1]",
            "[[grid]]\nseed = [1, 2]",
            "option seed cannot stand in a grid: list seeds under",
        ),
        (
            "seeds = [1]",
            "[[grid]]\ntarget-loss = 2.0",
            "list losses under `targets`",
        ),
        (
            "seeds = [1]",
            "[[grid]]\ncluster = \"local\"",
            "measured anew by every run",
        ),
        (
            "seeds = [1]",
            "[[grid]]\nname = \"a/b\"",
            "`a/b` is no name of runs",
        ),
        (
            "seeds = [1]",
            "[[grid]]\nname = \"{score}\"",
            "there is no option score",
        ),
        (
            "seeds = [1]",
            "[[grid]]\nname = \"a\"\nsteps = [5, 6]",
            "two groups with different options are called a",
        ),
        (
            "seeds = [1]",
            "[[grid]]\ncontrol = \"best\"",
            "[[grid]], control: unknown variant `best`",
        ),
        (
            "seeds = [1]",
            "[[grid]]\ncontrol = \"floor\"\nretention = [0.0, 0.5]",
            "both lrmoe@0.0 and lrmoe@0.5 are the floor",
        ),
    ];
    for (head, tables, message) in cases {
        let error = folder.grid(head, tables).expect_err(message).to_string();
        assert!(error.contains(message), "{tables}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let many = (1..200)
        .map(|n| n.to_string())
        .collect::<Vec<_>>()
        .join(", ");
    let tables = format!("[[grid]]\nsteps = [{many}]\nwarmup = [{many}]");
    let error = folder.grid("seeds = [1]", &tables).expect_err("too many");
    assert!(
        error.to_string().contains("more than 10000 groups"),
        "{error}"
    );
}
