//! Control sockets: who may connect, frames in, frames out.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forkd_proto::control::ErrorBody;
use forkd_proto::frame::{self, Decoder, Kind};
use forkd_proto::limits::FILES_MAX;
use serde::Serialize;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::error::Error;
use crate::jail::users;
use crate::sys::handed::{self, Keep};
use crate::sys::listener::Listener;
use crate::sys::{descriptors, process};

/// Connections to one process at a time; further clients wait until one of them closes.
pub const CONNECTIONS_MAX: usize = 64;
/// A client that does not read its answers for this long is dropped.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most files that a client hands over by one connection: a tap and a cgroup for each of the
/// children of the largest request that a daemon makes, and a chain.
const HANDED_MAX: usize = 4096;
/// Bytes read from a connection at a time.
const READ_BYTES: usize = 16 << 10;

/// Which connection.
pub type Token = u32;
/// The listening socket's.
pub const LISTENER: Token = 0;

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    decoder: Decoder,
    /// Came with requests that were not read yet.
    files: VecDeque<File>,
    /// As what the others are known, until the connection closes.
    handed: Vec<PathBuf>,
}

/// A listening control socket with its connections.
#[derive(Debug)]
pub struct Control {
    listener: Listener,
    epoll: Arc<Epoll>,
    tag: u64,
    connections: BTreeMap<Token, Connection>,
    next_token: Token,
}

impl Control {
    /// Listens at `path`, watched by `epoll` under tokens above `tag`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the socket cannot be made.
    pub fn listen(path: &Path, epoll: &Arc<Epoll>, tag: u64) -> Result<Self, Error> {
        let listener = Listener::bind(path)?;
        listener.watch(epoll, tag | u64::from(LISTENER))?;
        Ok(Self {
            listener,
            epoll: Arc::clone(epoll),
            tag,
            connections: BTreeMap::new(),
            next_token: LISTENER + 1,
        })
    }

    /// A socket is ready.  Returns the requests that have arrived whole.
    pub fn on_socket(&mut self, token: Token) -> Vec<Vec<u8>> {
        if token == LISTENER {
            self.accept();
            return Vec::new();
        }
        let Some(connection) = self.connections.get_mut(&token) else { return Vec::new() };
        match connection.read() {
            Ok(requests) => requests,
            Err(reason) => {
                if let Some(message) = reason {
                    let code = forkd_proto::control::ErrorCode::Protocol;
                    self.send(token, Kind::Error, &ErrorBody { code, message, field: None });
                }
                // Closing the descriptor ends the watch.
                self.connections.remove(&token);
                Vec::new()
            }
        }
    }

    /// Has files that came over a connection be opened by these names as long as it lasts.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there are not so many; those that came are closed.
    pub fn take_files(&mut self, token: Token, names: &[PathBuf]) -> Result<(), Error> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        let files = std::mem::take(&mut connection.files);
        if files.len() != names.len() {
            let problem = format!("{} names for {} files", names.len(), files.len());
            return Err(Error::Invalid { field: "names", problem });
        }
        if connection.handed.len() + names.len() > HANDED_MAX {
            let problem = format!("over {HANDED_MAX} files over one connection");
            return Err(Error::Invalid { field: "names", problem });
        }
        for (name, file) in names.iter().zip(files) {
            handed::put(name, Keep::Lent, file);
            connection.handed.push(name.clone());
        }
        Ok(())
    }

    /// Answers a request.  Returns whether the client is there to hear it.
    pub fn answer<T: Serialize>(&mut self, token: Token, result: Result<T, Error>) -> bool {
        match result {
            Ok(reply) => self.send(token, Kind::Reply, &reply),
            Err(error) => self.send(token, Kind::Error, &error.body()),
        }
    }

    /// Sends one frame.  A client that does not read is dropped.  Returns whether it was sent.
    pub fn send<T: Serialize>(&mut self, token: Token, kind: Kind, payload: &T) -> bool {
        let Some(connection) = self.connections.get_mut(&token) else { return false };
        let sent = serde_json::to_vec(payload)
            .map_err(std::io::Error::from)
            .and_then(|payload| frame::write_frame(&mut connection.stream, kind, &payload));
        if sent.is_err() {
            self.connections.remove(&token);
        }
        sent.is_ok()
    }

    /// Sends one frame to every connection.
    pub fn broadcast<T: Serialize>(&mut self, kind: Kind, payload: &T) {
        for token in self.connections.keys().copied().collect::<Vec<_>>() {
            self.send(token, kind, payload);
        }
    }

    /// Accepts those who waited for room, or for the kernel.  To be called whenever the poll loop
    /// has served what woke it.  Returns when to be called again though nothing happened.
    pub fn accept_waiting(&mut self) -> Option<Duration> {
        if self.listener.is_waiting() {
            self.accept();
        }
        self.listener.retry()
    }

    fn accept(&mut self) {
        while let Some(stream) = self.listener.accept(self.connections.len() < CONNECTIONS_MAX) {
            // Dropping the stream is the refusal.
            drop(self.admit(stream));
        }
    }

    fn admit(&mut self, stream: UnixStream) -> Result<(), Error> {
        let uid = descriptors::peer_uid(&stream)?;
        if uid != users::root() && uid != process::own_uid() {
            return Err(Error::State("a client of another user"));
        }
        // Reads happen only when there is something; writes may wait, but not for ever.
        stream.set_write_timeout(Some(WRITE_TIMEOUT)).map_err(Error::io("configure a client"))?;
        let token = self.next_token;
        self.next_token = self.next_token.wrapping_add(1).max(LISTENER + 1);
        let event = EpollEvent::new(EventSet::IN, self.tag | u64::from(token));
        self.epoll
            .ctl(ControlOperation::Add, stream.as_raw_fd(), event)
            .map_err(Error::io("watch a client"))?;
        self.connections.insert(
            token,
            Connection {
                stream,
                decoder: Decoder::new(),
                files: VecDeque::new(),
                handed: Vec::new(),
            },
        );
        Ok(())
    }

    /// In a fork of the process that listens: closes what is that process's alone.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a descriptor was not open.
    pub fn close_in_child(&self) -> Result<(), Error> {
        descriptors::close_in_child(self.listener.descriptor())?;
        self.connections
            .values()
            .try_for_each(|connection| descriptors::close_in_child(connection.stream.as_raw_fd()))
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.listener.path()
    }

    /// Removes the socket's name.  The process that listens calls this when it ends; a fork of it
    /// that merely drops the value does not.
    pub fn unlink(&self) {
        self.listener.unlink();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.handed.iter().for_each(|name| handed::forget(name));
    }
}

impl Connection {
    /// Whole requests; `Err` at the end of the stream, with a message if it ended in an error.
    fn read(&mut self) -> Result<Vec<Vec<u8>>, Option<String>> {
        let mut buffer = vec![0; READ_BYTES];
        let read = match descriptors::receive(&self.stream, &mut buffer, &mut self.files) {
            Ok(0) => return Err(None),
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(Vec::new()),
            Err(_) => return Err(None),
        };
        if self.files.len() > FILES_MAX {
            return Err(Some(format!("over {FILES_MAX} files that nobody asked for")));
        }
        self.decoder.push(&buffer[..read]);
        let mut requests = Vec::new();
        loop {
            match self.decoder.next_frame() {
                Ok(Some((Kind::Request, payload))) => requests.push(payload.to_vec()),
                Ok(Some((kind, _))) => {
                    return Err(Some(format!(
                        "a {kind:?} frame, where only requests are expected"
                    )));
                }
                Ok(None) => return Ok(requests),
                Err(error) => return Err(Some(error.to_string())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn control(name: &str) -> (Control, Arc<Epoll>) {
        let path =
            std::env::temp_dir().join(format!("forkd-control-{}-{name}", std::process::id()));
        let epoll = Arc::new(Epoll::new().unwrap());
        (Control::listen(&path, &epoll, 0).unwrap(), epoll)
    }

    #[test]
    fn a_request_in_two_pieces_arrives_once() {
        let (mut control, _epoll) = control("pieces");
        let mut client = UnixStream::connect(control.path()).unwrap();
        control.on_socket(LISTENER);
        let mut bytes = Vec::new();
        frame::encode(Kind::Request, br#"{"op":"status"}"#, &mut bytes).unwrap();

        client.write_all(&bytes[..5]).unwrap();
        let early = control.on_socket(1);
        client.write_all(&bytes[5..]).unwrap();
        let whole = control.on_socket(1);

        control.unlink();
        assert_eq!((early.len(), whole), (0, vec![br#"{"op":"status"}"#.to_vec()]));
    }

    #[test]
    fn a_client_past_the_most_is_served_when_another_has_gone() {
        let (mut control, _epoll) = control("crowd");
        let connect = |control: &Control| UnixStream::connect(control.path()).unwrap();
        let mut clients: Vec<_> = (0..=CONNECTIONS_MAX).map(|_| connect(&control)).collect();
        control.on_socket(LISTENER);
        let last = clients.last_mut().unwrap();
        frame::write_frame(last, Kind::Request, br#"{"op":"status"}"#).unwrap();
        assert_eq!((control.connections.len(), control.accept_waiting()), (CONNECTIONS_MAX, None));

        drop(clients.swap_remove(0));
        control.on_socket(1);
        control.accept_waiting();

        let token = *control.connections.keys().last().unwrap();
        let heard = control.on_socket(token);
        control.unlink();
        assert_eq!(heard, vec![br#"{"op":"status"}"#.to_vec()]);
    }

    #[test]
    fn a_client_that_speaks_out_of_turn_gets_an_error_and_is_dropped() {
        let (mut control, _epoll) = control("turn");
        let mut client = UnixStream::connect(control.path()).unwrap();
        control.on_socket(LISTENER);
        frame::write_frame(&mut client, Kind::Reply, b"{}").unwrap();

        control.on_socket(1);

        let answer = frame::read_frame(&mut client).unwrap().unwrap();
        control.unlink();
        assert_eq!(answer.kind, Kind::Error);
        assert!(control.connections.is_empty());
    }
}
