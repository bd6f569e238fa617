//! A driver for tests: the guest's side of the transport and of the rings.

use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::VirtioDevice;
use super::mmio::{Effect, Mmio};

pub(crate) type Memory = GuestMemoryMmap<()>;

/// Size of the memory a [`Driver`] has.
pub(crate) const MEMORY_BYTES: usize = 8 << 20;
/// Where it may put data.
pub(crate) const DATA: u64 = 0x10_0000;
pub(crate) const QUEUE_SIZE: u16 = 256;

const STATUS: u64 = 0x70;

/// One queue's place and positions.
#[derive(Debug, Default)]
struct Ring {
    next_descriptor: u16,
    avail: u16,
    used: u16,
}

#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) memory: Memory,
    rings: Vec<Ring>,
}

/// One descriptor to be: address, length, and whether the device writes it.
pub(crate) type Piece = (u64, u32, bool);

pub(crate) fn load<D: VirtioDevice>(device: &mut Mmio<D>, offset: u64) -> u32 {
    let mut data = [0xaa; 4];
    device.read(offset, &mut data);
    u32::from_le_bytes(data)
}

pub(crate) fn store<D: VirtioDevice>(device: &mut Mmio<D>, offset: u64, value: u32) -> Effect {
    device.write(offset, &value.to_le_bytes())
}

fn base(queue: usize) -> u64 {
    0x1_0000 * (queue as u64 + 1)
}
pub(crate) fn descriptors(queue: usize) -> u64 {
    base(queue)
}
pub(crate) fn avail_ring(queue: usize) -> u64 {
    base(queue) + 0x2000
}
pub(crate) fn used_ring(queue: usize) -> u64 {
    base(queue) + 0x4000
}

impl Driver {
    pub(crate) fn new() -> Self {
        let memory = Memory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
        Self { memory, rings: Vec::new() }
    }

    /// Initialises `device` as a guest does, with every feature it offers.
    pub(crate) fn started<D: VirtioDevice>(device: &mut Mmio<D>) -> Self {
        let mut driver = Self::new();
        let features = device.device().device_features();
        assert_eq!(driver.start(device, features), Effect::Activated);
        driver
    }

    /// Initialises `device` with these features and returns the last effect.
    pub(crate) fn start<D: VirtioDevice>(&mut self, device: &mut Mmio<D>, features: u64) -> Effect {
        agree(device, features);
        for queue in 0..device.device().queue_max_sizes().len() {
            self.rings.push(Ring::default());
            set_up_queue(device, queue);
        }
        store(device, STATUS, 15)
    }

    /// Makes `pieces` available on `queue` as one chain; returns its head.
    pub(crate) fn push(&mut self, queue: usize, pieces: &[Piece]) -> u16 {
        let count = u16::try_from(pieces.len()).unwrap();
        let ring = &mut self.rings[queue];
        if ring.next_descriptor + count > QUEUE_SIZE {
            ring.next_descriptor = 0;
        }
        let head = ring.next_descriptor;
        ring.next_descriptor += count;
        for (index, &(address, length, writable)) in (head..).zip(pieces) {
            let next = index + 1 < head + count;
            let flags = if writable { VRING_DESC_F_WRITE } else { 0 }
                | if next { VRING_DESC_F_NEXT } else { 0 };
            self.descriptor(queue, index, address, length, flags, index + 1);
        }
        self.offer(queue, head);
        head
    }

    /// Writes one descriptor, sensible or not.
    pub(crate) fn descriptor(
        &self,
        queue: usize,
        index: u16,
        address: u64,
        length: u32,
        flags: u32,
        next: u16,
    ) {
        let at = descriptors(queue) + 16 * u64::from(index);
        let flags = u16::try_from(flags).unwrap();
        self.memory.write_obj(address, GuestAddress(at)).unwrap();
        self.memory.write_obj(length, GuestAddress(at + 8)).unwrap();
        self.memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
        self.memory.write_obj(next, GuestAddress(at + 14)).unwrap();
    }

    /// Makes `head` available.
    pub(crate) fn offer(&mut self, queue: usize, head: u16) {
        let ring = &mut self.rings[queue];
        let slot = avail_ring(queue) + 4 + 2 * u64::from(ring.avail % QUEUE_SIZE);
        self.memory.write_obj(head, GuestAddress(slot)).unwrap();
        ring.avail = ring.avail.wrapping_add(1);
        self.memory.write_obj(ring.avail, GuestAddress(avail_ring(queue) + 2)).unwrap();
    }

    /// The next chain that came back: its head and the bytes written.
    pub(crate) fn used(&mut self, queue: usize) -> Option<(u32, u32)> {
        let at = used_ring(queue);
        let index: u16 = self.memory.read_obj(GuestAddress(at + 2)).unwrap();
        let ring = &mut self.rings[queue];
        if ring.used == index {
            return None;
        }
        let slot = at + 4 + 8 * u64::from(ring.used % QUEUE_SIZE);
        ring.used = ring.used.wrapping_add(1);
        // Ask to be interrupted by the next one.
        let event = avail_ring(queue) + 4 + 2 * u64::from(QUEUE_SIZE);
        self.memory.write_obj(ring.used, GuestAddress(event)).unwrap();
        let head = self.memory.read_obj(GuestAddress(slot)).unwrap();
        Some((head, self.memory.read_obj(GuestAddress(slot + 4)).unwrap()))
    }

    pub(crate) fn put(&self, address: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    pub(crate) fn get(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }
}

/// Goes through the status bits up to the agreement on `features`.
pub(crate) fn agree<D: VirtioDevice>(device: &mut Mmio<D>, features: u64) {
    store(device, STATUS, 1);
    store(device, STATUS, 3);
    for half in [0, 1] {
        store(device, 0x24, half);
        let bits = features >> (32 * half) & u64::from(u32::MAX);
        store(device, 0x20, u32::try_from(bits).unwrap());
    }
    store(device, STATUS, 11);
}

fn set_up_queue<D: VirtioDevice>(device: &mut Mmio<D>, queue: usize) {
    store(device, 0x30, u32::try_from(queue).unwrap());
    store(device, 0x38, u32::from(QUEUE_SIZE));
    for (offset, address) in
        [(0x80, descriptors(queue)), (0x90, avail_ring(queue)), (0xa0, used_ring(queue))]
    {
        store(device, offset, u32::try_from(address).unwrap());
        store(device, offset + 4, 0);
    }
    store(device, 0x44, 1);
}
