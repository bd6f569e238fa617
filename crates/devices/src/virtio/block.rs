//! The disk's front: block requests, from buffers to a [`Disk`].
//!
//! | Configuration | Field                    | Value                             |
//! |---------------|--------------------------|-----------------------------------|
//! | 0x00, 8 bytes | `capacity`               | size in sectors of 512 bytes      |
//! | 0x08, 4 bytes | `size_max`               | [`SEGMENT_BYTES_MAX`]             |
//! | 0x0c, 4 bytes | `seg_max`                | [`SEGMENTS_MAX`]                  |
//! | 0x14, 4 bytes | `blk_size`               | 512                               |
//! | 0x18, 1 byte  | `physical_block_exp`     | 3: sectors come in eights         |
//! | 0x24, 4 bytes | `max_discard_sectors`    | [`CLEAR_BYTES_MAX`] in sectors    |
//! | 0x28, 4 bytes | `max_discard_seg`        | 1                                 |
//! | 0x2c, 4 bytes | `discard_sector_alignment` | 8                               |
//! | 0x30, 4 bytes | `max_write_zeroes_sectors` | [`CLEAR_BYTES_MAX`] in sectors  |
//! | 0x34, 4 bytes | `max_write_zeroes_seg`   | 1                                 |
//! | 0x38, 1 byte  | `write_zeroes_may_unmap` | 1                                 |
//!
//! A request is a header of 16 bytes (type, reserved, first sector), the data,
//! and a last writable byte for the status.  Where the guest cuts it into
//! descriptors is its own business.
//!
//! # Trust
//!
//! The guest chooses all of it.  Sectors are checked against the capacity and
//! lengths against [`REQUEST_BYTES_MAX`] before the disk is asked; data passes
//! through one buffer of at most [`BOUNCE_BYTES_MAX`], which lives as long as
//! one pass.  A bad request ends in `IOERR` or `UNSUPP`, one without a status
//! byte in nothing at all, and each is counted.

use std::io;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR,
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_queue::Queue;
use vm_memory::GuestMemory;

use super::chain::{Chain, Cursor, Fault, Served, serve};
use super::{Broken, Progress, QUEUE_SIZE_MAX, TRANSPORT_FEATURES, VirtioDevice, read_space};

/// The unit that requests count in.
pub const SECTOR_BYTES: u64 = 512;

/// Most pieces of data that we ask a driver to put into one request: the queue
/// less the header and the status.
pub const SEGMENTS_MAX: u32 = 254;

/// Most bytes that we ask a driver to put into one piece.
pub const SEGMENT_BYTES_MAX: u32 = 64 * 1024;

/// Most data one request may move.
pub const REQUEST_BYTES_MAX: u64 = SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64;

/// Most bytes one request may discard or zero.
pub const CLEAR_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Data in flight between the guest and the disk.
pub const BOUNCE_BYTES_MAX: usize = 64 * 1024;

/// Length of the name that a guest can ask for.
pub const ID_BYTES: usize = 20;

const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;
const CONFIG_BYTES: usize = 60;
const SECTORS_PER_BLOCK: u32 = 8;
const PHYSICAL_BLOCK_EXPONENT: u8 = 3;

/// A disk's content, addressed in bytes.
///
/// Ranges given to it lie within [`Disk::size_bytes`] and are multiples of
/// [`SECTOR_BYTES`].  An error reaches the guest as `IOERR`.
pub trait Disk {
    /// Size in bytes; a multiple of [`SECTOR_BYTES`], and constant.
    fn size_bytes(&self) -> u64;

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    ///
    /// If the host cannot read it.
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Stores `data` at `offset`.
    ///
    /// # Errors
    ///
    /// If the host cannot store it, or may not because of a limit.
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Makes everything stored so far survive a crash of the host.
    ///
    /// # Errors
    ///
    /// If the host cannot promise that.
    fn flush(&mut self) -> io::Result<()>;

    /// Forgets a range; what it reads as afterwards is undefined.
    ///
    /// # Errors
    ///
    /// If the host cannot.
    fn discard(&mut self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes a range read as zeros.
    ///
    /// # Errors
    ///
    /// As [`Disk::write_at`].
    fn write_zeroes(&mut self, offset: u64, length: u64) -> io::Result<()>;
}

/// The device.
#[derive(Debug)]
pub struct Block<D> {
    disk: D,
    id: [u8; ID_BYTES],
    rejected: u64,
}

/// A header, as the guest wrote it.
#[derive(Clone, Copy, Debug)]
struct Header {
    kind: u32,
    sector: u64,
}

/// How a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Io,
    Unsupported,
}

impl From<Fault> for Failure {
    fn from(_: Fault) -> Self {
        Self::Io
    }
}

impl From<io::Error> for Failure {
    fn from(_: io::Error) -> Self {
        Self::Io
    }
}

impl<D: Disk> Block<D> {
    /// A device over `disk`.  A guest that asks for its name gets `id`.
    pub fn new(disk: D, id: [u8; ID_BYTES]) -> Self {
        Self { disk, id, rejected: 0 }
    }

    /// The disk.
    pub fn disk(&self) -> &D {
        &self.disk
    }

    /// The disk, for the host's side of it.
    pub fn disk_mut(&mut self) -> &mut D {
        &mut self.disk
    }

    /// Serves one request and returns the bytes written to it.
    fn answer<M: GuestMemory>(&mut self, memory: &M, chain: &Chain, bounce: &mut Vec<u8>) -> u32 {
        let mut status = chain.writer();
        let Some(data_bytes) = status.remaining().checked_sub(1) else {
            self.reject();
            return 0;
        };
        let outcome = self.execute(memory, chain, data_bytes, bounce);
        let (code, written) = match outcome {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(Failure::Io) => (VIRTIO_BLK_S_IOERR, 0),
            Err(Failure::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0),
        };
        let code = u8::try_from(code).unwrap_or(u8::MAX);
        let answered = status.skip(data_bytes).and_then(|()| status.write(memory, &[code])).is_ok();
        if outcome.is_err() || !answered {
            self.reject();
        }
        u32::try_from(written + u64::from(answered)).unwrap_or(0)
    }

    /// Does what the header asks; returns the bytes of data written back.
    fn execute<M: GuestMemory>(
        &mut self,
        memory: &M,
        chain: &Chain,
        data_bytes: u64,
        bounce: &mut Vec<u8>,
    ) -> Result<u64, Failure> {
        let mut input = chain.reader();
        let mut output = chain.writer();
        let header = Header::read(memory, &mut input)?;
        match header.kind {
            VIRTIO_BLK_T_IN => {
                let start = self.start_of(header.sector, data_bytes, REQUEST_BYTES_MAX)?;
                self.read(memory, &mut output, start, data_bytes, bounce)?;
                Ok(data_bytes)
            }
            VIRTIO_BLK_T_OUT => {
                let length = input.remaining();
                let start = self.start_of(header.sector, length, REQUEST_BYTES_MAX)?;
                self.write(memory, &mut input, start, length, bounce)?;
                Ok(0)
            }
            VIRTIO_BLK_T_FLUSH => {
                self.disk.flush()?;
                Ok(0)
            }
            VIRTIO_BLK_T_GET_ID => {
                let length = usize::try_from(data_bytes).unwrap_or(ID_BYTES).min(ID_BYTES);
                output.write(memory, &self.id[..length])?;
                Ok(length as u64)
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                self.clear(memory, &mut input, header.kind)?;
                Ok(0)
            }
            _ => Err(Failure::Unsupported),
        }
    }

    fn read<M: GuestMemory>(
        &mut self,
        memory: &M,
        output: &mut Cursor<'_>,
        start: u64,
        length: u64,
        bounce: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let mut done = 0;
        while done < length {
            let piece = piece_of(bounce, length - done);
            self.disk.read_at(start + done, piece)?;
            output.write(memory, piece)?;
            done += piece.len() as u64;
        }
        Ok(())
    }

    fn write<M: GuestMemory>(
        &mut self,
        memory: &M,
        input: &mut Cursor<'_>,
        start: u64,
        length: u64,
        bounce: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let mut done = 0;
        while done < length {
            let piece = piece_of(bounce, length - done);
            input.read(memory, piece)?;
            self.disk.write_at(start + done, piece)?;
            done += piece.len() as u64;
        }
        Ok(())
    }

    /// Discards or zeros the one range that the request names.
    fn clear<M: GuestMemory>(
        &mut self,
        memory: &M,
        input: &mut Cursor<'_>,
        kind: u32,
    ) -> Result<(), Failure> {
        let mut range = [0; RANGE_BYTES];
        input.read(memory, &mut range)?;
        let (sector, sectors, flags) = parse_range(range);
        // One range per request is what `max_discard_seg` allows.
        if input.remaining() != 0 {
            return Err(Failure::Io);
        }
        let allowed =
            if kind == VIRTIO_BLK_T_DISCARD { 0 } else { VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP };
        if flags & !allowed != 0 {
            return Err(Failure::Unsupported);
        }
        let length = u64::from(sectors) * SECTOR_BYTES;
        let start = self.start_of(sector, length, CLEAR_BYTES_MAX)?;
        if kind == VIRTIO_BLK_T_DISCARD {
            self.disk.discard(start, length)?;
        } else {
            self.disk.write_zeroes(start, length)?;
        }
        Ok(())
    }

    /// Where a request starts in bytes, if all of it lies on the disk.
    fn start_of(&self, sector: u64, length: u64, limit: u64) -> Result<u64, Failure> {
        let start = sector.checked_mul(SECTOR_BYTES).ok_or(Failure::Io)?;
        let end = start.checked_add(length).ok_or(Failure::Io)?;
        let whole = length.is_multiple_of(SECTOR_BYTES);
        if whole && length <= limit && end <= self.disk.size_bytes() {
            Ok(start)
        } else {
            Err(Failure::Io)
        }
    }

    fn reject(&mut self) {
        self.rejected = self.rejected.saturating_add(1);
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        let capacity = self.disk.size_bytes() / SECTOR_BYTES;
        let clear_sectors = u32::try_from(CLEAR_BYTES_MAX / SECTOR_BYTES).unwrap_or(u32::MAX);
        let mut config = [0; CONFIG_BYTES];
        config[0x00..0x08].copy_from_slice(&capacity.to_le_bytes());
        config[0x18] = PHYSICAL_BLOCK_EXPONENT;
        config[0x38] = 1;
        for (offset, value) in [
            (0x08, SEGMENT_BYTES_MAX),
            (0x0c, SEGMENTS_MAX),
            (0x14, 512),
            (0x24, clear_sectors),
            (0x28, 1),
            (0x2c, SECTORS_PER_BLOCK),
            (0x30, clear_sectors),
            (0x34, 1),
        ] {
            config[offset..offset + 4].copy_from_slice(&u32::to_le_bytes(value));
        }
        config
    }
}

impl Header {
    fn read<M: GuestMemory>(memory: &M, input: &mut Cursor<'_>) -> Result<Self, Fault> {
        let mut bytes = [0; HEADER_BYTES];
        input.read(memory, &mut bytes)?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = bytes;
        Ok(Self { kind: u32::from_le_bytes([a, b, c, d]), sector: u64::from_le_bytes(sector) })
    }
}

/// First sector, number of sectors, flags.
fn parse_range(bytes: [u8; RANGE_BYTES]) -> (u64, u32, u32) {
    let bytes = u128::from_le_bytes(bytes);
    let word = |shift: u32| u32::try_from(bytes >> shift & u128::from(u32::MAX)).unwrap_or(0);
    (u64::from(word(0)) | u64::from(word(32)) << 32, word(64), word(96))
}

/// As much of `bounce` as the next step needs; it grows to the largest step.
fn piece_of(bounce: &mut Vec<u8>, left: u64) -> &mut [u8] {
    let length = usize::try_from(left).map_or(BOUNCE_BYTES_MAX, |left| left.min(BOUNCE_BYTES_MAX));
    if bounce.len() < length {
        bounce.resize(length, 0);
    }
    &mut bounce[..length]
}

impl<D: Disk> VirtioDevice for Block<D> {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn device_features(&self) -> u64 {
        TRANSPORT_FEATURES
            | 1 << VIRTIO_BLK_F_SIZE_MAX
            | 1 << VIRTIO_BLK_F_SEG_MAX
            | 1 << VIRTIO_BLK_F_BLK_SIZE
            | 1 << VIRTIO_BLK_F_FLUSH
            | 1 << VIRTIO_BLK_F_TOPOLOGY
            | 1 << VIRTIO_BLK_F_DISCARD
            | 1 << VIRTIO_BLK_F_WRITE_ZEROES
    }

    fn queue_max_sizes(&self) -> &'static [u16] {
        &[QUEUE_SIZE_MAX]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_space(&self.config(), offset, data);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {
        self.reject();
    }

    fn reset(&mut self) {}

    fn process<M: GuestMemory>(
        &mut self,
        memory: &M,
        queues: &mut [Queue],
        index: usize,
    ) -> Result<Progress, Broken> {
        let Some(queue) = queues.get_mut(index) else {
            return Ok(Progress::default());
        };
        let mut bounce = Vec::new();
        serve(memory, queue, |chain| Served::Used(self.answer(memory, chain, &mut bounce)))
    }

    fn rejected(&self) -> u64 {
        self.rejected
    }
}

#[cfg(test)]
mod tests;
