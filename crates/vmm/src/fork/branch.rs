//! Branching: a running machine forks a seed of itself, and goes on.
//!
//! ```text
//!   source    pause ─ state ─ freeze the disk ─ fork(2) ─ resume ─────────────► runs on
//!                                                  └► seed: lets go of everything that is the
//!                                                     source's, serves `fork` and `save`
//! ```
//!
//! The kernel's copy-on-write is the snapshot: memory, vCPUs, devices and disk are
//! those of one instant, at which no vCPU ran and no device acted.  The seed is a
//! zygote like any other from then on; [`SeedLife`] makes it one.
//!
//! A process with several threads forks here.  The vCPU threads are parked, hold
//! nothing of the allocator ([`crate::machine::vcpu::Vcpus::each`]), and do not exist in the seed.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::fork::plan::ForkPlan;
use crate::machine::{Frozen, Machine};
use crate::memory::ram::Ram;
use crate::sys::process::{self, Forked};
use crate::sys::{descriptors, output};

/// Which process a branch came back in.
#[derive(Debug)]
pub enum Branched {
    /// The source.
    Source {
        /// The seed's process id.
        pid: i32,
        /// For how long the guest was paused, in milliseconds; 0 if it was before.
        pause_ms: f64,
    },
    /// The seed, which has nothing more to do with the machine.
    Seed(Box<Seed>),
}

/// What a seed keeps of the machine that it was.
#[derive(Debug)]
pub struct Seed {
    /// Registers, devices and disk at the instant.
    pub frozen: Box<Frozen>,
    /// Memory, which is this process's now.
    pub ram: Ram,
    /// Where the machine was forked; `None` if it booted.
    pub origin: Option<Arc<ForkPlan>>,
}

/// The rest of a seed's process: it serves in a folder, and says through a file when it does.
pub type SeedLife = fn(Seed, &Path, &File) -> !;

impl Machine {
    /// Forks a seed, into `cgroup` or where this process is; `origin` is where the machine itself
    /// was forked.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`] or [`Error::Io`] naming what the host refused, [`Error::State`] if a vCPU
    /// does not stop.  The guest goes on in any case, unless it was paused before.
    pub fn branch(
        &mut self,
        cgroup: Option<&Path>,
        origin: Option<&Arc<ForkPlan>>,
    ) -> Result<Branched, Error> {
        let cgroup = cgroup.map(process::open_cgroup).transpose()?;
        let (gate, opener) = descriptors::pipe()?;
        let running = self.paused_since.is_none();
        let urgent = running.then(|| self.vcpus.hurry()).flatten();
        let instant = self.pause_and_save().and_then(|vcpus| self.instant(vcpus));
        let forked =
            instant.and_then(|instant| Ok((process::fork_into(cgroup.as_ref())?, instant)));
        let left = match forked {
            Ok((Forked::Child, frozen)) => {
                // On a processor that they share it would come first, and the guest wait for it.
                drop(opener);
                drop((&gate).read(&mut [0]));
                return Ok(self.seed(frozen, origin.cloned()));
            }
            Ok((Forked::Parent(pid), instant)) => Ok((pid, instant)),
            Err(error) => Err(error),
        };
        let resumed = if running { self.resume().map(drop) } else { Ok(()) };
        drop(urgent);
        drop(opener);
        resumed?;
        // Nothing is freed before the guest runs again: what that writes to is copied first.
        let (pid, _) = left?;
        self.tidy_disk();
        let still = if running { self.vcpus.stood_still() } else { Duration::ZERO };
        Ok(Branched::Source { pid, pause_ms: still.as_secs_f64() * 1e3 })
    }

    /// In the new process.
    fn seed(&self, frozen: Box<Frozen>, origin: Option<Arc<ForkPlan>>) -> Branched {
        Branched::Seed(Box::new(Seed { frozen, ram: self.ram.clone(), origin }))
    }

    /// Keeps the number of the disk's layers down, and what they store, while the guest runs.
    pub fn tidy_disk(&self) {
        let Some(merge) = self.bus.block().and_then(|block| block.device().disk().crowded()) else {
            return;
        };
        match merge.make() {
            Ok(merged) => {
                if let Some(mut block) = self.bus.block() {
                    block.device_mut().disk_mut().adopt(merged);
                }
            }
            // There is one layer more; the next time tries again.
            Err(error) => output::log(format_args!("machine: {error}")),
        }
    }
}
