//! A program that is killed while it writes, and a disk that is full.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::adamw::Moments;
use crate::train::Checkpoint;

/// Tells [`writer`] where to write.
const TARGET: &str = "LRMOE_TEST_WRITES_TO";
/// So much that most of the writer's time is spent within a file.
const NUMBERS: usize = 1 << 19;
const KILLS: usize = 50;

fn identity() -> BTreeMap<String, String> {
    BTreeMap::from([("seed".to_owned(), "1".to_owned())])
}

/// A checkpoint after `step` steps, all of whose numbers say so.
fn checkpoint(step: u32) -> Checkpoint {
    let numbers = || vec![step as f32; NUMBERS];
    Checkpoint {
        step,
        dense: numbers(),
        moments: Moments {
            first: numbers(),
            second: numbers(),
        },
        layers: Vec::new(),
        retention_noise: Vec::new(),
    }
}

/// No test but what the others start as a process of its own: writes one checkpoint after the other, from the steps of the one that is there,
/// until it is killed or cannot.
#[test]
#[ignore = "the program that other tests kill"]
fn writer() {
    let path = PathBuf::from(std::env::var_os(TARGET).expect("started by another test"));
    let last = Checkpoint::load(&path, &identity()).map_or(0, |last| last.step);
    for step in last + 1.. {
        if let Err(error) = checkpoint(step).save(&path, &identity()) {
            eprintln!("{error}");
            std::process::exit(2);
        }
    }
}

/// [`writer`], behind the words of another command.
fn writer_of(path: &Path, before: &[&str]) -> Command {
    let program = std::env::current_exe().expect("this program");
    let entry = [
        "--ignored",
        "--exact",
        "files::tests::writer",
        "--nocapture",
    ];
    let mut command = match before {
        [] => Command::new(program),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
    };
    command
        .args(entry)
        .env(TARGET, path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

fn leftovers(folder: &Path) -> usize {
    let entries = folder.read_dir().expect("the folder");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    names
        .filter(|name| name.to_string_lossy().ends_with(super::SUFFIX))
        .count()
}

fn written(path: &Path) -> SystemTime {
    let metadata = std::fs::metadata(path).expect("the file");
    metadata.modified().expect("the time")
}

/// Loads the checkpoint, which must be whole, and gives its steps.
fn steps_of_whole(path: &Path) -> u32 {
    let found = Checkpoint::load(path, &identity()).expect("a whole checkpoint");
    assert!(
        found == checkpoint(found.step),
        "numbers of step {}",
        found.step
    );
    found.step
}

#[test]
fn a_kill_in_mid_write_leaves_the_old_file_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("checkpoint.safetensors");
    checkpoint(1).save(&path, &identity()).expect("saved");
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let (mut last, mut in_mid_write) = (1, 0);
    for _ in 0..KILLS {
        let before = written(&path);
        let mut child = writer_of(&path, &[]).spawn().expect("the writer starts");
        // It is not to be killed before it has begun to write.
        while leftovers(folder.path()) == 0 && written(&path) == before {
            std::thread::sleep(Duration::from_micros(100));
        }
        std::thread::sleep(Duration::from_micros(random.random_range(0..8_000)));
        child.kill().expect("killed");
        child.wait().expect("ended");
        let step = steps_of_whole(&path);
        assert!(step >= last, "step {step} after step {last}");
        last = step;
        in_mid_write += leftovers(folder.path());
        super::remove_leftovers(&path).expect("removed");
        assert_eq!(leftovers(folder.path()), 0);
    }
    // Else the kills have shown nothing.
    assert!(
        in_mid_write >= KILLS / 5,
        "{in_mid_write} of {KILLS} kills came in mid-write"
    );
}

#[test]
fn leftovers_of_other_files_stay() {
    let folder = tempfile::tempdir().expect("a folder");
    let names = [
        ".a.x1.part",
        ".a.b.x1.part",
        ".ab.x1.part",
        "a.x1.part",
        ".a.part.x",
        "a",
    ];
    for name in names {
        std::fs::write(folder.path().join(name), "").expect("written");
    }
    super::remove_leftovers(&folder.path().join("a.b")).expect("removed");
    let left = names.map(|name| folder.path().join(name).exists());
    assert_eq!(left, [true, false, true, true, true, true]);
    assert!(super::remove_leftovers(Path::new("/nowhere/at/all")).is_err());
}

/// A limit on the size of files is there for everybody; it shows as another error than a full disk.
#[test]
fn a_file_past_the_limit_is_an_error_and_the_old_one_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("checkpoint.safetensors");
    checkpoint(4).save(&path, &identity()).expect("saved");
    // Blocks of 512 bytes: less than one checkpoint. Without the trap the limit would kill.
    let limited = [
        "sh",
        "-c",
        "trap '' XFSZ; ulimit -f 4000; exec \"$@\"",
        "sh",
    ];
    let (status, said) = run(writer_of(&path, &limited));
    assert_eq!(status.code(), Some(2), "{said}");
    let expected = format!("{}: File too large (os error 27)\n", path.display());
    assert!(said.ends_with(&expected), "{said}");
    assert_eq!((steps_of_whole(&path), leftovers(folder.path())), (4, 0));
}

fn run(mut command: Command) -> (ExitStatus, String) {
    let output = command.output().expect("the program starts");
    (
        output.status,
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}
