//! The devices of a machine, and the way of an access to the one it is for.
//!
//! vCPU threads come in with port and memory-mapped accesses, the I/O thread with
//! bytes from sockets and the tap.  Each device has a lock of its own.  Requests
//! are served on the thread that rang: there is no ioeventfd, since each of those
//! costs a grace period when a machine is made (ADR 0002), and a fork is made more
//! often than a disk is busy.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forkd_devices::virtio::block::Block;
use forkd_devices::virtio::mmio::Mmio;
use forkd_devices::virtio::net::{Net, RX_QUEUE as NET_RX_QUEUE};
use forkd_devices::virtio::rng::Rng;
use kvm_ioctls::VmFd;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::disk::host_disk::HostDisk;
use crate::error::Error;
use crate::io::console::ConsoleLog;
use crate::io::entropy::KernelEntropy;
use crate::io::queues::{serve, serve_all, write_and_serve};
use crate::io::tap::Tap;
use crate::io::vsock::VsockHost;
use crate::layout;

/// Why a machine is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest powered off.
    Shutdown,
    /// The guest stopped its processors for good.
    Halted,
    /// The guest reset itself.
    Reset,
    /// The guest reset itself after its kernel had panicked.
    Panic,
    /// The guest's processor could not even tell the guest of a fault, and gave up.
    TripleFault,
    /// The guest runs without its agent, so that nobody can use it any more.
    Agent,
    /// Somebody told the machine to stop.
    Stopped,
    /// The VMM cannot go on.
    Error(String),
}

impl fmt::Display for End {
    /// For whoever asks why a sandbox has exited.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shutdown => "the guest powered off",
            Self::Halted => "the guest halted",
            Self::Reset => "the guest reset itself",
            Self::Panic => "the guest's kernel panicked",
            Self::TripleFault => "the guest's processor gave up (triple fault)",
            Self::Agent => "its agent was killed",
            Self::Stopped => "it was stopped",
            Self::Error(message) => message,
        })
    }
}

/// The edge-triggered interrupt lines of the in-kernel I/O APIC.
///
/// A pulse is two calls.  If a second thread raised a line between the first one's two, while the
/// guest had served the first pulse already, KVM would see no edge and the second interrupt would
/// be lost; so one pulse at a time.
#[derive(Debug)]
pub struct Lines {
    vm: Arc<VmFd>,
    pulse: Mutex<()>,
}

impl Lines {
    /// The lines of `vm`.
    #[must_use]
    pub fn new(vm: &Arc<VmFd>) -> Self {
        Self { vm: Arc::clone(vm), pulse: Mutex::new(()) }
    }

    fn pulse(&self, gsi: u32) -> Result<(), kvm_ioctls::Error> {
        let _one_at_a_time = lock(&self.pulse);
        self.vm.set_irq_line(gsi, true)?;
        self.vm.set_irq_line(gsi, false)
    }
}

/// One of the lines.
#[derive(Clone, Debug)]
pub struct Line {
    lines: Arc<Lines>,
    gsi: u32,
}

impl Line {
    /// The line `gsi`.
    #[must_use]
    pub fn new(lines: &Arc<Lines>, gsi: u32) -> Self {
        Self { lines: Arc::clone(lines), gsi }
    }
}

impl Trigger for Line {
    type E = kvm_ioctls::Error;

    fn trigger(&self) -> Result<(), Self::E> {
        self.lines.pulse(self.gsi)
    }
}

/// The serial console.
pub type Console = Serial<Line, NoEvents, ConsoleLog>;

/// The devices, before they are wired to a bus.
#[derive(Debug)]
pub struct Devices {
    /// Serial console.
    pub serial: Console,
    /// The disk, if the machine has one.
    pub block: Option<Mmio<Block<HostDisk>>>,
    /// Network; without a tap it drops what it is given.
    pub net: Mmio<Net<Tap>>,
    /// vsock with its host side.
    pub vsock: VsockHost,
    /// Entropy.
    pub rng: Mmio<Rng<KernelEntropy>>,
}

/// All devices of a machine, shared by its threads.
#[derive(Debug)]
pub struct Bus {
    memory: GuestMemoryMmap,
    lines: Arc<Lines>,
    serial: Mutex<Console>,
    block: Option<Mutex<Mmio<Block<HostDisk>>>>,
    net: Mutex<Mmio<Net<Tap>>>,
    vsock: Mutex<VsockHost>,
    rng: Mutex<Mmio<Rng<KernelEntropy>>>,
    end: Mutex<Option<End>>,
    ended: EventFd,
    rest: EventFd,
    halting: AtomicBool,
    exits: AtomicU64,
    rejected: AtomicU64,
}

/// Takes a lock; a holder that panicked has ended the process already (`panic = "abort"`).
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bus {
    /// Wires `devices` to guest memory and to the interrupt lines.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if no eventfd is to be had.
    pub fn new(
        lines: Arc<Lines>,
        memory: GuestMemoryMmap,
        devices: Devices,
    ) -> Result<Self, Error> {
        let event =
            || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(Error::io("create an eventfd"));
        let (ended, rest) = (event()?, event()?);
        Ok(Self {
            memory,
            lines,
            serial: Mutex::new(devices.serial),
            block: devices.block.map(Mutex::new),
            net: Mutex::new(devices.net),
            vsock: Mutex::new(devices.vsock),
            rng: Mutex::new(devices.rng),
            end: Mutex::new(None),
            ended,
            rest,
            halting: AtomicBool::new(false),
            exits: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
        })
    }

    /// Becomes readable when the machine is over.
    #[must_use]
    pub fn ended(&self) -> &EventFd {
        &self.ended
    }

    /// Declares the machine over.  The first reason counts.
    pub fn end(&self, end: End) {
        lock(&self.end).get_or_insert(end);
        // An eventfd's counter cannot overflow here, and a full one is readable too.
        drop(self.ended.write(1));
    }

    /// Why the machine is over, if it is.
    #[must_use]
    pub fn end_reason(&self) -> Option<End> {
        lock(&self.end).clone()
    }

    /// The serial console.
    pub fn serial(&self) -> MutexGuard<'_, Console> {
        lock(&self.serial)
    }

    /// The disk.
    pub fn block(&self) -> Option<MutexGuard<'_, Mmio<Block<HostDisk>>>> {
        self.block.as_ref().map(lock)
    }

    /// How much memory the guest has.
    pub fn memory_bytes(&self) -> u64 {
        self.memory.iter().map(GuestMemoryRegion::len).sum()
    }

    /// The network device.
    pub fn net(&self) -> MutexGuard<'_, Mmio<Net<Tap>>> {
        lock(&self.net)
    }

    /// The entropy device.
    pub fn rng(&self) -> MutexGuard<'_, Mmio<Rng<KernelEntropy>>> {
        lock(&self.rng)
    }

    /// Works with vsock from the host's side; the guest is told of what came of it.
    pub fn vsock<R>(&self, work: impl FnOnce(&mut VsockHost) -> R) -> R {
        let (result, interrupt) = {
            let mut vsock = lock(&self.vsock);
            let result = work(&mut vsock);
            let interrupt = vsock.pump(&self.memory);
            if vsock.has_rest() {
                self.have_rest_served();
            }
            (result, interrupt)
        };
        if interrupt {
            self.raise(slot_gsi(Slot::Vsock));
        }
        result
    }

    /// Works with vsock while the guest is paused; it is told of nothing.
    pub fn vsock_still<R>(&self, work: impl FnOnce(&mut VsockHost) -> R) -> R {
        work(&mut lock(&self.vsock))
    }

    /// Whether the guest has said that it halts, which is no proof.  Says so once; [`Self::rest`]
    /// becomes readable for it.
    pub fn take_halting(&self) -> bool {
        self.halting.swap(false, Ordering::Relaxed)
    }

    /// The interrupt line of the serial console.
    #[must_use]
    pub fn console_line(&self) -> Line {
        Line::new(&self.lines, layout::SERIAL_GSI)
    }

    /// Frames have arrived on the tap.  Those for which the guest has no buffers stay there until
    /// it rings.
    pub fn poll_tap(&self) {
        let interrupt = serve(&mut self.net(), &self.memory, NET_RX_QUEUE);
        self.raise_if(interrupt, Slot::Net);
        if self.has_rest(Slot::Net) {
            self.have_rest_served();
        }
    }

    /// Tells the guest's kernel that its generation id has changed.
    pub fn announce_generation(&self) {
        self.raise(layout::GED_GSI);
    }

    /// Exits to user space that were served, and accesses that hit nothing.
    #[must_use]
    pub fn counters(&self) -> (u64, u64) {
        (self.exits.load(Ordering::Relaxed), self.rejected.load(Ordering::Relaxed))
    }

    /// Raises interrupts again that were pending when the devices were saved.
    ///
    /// The I/O APIC's state holds what was delivered to it; this covers a device whose status was
    /// set and whose line had not been pulsed yet.  A spurious interrupt is harmless.
    pub fn raise_pending(&self) {
        let pending = [
            (Slot::Block, self.block().is_some_and(|block| block.interrupt_pending())),
            (Slot::Net, self.net().interrupt_pending()),
            (Slot::Vsock, lock(&self.vsock).interrupt_pending()),
            (Slot::Rng, self.rng().interrupt_pending()),
        ];
        for (slot, _) in pending.into_iter().filter(|(_, pending)| *pending) {
            self.raise(slot_gsi(slot));
        }
    }

    fn raise(&self, gsi: u32) {
        if let Err(error) = self.lines.pulse(gsi) {
            self.end(End::Error(format!("KVM_IRQ_LINE {gsi}: {error}")));
        }
    }

    /// A guest's load from a memory-mapped register.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        self.exits.fetch_add(1, Ordering::Relaxed);
        data.fill(0);
        let Some((slot, offset)) = slot_of(address) else {
            self.rejected.fetch_add(1, Ordering::Relaxed);
            return;
        };
        match slot {
            Slot::Block => {
                if let Some(mut block) = self.block() {
                    block.read(offset, data);
                }
            }
            Slot::Net => self.net().read(offset, data),
            Slot::Vsock => lock(&self.vsock).read(offset, data),
            Slot::Rng => self.rng().read(offset, data),
        }
    }

    /// A guest's store to a memory-mapped register.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        self.exits.fetch_add(1, Ordering::Relaxed);
        let Some((slot, offset)) = slot_of(address) else {
            self.rejected.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let interrupt = match slot {
            Slot::Block => self
                .block()
                .is_some_and(|mut block| write_and_serve(&mut block, &self.memory, offset, data)),
            Slot::Net => write_and_serve(&mut self.net(), &self.memory, offset, data),
            Slot::Rng => write_and_serve(&mut self.rng(), &self.memory, offset, data),
            Slot::Vsock => lock(&self.vsock).write(&self.memory, offset, data),
        };
        if self.has_rest(slot) {
            self.have_rest_served();
        }
        if interrupt {
            self.raise(slot_gsi(slot));
        }
    }

    fn has_rest(&self, slot: Slot) -> bool {
        match slot {
            Slot::Block => self.block().is_some_and(|block| block.unfinished()),
            Slot::Net => self.net().unfinished(),
            Slot::Rng => self.rng().unfinished(),
            Slot::Vsock => lock(&self.vsock).has_rest(),
        }
    }

    fn have_rest_served(&self) {
        // As with `ended`: the counter cannot overflow, and a full one is readable too.
        drop(self.rest.write(1));
    }

    /// Becomes readable when [`Self::serve_rest`] has something to do.
    #[must_use]
    pub fn rest(&self) -> &EventFd {
        &self.rest
    }

    /// Serves what a vCPU thread left in the queues when it had done its share.
    pub fn serve_rest(&self) {
        // Only to make it unreadable; who wrote it is asked below.
        drop(self.rest.read());
        if let Some(mut block) = self.block() {
            let interrupt = serve_all(&mut block, &self.memory, BLOCK_QUEUES);
            drop(block);
            self.raise_if(interrupt, Slot::Block);
        }
        let interrupt = serve_all(&mut self.net(), &self.memory, NET_QUEUES);
        self.raise_if(interrupt, Slot::Net);
        let interrupt = serve_all(&mut self.rng(), &self.memory, RNG_QUEUES);
        self.raise_if(interrupt, Slot::Rng);
        if self.has_rest(Slot::Vsock) {
            self.vsock(|_| ());
        }
        if self.has_any_rest() {
            self.have_rest_served();
        }
    }

    /// Serves all that a guest which is paused has rung for, so that nothing is under way in
    /// any queue.  A standing guest refills none, so this ends.  Returns whether there was any.
    pub fn settle(&self) -> bool {
        let any = self.has_any_rest();
        while self.has_any_rest() {
            self.serve_rest();
        }
        any
    }

    fn has_any_rest(&self) -> bool {
        SLOTS.into_iter().any(|slot| self.has_rest(slot))
    }

    fn raise_if(&self, due: bool, slot: Slot) {
        if due {
            self.raise(slot_gsi(slot));
        }
    }

    /// A guest's read from a port.
    pub fn io_in(&self, port: u16, data: &mut [u8]) {
        self.exits.fetch_add(1, Ordering::Relaxed);
        // An empty bus reads as all ones.
        data.fill(0xff);
        if let (Some(offset), [byte]) = (serial_offset(port), data) {
            *byte = self.serial().read(offset);
        }
    }

    /// A guest's write to a port.
    ///
    /// # Errors
    ///
    /// [`End`] if that was the guest's last.
    pub fn io_out(&self, port: u16, data: &[u8]) -> Result<(), End> {
        const SLEEP_ENABLE: u8 = 1 << 5;
        self.exits.fetch_add(1, Ordering::Relaxed);
        match (port, data) {
            (layout::SLEEP_PORT, [value]) if value & SLEEP_ENABLE != 0 => Err(End::Shutdown),
            (layout::RESET_PORT, [layout::RESET_VALUE]) => {
                Err(if self.serial().writer().has_panicked() { End::Panic } else { End::Reset })
            }
            (_, [byte]) if serial_offset(port).is_some() => {
                let mut serial = self.serial();
                // The log's disk may be full; a guest that talks must not die of it.
                drop(serial.write(serial_offset(port).unwrap_or(0), *byte));
                if serial.writer_mut().take_halted() {
                    self.halting.store(true, Ordering::Relaxed);
                    self.have_rest_served();
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

const BLOCK_QUEUES: usize = 1;
const NET_QUEUES: usize = 2;
const RNG_QUEUES: usize = 1;

/// The virtio-mmio slots, in the order of their addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Block,
    Net,
    Vsock,
    Rng,
}

const SLOTS: [Slot; layout::VIRTIO_SLOTS] = [Slot::Block, Slot::Net, Slot::Vsock, Slot::Rng];

fn slot_of(address: u64) -> Option<(Slot, u64)> {
    let offset = address.checked_sub(layout::VIRTIO_BASE)?;
    let index = usize::try_from(offset / layout::VIRTIO_STRIDE).ok()?;
    SLOTS.get(index).map(|slot| (*slot, offset % layout::VIRTIO_STRIDE))
}

fn slot_gsi(slot: Slot) -> u32 {
    SLOTS
        .into_iter()
        .zip(layout::VIRTIO_GSI..)
        .find(|(each, _)| *each == slot)
        .map_or(0, |(_, gsi)| gsi)
}

fn serial_offset(port: u16) -> Option<u8> {
    port.checked_sub(layout::SERIAL_PORT)
        .filter(|offset| *offset < 8)
        .and_then(|offset| u8::try_from(offset).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_found_at_its_address_and_nothing_beyond() {
        let address = |slot: u64| layout::VIRTIO_BASE + slot * layout::VIRTIO_STRIDE + 0x10;

        assert_eq!(slot_of(address(0)), Some((Slot::Block, 0x10)));
        assert_eq!(slot_of(address(3)), Some((Slot::Rng, 0x10)));
        assert_eq!(slot_of(address(4)), None);
        assert_eq!(slot_of(layout::VIRTIO_BASE - 1), None);
    }

    #[test]
    fn slots_have_the_interrupts_that_the_dsdt_names() {
        assert_eq!(slot_gsi(Slot::Block), layout::VIRTIO_GSI);
        assert_eq!(slot_gsi(Slot::Rng), layout::VIRTIO_GSI + 3);
        assert!(slot_gsi(Slot::Rng) < layout::GED_GSI);
    }
}
