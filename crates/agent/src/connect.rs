//! `connect`: a TCP connection to a program in the guest, as bytes in both directions.
//!
//! Each direction ends by itself, as those of TCP do.  It is over when both have ended.  A client
//! that goes before that resets the connection, so that its program never takes half of a request
//! for a whole one.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use forkd_proto::Kind;
use forkd_proto::guest::{ErrorBody, ErrorCode};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use crate::failure::{Outcome, code_of, failure, refused};
use crate::stream::{BACKLOG_MAX, Stream};

/// How long a program may take until its queue has room: the kernel accepts for it, at once.
pub const ACCEPT_MAX: Duration = Duration::from_secs(10);

/// Unwritten bytes from which on the client is read no further.
const UNWRITTEN_MAX: usize = 256 << 10;

/// One connection to a program.
#[derive(Debug)]
pub struct Connect {
    socket: TcpStream,
    port: NonZeroU16,
    /// Until the program has accepted.
    pending: Option<Pending>,
    /// What the client has sent, from `written` on, that the program has yet to take.
    unwritten: Vec<u8>,
    written: usize,
    /// Whether the client will send no more.
    client_ended: bool,
    /// Whether the program may get more, as far as we know.
    writes: bool,
    /// Whether more may come from the program.
    reads: bool,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    deadline: Instant,
    /// Whether the other loopback address is to be tried yet.
    other: bool,
}

/// What comes of driving a [`Connect`].
#[derive(Debug)]
pub enum Progress {
    /// It waits for something.
    Waiting,
    /// It could go on at once, were it not for the others.
    More,
    /// The program has accepted, just now.
    Connected,
    /// There is another socket to watch.
    Redialed,
    /// It is over.
    Done(Outcome<()>),
}

impl Connect {
    /// Calls the program that listens on a port of 127.0.0.1, or else of `::1`.
    ///
    /// # Errors
    ///
    /// Nobody listens there, or the kernel refused a socket.
    pub fn start(port: NonZeroU16, now: Instant) -> Outcome<Self> {
        let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port.get()));
        let (socket, other) = match dial(v4) {
            Ok(socket) => (socket, true),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => (dial_v6(port)?, false),
            Err(error) => return Err(refused("cannot connect", &error)),
        };
        Ok(Self {
            socket,
            port,
            pending: Some(Pending { deadline: now + ACCEPT_MAX, other }),
            unwritten: Vec::new(),
            written: 0,
            client_ended: false,
            writes: true,
            reads: true,
        })
    }

    /// What the poll loop must watch for it.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// When to drive it even if nothing happens.
    pub fn wake_at(&self) -> Option<Instant> {
        self.pending.map(|pending| pending.deadline)
    }

    /// Whether it takes more frames from its client.
    pub fn wants_input(&self) -> bool {
        self.unwritten.len() - self.written < UNWRITTEN_MAX
    }

    /// Takes one frame from the client.
    ///
    /// # Errors
    ///
    /// What makes the frame unacceptable.
    pub fn on_frame(&mut self, kind: Kind, payload: &[u8]) -> Outcome<()> {
        match kind {
            Kind::Data if !self.client_ended => {
                // What a program that reads no more is sent is dropped.
                if self.writes {
                    self.unwritten.extend_from_slice(payload);
                }
            }
            Kind::DataEof if !self.client_ended => self.client_ended = true,
            _ => return Err(failure(ErrorCode::Protocol, format!("{kind:?} during connect"))),
        }
        Ok(())
    }

    /// Moves bytes in both directions as far as they go without waiting.
    pub fn drive(&mut self, stream: &mut Stream, scratch: &mut [u8], now: Instant) -> Progress {
        if let Some(pending) = self.pending {
            return self.dialed(pending, now).unwrap_or_else(|body| Progress::Done(Err(body)));
        }
        self.write();
        match self.read(stream, scratch) {
            Ok(_) if !self.writes && !self.reads => Progress::Done(Ok(())),
            Ok(true) => Progress::More,
            Ok(false) => Progress::Waiting,
            Err(error) => Progress::Done(Err(refused("the program's connection broke", &error))),
        }
    }

    /// Has the program see that its client is gone, rather than that it has said all.
    pub fn cancel(&self) {
        if let Err(error) = sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO)) {
            crate::log::line(&format!("cannot reset a connection: {error}"));
        }
    }

    fn dialed(&mut self, pending: Pending, now: Instant) -> Outcome<Progress> {
        let error = self.socket.take_error();
        match error.map_err(|error| refused("cannot connect", &error))? {
            Some(error) if error.kind() == ErrorKind::ConnectionRefused && pending.other => {
                self.socket = dial_v6(self.port)?;
                self.pending = Some(Pending { other: false, ..pending });
                Ok(Progress::Redialed)
            }
            Some(error) => Err(unheard(self.port, &error)),
            None if self.socket.peer_addr().is_ok() => {
                self.pending = None;
                Ok(Progress::Connected)
            }
            None if now >= pending.deadline => Err(failure(
                ErrorCode::Busy,
                format!("the program on port {} accepts no connection now", self.port),
            )),
            None => Ok(Progress::Waiting),
        }
    }

    fn write(&mut self) {
        while let Some(rest) = self.unwritten.get(self.written..).filter(|rest| !rest.is_empty()) {
            match self.socket.write(rest) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // It reads no more; that is its right.
                Err(_) => {
                    self.writes = false;
                    break;
                }
            }
        }
        self.written = 0;
        self.unwritten.clear();
        self.unwritten.shrink_to(UNWRITTEN_MAX);
        if self.client_ended && self.writes {
            self.writes = false;
            // It fails if the program has gone, which reading tells.
            drop(self.socket.shutdown(Shutdown::Write));
        }
    }

    /// Reads a buffer; true if there may be more.
    fn read(&mut self, stream: &mut Stream, scratch: &mut [u8]) -> io::Result<bool> {
        // With a backlog, it goes on when the client has read, which is an event of its own.
        if !self.reads || stream.backlog() >= BACKLOG_MAX {
            return Ok(false);
        }
        match self.socket.read(scratch) {
            Ok(0) => {
                self.reads = false;
                stream.queue(Kind::DataEof, &[]);
                Ok(false)
            }
            Ok(count) => {
                stream.queue(Kind::Data, scratch.get(..count).unwrap_or_default());
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// Begins to connect without waiting for it.
fn dial(address: SocketAddr) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let socket = TcpStream::from(socket);
    socket.set_nodelay(true)?;
    Ok(socket)
}

fn dial_v6(port: NonZeroU16) -> Outcome<TcpStream> {
    let address = SocketAddr::from((Ipv6Addr::LOCALHOST, port.get()));
    dial(address).map_err(|error| unheard(port, &error))
}

/// What a client is told of a program that was called at both addresses, in vain: one of them was
/// refused, and a guest may be without IPv6.
fn unheard(port: NonZeroU16, error: &io::Error) -> ErrorBody {
    if code_of(error) == ErrorCode::Busy {
        return refused("cannot connect", error);
    }
    let message = format!("nothing listens on port {port} of 127.0.0.1 or ::1 in the sandbox");
    failure(ErrorCode::Refused, message)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A port where a program listens whose queue is full, and what keeps it so.
    fn full() -> (NonZeroU16, Vec<TcpStream>, impl Sized) {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let listener = std::net::TcpListener::from(socket);
        let address = listener.local_addr().unwrap();
        let queue = (0..2).map(|_| dial(address).unwrap()).collect();
        (NonZeroU16::new(address.port()).unwrap(), queue, listener)
    }

    #[test]
    fn a_program_whose_queue_is_full_has_so_long_to_make_room() {
        let (port, _queue, _listener) = full();
        let (now, mut scratch) = (Instant::now(), [0; 16]);
        let mut stream = Stream::new(UnixStream::pair().unwrap().0.into());
        let mut connect = Connect::start(port, now).unwrap();
        let due = connect.wake_at().unwrap();

        let before = connect.drive(&mut stream, &mut scratch, now);
        let after = connect.drive(&mut stream, &mut scratch, due);

        assert!(matches!(before, Progress::Waiting), "{before:?}");
        let Progress::Done(Err(body)) = after else { panic!("{after:?}") };
        assert_eq!((body.code, due), (ErrorCode::Busy, now + ACCEPT_MAX));
    }
}
