//! A handshake with the agent of a machine's own guest, with a deadline.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forkd_devices::virtio::vsock::Id;
use forkd_proto::limits::AGENT_PORT;

use crate::control::handshake::{Handshake, Identity};
use crate::error::Error;
use crate::io::bus::Bus;

/// A handshake under way.  Dropping it closes the connection, which has the agent give it up.
#[derive(Debug)]
pub struct Introduction {
    handshake: Handshake,
    connection: Id,
    deadline: Instant,
}

impl Introduction {
    /// Calls the agent, over a pair of connected streams, and sends what it is to be.  The guest
    /// need not run yet: it finds the connection when it does.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the host has no entropy to give, [`Error::Guest`] if the guest has as many
    /// connections as it may have.
    pub fn start(
        bus: &Bus,
        (ours, guests): (UnixStream, UnixStream),
        identity: Identity<'_>,
        deadline: Instant,
    ) -> Result<Self, Error> {
        let connection = bus.vsock(|vsock| vsock.connect(AGENT_PORT, guests))?;
        let disk = bus.block().and_then(|block| block.device().disk().limit());
        let identity = identity.within(bus.memory_bytes());
        let handshake = Handshake::start(ours, identity, disk)?;
        Ok(Self { handshake, connection, deadline })
    }

    /// What to watch for input.
    #[must_use]
    pub fn descriptor(&self) -> i32 {
        self.handshake.stream().as_raw_fd()
    }

    /// The connection in the vsock device.
    #[must_use]
    pub fn connection(&self) -> Id {
        self.connection
    }

    /// The descriptor is ready.  Returns whether the guest has taken its identity.
    ///
    /// # Errors
    ///
    /// As [`Handshake::advance`] and [`Self::time_left`].
    pub fn advance(&mut self, bus: &Bus) -> Result<bool, Error> {
        let received_ns = bus.vsock(|vsock| vsock.received_ns(self.connection));
        let ready = self.handshake.advance(received_ns)?;
        if self.handshake.take_announcement() {
            bus.announce_generation();
        }
        // A guest that answers one byte at a time is late as well.
        Ok(ready || self.time_left().map(|_| false)?)
    }

    /// Whether the guest has said that it has the IPv6 address that it was given, or will.
    #[must_use]
    pub fn has_ipv6(&self) -> bool {
        self.handshake.has_ipv6()
    }

    /// Time until the deadline.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] if that has passed.
    pub fn time_left(&self) -> Result<Duration, Error> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Guest(
                "the agent has not answered within the deadline; the host may be busy, or the \
                 image's post-fork hook hang"
                    .into(),
            ));
        }
        Ok(left)
    }
}
