//! Processes do what threads do.

use libtest_mimic::Failed;
use lrmoe::trace::TraceReader;

use crate::job::{Folder, assert_success, text};

const RUN: &str = "--steps 12 --eval-every 6 --checkpoint-every 5";

/// The same losses and checkpoint to the bit, and traces that replay the same.
pub(crate) fn losses_and_files() -> Result<(), Failed> {
    let folder = Folder::new();
    let run = format!("{RUN} --record-pairs-every 5 --oracle-every 6 --oracle-draws 2");
    assert_success(&folder.threads(&format!("{run} --out threads --record-trace threads.st")));
    let options = format!("{run} --out processes --record-trace processes.st");
    let output = folder.mpirun("", &options).output()?;
    assert_success(&output);
    let printed = text(&output.stdout);
    let (oracle, rest) = printed
        .lines()
        .partition::<Vec<_>, _>(|line| line.starts_with('|') || line.contains("ean"));
    assert_eq!(
        (oracle.len(), rest.len()),
        (6, 1),
        "rank 0 alone prints: {printed}"
    );
    let oracles = |out: &str| -> Vec<_> {
        let records = folder.records(out);
        records
            .into_iter()
            .flat_map(|record| record.layers)
            .map(|layer| layer.oracle)
            .collect()
    };
    assert_eq!(oracles("threads"), oracles("processes"));
    assert_eq!(oracles("threads").iter().flatten().count(), 4);
    assert_eq!(folder.losses("threads"), folder.losses("processes"));
    assert_eq!(folder.tensors("threads"), folder.tensors("processes"));
    let [mut a, mut b] = ["threads.st", "processes.st"]
        .map(|name| TraceReader::open(folder.path(name)).expect("a trace"));
    assert_eq!(a.header(), b.header());
    for step in 0..a.header().steps {
        assert_eq!(a.step(step)?, b.step(step)?);
    }
    for pairs in 0..a.header().recorded.len() {
        assert_eq!(
            format!("{:?}", a.pairs(pairs)?),
            format!("{:?}", b.pairs(pairs)?)
        );
    }
    Ok(())
}

/// Exchanges while the ranks compute change nothing, with threads and with processes.
pub(crate) fn overlap() -> Result<(), Failed> {
    let folder = Folder::new();
    let run = format!("{RUN} --chunk-rows 7");
    assert_success(&folder.threads(&format!("{run} --out off")));
    assert_success(&folder.threads(&format!("{run} --overlap on --out threads")));
    let options = format!("{run} --overlap on --out processes");
    assert_success(&folder.mpirun("", &options).output()?);
    for on in ["threads", "processes"] {
        assert_eq!(folder.losses("off"), folder.losses(on), "{on}");
        assert_eq!(folder.tensors("off"), folder.tensors(on), "{on}");
    }
    Ok(())
}

/// A run goes on with processes where threads left it, bit for bit.
pub(crate) fn resumes() -> Result<(), Failed> {
    let folder = Folder::new();
    assert_success(&folder.threads(&format!("{RUN} --out whole")));
    assert_success(&folder.threads(&format!("{RUN} --out parts --target-loss 100")));
    assert_eq!(
        folder.records("parts").len(),
        6,
        "stopped at the first evaluation"
    );
    let rest = folder
        .mpirun("", &format!("{RUN} --out parts --resume"))
        .output()?;
    assert_success(&rest);
    assert_eq!(folder.losses("whole"), folder.losses("parts"));
    assert_eq!(folder.tensors("whole"), folder.tensors("parts"));
    Ok(())
}

/// What makes a run impossible is said by one rank and ends all.
pub(crate) fn refusals() -> Result<(), Failed> {
    let folder = Folder::new();
    assert_success(&folder.threads(&format!("{RUN} --out taken")));
    for (options, message) in [
        ("--text missing.txt", "missing.txt does not exist"),
        ("--ranks 3", "--ranks 3, but 4 processes were started"),
        (
            "--compare dropless,lrmoe",
            "--compare runs its ranks as threads",
        ),
        ("--out taken", "taken already holds a run"),
        ("--out nothing --resume", "no checkpoint to resume from"),
        ("--batch 6", "not a multiple of 4 ranks"),
    ] {
        let output = folder.mpirun("", options).output()?;
        let errors = text(&output.stderr);
        let told: Vec<_> = errors
            .lines()
            .filter(|line| line.starts_with("lrmoe: "))
            .collect();
        assert!(
            matches!(&told[..], [one] if one.contains(message)),
            "{options}: {errors}"
        );
        assert_eq!(output.status.code(), Some(2), "{options}");
    }
    Ok(())
}
