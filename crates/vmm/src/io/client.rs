//! Clients of `vsock.sock`: while they say which port they want, and once they are connected.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use vmm_sys_util::epoll::EventSet;

/// Longest greeting, `CONNECT 4294967295\n`.
pub(super) const GREETING_BYTES_MAX: usize = 19;

/// A stream between a socket and the guest.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "both directions end on their own, on either side"
)]
pub(super) struct Link {
    pub(super) stream: UnixStream,
    /// `OK <port>` is still owed to the client.
    pub(super) greets: bool,
    pub(super) connected: bool,
    /// Taken from the device, not yet accepted by the socket.
    pub(super) leftover: Vec<u8>,
    /// The guest will send no more; tell the socket once it has everything.
    pub(super) guest_done: bool,
    /// The socket has delivered its end.
    pub(super) client_done: bool,
    /// The device has forgotten the stream; the link lives until the socket has everything.
    pub(super) closed: bool,
    pub(super) interest: EventSet,
    /// The host's wall clock when the guest last sent anything, in nanoseconds since the epoch.
    pub(super) received_ns: i64,
}

#[derive(Debug)]
pub(super) struct Greeting {
    pub(super) stream: UnixStream,
    pub(super) line: Vec<u8>,
}

impl Link {
    /// The guest has accepted the connection.
    pub(super) fn accepted(&mut self, host_port: u32) {
        self.connected = true;
        if self.greets {
            self.leftover.extend_from_slice(format!("OK {host_port}\n").as_bytes());
        }
    }

    /// Writes what is left over.  Returns whether nothing remains.
    pub(super) fn flush(&mut self) -> bool {
        while !self.leftover.is_empty() {
            match self.stream.write(&self.leftover) {
                Ok(written) => {
                    self.leftover.drain(..written);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                // The client is gone: what it did not read is of use to nobody.
                Err(_) => self.leftover.clear(),
            }
        }
        true
    }
}

impl Greeting {
    /// The port, once the line is complete; `Err` if it is no greeting.
    pub(super) fn read(&mut self) -> Result<Option<u32>, ()> {
        let mut byte = [0];
        loop {
            match self.stream.read(&mut byte) {
                Ok(1) if byte[0] == b'\n' => return parse_greeting(&self.line).map(Some).ok_or(()),
                Ok(1) if self.line.len() < GREETING_BYTES_MAX => self.line.push(byte[0]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return Err(()),
            }
        }
    }
}

fn parse_greeting(line: &[u8]) -> Option<u32> {
    std::str::from_utf8(line).ok()?.strip_prefix("CONNECT ")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_names_a_port_or_is_none() {
        assert_eq!(parse_greeting(b"CONNECT 1024"), Some(1024));
        assert_eq!(parse_greeting(b"CONNECT 4294967296"), None);
        assert_eq!(parse_greeting(b"GET / HTTP/1.1"), None);
    }

    #[test]
    fn a_greeting_one_byte_too_long_is_refused() {
        let (mut client, stream) = UnixStream::pair().unwrap();
        client.write_all(&[b'C'; GREETING_BYTES_MAX + 1]).unwrap();

        assert_eq!(Greeting { stream, line: Vec::new() }.read(), Err(()));
    }
}
