//! A disk that is full.

use std::process::{Command, Stdio};

use libtest_mimic::Failed;

use crate::job::{Folder, assert_success, text};

/// A shell that is root of a namespace of mounts, where it may mount what it likes.
fn shell(script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-ec", script]);
    command
}

/// Why this machine cannot have a disk of its own.
pub(crate) fn missing() -> Option<&'static str> {
    let mut command = shell("mount -t tmpfs -o size=64k tmpfs /mnt");
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let made = command.status().is_ok_and(|status| status.success());
    (!made).then_some("no disk of its own: that needs unshare and namespaces of users")
}

/// A disk with room for one checkpoint, but not for the next beside it: the run ends with the system's word for it, and what was saved is whole
/// and can be resumed from.
pub(crate) fn full() -> Result<(), Failed> {
    let folder = Folder::new();
    let steps = "--steps 12 --eval-every 6";
    assert_success(&folder.threads(&format!("--out whole --checkpoint-every 4 {steps}")));
    let checkpoint = folder.path("whole").join("checkpoint.safetensors");
    let size = std::fs::metadata(&checkpoint)?.len();
    std::fs::create_dir(folder.path("small"))?;
    std::fs::create_dir(folder.path("kept"))?;
    let script = format!(
        "mount -t tmpfs -o size={} tmpfs small; code=0; \"$@\" || code=$?; cp -r small/out kept/; exit $code",
        size + size / 2
    );
    let mut command = shell(&script);
    let program = folder.thread_program(&format!("--out small/out --checkpoint-every 4 {steps}"));
    command
        .arg("sh")
        .arg(program.get_program())
        .args(program.get_args());
    let output = folder.quiet(&mut command).output()?;
    let said = text(&output.stderr);
    if output.status.code() != Some(2)
        || !said.contains("small/out/checkpoint.safetensors: No space left on device")
    {
        return Err(format!("{}, {said}", output.status).into());
    }
    let left = std::fs::read_dir(folder.path("kept").join("out"))?.count();
    // The log, the lock and the checkpoint; nothing half written.
    assert_eq!(left, 3, "files are left");
    assert_eq!(folder.records("kept/out").len(), 8);
    assert_success(&folder.threads(&format!(
        "--out kept/out --resume --checkpoint-every 4 {steps}"
    )));
    assert_eq!(folder.losses("kept/out"), folder.losses("whole"));
    assert_eq!(folder.tensors("kept/out"), folder.tensors("whole"));
    Ok(())
}
