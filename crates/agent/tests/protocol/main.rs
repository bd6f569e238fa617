//! The agent, spoken to over the real protocol on a Unix socket, without a guest around it.

#![expect(clippy::expect_used, reason = "a helper of a test that panics is a test that fails")]

mod archive;
mod broken_runtime;
mod connect;
mod crowd;
mod exec;
mod files;
mod hung_mount;
mod runtime;
mod support;
mod terminal;
mod watch;
