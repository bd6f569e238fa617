//! Going back to the fork point in place.
//!
//! Everything that a guest can change is put back to what the fork began with:
//! private pages and the disk's top are dropped, registers and devices reloaded.
//! The process stays with its VM, sockets, tap and cgroup, and nothing is left that
//! could grow.  What a sibling of a live branch began with is in its seed
//! ([`crate::memory::seed_memory`]).  The guest then is what it was at the fork, and gets an
//! identity of its own in the same way ([`crate::control::handshake`]).

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::boot::generation;
use crate::error::Error;
use crate::fork::plan::ForkPlan;
use crate::io::bus::Bus;
use crate::kvm::cpu::Numbered;
use crate::kvm::tsc::Counters;
use crate::kvm::vm;
use crate::machine::Machine;
use crate::machine::devices::{saved_serial, saved_vsock};
use crate::memory::seed_memory::SeedMemory;
use crate::snapshot::state::MachineState;
use crate::sys::pagemap::Pagemap;

/// Where a machine that was forked at `origin` can go back to.
///
/// # Errors
///
/// [`Error::State`] if it was booted, or if it is the branch of a machine whose seed has ended.
pub fn fork_point(origin: Option<&Arc<ForkPlan>>) -> Result<Arc<ForkPlan>, Error> {
    let Some(plan) = origin else {
        return Err(Error::State("the machine was booted: it has no fork point"));
    };
    plan.seed_memory().map_or(Ok(()), SeedMemory::check)?;
    Ok(Arc::clone(plan))
}

/// What going back needs of the host, taken before anything changes: a machine that cannot have
/// it runs on.
#[derive(Debug)]
pub struct Means {
    pagemap: Pagemap,
    /// For the handshake afterwards.
    pub streams: (UnixStream, UnixStream),
}

impl Means {
    /// Takes them.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], for one because there are no descriptors left.
    pub fn take() -> Result<Self, Error> {
        let streams = UnixStream::pair().map_err(Error::io("make a socket pair"))?;
        Ok(Self { pagemap: Pagemap::own()?, streams })
    }
}

impl Machine {
    /// Goes back to `plan`, where it was forked; it is paused afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`], [`Error::Io`] naming what the host refused; the machine is of no use then.
    pub fn rewind(&mut self, plan: &Arc<ForkPlan>, means: &Means) -> Result<(), Error> {
        self.pause()?;
        let warm = |address| plan.warmth().is_some_and(|warmth| warmth.contains(address));
        self.ram.rewind(&means.pagemap, plan.seed_memory(), warm)?;
        if let Some(warmth) = plan.warmth() {
            warmth.apply();
        }
        self.bus.rewind(plan)?;
        vm::restore_irqchips(&self.vm, &plan.state().irqchips)?;
        vm::restore_clock(&self.vm, &plan.state().clock)?;
        let (source, defaults) = (Arc::clone(plan), Arc::clone(&self.msr_defaults));
        let counters = Counters::new(&plan.state().vcpus);
        self.vcpus.each(move |id, fd| {
            let vcpu = Numbered { id, fd, counters: &counters };
            source.state().vcpus[id].reinstate(&vcpu, &defaults)
        })?;
        generation::renew(self.ram.view())?;
        self.generation = self.generation.saturating_add(1);
        self.bus.raise_pending();
        Ok(())
    }
}

impl Bus {
    /// Puts all devices back to a fork point; what is the host's of them stays.
    fn rewind(&self, plan: &ForkPlan) -> Result<(), Error> {
        let state: &MachineState = plan.state();
        let damaged = |error| Error::Damaged(format!("state of a device: {error}"));
        if let (Some(mut block), Some((transport, _)), Some(lower)) =
            (self.block(), &state.block, plan.lower())
        {
            block.device_mut().disk_mut().rewind(lower)?;
            block.reload(transport).map_err(damaged)?;
        }
        self.net().reload(&state.net.0).map_err(damaged)?;
        self.rng().reload(&state.rng).map_err(damaged)?;
        let vsock = saved_vsock(state)?;
        self.vsock_still(|host| host.rewind(vsock));
        let mut serial = self.serial();
        let log = serial.writer_mut().take();
        *serial = saved_serial(&state.serial, self.console_line(), log)?;
        Ok(())
    }
}
