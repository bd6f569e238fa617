//! The shell as a warm runtime: `forkd-agent shell FD`, between the agent and `bash` or `sh`.
//!
//! The shell is an interactive one without a terminal or prompts, because only such a shell lives
//! on after SIGINT, a syntax error, or an unset variable under `set -u`.  For each cell it reads
//! two lines: one sources the cell's text from a file in memory, and one reports the exit status,
//! also after the first was given up half-way.  Shells other than bash read ahead, so each line is
//! a packet to them.
//!
//! All are in one process group, which the agent kills as a whole; SIGINT is passed on to it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::process::{Child, Command, ExitCode, Stdio};

use forkd_proto::Kind;
use forkd_proto::guest::{ErrorBody, ErrorCode, EvalError, EvalReply};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::{Pid, pipe};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use serde::Deserialize;
use serde_json::json;

use crate::failure::failure;
use crate::stream::Stream;

/// Bytes read at once.
const SCRATCH: usize = 64 << 10;

/// How long the shell has to read lines again after a cell was interrupted, in ms, before SIGINT is
/// sent once more: bash at times gives up what it has read ahead, or does not wake from its read.
const SETTLING_MS: u8 = 100;

/// Undoes what an interactive shell does for a person.
const SET_UP: &str = "unset PROMPT_COMMAND MAIL MAILPATH TMOUT ENV HISTFILE; set +m";

/// The same, for what only bash has.
const SET_UP_BASH: &str = "; set +o history +H";

/// Serves the descriptor of this number until the agent goes or the shell ends.
pub fn run(fd: &str) -> ExitCode {
    let served = fd.parse().map_err(io::Error::other).and_then(Shell::start).and_then(Shell::serve);
    served.unwrap_or_else(|error| {
        eprintln!("forkd-agent shell: {error}");
        ExitCode::FAILURE
    })
}

#[derive(Debug)]
struct Shell {
    agent: Stream,
    signals: SignalFd,
    child: Child,
    lines: File,
    code: File,
    status: File,
    /// What the shell calls the last two.
    numbers: (RawFd, RawFd),
    is_bash: bool,
    turn: u64,
    /// Of what the shell says, what is no whole line yet.
    said: String,
    /// Frames that came while a cell ran.
    early: VecDeque<(Kind, Vec<u8>)>,
}

/// How a cell ended.
struct Cell {
    status: i32,
    interrupted: bool,
    /// The agent had announced it.
    timed_out: bool,
}

enum Step {
    Ended(Cell),
    /// The shell has ended, and so do we.
    ShellGone(ExitCode),
}

/// What ended a wait.
enum Woken {
    /// Somebody else sent SIGINT.
    Signal,
    /// The shell has said something, or has ended.
    Shell,
    /// The time was over.
    Late,
}

/// What the shell has said of the turn that it was asked about.
enum Report {
    Status(i32),
    NotYet,
    /// The shell has ended.
    Gone,
}

#[derive(Debug, Default, Deserialize)]
struct Request {
    op: String,
    #[serde(default)]
    code: Option<String>,
    #[serde(default)]
    seed: String,
}

impl Shell {
    fn start(fd: RawFd) -> io::Result<Self> {
        let own = pidfd_open(getpid(), PidfdFlags::empty())?;
        let socket = pidfd_getfd(&own, fd, PidfdGetfdFlags::empty())?;
        nix::unistd::close(fd)?;
        drop(own);
        let code = File::from(memfd_create("cell", MFdFlags::empty())?);
        let (status, report) = pipe()?;
        fcntl(&status, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        let numbers = (code.as_raw_fd(), report.as_raw_fd());
        let search = std::env::var_os("PATH").unwrap_or_default();
        let is_bash = std::env::split_paths(&search).any(|folder| folder.join("bash").is_file());
        let (lines, theirs) = line_channel(is_bash)?;
        let mut command = Command::new(if is_bash { "bash" } else { "sh" });
        if is_bash {
            command.args(["--noprofile", "--norc", "--noediting"]);
        }
        command.arg("-i").env("PS1", "").env("PS2", "").env_remove("ENV").stdin(theirs);
        let child = command.spawn()?;
        drop((command, report));
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGINT);
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let (agent, status) = (Stream::new(socket), File::from(status));
        let (turn, said, early) = (0, String::new(), VecDeque::new());
        Ok(Self { agent, signals, child, lines, code, status, numbers, is_bash, turn, said, early })
    }

    fn serve(mut self) -> io::Result<ExitCode> {
        let set_up = if self.is_bash { [SET_UP, SET_UP_BASH].concat() } else { SET_UP.to_owned() };
        if let Step::ShellGone(code) = self.evaluate(set_up.as_bytes())? {
            return Ok(code);
        }
        let mut scratch = vec![0; SCRATCH];
        loop {
            let frame = match self.early.pop_front() {
                Some(frame) => Some(frame),
                None => self.agent.wait_frame(&mut scratch)?,
            };
            let Some((kind, payload)) = frame else { return Ok(ExitCode::SUCCESS) };
            let gone = match kind {
                Kind::Data => match self.evaluate(&payload)? {
                    Step::Ended(cell) => self.reply(Kind::Reply, &described(&cell))?,
                    Step::ShellGone(code) => Some(code),
                },
                Kind::Request => self.answer(&payload)?,
                // An interruption of what has ended is nobody's.
                _ => None,
            };
            if let Some(code) = gone {
                return Ok(code);
            }
        }
    }

    /// Answers a request; the exit status, if the shell has ended over it.
    fn answer(&mut self, payload: &[u8]) -> io::Result<Option<ExitCode>> {
        let request: Request = serde_json::from_slice(payload)?;
        let code = request.code.unwrap_or_default();
        let (code, refusal, done) = match request.op.as_str() {
            "hello" => {
                let language = if self.is_bash { "shell (bash)" } else { "shell (sh)" };
                let said = json!({"contract": 1, "language": language});
                return self.reply(Kind::Reply, &said);
            }
            "freeze" => return self.reply(Kind::Reply, &json!({})),
            "warm" => (code, ErrorCode::WarmUpFailed, json!({})),
            "post_fork" => {
                let seed = request.seed.get(..7).unwrap_or("0");
                let hook = if code.is_empty() { "none" } else { "ran" };
                let mut reseeded = Vec::new();
                let mut all = code;
                if self.is_bash {
                    reseeded.push("bash.RANDOM");
                    all = format!("RANDOM=$((16#{seed}))\n{all}");
                }
                let done = json!({"reseeded": reseeded, "hook": hook});
                (all, ErrorCode::HookFailed, done)
            }
            other => {
                let message = format!("this runtime does not know {other}");
                return self.reply(Kind::Error, &failure(ErrorCode::Protocol, message));
            }
        };
        match self.evaluate(code.as_bytes())? {
            Step::ShellGone(code) => Ok(Some(code)),
            Step::Ended(cell) => match described(&cell).error {
                None => self.reply(Kind::Reply, &done),
                Some(error) => {
                    let body: ErrorBody = failure(refusal, error.traceback);
                    self.reply(Kind::Error, &body)
                }
            },
        }
    }

    fn reply(&mut self, kind: Kind, body: &impl serde::Serialize) -> io::Result<Option<ExitCode>> {
        self.agent.wait_send(kind, &serde_json::to_vec(body)?).map(|()| None)
    }

    fn evaluate(&mut self, code: &[u8]) -> io::Result<Step> {
        self.code.set_len(0)?;
        self.code.rewind()?;
        self.code.write_all(code)?;
        self.turn += 1;
        // What came until now was for nobody.
        while self.signals.read_signal()?.is_some() {}
        let (cell, report) = self.numbers;
        let source = format!(". /proc/self/fd/{cell} </dev/null {report}>&-\n");
        if self.lines.write_all(source.as_bytes()).is_err() || self.ask_status().is_err() {
            return self.ended();
        }
        let (mut interrupted, mut timed_out) = (false, false);
        let status = loop {
            if let Woken::Signal = self.wait(PollTimeout::NONE)? {
                interrupted = true;
                timed_out |= self.take_control()?;
                // The line that asked for it may have been given up with the cell's.
                if !self.interrupt()? {
                    return self.ended();
                }
                continue;
            }
            match self.read_report()? {
                Report::Status(status) => break status,
                Report::NotYet => {}
                Report::Gone => return self.ended(),
            }
        };
        if interrupted && !self.settle()? {
            return self.ended();
        }
        Ok(Step::Ended(Cell { status, interrupted, timed_out }))
    }

    /// Interrupts the shell and what it runs, and asks it again; false if it has ended.
    fn interrupt(&mut self) -> io::Result<bool> {
        kill(Pid::from_raw(0), Signal::SIGINT)?;
        Ok(self.ask_status().is_ok())
    }

    /// Waits until the shell reads lines again after an interruption; false if it has ended.
    fn settle(&mut self) -> io::Result<bool> {
        self.turn += 1;
        let mut asked = self.ask_status().is_ok();
        while asked {
            match self.wait(PollTimeout::from(SETTLING_MS))? {
                Woken::Signal => {}
                Woken::Late => asked = self.interrupt()?,
                Woken::Shell => match self.read_report()? {
                    Report::Status(_) => return Ok(true),
                    Report::NotYet => {}
                    Report::Gone => return Ok(false),
                },
            }
        }
        Ok(false)
    }

    fn read_report(&mut self) -> io::Result<Report> {
        let mut chunk = [0; 256];
        let count = self.status.read(&mut chunk)?;
        if count == 0 {
            return Ok(Report::Gone);
        }
        self.said.push_str(&String::from_utf8_lossy(chunk.get(..count).unwrap_or_default()));
        let mut report = Report::NotYet;
        while let Some((line, rest)) = self.said.split_once('\n') {
            let mut words = line.split(' ').map(str::parse::<u64>);
            let (status, turn) = (words.next(), words.next());
            if let (Some(Ok(status)), Some(Ok(turn))) = (status, turn)
                && turn == self.turn
            {
                report = Report::Status(i32::try_from(status).unwrap_or(i32::MAX));
            }
            self.said = rest.to_owned();
        }
        Ok(report)
    }

    fn ask_status(&mut self) -> io::Result<()> {
        let line = format!("command printf '%d %d\\n' \"$?\" {} >&{}\n", self.turn, self.numbers.1);
        self.lines.write_all(line.as_bytes())
    }

    /// Waits until the shell says something, or somebody else sends SIGINT.
    fn wait(&mut self, patience: PollTimeout) -> io::Result<Woken> {
        loop {
            let mut watched = [
                PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.status.as_fd(), PollFlags::POLLIN),
            ];
            if poll(&mut watched, patience)? == 0 {
                return Ok(Woken::Late);
            }
            let own = std::process::id();
            while let Some(signal) = self.signals.read_signal()? {
                // One of our own comes back, because we are in the group that it goes to.
                if signal.ssi_pid != own {
                    return Ok(Woken::Signal);
                }
            }
            let [_, status] = watched;
            if status.any() == Some(true) {
                return Ok(Woken::Shell);
            }
        }
    }

    /// Takes what the agent has sent meanwhile; true if it wants the cell to end.
    fn take_control(&mut self) -> io::Result<bool> {
        let (mut scratch, mut found) = (vec![0; SCRATCH], false);
        self.agent.readable = true;
        while self.agent.fill(&mut scratch)? {}
        while let Some((kind, payload)) = self.agent.next_frame().map_err(io::Error::other)? {
            if kind == Kind::Control {
                found = true;
            } else {
                self.early.push_back((kind, payload));
            }
        }
        Ok(found)
    }

    fn ended(&mut self) -> io::Result<Step> {
        let ended = self.child.wait()?;
        let code = ended.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        Ok(Step::ShellGone(ExitCode::from(code)))
    }
}

/// Both ends of what the shell reads its lines from.
fn line_channel(is_bash: bool) -> io::Result<(File, Stdio)> {
    let kind = if is_bash { SockType::Stream } else { SockType::SeqPacket };
    let (ours, theirs): (OwnedFd, OwnedFd) =
        socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC)?;
    Ok((File::from(ours), Stdio::from(theirs)))
}

fn described(cell: &Cell) -> EvalReply {
    let error = (cell.interrupted || cell.status != 0).then(|| {
        let (kind, message) = if cell.interrupted {
            ("Interrupted", "the code was interrupted".to_owned())
        } else {
            ("ExitStatus", format!("the last command ended with status {}", cell.status))
        };
        let traceback = format!("{kind}: {message}");
        EvalError { kind: kind.to_owned(), message, traceback }
    });
    EvalReply {
        has_value: false,
        repr: None,
        value: serde_json::Value::Null,
        value_is_json: false,
        error,
        timed_out: cell.interrupted && cell.timed_out,
        results: Vec::new(),
        more_results: None,
    }
}
