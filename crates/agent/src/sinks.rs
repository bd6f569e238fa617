//! Outputs of commands that are over, and to which somebody still writes.
//!
//! A server in the background keeps the pipes of the command that started it.  Were our ends
//! closed, it would die of its next log line (SIGPIPE); were they left unread, it would wait
//! as soon as they are full.  So they are read into nowhere until the last writer has gone.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::sync::Arc;

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};

use crate::log;

/// Most pipes that are kept.  One more is closed at once: those of servers that run already stay.
pub const SINKS_MAX: usize = 512;

/// Tokens of the poll from here on are sinks'; no connection has one as large.
pub const FIRST_TOKEN: u64 = 1 << 40;

/// Pipes that are read into nowhere.
#[derive(Debug, Default)]
pub struct Sinks {
    pipes: BTreeMap<u64, Arc<File>>,
    made: u64,
}

impl Sinks {
    /// Keeps pipes that `epoll` watches already.
    pub fn adopt(&mut self, epoll: &Epoll, pipes: Vec<Arc<File>>) {
        for pipe in pipes {
            if self.pipes.len() >= SINKS_MAX {
                log::line(&format!(
                    "programs in the background hold {SINKS_MAX} outputs: one more was closed"
                ));
                continue;
            }
            let token = FIRST_TOKEN + self.made;
            // Not edge-triggered: who writes without end is read from once in each turn of the
            // loop, and the loop is everybody's.
            match epoll.modify(&pipe, &mut EpollEvent::new(EpollFlags::EPOLLIN, token)) {
                Ok(()) => {
                    self.made += 1;
                    self.pipes.insert(token, pipe);
                }
                Err(error) => log::line(&format!("cannot watch an output: {error}")),
            }
        }
    }

    /// Reads once from the pipe of that token; forgets it if nobody can write to it any more.
    pub fn drain(&mut self, token: u64, scratch: &mut [u8]) {
        let Some(pipe) = self.pipes.get(&token) else { return };
        match pipe.as_ref().read(scratch) {
            Ok(1..) => {}
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Ok(0) | Err(_) => drop(self.pipes.remove(&token)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use nix::sys::epoll::{EpollCreateFlags, EpollTimeout};

    use super::*;
    use crate::exec::output_pipe;

    #[test]
    fn so_many_pipes_are_kept_and_one_more_is_closed() {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        let mut sinks = Sinks::default();
        // One pipe is enough: its file counts as often as it is adopted.
        let (read, write) = output_pipe().unwrap();
        epoll.add(&read, EpollEvent::new(EpollFlags::EPOLLIN, 0)).unwrap();
        let read = Arc::new(read);
        sinks.adopt(&epoll, vec![Arc::clone(&read); SINKS_MAX]);
        assert_eq!(Arc::strong_count(&read), SINKS_MAX + 1);

        let (one_more, its_writer) = output_pipe().unwrap();
        sinks.adopt(&epoll, vec![Arc::new(one_more)]);

        let refused = File::from(its_writer).write(b"x").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::BrokenPipe);
        assert_eq!(File::from(write).write(b"x").unwrap(), 1);
    }

    #[test]
    fn a_pipe_is_kept_until_its_last_writer_has_gone() {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        let mut sinks = Sinks::default();
        let (read, write) = output_pipe().unwrap();
        epoll.add(&read, EpollEvent::new(EpollFlags::EPOLLIN, 0)).unwrap();
        sinks.adopt(&epoll, vec![Arc::new(read)]);
        let mut drain = || {
            let mut events = [EpollEvent::empty()];
            assert_eq!(epoll.wait(&mut events, EpollTimeout::ZERO).unwrap(), 1);
            sinks.drain(events[0].data(), &mut [0; 64]);
            sinks.pipes.len()
        };
        let mut write = File::from(write);
        write.write_all(&[0; 65]).unwrap();

        assert_eq!([drain(), drain()], [1, 1]);
        drop(write);
        assert_eq!(drain(), 0);
    }
}
