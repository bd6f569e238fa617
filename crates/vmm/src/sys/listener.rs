//! A listening Unix socket, whose clients wait while there is no room for them.
//!
//! It is watched for edges, so a client that cannot be accepted now does not wake
//! the poll loop again and again.  Whoever makes room, and whoever wakes up after
//! [`RETRY`], calls [`Listener::accept`] once more: no other says that there is
//! somebody in the backlog.

use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::error::Error;

/// How long until a connection is accepted that the kernel could not give us, mostly because no
/// descriptor was free.
pub const RETRY: Duration = Duration::from_millis(100);

/// The socket.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    waiting: Waiting,
}

/// Whether somebody may be in the backlog of whom no event will tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    Nobody,
    /// For room.
    ForRoom,
    /// For the kernel, which refused.
    ForKernel,
}

impl Listener {
    /// Listens at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] naming it.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        let what = format!("listen on {}", path.display());
        let socket = UnixListener::bind(path).map_err(Error::io(what.as_str()))?;
        socket.set_nonblocking(true).map_err(Error::io(what))?;
        Ok(Self { socket, path: path.to_path_buf(), waiting: Waiting::Nobody })
    }

    /// Its descriptor.
    #[must_use]
    pub fn descriptor(&self) -> i32 {
        self.socket.as_raw_fd()
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Watches for clients.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the kernel has no memory for it.
    pub fn watch(&self, epoll: &Epoll, token: u64) -> Result<(), Error> {
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, token);
        epoll
            .ctl(ControlOperation::Add, self.descriptor(), event)
            .map_err(Error::io(format!("watch {}", self.path.display())))
    }

    /// Accepts a client, if one waits and there is `room` for it.
    pub fn accept(&mut self, room: bool) -> Option<UnixStream> {
        if !room {
            self.waiting = Waiting::ForRoom;
            return None;
        }
        loop {
            self.waiting = Waiting::Nobody;
            match self.socket.accept() {
                Ok((stream, _)) => return Some(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                // A signal came, or the client has gone again.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) => {}
                Err(_) => {
                    self.waiting = Waiting::ForKernel;
                    return None;
                }
            }
        }
    }

    /// Whether to call [`Self::accept`] though no event came.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.waiting != Waiting::Nobody
    }

    /// When to do so at the latest.
    #[must_use]
    pub fn retry(&self) -> Option<Duration> {
        (self.waiting == Waiting::ForKernel).then_some(RETRY)
    }

    /// Removes its name.
    pub fn unlink(&self) {
        // It may be gone with its folder.
        drop(std::fs::remove_file(&self.path));
    }
}
