use std::collections::VecDeque;

use super::*;
use crate::virtio::mmio::Mmio;
use crate::virtio::testing::{DATA, Driver};

/// A wire that remembers what was sent and holds what is to be received.
#[derive(Debug, Default)]
struct Wire {
    sent: Vec<Vec<u8>>,
    waiting: VecDeque<Vec<u8>>,
    broken: bool,
}

impl Frames for Wire {
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        if self.broken {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.sent.push(frame.to_vec());
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        if self.broken {
            return Err(io::ErrorKind::Other.into());
        }
        Ok(self.waiting.pop_front().map(|frame| {
            let length = frame.len().min(buffer.len());
            buffer[..length].copy_from_slice(&frame[..length]);
            frame.len()
        }))
    }
}

type Device = Mmio<Net<Wire>>;

fn started() -> (Device, Driver) {
    let mut device = Mmio::new(Net::new(Wire::default(), [2, 0, 0, 0, 0, 9], 1500));
    let driver = Driver::started(&mut device);
    (device, driver)
}

fn send(device: &mut Device, driver: &mut Driver, pieces: &[(u64, u32, bool)]) {
    driver.push(TX_QUEUE, pieces);
    device.process(&driver.memory, TX_QUEUE);
    assert!(driver.used(TX_QUEUE).is_some(), "every frame's buffer is returned");
}

#[test]
fn a_sent_frame_loses_its_header_wherever_it_is_cut() {
    let (mut device, mut driver) = started();
    driver.put(DATA, &[0xff; 12]);
    driver.put(DATA + 12, b"a frame of 18 byte");
    send(&mut device, &mut driver, &[(DATA, 30, false)]);
    send(
        &mut device,
        &mut driver,
        &[(DATA, 5, false), (DATA + 5, 10, false), (DATA + 15, 15, false)],
    );

    assert_eq!(device.device().wire().sent, [b"a frame of 18 byte"; 2]);
    assert_eq!(device.rejected(), 0);
}

#[test]
fn frames_have_a_least_and_a_greatest_length() {
    let (mut device, mut driver) = started();
    let longest = u32::try_from(FRAME_BYTES_MAX).unwrap();
    for length in [0, 11, 12, 12 + 13, 12 + 14, 12 + longest, 12 + longest + 1] {
        send(&mut device, &mut driver, &[(DATA, length, false)]);
    }

    let lengths: Vec<usize> = device.device().wire().sent.iter().map(Vec::len).collect();
    assert_eq!(lengths, [14, FRAME_BYTES_MAX]);
    assert_eq!(device.rejected(), 5);
}

#[test]
fn a_frame_outside_memory_or_refused_by_the_host_is_dropped() {
    let (mut device, mut driver) = started();
    send(&mut device, &mut driver, &[(1 << 40, 100, false)]);
    send(&mut device, &mut driver, &[(DATA, 100, true)]);
    device.device_mut().wire_mut().broken = true;
    send(&mut device, &mut driver, &[(DATA, 100, false)]);

    assert!(device.device().wire().sent.is_empty());
    assert_eq!(device.rejected(), 3);
}

#[test]
fn a_received_frame_gets_a_header_and_fills_pieces_in_order() {
    let (mut device, mut driver) = started();
    device.device_mut().wire_mut().waiting.push_back((0..20).collect());
    driver.push(RX_QUEUE, &[(DATA, 12, true), (DATA + 100, 4, true), (DATA + 200, 100, true)]);

    assert!(device.process(&driver.memory, RX_QUEUE));

    assert_eq!(driver.used(RX_QUEUE), Some((0, 32)));
    assert_eq!(driver.get(DATA, 12), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(driver.get(DATA + 100, 4), [0, 1, 2, 3]);
    assert_eq!(driver.get(DATA + 200, 17), [&(4..20).collect::<Vec<u8>>()[..], &[0]].concat());
}

#[test]
fn frames_wait_for_buffers_and_buffers_for_frames() {
    let (mut device, mut driver) = started();
    device.device_mut().wire_mut().waiting.extend([vec![1; 60], vec![2; 60]]);
    assert!(!device.process(&driver.memory, RX_QUEUE));
    for _ in 0..3 {
        driver.push(RX_QUEUE, &[(DATA, 2048, true)]);
    }

    assert!(device.process(&driver.memory, RX_QUEUE));
    assert!(!device.unfinished());

    assert_eq!(driver.used(RX_QUEUE), Some((0, 72)));
    assert_eq!(driver.used(RX_QUEUE), Some((1, 72)));
    assert_eq!(driver.used(RX_QUEUE), None);
    assert!(!device.process(&driver.memory, RX_QUEUE));
    device.device_mut().wire_mut().waiting.push_back(vec![3; 60]);
    assert!(device.process(&driver.memory, RX_QUEUE));
    assert_eq!(driver.used(RX_QUEUE), Some((2, 72)));
}

#[test]
fn a_frame_that_does_not_fit_is_dropped_with_its_buffer() {
    let (mut device, mut driver) = started();
    let wire = device.device_mut().wire_mut();
    wire.waiting.extend([vec![1; 60], vec![2; 60], vec![3; 60], vec![4; FRAME_BYTES_MAX + 1]]);
    driver.push(RX_QUEUE, &[(DATA, 71, true)]);
    driver.push(RX_QUEUE, &[(DATA, 72, true)]);
    driver.push(RX_QUEUE, &[(1 << 40, 72, true)]);
    driver.push(RX_QUEUE, &[(DATA, 100_000, true)]);
    device.process(&driver.memory, RX_QUEUE);

    let used: Vec<u32> = std::iter::from_fn(|| driver.used(RX_QUEUE)).map(|(_, n)| n).collect();
    assert_eq!(used, [0, 72, 0, 0]);
    assert_eq!(device.rejected(), 3);
}

#[test]
fn a_wire_that_fails_keeps_the_buffers() {
    let (mut device, mut driver) = started();
    driver.push(RX_QUEUE, &[(DATA, 2048, true)]);
    device.device_mut().wire_mut().broken = true;
    assert!(!device.process(&driver.memory, RX_QUEUE));
    device.device_mut().wire_mut().broken = false;
    device.device_mut().wire_mut().waiting.push_back(vec![1; 60]);

    assert!(device.process(&driver.memory, RX_QUEUE));
    assert_eq!((driver.used(RX_QUEUE), device.rejected()), (Some((0, 72)), 1));
}

#[test]
fn the_configuration_holds_address_and_mtu() {
    let (mut device, _driver) = started();
    let mut config = [0xaa; 16];
    device.read(0x100, &mut config);

    assert_eq!(config, [2, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0xdc, 0x05, 0, 0, 0, 0]);
}
