//! From a process that was just started to a server that serves.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forkd_proto::guest::Event;
use forkd_proto::limits::{AGENT_PORT, HOST_PORT};
use forkd_proto::{Kind, write_frame};
use nix::sys::reboot::set_cad_enabled;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, connect, listen, socket,
};

use crate::cgroup::Cgroups;
use crate::identity::Identity;
use crate::image::{Defaults, IMAGE_FILE};
use crate::oom::Order;
use crate::server::{Parts, Server};
use crate::spawn::Launcher;
use crate::{cgroup, log, netlink, rlimits};

/// Where the agent keeps its own files, in memory.
pub const FOLDER: &str = "/run/forkd";

const CID_HOST: u32 = 2;
const CID_ANY: u32 = u32::MAX;

/// Clients that the kernel keeps waiting while the loop is busy: as many as are served at a time,
/// for it resets the connection of one more.
const LISTEN_BACKLOG: i32 = 512;

/// The agent of a guest.
pub fn guest() -> ExitCode {
    match serve_guest() {
        Ok(never) => match never {},
        Err(error) => {
            log::line(&format!("cannot serve: {error}"));
            // An init that ends makes the kernel panic, and the host sees that the machine is over.
            ExitCode::FAILURE
        }
    }
}

/// The agent without a guest around it.
pub fn host(socket: &str, rest: &[&str]) -> ExitCode {
    let folder = match rest {
        ["--state", folder] => PathBuf::from(folder),
        _ => Path::new(socket).with_extension("state"),
    };
    let serve = || {
        fs::create_dir_all(&folder)?;
        let listener = UnixListener::bind(socket)?;
        let (defaults, identity) = (Defaults::default(), None);
        // This host's cgroups are not ours.
        let launcher = Launcher::new(None);
        let listener = listener.into();
        let server = Server::new(Parts { listener, defaults, identity, launcher, folder })?;
        // Whoever started us waits for this line.
        println!("listening");
        io::stdout().flush()?;
        server.run()
    };
    match serve() {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("forkd-agent: {socket}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve_guest() -> io::Result<std::convert::Infallible> {
    std::env::set_current_dir("/")?;
    rlimits::raise();
    let folder = PathBuf::from(FOLDER);
    if std::process::id() == 1
        && let Err(errno) = set_cad_enabled(false)
    {
        log::line(&format!("control-alt-delete stays: {errno}"));
    }
    if let Err(error) = netlink::loopback_up() {
        log::line(&format!("lo: {error}"));
    }
    let mut identity = Identity::prepare(&folder)?;
    identity.adopt_hostname()?;
    let defaults = Defaults::load(Path::new(IMAGE_FILE));
    let listener = vsock_listener()?;
    let cgroups = Cgroups::prepare(Path::new(cgroup::MOUNTED_AT));
    let said = |error: &io::Error| log::line(&format!("no cgroups: {error}"));
    let launcher = Launcher::in_guest(cgroups.inspect_err(said).ok(), Order::establish());
    let parts = Parts { listener, defaults, identity: Some(identity), launcher, folder };
    let server = Server::new(parts)?;
    // The listener is open, so whoever hears of us can reach us.  A guest that nobody waits for
    // serves all the same.
    if let Err(error) = announce() {
        log::line(&format!("nobody was told that the guest has booted: {error}"));
    }
    server.run()
}

fn vsock_listener() -> io::Result<OwnedFd> {
    let listener = vsock_socket()?;
    bind(listener.as_raw_fd(), &VsockAddr::new(CID_ANY, AGENT_PORT))?;
    listen(&listener, Backlog::new(LISTEN_BACKLOG)?)?;
    Ok(listener)
}

/// Tells the host that the guest has booted.
fn announce() -> io::Result<()> {
    let socket = vsock_socket()?;
    connect(socket.as_raw_fd(), &VsockAddr::new(CID_HOST, HOST_PORT))?;
    let event = Event::Booted { version: env!("CARGO_PKG_VERSION").to_owned() };
    let json = serde_json::to_vec(&event)?;
    write_frame(&mut fs::File::from(socket), Kind::Event, &json)
}

fn vsock_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?)
}
