//! An agent on a Unix socket, and a client of it, for tests that speak the protocol for real.

use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forkd_proto::{Frame, Kind, ReadError, read_frame, write_frame};
use nix::errno::Errno;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::Value;

/// No answer takes longer than this, unless something is broken.
const DEADLINE: Duration = Duration::from_secs(30);

static AGENTS: AtomicU32 = AtomicU32::new(0);

/// A running agent; killed, and its folder removed, when the test ends.
#[derive(Debug)]
pub struct Agent {
    process: Child,
    folder: PathBuf,
}

impl Agent {
    /// Starts an agent and waits until it listens.
    pub fn start() -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_forkd-agent")))
    }

    /// As [`Self::start`], an agent that may have so many descriptors open.
    pub fn start_with_descriptors(most: u32) -> Self {
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {most} && exec \"$0\" \"$@\"");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_forkd-agent")]);
        Self::start_by(command)
    }

    fn start_by(mut command: Command) -> Self {
        let number = AGENTS.fetch_add(1, Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("forkd-agent-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut process = command
            .args(["serve", "--unix"])
            .arg(folder.join("agent.sock"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("the agent starts");
        let mut line = String::new();
        let stdout = process.stdout.as_mut().expect("its output");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        assert_eq!(line, "listening\n");
        Self { process, folder }
    }

    /// A new connection.
    pub fn connect(&self) -> Client {
        let stream = UnixStream::connect(self.folder.join("agent.sock")).expect("a connection");
        stream.set_read_timeout(Some(DEADLINE)).expect("a deadline");
        stream.set_write_timeout(Some(DEADLINE)).expect("a deadline");
        Client { stream }
    }

    /// A path that only this test uses, and that exists as long as the agent does.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The agent's process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Whether the agent used no processor during the next `span`; it then waits for an event.
    pub fn slept_for(&self, span: Duration) -> bool {
        let used = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/schedstat", self.pid()));
            stat.ok().and_then(|text| text.split(' ').nth(2)?.trim().parse::<u64>().ok())
        };
        let before = used();
        let until = std::time::Instant::now() + span;
        while std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        before.is_some() && used() == before
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // What it runs would outlive it here: in a guest everything ends with process 1.
        let pid = self.process.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        self.process.kill().expect("the agent can be killed");
        self.process.wait().expect("the agent ends");
        for child in
            children.unwrap_or_default().split_whitespace().filter_map(|id| id.parse().ok())
        {
            // Its whole group, if it leads one.
            let killed = signal::killpg(Pid::from_raw(child), Signal::SIGKILL);
            assert!(matches!(killed, Ok(()) | Err(Errno::ESRCH)), "{killed:?}");
        }
        std::fs::remove_dir_all(&self.folder).expect("its folder can be removed");
    }
}

/// One connection to an agent.
#[derive(Debug)]
pub struct Client {
    /// For tests that break the rules.
    pub stream: UnixStream,
}

/// Everything that an operation has answered.
#[derive(Debug, Default)]
pub struct Answer {
    /// STDOUT, all of it.
    pub stdout: Vec<u8>,
    /// STDERR, all of it.
    pub stderr: Vec<u8>,
    /// DATA, all of it.
    pub data: Vec<u8>,
    /// EVENTs, in their order.
    pub events: Vec<Value>,
    /// The REPLY, or null.
    pub reply: Value,
    /// The ERROR, or null.
    pub error: Value,
}

impl Answer {
    /// The error's code, or what came instead of an error.
    pub fn code(&self) -> &str {
        self.error["code"].as_str().unwrap_or("no error")
    }

    /// STDOUT as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl Client {
    /// Sends one JSON frame.
    pub fn send(&mut self, kind: Kind, body: &Value) {
        self.send_bytes(kind, body.to_string().as_bytes());
    }

    /// Sends one frame.
    pub fn send_bytes(&mut self, kind: Kind, payload: &[u8]) {
        write_frame(&mut self.stream, kind, payload).expect("the agent takes a frame");
    }

    /// The next frame; `None` if the agent has closed the connection.
    pub fn next(&mut self) -> Option<Frame> {
        match read_frame(&mut self.stream) {
            Ok(frame) => frame,
            Err(ReadError::Io(error)) if error.kind() == ErrorKind::ConnectionReset => None,
            Err(error) => panic!("no frame within the deadline: {error}"),
        }
    }

    /// Everything up to the end of the operation.
    pub fn finish(&mut self) -> Answer {
        let mut answer = Answer::default();
        loop {
            let frame = self.next().expect("the operation ends with an answer");
            let json = || serde_json::from_slice(&frame.payload).expect("JSON");
            match frame.kind {
                Kind::Stdout => answer.stdout.extend(frame.payload),
                Kind::Stderr => answer.stderr.extend(frame.payload),
                Kind::Data => answer.data.extend(frame.payload),
                Kind::DataEof => {}
                Kind::Event => answer.events.push(json()),
                Kind::Reply => {
                    answer.reply = json();
                    return answer;
                }
                Kind::Error => {
                    answer.error = json();
                    return answer;
                }
                kind => panic!("{kind:?} from the agent"),
            }
        }
    }

    /// Sends a request and takes its whole answer.
    pub fn ask(&mut self, request: &Value) -> Answer {
        self.send(Kind::Request, request);
        self.finish()
    }

    /// Whether a request is answered; it may find the connection closed already.
    pub fn served(&mut self, request: &Value) -> bool {
        let sent = write_frame(&mut self.stream, Kind::Request, request.to_string().as_bytes());
        sent.is_ok() && self.next().is_some_and(|frame| frame.kind == Kind::Reply)
    }

    /// Runs a shell script.
    pub fn sh(&mut self, script: &str) -> Answer {
        self.ask(&serde_json::json!({"op": "exec", "args": ["sh", "-c", script]}))
    }
}

/// Waits until `done` holds, which an event elsewhere will make true.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let limit = std::time::Instant::now() + DEADLINE;
    while !done() {
        assert!(std::time::Instant::now() < limit, "not within the deadline: {what}");
        std::thread::yield_now();
    }
}

/// Whether a process is alive (a zombie is not).
pub fn is_alive(pid: u64) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    stat.is_ok_and(|text| !text.contains(") Z "))
}
