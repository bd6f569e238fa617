//! The virtio-mmio transport, version 2 (virtio 1.2, §4.2).
//!
//! | Offset      | Access | Register                | Meaning                                   |
//! |-------------|--------|-------------------------|-------------------------------------------|
//! | 0x000       | R      | `MagicValue`            | [`MAGIC`]                                 |
//! | 0x004       | R      | `Version`               | 2                                         |
//! | 0x008       | R      | `DeviceID`              | [`VirtioDevice::device_type`]             |
//! | 0x00c       | R      | `VendorID`              | [`VENDOR`]                                |
//! | 0x010       | R      | `DeviceFeatures`        | the half that 0x014 selects               |
//! | 0x014       | W      | `DeviceFeaturesSel`     | 0 or 1                                    |
//! | 0x020       | W      | `DriverFeatures`        | the half that 0x024 selects               |
//! | 0x024       | W      | `DriverFeaturesSel`     | 0 or 1                                    |
//! | 0x030       | W      | `QueueSel`              | which queue the registers below mean      |
//! | 0x034       | R      | `QueueNumMax`           | 0 if there is no such queue               |
//! | 0x038       | W      | `QueueNum`              | size, a power of two                      |
//! | 0x044       | RW     | `QueueReady`            |                                           |
//! | 0x050       | W      | `QueueNotify`           | index of the queue that has work          |
//! | 0x060       | R      | `InterruptStatus`       | bit 0: used ring, bit 1: configuration    |
//! | 0x064       | W      | `InterruptACK`          | bits to clear                             |
//! | 0x070       | RW     | `Status`                | 0 resets                                  |
//! | 0x080-0x0a4 | W      | `Queue{Desc,Driver,Device}{Low,High}` | addresses of the rings      |
//! | 0x0b0-0x0bc | R      | `SHM{Len,Base}`         | all ones: there is no shared memory       |
//! | 0x0fc       | R      | `ConfigGeneration`      | rises when the device changes its space   |
//! | 0x100-      | RW     | configuration space     | the device's, any width                   |
//!
//! Registers are 32 bits, little-endian, and accessed whole.
//!
//! # Trust
//!
//! The guest chooses every offset, width, value and order.  Status bits are
//! accepted one at a time and in the specification's order; features and rings
//! only while they may change.  Anything else is dropped and counted.  A queue
//! whose rings lie outside memory, or hold impossible indexes, sets
//! `DEVICE_NEEDS_RESET`, after which only a reset is served.
//!
//! # Host side
//!
//! A store never touches a queue: [`Mmio::write`] says what is to be done, and
//! whoever owns the device's thread calls [`Mmio::process`].  Interrupts are
//! edges: `true` from [`Mmio::process`] means "raise one now".

use std::fmt;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE as ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER as DRIVER,
    VIRTIO_CONFIG_S_DRIVER_OK as DRIVER_OK, VIRTIO_CONFIG_S_FAILED as FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK as FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET as NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::{
    VIRTIO_MMIO_INT_CONFIG as INTERRUPT_CONFIG, VIRTIO_MMIO_INT_VRING as INTERRUPT_RING,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueState as RawQueueState, QueueT};
use vm_memory::{GuestAddress, GuestMemory};

use super::VirtioDevice;

/// Bytes of address space per device.
pub const REGION_BYTES: u64 = 0x1000;

/// Reads back from offset 0: `virt` in ASCII.
pub const MAGIC: u32 = u32::from_le_bytes(*b"virt");

/// Reads back as the vendor: `FKRD` in ASCII.
pub const VENDOR: u32 = u32::from_le_bytes(*b"FKRD");

const VERSION: u32 = 2;
const NO_SHARED_MEMORY: u32 = u32::MAX;

const REG_MAGIC: u64 = 0x000;
const REG_VERSION: u64 = 0x004;
const REG_DEVICE_ID: u64 = 0x008;
const REG_VENDOR_ID: u64 = 0x00c;
const REG_DEVICE_FEATURES: u64 = 0x010;
const REG_DEVICE_FEATURES_SELECT: u64 = 0x014;
const REG_DRIVER_FEATURES: u64 = 0x020;
const REG_DRIVER_FEATURES_SELECT: u64 = 0x024;
const REG_QUEUE_SELECT: u64 = 0x030;
const REG_QUEUE_SIZE_MAX: u64 = 0x034;
const REG_QUEUE_SIZE: u64 = 0x038;
const REG_QUEUE_READY: u64 = 0x044;
const REG_QUEUE_NOTIFY: u64 = 0x050;
const REG_INTERRUPT_STATUS: u64 = 0x060;
const REG_INTERRUPT_ACK: u64 = 0x064;
const REG_STATUS: u64 = 0x070;
const REG_DESCRIPTORS_LOW: u64 = 0x080;
const REG_DESCRIPTORS_HIGH: u64 = 0x084;
const REG_DRIVER_RING_LOW: u64 = 0x090;
const REG_DRIVER_RING_HIGH: u64 = 0x094;
const REG_DEVICE_RING_LOW: u64 = 0x0a0;
const REG_DEVICE_RING_HIGH: u64 = 0x0a4;
const REG_SHM_SELECT: u64 = 0x0ac;
const REG_SHM_FIRST: u64 = 0x0b0;
const REG_SHM_LAST: u64 = 0x0bc;
const REG_CONFIG_GENERATION: u64 = 0x0fc;
const REG_CONFIG: u64 = 0x100;

/// What the VMM has to do after a guest's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// Process this queue.
    Notify(usize),
    /// The driver is ready; process every queue once.
    Activated,
    /// The driver reset the device; drop what was pending for it.
    Reset,
}

/// A device with its registers and queues, as the bus holds it.
#[derive(Debug)]
pub struct Mmio<D> {
    device: D,
    // Invariant: one per entry of `device.queue_max_sizes()`, in its order.
    queues: Vec<Queue>,
    registers: Registers,
    // One bit for each queue.
    unfinished: u64,
    rejected: u64,
}

/// The registers that a guest's stores set, apart from the queues'.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registers {
    /// Which half of the device's features is read.
    pub device_features_select: u32,
    /// Which half of the driver's features is written.
    pub driver_features_select: u32,
    /// What the driver accepted.
    pub driver_features: u64,
    /// Which queue the queue registers mean.
    pub queue_select: u32,
    /// Causes of interrupts that the guest has not acknowledged.
    pub interrupt_status: u32,
    /// How far initialisation has come.
    pub status: u32,
    /// Changes of the configuration space so far.
    pub config_generation: u32,
}

/// A queue, as a snapshot keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Descriptors, as the driver chose.
    pub size: u16,
    /// Whether the driver has finished setting it up.
    pub ready: bool,
    /// Guest address of the descriptor table.
    pub descriptors: u64,
    /// Guest address of the available ring.
    pub driver_ring: u64,
    /// Guest address of the used ring.
    pub device_ring: u64,
    /// Position in the available ring.
    pub next_avail: u16,
    /// Position in the used ring.
    pub next_used: u16,
}

/// The transport of one device, as a snapshot keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmioState {
    /// Type of the device behind it.
    pub device_type: u32,
    /// Its registers.
    pub registers: Registers,
    /// Its queues, in order.
    pub queues: Vec<QueueState>,
}

/// Why a saved state cannot be brought back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreError {
    /// The state belongs to a device of this other type.
    DeviceType(u32),
    /// The state has this many queues, and the device another number.
    QueueCount(usize),
    /// This queue's size, alignment or readiness could not have been saved.
    Queue(usize),
    /// The driver accepted features that the device does not offer.
    Features(u64),
    /// The status register could not have held this.
    Status(u32),
    /// The interrupt status register could not have held this.
    InterruptStatus(u32),
    /// More connections are listed than could have been open.
    Connections(usize),
    /// The next port to give out is outside the range they come from.
    NextPort(u32),
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DeviceType(found) => write!(f, "saved state is of device type {found}"),
            Self::QueueCount(found) => write!(f, "saved state has {found} queues"),
            Self::Queue(index) => write!(f, "saved queue {index} is not one a device can have"),
            Self::Features(found) => write!(f, "saved features {found:#x} were never offered"),
            Self::Status(found) => write!(f, "saved status {found:#x} cannot be reached"),
            Self::InterruptStatus(found) => write!(f, "saved interrupt status {found:#x}"),
            Self::Connections(found) => write!(f, "saved state lists {found} connections"),
            Self::NextPort(found) => write!(f, "saved next port {found} is out of range"),
        }
    }
}

impl std::error::Error for RestoreError {}

impl<D: VirtioDevice> Mmio<D> {
    /// `device` behind registers that no driver has touched.
    pub fn new(device: D) -> Self {
        let queues = new_queues(device.queue_max_sizes());
        Self { device, queues, registers: Registers::default(), unfinished: 0, rejected: 0 }
    }

    /// The transport as it was when `state` was saved, in front of `device`.
    ///
    /// An interrupt that was pending stays pending: see
    /// [`Mmio::interrupt_pending`].
    ///
    /// # Errors
    ///
    /// [`RestoreError`] if the device could never have saved `state`.
    /// Snapshots come from disk, so they are checked like any other input.
    pub fn restore(state: &MmioState, device: D) -> Result<Self, RestoreError> {
        let mut restored = Self::new(device);
        restored.reload(state)?;
        Ok(restored)
    }

    /// Puts the transport back to what it was when `state` was saved; the
    /// device behind it stays.
    ///
    /// # Errors
    ///
    /// As [`Mmio::restore`]; nothing has changed then.
    pub fn reload(&mut self, state: &MmioState) -> Result<(), RestoreError> {
        let registers = state.registers;
        check_registers(&registers, self.device.device_features())?;
        if state.device_type != self.device.device_type() {
            return Err(RestoreError::DeviceType(state.device_type));
        }
        let sizes = self.device.queue_max_sizes();
        if state.queues.len() != sizes.len() {
            return Err(RestoreError::QueueCount(state.queues.len()));
        }
        let queues = state
            .queues
            .iter()
            .zip(sizes)
            .enumerate()
            .map(|(index, (queue, &max))| {
                restore_queue(queue, max, &registers).ok_or(RestoreError::Queue(index))
            })
            .collect::<Result<Vec<_>, _>>()?;
        (self.queues, self.registers, self.unfinished) = (queues, registers, 0);
        Ok(())
    }

    /// What to put in a snapshot, apart from the device's own state.
    pub fn save(&self) -> MmioState {
        MmioState {
            device_type: self.device.device_type(),
            registers: self.registers,
            queues: self.queues.iter().map(save_queue).collect(),
        }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, for the host's side of it.  Follow with [`Mmio::process`]
    /// if the call gave it something to say to the guest.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Accesses and requests dropped or refused so far, for the metrics page.
    pub fn rejected(&self) -> u64 {
        self.rejected.saturating_add(self.device.rejected())
    }

    /// Whether the guest has an interrupt to acknowledge.  Raise one after a
    /// restore if so: one too many is harmless, one too few is a hang.
    pub fn interrupt_pending(&self) -> bool {
        self.registers.interrupt_status != 0
    }

    /// Whether the last [`Mmio::process`] of some queue ended at its limit with
    /// buffers left.  Nobody will ring for those: call it again, soon.
    pub fn unfinished(&self) -> bool {
        self.unfinished != 0
    }

    /// Whether that is so of this queue.
    pub fn is_unfinished(&self, queue: usize) -> bool {
        self.unfinished & bit_of(queue) != 0
    }

    /// Serves a queue and returns whether to raise an interrupt.  Does nothing
    /// until the driver is ready.  Look at [`Mmio::unfinished`] afterwards.
    pub fn process<M: GuestMemory>(&mut self, memory: &M, queue: usize) -> bool {
        self.unfinished &= !bit_of(queue);
        if !self.is_active() {
            return false;
        }
        let Ok(progress) = self.device.process(memory, &mut self.queues, queue) else {
            self.reject();
            self.registers.status |= NEEDS_RESET;
            self.registers.interrupt_status |= INTERRUPT_CONFIG;
            return true;
        };
        if progress.unfinished {
            self.unfinished |= bit_of(queue);
        }
        if progress.interrupt {
            self.registers.interrupt_status |= INTERRUPT_RING;
        }
        progress.interrupt
    }

    /// Tells the driver that the device changed its configuration space.
    /// Raise an interrupt after it.
    pub fn config_changed(&mut self) {
        self.registers.config_generation = self.registers.config_generation.wrapping_add(1);
        self.registers.interrupt_status |= INTERRUPT_CONFIG;
    }

    /// Guest load.  Fills all of `data`.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        if offset >= REG_CONFIG {
            return self.device.read_config(offset - REG_CONFIG, data);
        }
        data.fill(0);
        match (self.register(offset), <&mut [u8; 4]>::try_from(data)) {
            (Some(value), Ok(register)) => *register = value.to_le_bytes(),
            _ => self.reject(),
        }
    }

    /// Guest store.  Touches no queue: the answer says what is to be done.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        if offset >= REG_CONFIG {
            self.device.write_config(offset - REG_CONFIG, data);
            return Effect::None;
        }
        let effect = <[u8; 4]>::try_from(data)
            .ok()
            .and_then(|bytes| self.set_register(offset, u32::from_le_bytes(bytes)));
        effect.unwrap_or_else(|| {
            self.reject();
            Effect::None
        })
    }

    fn register(&self, offset: u64) -> Option<u32> {
        let selected = self.selected();
        Some(match offset {
            REG_MAGIC => MAGIC,
            REG_VERSION => VERSION,
            REG_DEVICE_ID => self.device.device_type(),
            REG_VENDOR_ID => VENDOR,
            REG_DEVICE_FEATURES => {
                half(self.device.device_features(), self.registers.device_features_select)
            }
            REG_QUEUE_SIZE_MAX => selected.map_or(0, |queue| u32::from(queue.max_size())),
            REG_QUEUE_READY => selected.map_or(0, |queue| u32::from(queue.ready())),
            REG_INTERRUPT_STATUS => self.registers.interrupt_status,
            REG_STATUS => self.registers.status,
            REG_SHM_FIRST..=REG_SHM_LAST if offset.is_multiple_of(4) => NO_SHARED_MEMORY,
            REG_CONFIG_GENERATION => self.registers.config_generation,
            _ => return None,
        })
    }

    /// Stores to a register; `None` if it may not be.
    fn set_register(&mut self, offset: u64, value: u32) -> Option<Effect> {
        match offset {
            REG_DEVICE_FEATURES_SELECT => self.registers.device_features_select = value,
            REG_DRIVER_FEATURES_SELECT => self.registers.driver_features_select = value,
            REG_DRIVER_FEATURES => self.set_driver_features(value)?,
            REG_QUEUE_SELECT => self.registers.queue_select = value,
            REG_QUEUE_NOTIFY => return self.notify(value),
            REG_INTERRUPT_ACK => self.registers.interrupt_status &= !value,
            REG_STATUS => return self.set_status(value),
            REG_SHM_SELECT => {}
            REG_QUEUE_READY if value == 0 => self.stop_queue()?,
            _ => self.set_up_queue(offset, value)?,
        }
        Some(Effect::None)
    }

    fn set_driver_features(&mut self, value: u32) -> Option<()> {
        let features = self.registers.driver_features;
        let value = u64::from(value);
        let settable = self.registers.status & (DRIVER | FEATURES_OK) == DRIVER;
        self.registers.driver_features = match self.registers.driver_features_select {
            0 if settable => features & !u64::from(u32::MAX) | value,
            1 if settable => features & u64::from(u32::MAX) | value << 32,
            // Linux clears the halves we do not have.
            2.. if settable && value == 0 => features,
            _ => return None,
        };
        Some(())
    }

    fn notify(&self, value: u32) -> Option<Effect> {
        let index = usize::try_from(value).ok()?;
        (self.is_active() && index < self.queues.len()).then_some(Effect::Notify(index))
    }

    fn stop_queue(&mut self) -> Option<()> {
        self.selected_mut()?.set_ready(false);
        Some(())
    }

    /// Stores to a register that describes the selected queue, which is
    /// allowed after the features are agreed and before the driver is ready.
    fn set_up_queue(&mut self, offset: u64, value: u32) -> Option<()> {
        let configuring = FEATURES_OK | DRIVER | ACKNOWLEDGE;
        if self.registers.status != configuring {
            return None;
        }
        let queue = self.selected_mut().filter(|queue| !queue.ready())?;
        match offset {
            REG_QUEUE_SIZE => queue.try_set_size(u16::try_from(value).ok()?).ok(),
            REG_QUEUE_READY => {
                queue.set_ready(value == 1);
                (value == 1).then_some(())
            }
            REG_DESCRIPTORS_LOW | REG_DESCRIPTORS_HIGH => {
                let address = merge(queue.desc_table(), value, offset == REG_DESCRIPTORS_HIGH);
                queue.try_set_desc_table_address(address).ok()
            }
            REG_DRIVER_RING_LOW | REG_DRIVER_RING_HIGH => {
                let address = merge(queue.avail_ring(), value, offset == REG_DRIVER_RING_HIGH);
                queue.try_set_avail_ring_address(address).ok()
            }
            REG_DEVICE_RING_LOW | REG_DEVICE_RING_HIGH => {
                let address = merge(queue.used_ring(), value, offset == REG_DEVICE_RING_HIGH);
                queue.try_set_used_ring_address(address).ok()
            }
            _ => None,
        }
    }

    /// Sets one more status bit, in the specification's order.
    fn set_status(&mut self, value: u32) -> Option<Effect> {
        if value == 0 {
            self.reset();
            return Some(Effect::Reset);
        }
        let status = self.registers.status;
        let kept = status & !NEEDS_RESET;
        let added = value & !status;
        let in_order = match added {
            0 | FAILED => true,
            ACKNOWLEDGE => status == 0,
            DRIVER => status == ACKNOWLEDGE,
            FEATURES_OK => status == ACKNOWLEDGE | DRIVER && self.features_agreed(),
            DRIVER_OK => status == ACKNOWLEDGE | DRIVER | FEATURES_OK,
            _ => false,
        };
        if value & kept != kept || !in_order {
            return None;
        }
        self.registers.status |= added;
        if added == DRIVER_OK {
            return Some(Effect::Activated);
        }
        if added == FEATURES_OK {
            let event_idx = has_event_idx(self.registers.driver_features);
            self.queues.iter_mut().for_each(|queue| queue.set_event_idx(event_idx));
        }
        Some(Effect::None)
    }

    fn features_agreed(&self) -> bool {
        agree(self.registers.driver_features, self.device.device_features())
    }

    fn reset(&mut self) {
        self.device.reset();
        self.queues.iter_mut().for_each(QueueT::reset);
        self.unfinished = 0;
        self.registers = Registers {
            config_generation: self.registers.config_generation,
            ..Registers::default()
        };
    }

    fn is_active(&self) -> bool {
        self.registers.status & (DRIVER_OK | FAILED | NEEDS_RESET) == DRIVER_OK
    }

    fn selected(&self) -> Option<&Queue> {
        self.queues.get(usize::try_from(self.registers.queue_select).ok()?)
    }

    fn selected_mut(&mut self) -> Option<&mut Queue> {
        self.queues.get_mut(usize::try_from(self.registers.queue_select).ok()?)
    }

    fn reject(&mut self) {
        self.rejected = self.rejected.saturating_add(1);
    }
}

/// The bit of a queue; none of one beyond those that a device can have.
fn bit_of(queue: usize) -> u64 {
    u32::try_from(queue).ok().and_then(|queue| 1_u64.checked_shl(queue)).unwrap_or(0)
}

fn new_queues(max_sizes: &[u16]) -> Vec<Queue> {
    // A device whose sizes are no powers of two would lose a queue here; that
    // is a mistake of ours which every test of that device meets.
    max_sizes.iter().filter_map(|&size| Queue::new(size).ok()).collect()
}

fn save_queue(queue: &Queue) -> QueueState {
    QueueState {
        size: queue.size(),
        ready: queue.ready(),
        descriptors: queue.desc_table(),
        driver_ring: queue.avail_ring(),
        device_ring: queue.used_ring(),
        next_avail: queue.next_avail(),
        next_used: queue.next_used(),
    }
}

fn restore_queue(state: &QueueState, max_size: u16, registers: &Registers) -> Option<Queue> {
    if state.ready && registers.status & FEATURES_OK == 0 {
        return None;
    }
    let features_agreed = registers.status & FEATURES_OK != 0;
    Queue::try_from(RawQueueState {
        max_size,
        next_avail: state.next_avail,
        next_used: state.next_used,
        event_idx_enabled: features_agreed && has_event_idx(registers.driver_features),
        size: state.size,
        ready: state.ready,
        desc_table: state.descriptors,
        avail_ring: state.driver_ring,
        used_ring: state.device_ring,
    })
    .ok()
}

fn check_registers(registers: &Registers, offered: u64) -> Result<(), RestoreError> {
    let status = registers.status;
    let reachable = [
        0,
        ACKNOWLEDGE,
        ACKNOWLEDGE | DRIVER,
        ACKNOWLEDGE | DRIVER | FEATURES_OK,
        ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK,
    ];
    if !reachable.contains(&(status & !(FAILED | NEEDS_RESET))) {
        return Err(RestoreError::Status(status));
    }
    if status & FEATURES_OK != 0 && !agree(registers.driver_features, offered) {
        return Err(RestoreError::Features(registers.driver_features));
    }
    if registers.interrupt_status & !(INTERRUPT_RING | INTERRUPT_CONFIG) != 0 {
        return Err(RestoreError::InterruptStatus(registers.interrupt_status));
    }
    Ok(())
}

/// Whether a driver may choose these of the offered features.
fn agree(chosen: u64, offered: u64) -> bool {
    chosen & !offered == 0 && chosen & 1 << VIRTIO_F_VERSION_1 != 0
}

fn has_event_idx(features: u64) -> bool {
    features & 1 << VIRTIO_RING_F_EVENT_IDX != 0
}

/// The 32 bits of `features` that a select register picks.
fn half(features: u64, select: u32) -> u32 {
    let shifted = match select {
        0 => features,
        1 => features >> 32,
        _ => 0,
    };
    u32::try_from(shifted & u64::from(u32::MAX)).unwrap_or(0)
}

/// `address` with one half replaced.
fn merge(address: u64, value: u32, high: bool) -> GuestAddress {
    let value = u64::from(value);
    GuestAddress(if high {
        address & u64::from(u32::MAX) | value << 32
    } else {
        address & !u64::from(u32::MAX) | value
    })
}

#[cfg(test)]
mod tests;
