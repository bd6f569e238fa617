//! The pipes that processes of a zygote report through: one each, for one report.
//!
//! A process has the writing end of its own and of no other, and no end of it once it has reported.
//! So it cannot report for another process, nor twice; what it can make the zygote keep is bounded.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::report::{REPORT_BYTES_MAX, Report};
use crate::error::Error;
use crate::sys::descriptors;

/// What a process said, or `None` if that was nothing, or nothing of ours.
pub(super) type Said = Option<Report>;

/// The pipes of those that have not reported yet.
#[derive(Debug)]
pub(super) struct Reports {
    epoll: Arc<Epoll>,
    /// The upper half of their epoll tokens; the lower half is the descriptor.
    tag: u64,
    pipes: BTreeMap<RawFd, Pipe>,
}

#[derive(Debug)]
struct Pipe {
    pid: i32,
    read: File,
    said: Vec<u8>,
}

/// A pipe for a process that is to be forked.
#[derive(Debug)]
pub(super) struct Opened {
    read: File,
    write: File,
}

/// A process's end of its pipe.
#[derive(Debug)]
pub(super) struct Reporter(File);

impl Reports {
    /// None yet; `epoll` will say with `tag` when there is something to read.
    pub(super) fn new(epoll: &Arc<Epoll>, tag: u64) -> Self {
        Self { epoll: Arc::clone(epoll), tag, pipes: BTreeMap::new() }
    }

    /// A pipe for a process that is to be forked now.
    pub(super) fn open(&self) -> Result<Opened, Error> {
        let (read, write) = descriptors::nonblocking_pipe()?;
        let fd = read.as_raw_fd();
        let event = EpollEvent::new(EventSet::IN, self.tag | u64::from(fd.unsigned_abs()));
        self.epoll.ctl(ControlOperation::Add, fd, event).map_err(Error::io("epoll_ctl"))?;
        Ok(Opened { read, write })
    }

    /// In the zygote: `pid` is the process that was forked for it.
    pub(super) fn expect(&mut self, pid: i32, Opened { read, write: _ }: Opened) {
        self.pipes.insert(read.as_raw_fd(), Pipe { pid, read, said: Vec::new() });
    }

    /// In a process that was forked: closes the pipes of others.
    pub(super) fn close_in_child(&self) -> Result<(), Error> {
        self.pipes.keys().try_for_each(|fd| descriptors::close_in_child(*fd))
    }

    /// Reads what there is in a pipe.  Returns whose it is and what was said, when no more is to
    /// come; the pipe is closed then.
    pub(super) fn read(&mut self, fd: RawFd) -> Option<(i32, Said)> {
        let Pipe { read, said, .. } = self.pipes.get_mut(&fd)?;
        // One byte more than a report may have shows that it is none.
        let mut chunk = [0; REPORT_BYTES_MAX + 1];
        let length = match read.read(&mut chunk[said.len()..]) {
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return None;
            }
            length => length.unwrap_or(0),
        };
        let from = said.len();
        said.extend_from_slice(&chunk[from..from + length]);
        let end = said.iter().position(|byte| *byte == b'\n');
        if length > 0 && end.is_none() && said.len() <= REPORT_BYTES_MAX {
            return None;
        }
        let Pipe { pid, said, .. } = self.close(fd)?;
        let line = end.filter(|end| *end < REPORT_BYTES_MAX).map(|end| &said[..end]);
        Some((pid, line.and_then(|line| serde_json::from_slice(line).ok())))
    }

    /// What a process that has ended said last, if it had not reported before.
    pub(super) fn last_words(&mut self, pid: i32) -> Option<(i32, Said)> {
        let fd = self.pipes.iter().find(|(_, pipe)| pipe.pid == pid).map(|(fd, _)| *fd)?;
        let said = self.read(fd);
        // Somebody else may hold its end, and is not heard any more.
        drop(self.close(fd));
        said
    }

    fn close(&mut self, fd: RawFd) -> Option<Pipe> {
        let pipe = self.pipes.remove(&fd)?;
        // A fork may not have closed it yet, and epoll would go on about it.
        drop(self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default()));
        Some(pipe)
    }
}

impl Opened {
    /// In the process that was forked for it.
    pub(super) fn reporter(self) -> Reporter {
        Reporter(self.write)
    }
}

impl Reporter {
    /// Tells the zygote.  If it is gone, nobody has heard of us or will: whoever asked for us was
    /// told that it ended, and counts us as ended.
    pub(super) fn say(mut self, mut report: Report) -> io::Result<()> {
        self.0.write_all(&report.line())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::process::{self, Forked};
    use forkd_proto::control::{ErrorCode, ForkMs};

    const TAG: u64 = 7 << 32;

    fn reports() -> Reports {
        Reports::new(&Arc::new(Epoll::new().unwrap()), TAG)
    }

    /// A pipe as if a process had been forked for it, and both its ends.
    fn open(reports: &mut Reports, pid: i32) -> (RawFd, File) {
        let opened = reports.open().unwrap();
        let (fd, write) = (opened.read.as_raw_fd(), opened.write.try_clone().unwrap());
        reports.expect(pid, opened);
        (fd, write)
    }

    /// Waits until nobody can write to a pipe, forks of other tests included.
    fn await_hang_up(fd: RawFd) {
        let mut poll = libc::pollfd { fd, events: 0, revents: 0 };
        while poll.revents & libc::POLLHUP == 0 {
            // SAFETY: one `pollfd`, which outlives the call.
            assert_eq!(unsafe { libc::poll(&raw mut poll, 1, -1) }, 1);
        }
    }

    fn failed(message: String) -> Report {
        let (stage, code) = ("agent".to_owned(), ErrorCode::Guest);
        Report::Failed { stage, code, message, again: false }
    }

    #[test]
    fn a_report_of_one_byte_too_many_is_none_and_its_pipe_is_closed() {
        let mut reports = reports();
        let spare = REPORT_BYTES_MAX - failed(String::new()).line().len();
        for (bytes, good) in [(spare, true), (spare + 1, false)] {
            let (fd, mut write) = open(&mut reports, 7);
            let mut line = serde_json::to_vec(&failed("x".repeat(bytes))).unwrap();
            line.push(b'\n');

            write.write_all(&line).unwrap();
            let (pid, said) = reports.read(fd).unwrap();

            assert_eq!((pid, said.is_some()), (7, good));
            assert!(reports.pipes.is_empty());
        }
    }

    #[test]
    fn what_never_ends_is_not_kept_and_what_comes_in_pieces_is_one_report() {
        let mut reports = reports();
        let (endless, mut write) = open(&mut reports, 7);
        let (slow, mut piecemeal) = open(&mut reports, 8);
        let line = Report::Ready { ms: ForkMs::default(), ipv6: false }.line();

        write.write_all(&[b'x'; REPORT_BYTES_MAX]).unwrap();
        assert!(reports.read(endless).is_none(), "it may end yet");
        write.write_all(&[b'x'; REPORT_BYTES_MAX]).unwrap();
        assert!(matches!(reports.read(endless), Some((7, None))));
        for (at, byte) in line.iter().enumerate() {
            piecemeal.write_all(&[*byte]).unwrap();
            let said = reports.read(slow);
            assert_eq!(matches!(said, Some((8, Some(_)))), at == line.len() - 1);
        }

        assert!(reports.read(endless).is_none() && reports.pipes.is_empty());
    }

    #[test]
    fn a_pipe_that_is_closed_without_a_report_says_so_once() {
        let mut reports = reports();
        let (fd, write) = open(&mut reports, 7);
        let (_, _held) = open(&mut reports, 8);
        drop(write);
        await_hang_up(fd);

        assert!(matches!(reports.read(fd), Some((7, None))));
        assert!(reports.last_words(7).is_none());
        assert!(reports.last_words(8).is_none() && reports.pipes.is_empty(), "it is gone anyway");
    }

    #[test]
    fn epoll_says_whose_report_there_is_and_nothing_of_a_pipe_that_a_fork_still_has() {
        let mut reports = reports();
        let (fd, mut write) = open(&mut reports, 7);
        let inherited = reports.pipes[&fd].read.try_clone().unwrap();
        let epoll = Arc::clone(&reports.epoll);
        let mut events = [EpollEvent::default(); 2];
        let mut woken = || {
            let count = epoll.wait(0, &mut events).unwrap();
            events[..count].iter().map(EpollEvent::data).collect::<Vec<_>>()
        };

        write.write_all(&Report::Ready { ms: ForkMs::default(), ipv6: false }.line()).unwrap();
        assert_eq!(woken(), [TAG | u64::from(fd.unsigned_abs())]);
        assert!(reports.read(fd).is_some());
        drop(write);

        assert!(woken().is_empty());
        drop(inherited);
    }

    #[test]
    fn a_process_has_no_pipe_of_another_and_none_of_its_own_once_it_has_reported() {
        let mut reports = reports();
        let (others, _others_end) = open(&mut reports, 7);
        let opened = reports.open().unwrap();
        let ends = [others, opened.read.as_raw_fd(), opened.write.as_raw_fd()];
        let (gate, go) = descriptors::pipe().unwrap();
        let line = Report::Ready { ms: ForkMs::default(), ipv6: false }.line();
        // SAFETY: F_GETFD takes no pointers.
        let is_open = |fd: &RawFd| unsafe { libc::fcntl(*fd, libc::F_GETFD) } >= 0;

        let Forked::Parent(pid) = process::fork_into(None).unwrap() else {
            // Nothing here may allocate: another thread may have held the allocator.
            let closed = reports.close_in_child().is_ok();
            let reporter = opened.reporter();
            let while_it_has_not = ends.each_ref().map(is_open);
            let told = (&reporter.0).write_all(&line).is_ok();
            drop(reporter);
            let right = closed && told && while_it_has_not == [false, false, true];
            let gone = !ends.iter().any(is_open);
            drop(go);
            drop((&gate).read(&mut [0]));
            process::exit_now(i32::from(!right || !gone));
        };
        let fd = opened.read.as_raw_fd();
        reports.expect(pid, opened);

        await_hang_up(fd);
        drop(go);

        let mut status = -1;
        // SAFETY: `status` outlives the call; `pid` is our child.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0);
    }
}
