//! Devices from states that no device saved.

use std::io;

use arbitrary::{Arbitrary, Result, Unstructured};
use forkd_devices::virtio::mmio::{Mmio, MmioState, QueueState, Registers};
use forkd_devices::virtio::rng::{Entropy, Rng};
use forkd_devices::virtio::vsock::{Ports, Vsock, VsockState};

use crate::guest::{Guest, Memory, Step, steps, with_memory};

#[derive(Debug)]
struct Zeros;

impl Entropy for Zeros {
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        buffer.fill(0);
        Ok(())
    }
}

pub(crate) fn run(data: &[u8]) {
    let Some((&how, rest)) = data.split_first() else {
        return;
    };
    // As the VMM reads them, and nearer to what a device saves.
    let decoded = if how & 1 == 0 {
        postcard::take_from_bytes::<(MmioState, VsockState)>(rest).ok()
    } else {
        let mut input = Unstructured::new(rest);
        states(&mut input).ok().map(|states| (states, input.take_rest()))
    };
    let Some(((transport, vsock), rest)) = decoded else {
        return;
    };
    let mut input = Unstructured::new(rest);
    with_memory(|memory| {
        let vsock_device = Vsock::restore(&vsock);
        if let Ok(device) = vsock_device {
            assert_eq!(device.save(), vsock);
            drive(memory, &transport, device, &mut input);
        }
        drive(memory, &transport, Rng::new(Zeros), &mut input);
    });
}

fn drive<D: forkd_devices::virtio::VirtioDevice>(
    memory: &Memory,
    state: &MmioState,
    device: D,
    input: &mut Unstructured<'_>,
) {
    let Ok(mut device) = Mmio::restore(state, device) else {
        return;
    };
    assert_eq!(device.save(), *state);
    let mut guest = Guest::new(memory);
    for queue in 0..4 {
        device.process(memory, queue);
    }
    steps(input, |step: Step| {
        guest.step(&mut device, &step);
        Ok(())
    });
}

fn states(input: &mut Unstructured<'_>) -> Result<(MmioState, VsockState)> {
    const STATUSES: [u32; 8] = [0, 1, 3, 11, 15, 79, 143, 15];
    const FEATURES: u64 = 1 << 32 | 1 << 29;
    let device_type = if input.arbitrary()? { 19 } else { 4 };
    let wild: u8 = input.arbitrary()?;
    let mut registers = Registers {
        driver_features: FEATURES,
        status: STATUSES[usize::from(u8::arbitrary(input)? % 8)],
        queue_select: input.arbitrary()?,
        interrupt_status: u32::from(u8::arbitrary(input)? % 4),
        ..Registers::default()
    };
    match wild % 16 {
        0 => registers.driver_features = input.arbitrary()?,
        1 => registers.status = input.arbitrary()?,
        2 => registers.interrupt_status = input.arbitrary()?,
        _ => {}
    }
    let mut queues = Vec::new();
    for _ in 0..if device_type == 19 { 3 } else { 1 } {
        queues.push(queue(input)?);
    }
    let connections = Vec::<(u32, u32)>::arbitrary(input)?;
    let connections = connections.into_iter().map(|(host, guest)| Ports { host, guest }).collect();
    let next_port = input.arbitrary::<u32>()? | if wild & 0x10 == 0 { 1 << 30 } else { 0 };
    let transport = MmioState { device_type, registers, queues };
    Ok((transport, VsockState { next_port, connections }))
}

fn queue(input: &mut Unstructured<'_>) -> Result<QueueState> {
    let size = 1 << (u8::arbitrary(input)? % 10);
    let near = |address: u32| (u64::from(address) % 0x3_0000) & !0xf;
    let wild: u8 = input.arbitrary()?;
    Ok(QueueState {
        size: if wild == 0 { input.arbitrary()? } else { size },
        ready: wild & 3 != 3,
        descriptors: if wild == 1 { input.arbitrary()? } else { near(input.arbitrary()?) },
        driver_ring: if wild == 2 { input.arbitrary()? } else { near(input.arbitrary()?) },
        device_ring: if wild == 4 { input.arbitrary()? } else { near(input.arbitrary()?) },
        next_avail: input.arbitrary()?,
        next_used: input.arbitrary()?,
    })
}
