//! Frames over a socket that the poll loop must never wait for, and that a thread may.
//!
//! The socket stays in blocking mode; the loop passes `MSG_DONTWAIT`.  So a connection can be lent
//! to a thread without changing anything about it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use forkd_proto::limits::FRAME_PAYLOAD_MAX;
use forkd_proto::{Decoder, FrameError, Header, Kind};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

/// Unsent bytes from which on a stream takes no more output: a few frames, so that a slow client
/// slows its process down.
pub const BACKLOG_MAX: usize = 256 << 10;

/// Largest buffer kept after the frame that needed it is gone.
const KEPT_MAX: usize = 64 << 10;

/// A connection, with what has arrived and what has yet to leave.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    decoder: Decoder,
    out: Vec<u8>,
    sent: usize,
    /// Whether the kernel may have bytes for us: set by the poll loop's edge, cleared by reading
    /// the last of them.
    pub readable: bool,
    /// Whether the peer will send no more.
    pub ended: bool,
}

impl Stream {
    /// A stream over a connected socket in blocking mode.
    pub fn new(socket: OwnedFd) -> Self {
        let (decoder, out) = (Decoder::new(), Vec::new());
        Self { socket, decoder, out, sent: 0, readable: true, ended: false }
    }

    /// The next frame that has arrived whole.
    ///
    /// # Errors
    ///
    /// The peer does not speak the protocol.
    pub fn next_frame(&mut self) -> Result<Option<(Kind, Vec<u8>)>, FrameError> {
        let Some((kind, payload)) = self.decoder.next_frame()? else {
            return Ok(None);
        };
        let frame = (kind, payload.to_vec());
        if frame.1.len() > KEPT_MAX {
            self.decoder.shrink();
        }
        Ok(Some(frame))
    }

    /// Takes what the kernel has, once; false if it had nothing.
    ///
    /// # Errors
    ///
    /// The connection broke.
    pub fn fill(&mut self, scratch: &mut [u8]) -> io::Result<bool> {
        if !self.readable || self.ended {
            return Ok(false);
        }
        match recv(self.socket.as_raw_fd(), scratch, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => self.ended = true,
            Ok(count) => {
                // A short read has emptied the socket, and the next byte brings a new edge.
                self.readable = count == scratch.len();
                self.decoder.push(scratch.get(..count).unwrap_or_default());
                return Ok(true);
            }
            Err(Errno::EAGAIN) => self.readable = false,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(false)
    }

    /// Adds a frame to what has yet to leave.  A payload past the limit is cut into several frames
    /// of its kind if it is bytes; JSON of ours is always within it.
    pub fn queue(&mut self, kind: Kind, payload: &[u8]) {
        let most = usize::try_from(FRAME_PAYLOAD_MAX).unwrap_or(usize::MAX);
        let mut rest = payload;
        loop {
            let (now, later) = rest.split_at(rest.len().min(most));
            if let Ok(header) = Header::new(kind, now.len()) {
                self.out.extend_from_slice(&header.encode());
                self.out.extend_from_slice(now);
            }
            if later.is_empty() {
                return;
            }
            rest = later;
        }
    }

    /// Bytes that have yet to leave.
    pub fn backlog(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Sends what the kernel takes; true if all has left.
    ///
    /// # Errors
    ///
    /// The connection broke.
    pub fn flush(&mut self) -> io::Result<bool> {
        self.send_all(MsgFlags::MSG_DONTWAIT)
    }

    /// Waits for the next frame; `None` at the end of the stream.  For threads.
    ///
    /// # Errors
    ///
    /// The connection broke, ended inside a frame, or carried something else than frames.
    pub fn wait_frame(&mut self, scratch: &mut [u8]) -> io::Result<Option<(Kind, Vec<u8>)>> {
        loop {
            let frame = self.next_frame().map_err(io::Error::other)?;
            if frame.is_some() || self.ended {
                return Ok(frame);
            }
            match recv(self.socket.as_raw_fd(), scratch, MsgFlags::empty()) {
                Ok(0) => self.ended = true,
                Ok(count) => self.decoder.push(scratch.get(..count).unwrap_or_default()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends one frame, after all that was queued.  For threads.
    ///
    /// # Errors
    ///
    /// The connection broke.
    pub fn wait_send(&mut self, kind: Kind, payload: &[u8]) -> io::Result<()> {
        self.queue(kind, payload);
        self.send_all(MsgFlags::empty()).map(drop)
    }

    fn send_all(&mut self, flags: MsgFlags) -> io::Result<bool> {
        while let Some(rest) = self.out.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match send(self.socket.as_raw_fd(), rest, flags | MsgFlags::MSG_NOSIGNAL) {
                Ok(count) => self.sent += count,
                Err(Errno::EAGAIN) => return Ok(false),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.sent = 0;
        self.out.clear();
        self.out.shrink_to(KEPT_MAX);
        Ok(true)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Stream, Stream) {
        let (a, b) = UnixStream::pair().unwrap();
        (Stream::new(a.into()), Stream::new(b.into()))
    }

    #[test]
    fn frames_cross_without_waiting() {
        let (mut a, mut b) = pair();
        let mut scratch = [0; 4096];
        assert!(!b.fill(&mut scratch).unwrap());
        a.queue(Kind::Stdout, b"hello");
        assert!(a.flush().unwrap());
        b.readable = true;
        assert!(b.fill(&mut scratch).unwrap());
        assert_eq!(b.next_frame().unwrap(), Some((Kind::Stdout, b"hello".to_vec())));
    }

    #[test]
    fn a_peer_that_does_not_read_leaves_a_backlog_instead_of_a_wait() {
        let (mut a, b) = pair();
        a.queue(Kind::Data, &vec![0; 4 << 20]);
        assert!(!a.flush().unwrap());
        assert!(a.backlog() > 0);
        drop(b);
        assert!(a.flush().is_err());
    }

    #[test]
    fn the_end_of_the_stream_is_seen() {
        let (mut a, b) = pair();
        drop(b);
        assert!(!a.fill(&mut [0; 16]).unwrap());
        assert!(a.ended);
    }
}
