use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use super::*;
use crate::virtio::testing::{DATA, Driver, QUEUE_SIZE, avail_ring, descriptors, used_ring};
use crate::virtio::{QUEUE_SIZE_MAX, TRANSPORT_FEATURES, VirtioDevice, mmio::Mmio};

/// Remembers the lengths of what it is given, and returns it unused.
#[derive(Debug, Default)]
struct Recorder {
    seen: Vec<(u64, u64)>,
    waiting: bool,
}

impl VirtioDevice for Recorder {
    fn device_type(&self) -> u32 {
        63
    }
    fn device_features(&self) -> u64 {
        TRANSPORT_FEATURES
    }
    fn queue_max_sizes(&self) -> &'static [u16] {
        &[QUEUE_SIZE_MAX]
    }
    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    fn reset(&mut self) {}
    fn process<M: GuestMemory>(
        &mut self,
        memory: &M,
        queues: &mut [Queue],
        index: usize,
    ) -> Result<Progress, Broken> {
        serve(memory, &mut queues[index], |chain| {
            if self.waiting {
                return Served::Waiting;
            }
            self.seen.push((chain.reader().remaining(), chain.writer().remaining()));
            Served::Used(1)
        })
    }
    fn rejected(&self) -> u64 {
        0
    }
}

fn started() -> (Mmio<Recorder>, Driver) {
    let mut device = Mmio::new(Recorder::default());
    let driver = Driver::started(&mut device);
    (device, driver)
}

#[test]
fn readable_and_writable_parts_are_told_apart() {
    let (mut device, mut driver) = started();
    driver.push(0, &[(DATA, 7, false), (DATA, 5, false), (DATA, 3, true)]);

    assert!(device.process(&driver.memory, 0));

    assert_eq!(device.device().seen, [(12, 3)]);
    assert_eq!(driver.used(0), Some((0, 1)));
}

#[test]
fn a_loop_of_descriptors_reads_as_empty() {
    let (mut device, mut driver) = started();
    driver.descriptor(0, 0, DATA, 8, VRING_DESC_F_NEXT, 1);
    driver.descriptor(0, 1, DATA, 8, VRING_DESC_F_NEXT, 0);
    driver.offer(0, 0);

    device.process(&driver.memory, 0);

    assert_eq!(device.device().seen, [(0, 0)]);
    assert_eq!(driver.used(0), Some((0, 1)));
}

#[test]
fn a_next_index_past_the_table_reads_as_empty() {
    let (mut device, mut driver) = started();
    driver.descriptor(0, 0, DATA, 8, VRING_DESC_F_NEXT, QUEUE_SIZE);
    driver.offer(0, 0);

    device.process(&driver.memory, 0);

    assert_eq!(device.device().seen, [(0, 0)]);
}

#[test]
fn a_readable_part_after_a_writable_one_reads_as_empty() {
    let (mut device, mut driver) = started();
    driver.push(0, &[(DATA, 7, true), (DATA, 5, false)]);

    device.process(&driver.memory, 0);

    assert_eq!(device.device().seen, [(0, 0)]);
}

#[test]
fn a_chain_may_be_as_long_as_the_queue_and_no_longer() {
    let (mut device, mut driver) = started();
    driver.push(0, &vec![(DATA, 1, false); usize::from(QUEUE_SIZE)]);
    device.process(&driver.memory, 0);
    // The one past it has to come by an indirect table, which we never offered.
    let table = vec![(DATA, 1, false); usize::from(QUEUE_SIZE) + 1];
    indirect(&mut driver, &table);

    device.process(&driver.memory, 0);

    assert_eq!(device.device().seen, [(u64::from(QUEUE_SIZE), 0), (0, 0)]);
}

/// Offers `pieces` through a table of their own.
fn indirect(driver: &mut Driver, pieces: &[(u64, u32, bool)]) {
    let table = DATA + 0x10_0000;
    for (index, &(address, length, _)) in pieces.iter().enumerate() {
        let last = index + 1 == pieces.len();
        let mut bytes = Vec::new();
        bytes.extend(address.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(u16::from(!last).to_le_bytes());
        bytes.extend(u16::try_from(index + 1).unwrap().to_le_bytes());
        driver.put(table + 16 * index as u64, &bytes);
    }
    let length = u32::try_from(16 * pieces.len()).unwrap();
    driver.descriptor(0, 7, table, length, VRING_DESC_F_INDIRECT, 0);
    driver.offer(0, 7);
}

#[test]
fn a_pass_ends_at_its_limit_and_says_so() {
    let (mut device, mut driver) = started();
    for _ in 0..=PASS_CHAINS_MAX {
        driver.push(0, &[(DATA, 1, true)]);
    }

    device.process(&driver.memory, 0);
    let first = (device.device().seen.len(), device.unfinished());
    device.process(&driver.memory, 0);
    let second = (device.device().seen.len(), device.unfinished());

    assert_eq!(first, (PASS_CHAINS_MAX, true));
    assert_eq!(second, (PASS_CHAINS_MAX + 1, false));
}

#[test]
fn a_chain_that_must_wait_is_still_there_later() {
    let (mut device, mut driver) = started();
    driver.push(0, &[(DATA, 1, true)]);
    device.device_mut().waiting = true;

    assert!(!device.process(&driver.memory, 0));
    assert!(!device.unfinished());
    device.device_mut().waiting = false;
    assert!(device.process(&driver.memory, 0));

    assert_eq!(driver.used(0), Some((0, 1)));
    assert_eq!(driver.used(0), None);
}

#[test]
fn the_used_ring_wraps_with_its_indexes() {
    let (mut device, mut driver) = started();
    for round in 0..70_000_u32 {
        let head = u32::from(driver.push(0, &[(DATA, 1, true)]));
        assert!(device.process(&driver.memory, 0), "round {round}");
        assert_eq!(driver.used(0), Some((head, 1)), "round {round}");
    }
}

#[test]
fn a_guest_that_waits_for_a_later_event_is_not_interrupted_before() {
    let (mut device, mut driver) = started();
    let event = avail_ring(0) + 4 + 2 * u64::from(QUEUE_SIZE);
    driver.put(event, &1u16.to_le_bytes());
    driver.push(0, &[(DATA, 1, true)]);
    let early = device.process(&driver.memory, 0);
    driver.push(0, &[(DATA, 1, true)]);
    let due = device.process(&driver.memory, 0);

    assert_eq!((early, due), (false, true));
}

#[test]
fn without_event_indexes_the_flags_count() {
    let mut device = Mmio::new(Recorder::default());
    let mut driver = Driver::new();
    driver.start(&mut device, 1 << 32);
    driver.put(avail_ring(0), &1u16.to_le_bytes());
    driver.push(0, &[(DATA, 1, true)]);
    let asked_not_to = device.process(&driver.memory, 0);
    driver.put(avail_ring(0), &0u16.to_le_bytes());
    driver.push(0, &[(DATA, 1, true)]);
    let asked_to = device.process(&driver.memory, 0);

    assert_eq!((asked_not_to, asked_to), (false, true));
    assert!(!device.process(&driver.memory, 0), "there was nothing to do");
    assert_eq!(driver.get(used_ring(0), 2), [0, 0], "notifications are on while we are idle");
}

#[test]
fn more_available_than_the_queue_holds_breaks_the_device() {
    let (mut device, driver) = started();
    driver.put(avail_ring(0) + 2, &(QUEUE_SIZE + 1).to_le_bytes());

    assert!(device.process(&driver.memory, 0));
    assert!(device.device().seen.is_empty());
    assert_eq!(device.save().registers.status, 15 | 64);
}

#[test]
fn a_head_past_the_table_breaks_the_device() {
    let (mut device, mut driver) = started();
    driver.offer(0, QUEUE_SIZE);

    assert!(device.process(&driver.memory, 0));
    assert_eq!(device.save().registers.status, 15 | 64);
    assert_eq!(driver.used(0), None);
}

#[test]
fn copying_crosses_pieces_and_stops_at_the_end_of_memory() {
    let (_, driver) = started();
    let end = u64::try_from(crate::virtio::testing::MEMORY_BYTES).unwrap();
    let segment = |address, length| Segment { address: GuestAddress(address), length };
    let pieces = [segment(DATA, 2), segment(DATA + 8, 0), segment(end - 2, 4)];
    let mut cursor = Cursor::new(&pieces);

    assert_eq!(cursor.write(&driver.memory, b"abcd"), Ok(()));
    assert_eq!(driver.get(DATA, 2), b"ab");
    assert_eq!(driver.get(end - 2, 2), b"cd");
    assert_eq!(cursor.remaining(), 2);
    assert_eq!(cursor.write(&driver.memory, b"e"), Err(Fault));
    assert_eq!(cursor.skip(3), Err(Fault));
    assert_eq!(cursor.skip(2), Ok(()));
    assert_eq!(Cursor::new(&pieces).read(&driver.memory, &mut [0; 7]), Err(Fault));
    let wrapping = [segment(u64::MAX - 1, 4)];
    assert_eq!(Cursor::new(&wrapping).read(&driver.memory, &mut [0; 4]), Err(Fault));
}

#[test]
fn descriptors_are_where_the_guest_said() {
    let (mut device, mut driver) = started();
    driver.descriptor(0, 3, DATA, 9, VRING_DESC_F_WRITE, 0);
    driver.offer(0, 3);
    assert_ne!(driver.get(descriptors(0) + 48, 8), [0; 8]);

    device.process(&driver.memory, 0);

    assert_eq!(device.device().seen, [(0, 9)]);
    assert_eq!(driver.used(0), Some((3, 1)));
}
