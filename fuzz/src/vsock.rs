//! A hostile guest and a busy host over one vsock device.

use std::collections::BTreeMap;

use arbitrary::{Arbitrary, Unstructured};
use forkd_devices::virtio::mmio::Mmio;
use forkd_devices::virtio::vsock::{
    BUFFER_BYTES, CONNECTIONS_MAX, GUEST_CID, HOST_CID, Id, Ports, RECEIVED_BYTES_MAX, RX_QUEUE,
    SEND_BYTES_MAX, Shutdown, TABLE_MAX, TX_QUEUE, Vsock, VsockEvent,
};

use crate::guest::{Guest, Piece, Step, check_restore, serve, steps, with_memory};

/// Where packets to be sent are put together.
const PACKET: u64 = 0x8000;
/// Where buffers for packets are.
const BUFFERS: u32 = 0xa000;
const HEADER_BYTES: u16 = 44;

#[derive(Arbitrary, Debug)]
enum Op {
    /// Anything a guest can do to any device.
    Guest(Step),
    /// A packet, mostly on ports that mean something.
    Packet {
        op: u8,
        port: u8,
        payload: u16,
        credit: u16,
        forwarded: u16,
        flags: u8,
        wrong: u8,
    },
    /// Buffers for packets.
    Buffers {
        count: u8,
        length: u16,
    },
    Open {
        port: u8,
    },
    /// A connection that the host opens and the guest accepts.
    Connect {
        port: u8,
        credit: u16,
    },
    Host {
        connection: u8,
        call: Call,
    },
    Drain,
}

#[derive(Arbitrary, Debug)]
enum Call {
    Accept,
    Refuse,
    Send(u16),
    Take(u16),
    Shutdown(u8),
    Reset,
}

/// The host's side, and what it believes.
#[derive(Default)]
struct Host {
    /// Connections it was told of, and whether they are `Incoming`.
    known: BTreeMap<Id, bool>,
}

pub(crate) fn run(input: &mut Unstructured<'_>) {
    with_memory(|memory| {
        let mut device = Mmio::new(Vsock::new());
        let mut guest = Guest::new(memory);
        let mut host = Host::default();
        guest.start(&mut device, 0);
        steps(input, |op: Op| {
            match op {
                Op::Guest(step) => guest.step(&mut device, &step),
                Op::Packet { op, port, payload, credit, forwarded, flags, wrong } => {
                    let ports = host.ports(device.device(), port);
                    let mut header = header(op, ports, payload, credit, forwarded, flags);
                    if wrong >= 0xf0 {
                        header[usize::from(wrong & 0x0f) * 2] ^= 0x81;
                    }
                    guest.poke(PACKET, &header);
                    let length = HEADER_BYTES.saturating_add(payload);
                    guest.chain(TX_QUEUE, &[piece(PACKET as u32, length, false)]);
                    serve(&mut device, memory, TX_QUEUE);
                }
                Op::Buffers { count, length } => {
                    for _ in 0..count % 8 {
                        guest.chain(RX_QUEUE, &[piece(BUFFERS, length, true)]);
                    }
                    serve(&mut device, memory, RX_QUEUE);
                }
                Op::Open { port } => {
                    host.open(&mut device, port);
                }
                Op::Connect { port, credit } => {
                    let Some(ports) = host.open(&mut device, port) else {
                        return Ok(());
                    };
                    guest.chain(RX_QUEUE, &[piece(BUFFERS, 4096, true)]);
                    serve(&mut device, memory, RX_QUEUE);
                    guest.poke(PACKET, &header(2, ports, 0, credit, 0, 0));
                    guest.chain(TX_QUEUE, &[piece(PACKET as u32, HEADER_BYTES, false)]);
                    serve(&mut device, memory, TX_QUEUE);
                }
                Op::Host { connection, call } => host.call(&mut device, connection, &call),
                Op::Drain => host.drain(device.device_mut()),
            }
            host.check(device.device());
            Ok(())
        });
        host.drain(device.device_mut());
        let state = device.device().save();
        assert!(state.connections.len() <= TABLE_MAX);
        let same = Vsock::restore(&state).expect("a saved state can be restored");
        assert_eq!(same.save(), state);
        let mut restored = check_restore(&device, same);
        for queue in 0..3 {
            serve(&mut restored, memory, queue);
        }
    });
}

fn piece(address: u32, length: u16, writable: bool) -> Piece {
    Piece { address, length, flags: if writable { 2 } else { 0 } }
}

fn header(op: u8, ports: Ports, payload: u16, credit: u16, forwarded: u16, flags: u8) -> [u8; 44] {
    let mut bytes = [0; 44];
    bytes[0..8].copy_from_slice(&GUEST_CID.to_le_bytes());
    bytes[8..16].copy_from_slice(&HOST_CID.to_le_bytes());
    bytes[16..20].copy_from_slice(&ports.guest.to_le_bytes());
    bytes[20..24].copy_from_slice(&ports.host.to_le_bytes());
    bytes[24..28].copy_from_slice(&u32::from(payload).to_le_bytes());
    bytes[28..30].copy_from_slice(&1u16.to_le_bytes());
    bytes[30..32].copy_from_slice(&u16::from(op % 9).to_le_bytes());
    bytes[32..36].copy_from_slice(&u32::from(flags).to_le_bytes());
    bytes[36..40].copy_from_slice(&u32::from(credit).to_le_bytes());
    bytes[40..44].copy_from_slice(&u32::from(forwarded).to_le_bytes());
    bytes
}

impl Host {
    fn open(&mut self, device: &mut Mmio<Vsock>, port: u8) -> Option<Ports> {
        let id = device.device_mut().open(u32::from(port % 8)).ok()?;
        assert_eq!(self.known.insert(id, false), None, "ids are used once");
        device.device().status(id).map(|status| status.ports)
    }

    /// Ports of a connection, or some that may have been one.
    fn ports(&self, device: &Vsock, choice: u8) -> Ports {
        let known = self.known.keys().nth(usize::from(choice % 8));
        match known.and_then(|&id| device.status(id)) {
            Some(status) if choice < 0xe0 => status.ports,
            _ if choice & 1 == 0 => Ports { host: (1 << 30) + u32::from(choice % 16), guest: 1 },
            _ => Ports { host: 1025, guest: u32::from(choice) },
        }
    }

    fn call(&mut self, device: &mut Mmio<Vsock>, connection: u8, call: &Call) {
        let device = device.device_mut();
        let Some(&id) = self.known.keys().nth(usize::from(connection) % self.known.len().max(1))
        else {
            return;
        };
        match call {
            Call::Accept => {
                device.accept(id);
            }
            Call::Refuse => {
                device.refuse(id);
                self.known.remove(&id);
            }
            Call::Send(length) => {
                let room = device.writable(id);
                let sent = device.send(id, &vec![7; usize::from(*length)]);
                assert_eq!(sent, room.min(usize::from(*length)));
            }
            Call::Take(length) => {
                let had = device.status(id).map_or(0, |status| status.readable);
                let taken = device.take(id, &mut vec![0; usize::from(*length)]);
                assert_eq!(taken, had.min(usize::from(*length)));
            }
            Call::Shutdown(which) => {
                let directions = [Shutdown::Read, Shutdown::Write, Shutdown::Both];
                device.shutdown(id, directions[usize::from(which % 3)]);
            }
            Call::Reset => {
                device.reset(id);
                assert_eq!(device.status(id), None);
                self.known.remove(&id);
            }
        }
    }

    fn drain(&mut self, device: &mut Vsock) {
        let events: Vec<VsockEvent> = device.drain_events().collect();
        for event in events {
            match event {
                VsockEvent::Incoming { id, .. } => {
                    assert_eq!(self.known.insert(id, true), None, "ids are used once");
                }
                VsockEvent::Closed(id) => {
                    assert!(self.known.remove(&id).is_some(), "closed once, and not unheard of");
                    assert_eq!(device.status(id), None);
                }
                VsockEvent::Connected(id) => assert_eq!(self.known.get(&id), Some(&false)),
                VsockEvent::Readable(id)
                | VsockEvent::Writable(id)
                | VsockEvent::HalfClosed { id, .. } => assert!(self.known.contains_key(&id)),
            }
        }
        assert_eq!(device.drain_events().next(), None);
    }

    fn check(&self, device: &Vsock) {
        let mut received = 0;
        for &id in self.known.keys() {
            let Some(status) = device.status(id) else {
                panic!("{id:?} is gone and the host was not told");
            };
            assert!(status.readable <= BUFFER_BYTES as usize);
            assert!(status.writable <= SEND_BYTES_MAX);
            received += status.readable;
        }
        // Those that the host has not heard of have received nothing.
        assert_eq!(device.received_bytes(), received);
        assert!(received <= RECEIVED_BYTES_MAX);
        assert!(self.known.len() <= CONNECTIONS_MAX);
    }
}
