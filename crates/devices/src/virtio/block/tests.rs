use virtio_bindings::virtio_blk::VIRTIO_BLK_T_SECURE_ERASE;

use super::*;
use crate::virtio::mmio::Mmio;
use crate::virtio::testing::{DATA, Driver, Piece};

const SECTORS: u64 = 64;
const STATUS: u64 = DATA + 0x100;
const BUFFER: u64 = DATA + 0x1000;
const ID: [u8; ID_BYTES] = *b"forkd-disk-000000001";

/// A disk in memory that can break.
#[derive(Debug)]
struct Plain {
    bytes: Vec<u8>,
    broken: bool,
    flushes: u32,
    discards: Vec<(u64, u64)>,
}

impl Plain {
    fn range(&self, offset: u64, length: u64) -> io::Result<std::ops::Range<usize>> {
        if self.broken {
            return Err(io::ErrorKind::Other.into());
        }
        let start = usize::try_from(offset).unwrap();
        Ok(start..start + usize::try_from(length).unwrap())
    }
}

impl Disk for Plain {
    fn size_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let range = self.range(offset, buffer.len() as u64)?;
        buffer.copy_from_slice(&self.bytes[range]);
        Ok(())
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let range = self.range(offset, data.len() as u64)?;
        self.bytes[range].copy_from_slice(data);
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        self.range(0, 0)?;
        self.flushes += 1;
        Ok(())
    }
    fn discard(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.discards.push((offset, length));
        Ok(())
    }
    fn write_zeroes(&mut self, offset: u64, length: u64) -> io::Result<()> {
        let range = self.range(offset, length)?;
        self.bytes[range].fill(0);
        Ok(())
    }
}

type Device = Mmio<Block<Plain>>;

fn started() -> (Device, Driver) {
    // Every byte says which sector it is of.
    let bytes = (0..64).flat_map(|sector| [sector; 512]).collect();
    let disk = Plain { bytes, broken: false, flushes: 0, discards: Vec::new() };
    let mut device = Mmio::new(Block::new(disk, ID));
    let driver = Driver::started(&mut device);
    (device, driver)
}

/// Sends one request, data at [`BUFFER`]; returns bytes written and status.
fn request(
    device: &mut Device,
    driver: &mut Driver,
    kind: u32,
    sector: u64,
    data: &[Piece],
) -> (u32, u8) {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend([0; 4]);
    header.extend(sector.to_le_bytes());
    driver.put(DATA, &header);
    driver.put(STATUS, &[0xff]);
    let mut pieces = vec![(DATA, 16, false)];
    pieces.extend(data);
    pieces.push((STATUS, 1, true));
    driver.push(0, &pieces);
    device.process(&driver.memory, 0);
    let (_, written) = driver.used(0).expect("every request is returned");
    (written, driver.get(STATUS, 1)[0])
}

#[test]
fn a_read_fills_pieces_in_order() {
    let (mut device, mut driver) = started();
    let pieces = [(BUFFER, 100, true), (BUFFER + 0x1000, 924, true)];

    let answer = request(&mut device, &mut driver, VIRTIO_BLK_T_IN, 3, &pieces);

    assert_eq!(answer, (1025, 0));
    assert_eq!(driver.get(BUFFER, 101), [vec![3; 100], vec![0]].concat());
    assert_eq!(driver.get(BUFFER + 0x1000, 924), [vec![3; 412], vec![4; 512]].concat());
}

#[test]
fn a_write_longer_than_the_bounce_buffer_arrives_whole() {
    let bytes = vec![0; 3 * BOUNCE_BYTES_MAX];
    let disk = Plain { bytes, broken: false, flushes: 0, discards: Vec::new() };
    let mut device = Mmio::new(Block::new(disk, ID));
    let mut driver = Driver::started(&mut device);
    let length = 2 * BOUNCE_BYTES_MAX + 512;
    let data: Vec<u8> = (0..251).cycle().take(length).collect();
    driver.put(BUFFER, &data);
    let pieces = [(BUFFER, u32::try_from(length).unwrap(), false)];

    let answer = request(&mut device, &mut driver, VIRTIO_BLK_T_OUT, 1, &pieces);

    assert_eq!(answer, (1, 0));
    assert!(device.device().disk().bytes[512..][..length] == data);
    let back = [(BUFFER + 0x10_0000, u32::try_from(length).unwrap(), true)];
    request(&mut device, &mut driver, VIRTIO_BLK_T_IN, 1, &back);
    assert!(driver.get(BUFFER + 0x10_0000, length) == data);
}

#[test]
fn the_last_sector_can_be_had_and_the_one_past_it_not() {
    let (mut device, mut driver) = started();
    let one = [(BUFFER, 512, true)];
    let two = [(BUFFER, 1024, true)];
    let mut read = |sector, pieces| request(&mut device, &mut driver, 0, sector, pieces);

    assert_eq!(read(SECTORS - 1, &one), (513, 0));
    assert_eq!(read(SECTORS, &one), (1, 1));
    assert_eq!(read(SECTORS - 1, &two), (1, 1));
    assert_eq!(read(u64::MAX, &one), (1, 1));
    assert_eq!(read(u64::MAX / 512, &two), (1, 1));
    assert_eq!(device.rejected(), 4);
}

#[test]
fn a_length_that_is_no_whole_sector_is_an_error_and_none_at_all_is_fine() {
    let (mut device, mut driver) = started();

    assert_eq!(request(&mut device, &mut driver, 0, 0, &[(BUFFER, 511, true)]), (1, 1));
    assert_eq!(request(&mut device, &mut driver, 1, 0, &[(BUFFER, 513, false)]), (1, 1));
    assert_eq!(request(&mut device, &mut driver, 0, 0, &[]), (1, 0));
    assert_eq!(request(&mut device, &mut driver, 1, 0, &[]), (1, 0));
}

#[test]
fn a_request_may_be_as_large_as_announced_and_no_larger() {
    let limit = usize::try_from(REQUEST_BYTES_MAX).unwrap();
    let disk =
        Plain { bytes: vec![5; limit + 512], broken: false, flushes: 0, discards: Vec::new() };
    let mut device = Mmio::new(Block::new(disk, ID));
    let mut driver = Driver::started(&mut device);
    // Every piece at the same place: memory here is smaller than the request.
    let mut pieces = vec![(BUFFER, SEGMENT_BYTES_MAX, true); SEGMENTS_MAX as usize];

    let fits = request(&mut device, &mut driver, 0, 0, &pieces);
    pieces[0].1 += 512;
    let over = request(&mut device, &mut driver, 0, 0, &pieces);

    assert_eq!(fits, (u32::try_from(limit).unwrap() + 1, 0));
    assert_eq!(over, (1, 1));
}

#[test]
fn data_outside_guest_memory_is_an_error() {
    let (mut device, mut driver) = started();
    let before = device.device().disk().bytes.clone();

    assert_eq!(request(&mut device, &mut driver, 0, 0, &[(1 << 40, 512, true)]), (1, 1));
    assert_eq!(request(&mut device, &mut driver, 1, 0, &[(1 << 40, 512, false)]), (1, 1));
    assert!(device.device().disk().bytes == before);
}

#[test]
fn a_header_in_pieces_is_a_header_and_a_short_one_is_not() {
    let (mut device, mut driver) = started();
    driver.put(DATA, &[0; 16]);
    driver.push(0, &[(DATA, 1, false), (DATA + 1, 15, false), (BUFFER, 513, true)]);
    driver.push(0, &[(DATA, 15, false), (BUFFER, 513, true)]);
    driver.push(0, &[(1 << 40, 16, false), (BUFFER, 513, true)]);
    device.process(&driver.memory, 0);

    assert_eq!(driver.used(0), Some((0, 513)));
    assert_eq!(driver.used(0), Some((3, 1)));
    assert_eq!(driver.used(0), Some((5, 1)));
    assert_eq!(device.rejected(), 2);
}

#[test]
fn a_request_without_a_place_for_its_status_is_returned_and_counted() {
    let (mut device, mut driver) = started();
    driver.push(0, &[(DATA, 16, false)]);
    driver.push(0, &[(DATA, 16, false), (1 << 40, 1, true)]);
    device.process(&driver.memory, 0);

    assert_eq!(driver.used(0), Some((0, 0)));
    assert_eq!(driver.used(0), Some((1, 0)));
    assert_eq!(device.rejected(), 2);
}

#[test]
fn errors_of_the_disk_reach_the_guest() {
    let (mut device, mut driver) = started();
    device.device_mut().disk_mut().broken = true;

    assert_eq!(request(&mut device, &mut driver, 0, 0, &[(BUFFER, 512, true)]), (1, 1));
    assert_eq!(request(&mut device, &mut driver, 1, 0, &[(BUFFER, 512, false)]), (1, 1));
    assert_eq!(request(&mut device, &mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), (1, 1));
}

#[test]
fn a_flush_reaches_the_disk() {
    let (mut device, mut driver) = started();

    assert_eq!(request(&mut device, &mut driver, VIRTIO_BLK_T_FLUSH, 0, &[]), (1, 0));
    assert_eq!(device.device().disk().flushes, 1);
}

#[test]
fn the_name_is_given_as_far_as_there_is_room() {
    let (mut device, mut driver) = started();
    let long = request(&mut device, &mut driver, VIRTIO_BLK_T_GET_ID, 0, &[(BUFFER, 30, true)]);
    let name = driver.get(BUFFER, 21);
    let short = request(&mut device, &mut driver, VIRTIO_BLK_T_GET_ID, 0, &[(BUFFER, 3, true)]);

    assert_eq!((long, short), ((21, 0), (4, 0)));
    assert_eq!(name, [ID.as_slice(), &[0]].concat());
}

#[test]
fn an_unknown_request_is_unsupported() {
    let (mut device, mut driver) = started();
    for kind in [2, 3, VIRTIO_BLK_T_SECURE_ERASE, u32::MAX] {
        let answer = request(&mut device, &mut driver, kind, 0, &[(BUFFER, 512, true)]);
        assert_eq!(answer, (1, 2), "{kind}");
    }
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn a_range_is_discarded_or_zeroed() {
    let (mut device, mut driver) = started();
    let piece = [(BUFFER, 16, false)];
    driver.put(BUFFER, &range(8, 16, 0));
    let discard = request(&mut device, &mut driver, VIRTIO_BLK_T_DISCARD, 0, &piece);
    driver.put(BUFFER, &range(2, 1, 1));
    let zero = request(&mut device, &mut driver, VIRTIO_BLK_T_WRITE_ZEROES, 0, &piece);

    assert_eq!((discard, zero), ((1, 0), (1, 0)));
    let disk = device.device().disk();
    assert_eq!(disk.discards, [(4096, 8192)]);
    assert_eq!(
        [disk.bytes[1023], disk.bytes[1024], disk.bytes[1535], disk.bytes[1536]],
        [1, 0, 0, 3]
    );
}

#[test]
fn a_range_past_the_end_or_of_a_shape_not_announced_is_refused() {
    let (mut device, mut driver) = started();
    let past = u32::try_from(SECTORS).unwrap();
    for (bytes, length, status) in [
        (range(1, past, 0), 16, 1),
        (range(u64::MAX, 1, 0), 16, 1),
        (range(0, u32::MAX, 0), 16, 1),
        (range(0, 1, 1), 16, 2),
        (range(0, 1, 2), 16, 2),
        (range(0, 1, 0), 15, 1),
        ([range(0, 1, 0), range(0, 1, 0)].concat(), 32, 1),
    ] {
        driver.put(BUFFER, &bytes);
        let pieces = [(BUFFER, length, false)];
        let answer = request(&mut device, &mut driver, VIRTIO_BLK_T_DISCARD, 0, &pieces);
        assert_eq!(answer, (1, status), "{bytes:?}");
    }
    assert!(device.device().disk().discards.is_empty());
}

#[test]
fn the_configuration_says_how_large_the_disk_is() {
    let (mut device, _driver) = started();
    let mut capacity = [0; 8];
    device.read(0x100, &mut capacity);
    let mut tail = [0xaa; 8];
    device.read(0x100 + 56, &mut tail);
    let mut beyond = [0xaa; 4];
    device.read(u64::MAX, &mut beyond);

    assert_eq!(u64::from_le_bytes(capacity), SECTORS);
    assert_eq!((tail, beyond), ([1, 0, 0, 0, 0, 0, 0, 0], [0; 4]));
    device.write(0x100, &[1; 8]);
    assert_eq!(device.rejected(), 1);
}
