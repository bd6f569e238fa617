//! A machine out of a fork point, in a process that was forked for it.

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use forkd_proto::control::Child;

use crate::boot::generation;
use crate::disk::host_disk::HostDisk;
use crate::disk::top::Tops;
use crate::error::Error;
use crate::fork::plan::ForkPlan;
use crate::io::bus::{Bus, Lines};
use crate::kvm::cpu::Numbered;
use crate::kvm::prefault;
use crate::kvm::tsc::Counters;
use crate::kvm::vm;
use crate::machine::Machine;
use crate::machine::devices::saved_devices;
use crate::machine::place::Place;
use crate::machine::vcpu::Vcpus;
use crate::memory::question::Question;

impl ForkPlan {
    /// Makes a machine of its own out of this process's view of the fork point.
    ///
    /// To be called once, in a process forked for the purpose: the memory of the plan becomes the
    /// machine's.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`] or [`Error::Io`] naming what the host refused, [`Error::Invalid`] naming the
    /// member of `child` at fault, [`Error::Damaged`] if a device refuses its saved state.
    pub fn fork(&self, child: &Child, tap: Option<File>, place: &Place) -> Result<Machine, Error> {
        if let Some(warmth) = self.warmth.get() {
            warmth.apply();
        }
        let vm = Arc::new(vm::create(&self.kvm, self.ram.view())?);
        let fds = (0..self.cpuids.len() as u64)
            .map(|id| vm.create_vcpu(id).map_err(Error::kvm("KVM_CREATE_VCPU")))
            .collect::<Result<Vec<_>, _>>()?;
        vm::restore_irqchips(&vm, &self.state.irqchips)?;
        vm::restore_clock(&vm, &self.state.clock)?;
        let counters = Counters::new(&self.state.vcpus);
        for (id, fd) in fds.iter().enumerate() {
            if let Some(khz) = self.host.tsc_khz {
                fd.set_tsc_khz(khz).map_err(Error::kvm("KVM_SET_TSC_KHZ"))?;
            }
            let vcpu = Numbered { id, fd, counters: &counters };
            self.state.vcpus[id].restore(&vcpu, &self.cpuids[id], &self.msrs[id])?;
        }
        if let Some((warmth, first)) = self.warmth.get().zip(fds.first())
            && prefault::is_offered(&self.kvm)
        {
            warmth.each_in(self.ram.view(), |at, bytes| prefault::map(first, at, bytes));
        }
        let folder = child.top_directory.as_deref();
        let tops = Tops::new(folder, &place.directory, child.top_reserve_bytes)?;
        let disk = self
            .lower
            .as_ref()
            .map(|lower| HostDisk::new(lower, tops, child.top_limit_bytes))
            .transpose()?;
        let lines = Arc::new(Lines::new(&vm));
        let devices = saved_devices(&self.state, &lines, place, disk, tap)?;
        generation::renew(self.ram.view())?;
        let bus = Arc::new(Bus::new(lines, self.ram.view().clone(), devices)?);
        let run_bytes =
            self.kvm.get_vcpu_mmap_size().map_err(Error::kvm("KVM_GET_VCPU_MMAP_SIZE"))?;
        let vcpus = Vcpus::start(fds, &bus, run_bytes)?;
        let (notebook, memory) = (Arc::clone(&self.notebook), self.ram.view().clone());
        let question = Question::new(notebook, memory, self.warmth.get().cloned());
        bus.vsock_still(|host| host.expect(question));
        bus.raise_pending();
        Ok(Machine {
            vcpus,
            bus,
            vm,
            ram: self.ram.clone(),
            vcpu_count: self.size().1,
            started: Instant::now(),
            paused_since: Some(Instant::now()),
            generation: self.state.generation.saturating_add(1),
            msr_defaults: Arc::clone(&self.host.msr_defaults),
            lineage: self.lineage.clone(),
        })
    }
}
