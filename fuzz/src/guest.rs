//! A guest's memory, and the ways in which it uses a device.

use std::cell::RefCell;

use arbitrary::{Arbitrary, Result, Unstructured};
use forkd_devices::virtio::VirtioDevice;
use forkd_devices::virtio::mmio::{Effect, Mmio, QueueState};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

pub(crate) type Memory = GuestMemoryMmap<()>;

/// Two regions with a hole between them.
const LOW_BYTES: usize = 0x1_0000;
const HIGH: u64 = 0x2_0000;
const HIGH_BYTES: usize = 0x4000;
/// Where headers and answers of requests are.
const HEADERS: u64 = 0x7000;
/// Where a queue's rings are, if the guest plays by the rules.
const RINGS: u64 = 0x1000;
const RINGS_BYTES: u64 = 0x1000;
const QUEUE_SIZE: u16 = 16;
/// The bit of the status register that says so.
const DRIVER_OK: u32 = 4;

thread_local! {
    static MEMORY: RefCell<Option<Memory>> = const { RefCell::new(None) };
}

/// Runs `with` on zeroed memory.
pub(crate) fn with_memory(with: impl FnOnce(&Memory)) {
    MEMORY.with_borrow_mut(|kept| {
        let memory = kept.get_or_insert_with(|| {
            let regions = [(GuestAddress(0), LOW_BYTES), (GuestAddress(HIGH), HIGH_BYTES)];
            Memory::from_ranges(&regions).expect("memory for a small guest")
        });
        static ZEROS: [u8; LOW_BYTES] = [0; LOW_BYTES];
        memory.write_slice(&ZEROS, GuestAddress(0)).expect("low memory");
        memory.write_slice(&ZEROS[..HIGH_BYTES], GuestAddress(HIGH)).expect("high memory");
        with(memory);
    });
}

/// One thing that a guest does.
#[derive(Arbitrary, Debug)]
pub(crate) enum Step {
    /// Load from any offset.
    Load { offset: u16, width: u8 },
    /// Store of any bytes at any offset.
    Store { offset: u16, data: [u8; 8], width: u8 },
    /// Store to a register.
    Register { register: u8, value: u32 },
    /// Whole initialisation, as a driver does it.
    Start { without: u64 },
    /// Any bytes anywhere in memory.
    Poke { address: u32, data: [u8; 16] },
    /// A request made available: a header, anything, and a byte for the answer.
    Request { queue: u8, header: Header, pieces: Vec<Piece> },
    /// A chain made available.
    Chain { queue: u8, pieces: Vec<Piece> },
    /// Rings at their usual place moved on without a chain behind it.
    Ring { queue: u8, index: u16, head: u16 },
    /// A notification.
    Notify { queue: u8 },
}

/// The header of a block request, mostly one that makes sense.
#[derive(Arbitrary, Debug)]
pub(crate) struct Header {
    kind: u8,
    sector: u8,
    wild: u8,
}

/// One descriptor to be.
#[derive(Arbitrary, Debug)]
pub(crate) struct Piece {
    pub(crate) address: u32,
    pub(crate) length: u16,
    pub(crate) flags: u8,
}

/// Registers that a driver knows.
const REGISTERS: [u64; 16] = [
    0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x50, 0x64, 0x70, 0x80, 0x84, 0x90, 0x94, 0xa0, 0xa4, 0xac,
];

/// The guest's side of a device.
pub(crate) struct Guest<'a> {
    pub(crate) memory: &'a Memory,
    avail: [u16; 3],
    descriptor: [u16; 3],
}

impl<'a> Guest<'a> {
    pub(crate) fn new(memory: &'a Memory) -> Self {
        Self { memory, avail: [0; 3], descriptor: [0; 3] }
    }

    /// Takes one step.  What a ready driver's rings are, only a reset may change.
    pub(crate) fn step<D: VirtioDevice>(&mut self, device: &mut Mmio<D>, step: &Step) {
        let before = device.save();
        self.take(device, step);
        let after = device.save();
        let resets = matches!(step, Step::Start { .. }) || after.registers.status == 0;
        if before.registers.status & DRIVER_OK != 0 && !resets {
            for (before, after) in before.queues.iter().zip(&after.queues) {
                let rings = |queue: &QueueState| {
                    (queue.size, queue.descriptors, queue.driver_ring, queue.device_ring)
                };
                assert_eq!(rings(before), rings(after));
            }
        }
    }

    /// What the device asks for in return is done at once.
    fn take<D: VirtioDevice>(&mut self, device: &mut Mmio<D>, step: &Step) {
        match step {
            Step::Request { queue, header, pieces } => {
                self.request(usize::from(queue % 3), header, pieces);
                serve(device, self.memory, usize::from(queue % 3));
            }
            Step::Load { offset, width } => {
                let mut data = [0xaa; 8];
                let width = usize::from(width % 9);
                device.read(u64::from(*offset), &mut data[..width]);
            }
            Step::Store { offset, data, width } => {
                let width = usize::from(width % 9);
                let effect = device.write(u64::from(*offset), &data[..width]);
                self.effect(device, effect);
            }
            Step::Register { register, value } => {
                let offset = REGISTERS[usize::from(register % 16)];
                let effect = device.write(offset, &value.to_le_bytes());
                self.effect(device, effect);
            }
            Step::Start { without } => self.start(device, *without),
            Step::Poke { address, data } => self.poke(u64::from(*address % 0x3_0000), data),
            Step::Chain { queue, pieces } => self.chain(usize::from(queue % 3), pieces),
            Step::Ring { queue, index, head } => {
                let ring = rings(usize::from(queue % 3)) + 0x400;
                self.poke(ring + 2, &index.to_le_bytes());
                self.poke(ring + 4 + 2 * u64::from(head % QUEUE_SIZE), &head.to_le_bytes());
            }
            Step::Notify { queue } => serve(device, self.memory, usize::from(*queue % 4)),
        }
    }

    /// Initialises the device as a driver would, but for some features.
    pub(crate) fn start<D: VirtioDevice>(&mut self, device: &mut Mmio<D>, without: u64) {
        let features = device.device().device_features() & !(without & 0xffff_ffff);
        (self.avail, self.descriptor) = ([0; 3], [0; 3]);
        store(device, 0x70, 0);
        store(device, 0x70, 1);
        store(device, 0x70, 3);
        for half in [0u32, 1] {
            store(device, 0x24, half);
            store(device, 0x20, (features >> (32 * half)) as u32);
        }
        store(device, 0x70, 11);
        for queue in 0..device.device().queue_max_sizes().len() {
            store(device, 0x30, queue as u32);
            store(device, 0x38, u32::from(QUEUE_SIZE));
            store(device, 0x80, rings(queue) as u32);
            store(device, 0x90, rings(queue) as u32 + 0x400);
            store(device, 0xa0, rings(queue) as u32 + 0x800);
            store(device, 0x44, 1);
            self.poke(rings(queue) + 0x400, &[0; 0x600]);
        }
        store(device, 0x70, 15);
    }

    fn effect<D: VirtioDevice>(&mut self, device: &mut Mmio<D>, effect: Effect) {
        match effect {
            Effect::Notify(queue) => serve(device, self.memory, queue),
            Effect::Activated => (0..3).for_each(|queue| serve(device, self.memory, queue)),
            Effect::Reset => (self.avail, self.descriptor) = ([0; 3], [0; 3]),
            Effect::None => {}
        }
    }

    pub(crate) fn poke(&self, address: u64, data: &[u8]) {
        // Outside memory a guest's own store goes nowhere either.
        drop(self.memory.write(data, GuestAddress(address)));
    }

    /// Makes a request available, in the shape that a block device expects.
    fn request(&mut self, queue: usize, header: &Header, pieces: &[Piece]) {
        const KINDS: [u8; 8] = [0, 1, 0, 1, 4, 8, 11, 13];
        let mut bytes = [0; 16];
        bytes[0] = KINDS[usize::from(header.kind % 8)];
        bytes[8] = header.sector % 40;
        if header.wild >= 0xf0 {
            bytes[usize::from(header.wild & 0xf)] = header.kind;
        }
        self.poke(HEADERS, &bytes);
        let piece = |address: u64, length, flags| Piece { address: address as u32, length, flags };
        let mut all = vec![piece(HEADERS, 16, 0)];
        let room = usize::from(QUEUE_SIZE) - 2;
        all.extend(pieces.iter().take(room).map(|given| Piece {
            // Whole sectors more often than not, and never too many.
            length: if given.flags & 1 == 0 { given.length & 0x1e00 } else { given.length },
            ..*given
        }));
        all.push(piece(HEADERS + 16, 1, 2));
        self.chain(queue, &all);
    }

    /// Makes pieces available as one chain, flags and addresses as they come.
    pub(crate) fn chain(&mut self, queue: usize, pieces: &[Piece]) {
        const NEXT: u16 = 1;
        let head = self.descriptor[queue] % QUEUE_SIZE;
        let count = pieces.len().min(usize::from(QUEUE_SIZE));
        for (index, piece) in pieces.iter().take(count).enumerate() {
            let place = self.descriptor[queue] % QUEUE_SIZE;
            self.descriptor[queue] = self.descriptor[queue].wrapping_add(1);
            let last = index + 1 == count;
            // Mostly proper chains; one flag in 128 ends or continues wrongly.
            let mut flags = u16::from(piece.flags & 0x02) | if last { 0 } else { NEXT };
            if piece.flags & 0xfc == 0xfc {
                flags = u16::from(piece.flags & 0x07);
            }
            let mut bytes = [0; 16];
            let address = u64::from(piece.address % 0x3_0000);
            bytes[..8].copy_from_slice(&address.to_le_bytes());
            bytes[8..12].copy_from_slice(&u32::from(piece.length).to_le_bytes());
            bytes[12..14].copy_from_slice(&flags.to_le_bytes());
            bytes[14..].copy_from_slice(&((place + 1) % QUEUE_SIZE).to_le_bytes());
            self.poke(rings(queue) + 16 * u64::from(place), &bytes);
        }
        let ring = rings(queue) + 0x400;
        let slot = ring + 4 + 2 * u64::from(self.avail[queue] % QUEUE_SIZE);
        self.poke(slot, &head.to_le_bytes());
        self.avail[queue] = self.avail[queue].wrapping_add(1);
        self.poke(ring + 2, &self.avail[queue].to_le_bytes());
    }
}

fn rings(queue: usize) -> u64 {
    RINGS + RINGS_BYTES * queue as u64
}

fn store<D: VirtioDevice>(device: &mut Mmio<D>, offset: u64, value: u32) {
    device.write(offset, &value.to_le_bytes());
}

/// Serves a queue, as often as a VMM would.  There need be no end: a used ring laid
/// over the available one refills itself.
pub(crate) fn serve<D: VirtioDevice>(device: &mut Mmio<D>, memory: &Memory, queue: usize) {
    const PASSES_MAX: usize = 8;
    for _ in 0..PASSES_MAX {
        device.process(memory, queue);
        if !device.is_unfinished(queue) {
            return;
        }
    }
}

/// A device saved and brought back is the same.
pub(crate) fn check_restore<D: VirtioDevice>(device: &Mmio<D>, same: D) -> Mmio<D> {
    let state = device.save();
    let restored = Mmio::restore(&state, same).expect("a saved state can be restored");
    assert_eq!(restored.save(), state);
    restored
}

/// Steps from the input until it or the patience ends.
pub(crate) fn steps<'b, S: Arbitrary<'b>>(
    input: &mut Unstructured<'b>,
    mut take: impl FnMut(S) -> Result<()>,
) {
    for _ in 0..crate::STEPS_MAX {
        if input.is_empty() {
            return;
        }
        if input.arbitrary().and_then(&mut take).is_err() {
            return;
        }
    }
}
