//! A terminal that the agent holds the other end of.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forkd_proto::guest::WindowSize;
use nix::libc::{O_NOCTTY, O_NONBLOCK};
use nix::pty::openpty;
use nix::unistd::ttyname;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, tcgetattr, tcsetattr};

use crate::child::back_off;
use crate::spawn::set_nonblocking;

/// Waits between two ends of the input that are typed.
const END_AGAIN_FIRST: Duration = Duration::from_millis(50);
const END_AGAIN_MOST: Duration = Duration::from_secs(5);

/// Both ends of a new terminal.
///
/// # Errors
///
/// Too many descriptors or terminals are open.
pub fn open(size: WindowSize) -> io::Result<(File, OwnedFd, End)> {
    let pty = openpty(None, None)?;
    for fd in [&pty.master, &pty.slave] {
        nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    }
    resize(&pty.master, size)?;
    set_nonblocking(&pty.master)?;
    let end =
        End { program_side: ttyname(&pty.slave).ok(), attempts: 0, due: None, owes_key: false };
    Ok((File::from(pty.master), pty.slave, end))
}

/// Says to the terminal's programs how large it is.
///
/// # Errors
///
/// It is no terminal.
pub fn resize(terminal: &impl AsFd, size: WindowSize) -> io::Result<()> {
    let size = rustix::termios::Winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}

/// The end of a terminal's input, once there is no more to type.
///
/// A pipe that has ended says so to everybody who reads it.  A terminal has a key for that, which
/// one read takes: in the middle of a line it only ends that part.  So it is typed again and again,
/// ever less often, for whoever reads next.  In raw mode it is a byte as any other: once all was
/// read, reads no longer wait for input, and the key is typed once, for the read that waits already
/// and for programs that know it.
#[derive(Debug)]
pub struct End {
    /// The name of the programs' side.
    program_side: Option<PathBuf>,
    attempts: u32,
    due: Option<Instant>,
    /// Reads no longer wait, and the key is still to be typed.
    owes_key: bool,
}

impl End {
    /// All input was typed.
    pub fn begin(&mut self, now: Instant) {
        self.due = Some(now);
    }

    /// When it is to be typed.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Types it, if it is due.
    pub fn type_to(&mut self, terminal: &File, now: Instant) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        self.due = Some(now + back_off(self.attempts, END_AGAIN_FIRST, END_AGAIN_MOST));
        self.attempts += 1;
        if let Err(error) = self.try_to_type(terminal)
            && error.kind() != io::ErrorKind::WouldBlock
        {
            crate::log::line(&format!("cannot end the input of a terminal: {error}"));
            self.due = None;
        }
    }

    fn try_to_type(&mut self, mut terminal: &File) -> io::Result<()> {
        let mut modes = tcgetattr(terminal)?;
        let key = modes.special_codes[SpecialCodeIndex::VEOF];
        if modes.local_modes.contains(LocalModes::ICANON) {
            return terminal.write_all(&[key]);
        }
        if modes.special_codes[SpecialCodeIndex::VMIN] > 0 {
            // What is on its way to the programs cannot be seen in the first moment.
            if self.attempts == 1 || self.has_unread() {
                return Ok(());
            }
            // Before the key: whoever has read the key and reads on must find the end.
            modes.special_codes[SpecialCodeIndex::VMIN] = 0;
            modes.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(terminal, OptionalActions::Now, &modes)?;
            self.owes_key = true;
        }
        if self.owes_key {
            terminal.write_all(&[key])?;
            self.owes_key = false;
        }
        Ok(())
    }

    /// Whether programs have yet to read some input.
    fn has_unread(&self) -> bool {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(O_NOCTTY | O_NONBLOCK);
        let opened = self.program_side.as_ref().map(|path| options.open(path));
        opened.is_some_and(|side| side.is_ok_and(|side| crate::exec::unread_bytes(&side) > 0))
    }
}
