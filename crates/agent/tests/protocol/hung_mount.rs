//! A file system whose server does not answer: only who uses it waits.

use std::fs::{File, create_dir};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;

use crate::support::Agent;
use forkd_proto::Kind;

/// A mount whose server is silent; when this goes, it is gone, and whoever waits is let go.
struct HungMount {
    server: Option<File>,
    folder: PathBuf,
}

impl HungMount {
    /// None without the right to mount, or in a kernel without FUSE.
    fn make(folder: PathBuf) -> Option<Self> {
        let server = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        create_dir(&folder).expect("a folder");
        let fd = server.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id=0,group_id=0");
        let (name, flags) = (Some("hung"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV);
        mount(name, &folder, Some("fuse"), flags, Some(options.as_str())).ok()?;
        Some(Self { server: Some(server), folder })
    }

    fn path(&self) -> &Path {
        &self.folder
    }

    /// Answers everything with an error from now on.
    fn give_up(&mut self) {
        self.server = None;
    }
}

impl Drop for HungMount {
    fn drop(&mut self) {
        self.give_up();
        umount2(&self.folder, MntFlags::MNT_DETACH).expect("an unmount");
    }
}

#[test]
fn a_command_that_waits_for_a_dead_server_keeps_nobody_else_waiting() {
    let agent = Agent::start();
    let Some(mut hung) = HungMount::make(agent.path("hung")) else {
        eprintln!("skipped: mounting FUSE needs root");
        return;
    };
    let program = hung.path().join("program");
    let search = format!("{}:/bin:/usr/bin", hung.path().display());
    let mut waiting: Vec<_> = [
        json!({"op": "exec", "args": ["true"], "cwd": hung.path()}),
        json!({"op": "exec", "args": [program]}),
        json!({"op": "exec", "args": ["true"], "env": {"PATH": search}}),
    ]
    .iter()
    .map(|request| {
        let mut client = agent.connect();
        client.send(Kind::Request, request);
        client
    })
    .collect();

    assert_eq!(agent.connect().sh("echo still here").text(), "still here\n");

    hung.give_up();
    for (client, wanted) in waiting.iter_mut().zip(["invalid_request", "not_found", "no error"]) {
        assert_eq!(client.finish().code(), wanted);
    }
}
