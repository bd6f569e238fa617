//! One client, and the operation that it waits for.

use std::time::Instant;

use forkd_proto::Kind;
use forkd_proto::guest::ErrorBody;
use nix::unistd::Pid;
use serde::Serialize;

use crate::connect::Connect;
use crate::exec::Exec;
use crate::fork::PostFork;
use crate::quiesce::Rehearsal;
use crate::stream::Stream;
use crate::warm::Warm;
use crate::watch::Watch;

/// A connection.
#[derive(Debug)]
pub struct Conn {
    /// Never used twice.
    pub id: u32,
    /// Its frames.
    pub stream: Stream,
    /// What it waits for.
    pub op: Op,
    /// Whether the poll loop watches for room in its socket.
    pub blocked: bool,
    /// Whether the peer has gone.
    pub gone: bool,
    /// What it watches for, beside its operation.
    pub watch: Option<Watch>,
}

/// An operation under way.
#[derive(Debug)]
pub enum Op {
    /// None.
    Idle,
    /// A process runs.
    Exec(Box<Exec>),
    /// A program is connected, or will be.
    Connect(Box<Connect>),
    /// The runtime evaluates, or will.
    Eval,
    /// The guest is being warmed up.
    Warm(Box<Warm>),
    /// A fork becomes somebody of its own.
    PostFork(Box<PostFork>),
    /// The answer to `watched` is due then.
    Watched(Instant),
    /// The guest has been made small, and rehearses.
    Rehearsal(Rehearsal),
    /// Everything has been said; the connection closes when it has left.
    Closing,
    /// The answer to `shutdown` leaves; then the machine goes.
    Shutdown,
}

impl Op {
    /// The process whose end it waits for.
    pub fn process(&self) -> Option<Pid> {
        match self {
            Self::Exec(exec) => Some(exec.pid()),
            Self::Warm(warm) => warm.process(),
            Self::PostFork(fork) => fork.process(),
            Self::Rehearsal(rehearsal) => Some(rehearsal.pid()),
            Self::Idle
            | Self::Connect(_)
            | Self::Eval
            | Self::Watched(_)
            | Self::Closing
            | Self::Shutdown => None,
        }
    }
}

impl Conn {
    /// A connection that waits for nothing.
    pub fn new(id: u32, stream: Stream) -> Self {
        Self { id, stream, op: Op::Idle, blocked: false, gone: false, watch: None }
    }

    /// When to drive it even if nothing happens.
    pub fn wake_at(&self) -> Option<Instant> {
        let operation = match &self.op {
            Op::Exec(exec) => exec.wake_at(self.blocked),
            Op::Connect(connect) => connect.wake_at(),
            Op::Warm(warm) => Some(warm.wake_at()),
            Op::PostFork(fork) => Some(fork.deadline()),
            Op::Rehearsal(rehearsal) => Some(rehearsal.deadline()),
            Op::Watched(due) => Some(*due),
            Op::Idle | Op::Eval | Op::Closing | Op::Shutdown => None,
        };
        operation.into_iter().chain(self.watch.and_then(|watch| watch.wake_at())).min()
    }

    /// Whether frames from the client are of use now.  Those of the next operation wait in the
    /// kernel until this one is over.
    pub fn wants_frames(&self) -> bool {
        match &self.op {
            Op::Idle => true,
            Op::Exec(exec) => exec.wants_input(),
            Op::Connect(connect) => connect.wants_input(),
            _ => false,
        }
    }

    /// Ends the operation with a REPLY.
    pub fn reply(&mut self, body: &impl Serialize) {
        match serde_json::to_vec(body) {
            Ok(json) => self.reply_raw(&json),
            Err(error) => crate::log::line(&format!("cannot write a reply: {error}")),
        }
    }

    /// Ends the operation with a REPLY that is JSON already.
    pub fn reply_raw(&mut self, json: &[u8]) {
        self.op = Op::Idle;
        self.stream.queue(Kind::Reply, json);
    }

    /// Ends the operation with an ERROR.
    pub fn fail(&mut self, body: &ErrorBody) {
        self.op = Op::Idle;
        self.stream.queue(Kind::Error, &serde_json::to_vec(body).unwrap_or_default());
    }

    /// Sends an EVENT.
    pub fn event(&mut self, body: &forkd_proto::guest::Event) {
        self.stream.queue(Kind::Event, &serde_json::to_vec(body).unwrap_or_default());
    }
}
