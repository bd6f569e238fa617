//! What a zygote has done for it by a process of its own, so that it goes on serving: writing out
//! what it holds, and becoming the zygote of a delta.
//!
//! Such a process says what came of it through its pipe ([`super::reports`]).  A
//! writer ends with its zygote; the zygote of a delta lives on.

use forkd_proto::control::{Derive, DeriveReply, ErrorBody, ErrorCode, SaveLink};
use forkd_proto::frame::Kind;
use serde_json::json;

use super::Zygote;
use super::report::Report;
use super::reports::{Reporter, Said};
use crate::control::socket::Token;
use crate::error::Error;
use crate::jail::filter::Role;
use crate::jail::{self, filter, rights};
use crate::machine::save::{self, Still};
use crate::sys::handed::{self, Keep};
use crate::sys::process::{self, Forked};

/// What is to be done.
#[derive(Debug)]
pub(super) enum Task {
    Save(SaveLink),
    Derive(Derive),
}

impl Task {
    /// Takes back what a process that ended half-way may have left.
    pub(super) fn undo(&self) {
        match self {
            Self::Save(to) => save::remove(&to.directory),
            // Its socket; it may not have come so far.
            Self::Derive(to) => drop(std::fs::remove_file(to.directory.join("zygote.sock"))),
        }
    }
}

/// A process that works, and who waits for it.
#[derive(Debug)]
pub(super) struct Helper {
    token: Token,
    pub(super) task: Task,
}

impl Zygote {
    /// Starts a process for `task`; the answer comes with its report.
    pub(super) fn help(&mut self, token: Token, task: Task) {
        let checked = match &task {
            // Before anything is forked, and so that `undo` removes only what is ours.
            Task::Save(to) => save::check_empty(&to.directory),
            Task::Derive(_) => Ok(()),
        };
        let zygote = std::process::id();
        let forked = checked.and_then(|()| {
            let pipe = self.reports.open()?;
            Ok((process::fork_into(None)?, pipe))
        });
        match forked {
            Ok((Forked::Parent(pid), pipe)) => {
                self.reports.expect(pid, pipe);
                self.helpers.insert(pid, Helper { token, task });
            }
            Ok((Forked::Child, pipe)) => match task {
                Task::Save(to) => self.write_out(&to, zygote, pipe.reporter()),
                Task::Derive(to) => self.become_derived(&to, pipe.reporter()),
            },
            Err(error) => {
                self.control.answer::<()>(token, Err(error));
            }
        }
    }

    /// In a writer: its whole life.
    fn write_out(&self, to: &SaveLink, zygote: u32, reporter: Reporter) -> ! {
        let plan = &self.plan;
        let still = Still {
            state: plan.state(),
            ram: plan.ram(),
            lineage: plan.lineage(),
            lower: plan.lower(),
        };
        let saved = process::die_with_parent(zygote)
            .and_then(|()| self.close_inherited())
            .and_then(|()| jail::show_ourselves())
            .and_then(|()| filter::put_on(Role::Writer))
            .and_then(|()| save::save(still, to));
        let failed = saved.is_err();
        drop(reporter.say(of(saved.map(|reply| json!(reply)))));
        process::exit_now(i32::from(failed))
    }

    /// In the zygote of a delta: its whole life.
    fn become_derived(&self, to: &Derive, reporter: Reporter) -> ! {
        let derived = self.derive(to);
        let pid = std::process::id();
        let (report, zygote) = match derived {
            Ok(zygote) => (Ok(json!(DeriveReply { pid })), Some(zygote)),
            Err(error) => (Err(error), None),
        };
        let told = reporter.say(of(report)).is_ok();
        let ended = match zygote {
            Some(zygote) if told => zygote.run(),
            _ => process::exit_now(1),
        };
        process::exit_now(i32::from(ended.is_err()))
    }

    fn derive(&self, to: &Derive) -> Result<Self, Error> {
        self.close_inherited()?;
        process::new_session()?;
        process::unblock_child_signals();
        // Before it reads the delta.
        if let Some(users) = &to.users {
            jail::users::enter(&users.name)?;
            rights::become_uid(users.uid)?;
        }
        let plan = self.plan.derive(to)?;
        handed::keep_only(Keep::Zygote);
        Self::serve(plan, &to.directory)
    }

    /// A process has said what came of its task.
    pub(super) fn on_help(&mut self, pid: i32, report: Said) {
        let Some(helper) = self.helpers.remove(&pid) else { return };
        match report {
            Some(Report::Done { reply }) => {
                let heard = self.control.answer(helper.token, Ok(reply));
                if !heard && matches!(helper.task, Task::Derive(_)) {
                    process::kill(pid);
                    helper.task.undo();
                }
            }
            Some(Report::Refused { error }) => {
                self.control.send(helper.token, Kind::Error, &error);
            }
            // Its end says more.
            _ => {
                process::kill(pid);
                self.helpers.insert(pid, helper);
            }
        }
    }

    /// A process has ended without a word.
    pub(super) fn help_failed(&mut self, helper: &Helper, status: i32) {
        helper.task.undo();
        let message = format!("the process that worked on it ended (status {status:#x})");
        let body = ErrorBody { code: ErrorCode::Io, message, field: None };
        self.control.send(helper.token, Kind::Error, &body);
    }
}

fn of(result: Result<serde_json::Value, Error>) -> Report {
    match result {
        Ok(reply) => Report::Done { reply },
        Err(error) => Report::Refused { error: error.body() },
    }
}
