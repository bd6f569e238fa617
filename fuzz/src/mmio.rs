//! Block, net and rng behind the transport.

use std::io;

use arbitrary::Unstructured;
use forkd_devices::disk::{BLOCK_BYTES, LayeredDisk};
use forkd_devices::virtio::VirtioDevice;
use forkd_devices::virtio::block::{Block, Disk, SECTOR_BYTES};
use forkd_devices::virtio::mmio::Mmio;
use forkd_devices::virtio::net::{FRAME_BYTES_MAX, FRAME_BYTES_MIN, Frames, Net};
use forkd_devices::virtio::rng::{Entropy, Rng};

use crate::disk::Store;
use crate::guest::{Guest, Step, check_restore, serve, steps, with_memory};

const DISK_BLOCKS: u64 = 4;
const TOP_LIMIT_BYTES: u64 = 2 * BLOCK_BYTES;

/// Drives `device` and hands it over at the end.
fn drive<D: VirtioDevice>(
    input: &mut Unstructured<'_>,
    device: D,
    same: impl FnOnce() -> D,
    check: impl FnOnce(&D),
) {
    with_memory(|memory| {
        let mut device = Mmio::new(device);
        let mut guest = Guest::new(memory);
        guest.start(&mut device, 0);
        steps(input, |step: Step| {
            guest.step(&mut device, &step);
            Ok(())
        });
        check(device.device());
        let mut restored = check_restore(&device, same());
        for queue in 0..device.device().queue_max_sizes().len() {
            serve(&mut restored, memory, queue);
        }
    });
}

/// A disk that is only asked for what a device may ask for.
#[derive(Debug)]
struct Watched(LayeredDisk<Store>);

impl Watched {
    fn new() -> Self {
        let size = DISK_BLOCKS * BLOCK_BYTES;
        let disk = LayeredDisk::new(size, Vec::new(), Store::new(size), TOP_LIMIT_BYTES);
        Self(disk.expect("a sound disk"))
    }

    fn check(&self, offset: u64, length: u64) {
        assert!(offset.is_multiple_of(SECTOR_BYTES) && length.is_multiple_of(SECTOR_BYTES));
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.0.size_bytes()));
    }
}

impl Disk for Watched {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.check(offset, buffer.len() as u64);
        self.0.read_at(offset, buffer)
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len() as u64);
        self.0.write_at(offset, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }

    fn discard(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length);
        self.0.discard(offset, length)
    }

    fn write_zeroes(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length);
        self.0.write_zeroes(offset, length)
    }
}

pub(crate) fn block(input: &mut Unstructured<'_>) {
    let block = || Block::new(Watched::new(), [0; 20]);
    drive(input, block(), block, |block| {
        assert!(block.disk().0.top_bytes() <= TOP_LIMIT_BYTES);
    });
}

/// A wire that looks at what is sent and has a frame now and then.
#[derive(Debug)]
struct Wire {
    turn: usize,
}

impl Frames for Wire {
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        assert!((FRAME_BYTES_MIN..=FRAME_BYTES_MAX).contains(&frame.len()));
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        const LENGTHS: [usize; 5] = [60, 1514, 0, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1];
        assert_eq!(buffer.len(), FRAME_BYTES_MAX);
        self.turn += 1;
        match self.turn % 7 {
            5 => Err(io::ErrorKind::Other.into()),
            6 => Ok(None),
            index => Ok(Some(LENGTHS[index])),
        }
    }
}

pub(crate) fn net(input: &mut Unstructured<'_>) {
    let net = || Net::new(Wire { turn: 0 }, [2, 0, 0, 0, 0, 1], 1500);
    drive(input, net(), net, |_| {});
}

/// Ones, so that what was written can be seen.
#[derive(Debug)]
struct Ones;

impl Entropy for Ones {
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        buffer.fill(1);
        Ok(())
    }
}

pub(crate) fn rng(input: &mut Unstructured<'_>) {
    drive(input, Rng::new(Ones), || Rng::new(Ones), |_| {});
}
