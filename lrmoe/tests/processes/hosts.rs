//! Two hosts, as network namespaces of this one, with MPI over TCP between them.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;

use crate::job::{Folder, RANKS, assert_success, text};

/// Why this machine cannot have network namespaces.
pub(crate) fn missing() -> Option<&'static str> {
    let name = format!("lrmoe-try-{}", std::process::id());
    let made = ip(&format!("netns add {name}"));
    if made {
        ip(&format!("netns del {name}"));
    }
    (!made).then_some("no network namespaces: they need ip and root")
}

fn ip(arguments: &str) -> bool {
    let mut command = Command::new("ip");
    command
        .args(arguments.split_whitespace())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Two namespaces with a cable between them.
struct Hosts([String; 2]);

impl Hosts {
    fn new() -> Self {
        let [a, b] = ["a", "b"].map(|host| format!("lrmoe-{}-{host}", std::process::id()));
        let hosts = Self([a, b]);
        let [a, b] = &hosts.0;
        for arguments in [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("-n {a} link add cable type veth peer name cable netns {b}"),
            format!("-n {a} addr add 10.77.0.1/24 dev cable"),
            format!("-n {b} addr add 10.77.0.2/24 dev cable"),
            format!("-n {a} link set cable up"),
            format!("-n {b} link set cable up"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
        ] {
            assert!(ip(&arguments), "ip {arguments}");
        }
        hosts
    }
}

impl Drop for Hosts {
    /// Ends what still runs on the hosts: without its cable `mpirun` waits for its daemon on the other one for ever.
    fn drop(&mut self) {
        for host in &self.0 {
            let processes = Command::new("ip").args(["netns", "pids", host]).output();
            let processes = processes
                .map(|output| text(&output.stdout))
                .unwrap_or_default();
            for process in processes.split_whitespace() {
                let kill = format!("kill -KILL {process}");
                // It may have ended meanwhile.
                let _ = Command::new("sh")
                    .args(["-c", &kill])
                    .stderr(Stdio::null())
                    .status();
            }
            ip(&format!("netns del {host}"));
        }
    }
}

const RUN: &str = "--steps 60 --warmup 2 --eval-every 30 --checkpoint-every 3";

/// The cable is pulled in mid-run: every rank says which one it missed, and the checkpoint is good.
pub(crate) fn a_link_is_cut() -> Result<(), Failed> {
    let folder = Folder::new();
    assert_success(&folder.threads(&format!("{RUN} --out whole")));
    let hosts = Hosts::new();
    let [a, b] = hosts.0.clone();
    // Instead of a remote shell: mpirun runs in one namespace and starts its daemon in the other, where process ids are others
    // too. Else the ranks would meet in shared memory, which no cable cuts.
    let agent = folder.path("agent");
    std::fs::write(
        &agent,
        format!(
            "#!/bin/sh\nshift\nexec ip netns exec {b} unshare --pid --fork --kill-child sh -c \"$*\"\n"
        ),
    )?;
    std::fs::set_permissions(&agent, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let settings = format!(
        "--enable-recovery --host 10.77.0.1:2,10.77.0.2:2 --mca plm_rsh_agent {} --mca btl tcp,self \
         --mca btl_tcp_if_include cable --mca oob_tcp_if_include cable --mca pml ob1",
        agent.display()
    );
    let inner = folder.mpirun(&settings, &format!("{RUN} --out cut"));
    let errors = folder.path("errors");
    let mut mpirun = Command::new("ip");
    mpirun.args(["netns", "exec", &a]);
    mpirun.arg(inner.get_program()).args(inner.get_args());
    mpirun
        .current_dir(folder.path(""))
        .env("CANDLE_NUM_THREADS", "1");
    mpirun
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&errors)?);
    let mut job = mpirun.spawn()?;
    folder.wait_for_steps("cut", 7);
    assert!(ip(&format!("-n {b} link set cable down")));
    let fault = Instant::now();
    // What the ranks of the other host say can no more be heard.
    let is_told = |errors: &str| {
        let tells = |rank| {
            let start = format!("lrmoe: rank {rank}: ");
            let mut lines = errors.lines();
            lines.any(|line| line.starts_with(&start) && line.contains(" did not come to "))
        };
        (0..RANKS / 2).all(tells)
    };
    let mut told = String::new();
    while !is_told(&told) {
        told = text(&std::fs::read(&errors)?);
        assert!(fault.elapsed() < Duration::from_secs(15), "{told}");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(hosts);
    job.wait()?;
    let rest = folder.threads(&format!("{RUN} --out cut --resume"));
    assert_success(&rest);
    assert_eq!(folder.losses("cut"), folder.losses("whole"));
    assert_eq!(folder.tensors("cut"), folder.tensors("whole"));
    Ok(())
}
