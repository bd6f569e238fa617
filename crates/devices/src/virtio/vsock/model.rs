//! The words in which the host and the device speak of connections.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::CONNECTIONS_MAX;

/// A connection, as the host names it; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(pub(super) u64);

/// A connection, as both sides name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ports {
    /// On the host.
    pub host: u32,
    /// In the guest.
    pub guest: u32,
}

/// What the host should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VsockEvent {
    /// The guest accepted what the host opened.
    Connected(Id),
    /// The guest wants to connect: accept or refuse.
    Incoming {
        /// The connection to be.
        id: Id,
        /// The port it calls, on the host.
        host_port: u32,
        /// The port it calls from.
        guest_port: u32,
    },
    /// There is something to take.  Said again only after more has come.
    Readable(Id),
    /// Bytes can be sent again, after none could.
    Writable(Id),
    /// The guest closed a direction.
    HalfClosed {
        /// The connection.
        id: Id,
        /// It will send no more than what can be taken now.
        done: bool,
        /// It will receive no more.
        deaf: bool,
    },
    /// It is over and everything received was taken; the id means nothing now.
    Closed(Id),
}

/// Which direction the host closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// The host will take no more; what was not taken is dropped.
    Read,
    /// The host will send no more than it has.
    Write,
    /// Both.
    Both,
}

/// How a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its ports.
    pub ports: Ports,
    /// Bytes that can be taken.
    pub readable: usize,
    /// Bytes that can be sent.
    pub writable: usize,
    /// The guest will send no more than that.
    pub done: bool,
    /// The guest will receive no more.
    pub deaf: bool,
}

/// There are as many connections as there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the guest already has {CONNECTIONS_MAX} connections, or resets to hear of")
    }
}

impl std::error::Error for Full {}

/// What a snapshot keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// The next port that the host would call from.
    pub next_port: u32,
    /// The connections that the guest believes in.
    pub connections: Vec<Ports>,
}
