use super::*;
use crate::virtio::mmio::Mmio;
use crate::virtio::testing::{DATA, Driver};

const PORT: u32 = 1024;
const TX_DATA: u64 = DATA;
const RX_DATA: u64 = DATA + 0x10_0000;
const RX_BYTES: u32 = 0x2000;
const GUEST_BUFFER: u32 = 1 << 20;

/// A guest's driver, and the machine's device.
struct Pair {
    device: Mmio<Vsock>,
    driver: Driver,
    rx: u64,
}

impl Pair {
    fn new() -> Self {
        Self::over(Vsock::new())
    }

    fn over(vsock: Vsock) -> Self {
        let mut device = Mmio::new(vsock);
        let driver = Driver::started(&mut device);
        Self { device, driver, rx: 0 }
    }

    fn host(&mut self) -> &mut Vsock {
        self.device.device_mut()
    }

    /// The guest sends one packet.
    fn guest_sends(&mut self, header: Header, payload: &[u8]) {
        let header = Header { length: u32::try_from(payload.len()).unwrap(), ..header };
        self.guest_sends_raw(&[&header.to_bytes()[..], payload].concat());
    }

    fn guest_sends_raw(&mut self, bytes: &[u8]) {
        self.driver.put(TX_DATA, bytes);
        let length = u32::try_from(bytes.len()).unwrap();
        self.driver.push(TX_QUEUE, &[(TX_DATA, length, false)]);
        self.device.process(&self.driver.memory, TX_QUEUE);
        assert!(self.driver.used(TX_QUEUE).is_some(), "every packet's buffer is returned");
    }

    /// The guest gives a buffer and gets the packet it was filled with.
    fn guest_receives(&mut self) -> Option<(Header, Vec<u8>)> {
        if !self.device.device().has_pending() {
            return None;
        }
        let at = RX_DATA + self.rx % 16 * u64::from(RX_BYTES);
        self.rx += 1;
        self.driver.push(RX_QUEUE, &[(at, RX_BYTES, true)]);
        self.device.process(&self.driver.memory, RX_QUEUE);
        let (_, length) = self.driver.used(RX_QUEUE)?;
        let bytes = self.driver.get(at, usize::try_from(length).unwrap());
        let header = Header::from_bytes(bytes[..HEADER_BYTES].try_into().unwrap());
        assert_eq!((header.source_cid, header.target_cid), (HOST_CID, GUEST_CID));
        assert_eq!(header.length as usize, bytes.len() - HEADER_BYTES);
        Some((header, bytes[HEADER_BYTES..].to_vec()))
    }

    fn guest_receives_op(&mut self) -> Option<u16> {
        self.guest_receives().map(|(header, _)| header.op)
    }

    fn events(&mut self) -> Vec<VsockEvent> {
        self.host().drain_events().collect()
    }

    /// The host opens a connection and the guest accepts it.
    fn connected(&mut self) -> (Id, Ports) {
        let id = self.host().open(PORT).unwrap();
        let ports = self.host().status(id).unwrap().ports;
        let (request, _) = self.guest_receives().unwrap();
        assert_eq!((request.op, request.target_port), (OP_REQUEST, PORT));
        self.guest_sends(from_guest(ports, OP_RESPONSE), &[]);
        assert_eq!(self.events(), [VsockEvent::Connected(id), VsockEvent::Writable(id)]);
        (id, ports)
    }
}

/// A header from the guest on a connection.
fn from_guest(ports: Ports, op: u16) -> Header {
    Header {
        source_cid: GUEST_CID,
        target_cid: HOST_CID,
        source_port: ports.guest,
        target_port: ports.host,
        kind: KIND_STREAM,
        op,
        buffer_bytes: GUEST_BUFFER,
        ..Header::default()
    }
}

fn half_closed(id: Id, done: bool, deaf: bool) -> VsockEvent {
    VsockEvent::HalfClosed { id, done, deaf }
}

#[test]
fn bytes_flow_both_ways_on_a_connection_the_host_opened() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    assert!(ports.host >= HOST_PORT_MIN);

    assert_eq!(pair.host().send(id, b"hello"), 5);
    let (header, payload) = pair.guest_receives().unwrap();
    pair.guest_sends(from_guest(ports, OP_RW), b"world!");
    let mut buffer = [0; 10];

    assert_eq!((header.op, payload.as_slice()), (OP_RW, &b"hello"[..]));
    assert_eq!(pair.events(), [VsockEvent::Readable(id)]);
    assert_eq!(pair.host().take(id, &mut buffer), 6);
    assert_eq!(&buffer[..6], b"world!");
    assert_eq!(pair.device.rejected(), 0);
}

#[test]
fn the_guest_opens_a_connection_and_the_host_accepts_it() {
    let mut pair = Pair::new();
    let ports = Ports { host: 1025, guest: 77 };
    pair.guest_sends(from_guest(ports, OP_REQUEST), &[]);
    let events = pair.events();
    let [VsockEvent::Incoming { id, host_port: 1025, guest_port: 77 }] = events[..] else {
        panic!("{events:?}");
    };

    assert_eq!(pair.guest_receives_op(), None);
    assert!(pair.host().accept(id));
    assert!(!pair.host().accept(id));

    assert_eq!(pair.guest_receives_op(), Some(OP_RESPONSE));
    assert_eq!(pair.host().send(id, b"x"), 1);
    assert_eq!(pair.guest_receives().unwrap().1, b"x");
}

#[test]
fn a_refused_guest_gets_a_reset() {
    let mut pair = Pair::new();
    let ports = Ports { host: 99, guest: 77 };
    pair.guest_sends(from_guest(ports, OP_REQUEST), &[]);
    let Some(VsockEvent::Incoming { id, .. }) = pair.host().drain_events().next() else {
        panic!("nothing came in");
    };
    pair.host().refuse(id);

    let (header, _) = pair.guest_receives().unwrap();
    assert_eq!((header.op, header.source_port, header.target_port), (OP_RST, 99, 77));
    assert_eq!((pair.host().status(id), pair.events()), (None, vec![]));
}

#[test]
fn a_host_refused_by_the_guest_hears_only_that_it_is_closed() {
    let mut pair = Pair::new();
    let id = pair.host().open(5).unwrap();
    let ports = pair.host().status(id).unwrap().ports;
    pair.guest_receives();
    pair.guest_sends(from_guest(ports, OP_RST), &[]);

    assert_eq!(pair.events(), [VsockEvent::Closed(id)]);
    assert_eq!(pair.host().status(id), None);
}

#[test]
fn a_guest_that_gives_up_before_the_host_heard_leaves_no_trace() {
    let mut pair = Pair::new();
    let ports = Ports { host: 99, guest: 77 };
    pair.guest_sends(from_guest(ports, OP_REQUEST), &[]);
    pair.guest_sends(from_guest(ports, OP_RST), &[]);

    assert_eq!(pair.events(), []);
    assert!(pair.host().connections.is_empty());
}

#[test]
fn the_host_sends_only_as_much_as_the_guest_has_room_for() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    let small = Header { buffer_bytes: 1000, ..from_guest(ports, OP_CREDIT_UPDATE) };
    pair.guest_sends(small, &[]);

    assert_eq!(pair.host().writable(id), 1000);
    assert_eq!(pair.host().send(id, &[7; 1500]), 1000);
    assert_eq!(pair.guest_receives().unwrap().1, [7; 1000]);
    assert_eq!(pair.host().send(id, &[7; 1]), 0);
    assert_eq!(pair.guest_receives_op(), Some(OP_CREDIT_REQUEST));
    assert_eq!(pair.host().send(id, &[7; 1]), 0);
    assert_eq!(pair.guest_receives_op(), None, "it was asked already");
    assert_eq!(pair.events(), []);

    pair.guest_sends(Header { forwarded: 400, ..small }, &[]);
    assert_eq!(pair.events(), [VsockEvent::Writable(id)]);
    assert_eq!(pair.host().send(id, &[7; 500]), 400);
    assert_eq!(pair.guest_receives_op(), Some(OP_RW));
    assert_eq!(pair.guest_receives_op(), Some(OP_CREDIT_REQUEST), "it has spoken since");
}

#[test]
fn credit_that_a_guest_cannot_have_is_none() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    let lie =
        Header { forwarded: 1, buffer_bytes: u32::MAX, ..from_guest(ports, OP_CREDIT_UPDATE) };
    pair.guest_sends(lie, &[]);

    assert_eq!(pair.host().writable(id), 0);
    assert_eq!(pair.host().send(id, b"x"), 0);
}

#[test]
fn what_the_guest_has_no_buffers_for_is_bounded() {
    let mut pair = Pair::new();
    let (id, _) = pair.connected();

    assert_eq!(pair.host().send(id, &vec![1; SEND_BYTES_MAX + 1]), SEND_BYTES_MAX);
    assert_eq!(pair.host().send(id, &[1]), 0);
    let mut received = 0;
    while received < SEND_BYTES_MAX {
        received += pair.guest_receives().unwrap().1.len();
    }
    assert_eq!((received, pair.guest_receives_op()), (SEND_BYTES_MAX, None));
    assert_eq!(pair.host().writable(id), SEND_BYTES_MAX);
}

#[test]
fn bytes_keep_their_order_however_they_are_cut() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    let bytes: Vec<u8> = (0..253).cycle().take(200_000).collect();
    let (mut sent, mut received) = (0, Vec::new());
    while received.len() < bytes.len() {
        sent += pair.host().send(id, &bytes[sent..bytes.len().min(sent + 7_001)]);
        let (header, payload) = pair.guest_receives().unwrap();
        assert_eq!(header.op, OP_RW);
        received.extend(payload);
    }
    assert!(received == bytes);
    let (mut back, mut buffer) = (Vec::<u8>::new(), [0; 5_003]);
    for piece in bytes.chunks(30_000) {
        pair.guest_sends(from_guest(ports, OP_RW), piece);
        let length = pair.host().take(id, &mut buffer);
        back.extend(&buffer[..length]);
    }
    while back.len() < bytes.len() {
        let length = pair.host().take(id, &mut buffer);
        back.extend(&buffer[..length]);
    }
    assert!(back == bytes);
}

#[test]
fn a_guest_may_fill_its_credit_and_not_a_byte_more() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    let packet = vec![9; PACKET_BYTES_MAX as usize];
    for _ in 0..BUFFER_BYTES / PACKET_BYTES_MAX {
        pair.guest_sends(from_guest(ports, OP_RW), &packet);
    }
    assert_eq!(pair.events(), [VsockEvent::Readable(id)]);
    assert_eq!(pair.host().status(id).unwrap().readable, BUFFER_BYTES as usize);

    pair.guest_sends(from_guest(ports, OP_RW), &[9]);

    assert_eq!(pair.device.rejected(), 1);
    assert_eq!(pair.guest_receives_op(), Some(OP_RST));
    assert_eq!(pair.events(), [half_closed(id, true, true)]);
    let mut buffer = vec![0; BUFFER_BYTES as usize];
    assert_eq!(pair.host().take(id, &mut buffer), BUFFER_BYTES as usize);
    assert_eq!(pair.events(), [VsockEvent::Closed(id)]);
}

#[test]
fn the_guest_hears_of_room_when_a_quarter_was_taken() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    let quarter = (BUFFER_BYTES / 4) as usize;
    pair.guest_sends(from_guest(ports, OP_RW), &vec![1; quarter]);
    let mut buffer = vec![0; quarter - 1];
    pair.host().take(id, &mut buffer);
    assert_eq!(pair.guest_receives_op(), None);

    pair.host().take(id, &mut buffer);

    let (header, _) = pair.guest_receives().unwrap();
    assert_eq!((header.op, header.forwarded), (OP_CREDIT_UPDATE, BUFFER_BYTES / 4));
    pair.guest_sends(from_guest(ports, OP_CREDIT_REQUEST), &[]);
    assert_eq!(pair.guest_receives_op(), Some(OP_CREDIT_UPDATE));
    pair.guest_sends(from_guest(ports, OP_RW), &[1]);
    pair.host().take(id, &mut buffer);
    assert_eq!(pair.guest_receives_op(), None, "until another quarter was taken");
}

#[test]
fn more_than_all_connections_may_hold_resets_the_one_that_sends_it() {
    let mut pair = Pair::new();
    let packet = vec![9; PACKET_BYTES_MAX as usize];
    let packets = RECEIVED_BYTES_MAX / packet.len();
    let each = (BUFFER_BYTES / PACKET_BYTES_MAX) as usize;
    let mut ports = Ports { host: 0, guest: 0 };
    for index in 0..packets {
        if index % each == 0 {
            ports = pair.connected().1;
        }
        pair.guest_sends(from_guest(ports, OP_RW), &packet);
        assert_eq!(pair.events().len(), 1, "there is something to take");
    }
    let (id, ports) = pair.connected();
    assert_eq!((pair.device.rejected(), pair.host().received), (0, RECEIVED_BYTES_MAX));

    pair.guest_sends(from_guest(ports, OP_RW), &[9]);

    assert_eq!(pair.device.rejected(), 1);
    assert_eq!(pair.events(), [VsockEvent::Closed(id)]);
}

#[test]
fn the_end_of_sending_waits_for_what_was_sent() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    pair.host().send(id, b"last words");
    pair.host().shutdown(id, Shutdown::Write);
    assert_eq!(pair.host().send(id, b"more"), 0);

    assert_eq!(pair.guest_receives().unwrap().1, b"last words");
    let (header, _) = pair.guest_receives().unwrap();
    assert_eq!((header.op, header.flags), (OP_SHUTDOWN, SHUTDOWN_SEND));
    pair.guest_sends(from_guest(ports, OP_RW), b"answer");
    let shutdown = Header { flags: SHUTDOWN_BOTH, ..from_guest(ports, OP_SHUTDOWN) };
    pair.guest_sends(shutdown, &[]);

    assert_eq!(pair.guest_receives_op(), Some(OP_RST));
    assert_eq!(pair.events(), [VsockEvent::Readable(id), half_closed(id, true, true)]);
    let mut buffer = [0; 10];
    assert_eq!(pair.host().take(id, &mut buffer), 6);
    assert_eq!(pair.events(), [VsockEvent::Closed(id)]);
}

#[test]
fn the_end_of_sending_waits_for_credit_too() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    pair.host().send(id, b"last words");
    pair.host().shutdown(id, Shutdown::Write);
    let less = Header { buffer_bytes: 4, ..from_guest(ports, OP_CREDIT_UPDATE) };
    pair.guest_sends(less, &[]);

    assert_eq!(pair.guest_receives().unwrap().1, b"last");
    assert_eq!(pair.guest_receives_op(), None);
    pair.guest_sends(Header { buffer_bytes: 100, ..less }, &[]);
    assert_eq!(pair.guest_receives().unwrap().1, b" words");
    assert_eq!(pair.guest_receives_op(), Some(OP_SHUTDOWN));
}

#[test]
fn each_direction_can_be_closed_by_itself() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    let done = Header { flags: SHUTDOWN_SEND, ..from_guest(ports, OP_SHUTDOWN) };
    pair.guest_sends(done, &[]);
    assert_eq!(pair.events(), [half_closed(id, true, false)]);
    assert_eq!(pair.host().send(id, b"still"), 5);
    assert_eq!(pair.guest_receives().unwrap().1, b"still");

    let deaf = Header { flags: SHUTDOWN_RECEIVE, ..from_guest(ports, OP_SHUTDOWN) };
    pair.host().send(id, b"too late");
    pair.guest_sends(deaf, &[]);

    assert_eq!(pair.events(), [half_closed(id, true, true), VsockEvent::Closed(id)]);
    assert_eq!(pair.guest_receives_op(), Some(OP_RST));
    assert_eq!(pair.guest_receives_op(), None);
}

#[test]
fn a_host_that_stops_reading_drops_what_comes_and_gives_the_credit_back() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    pair.guest_sends(from_guest(ports, OP_RW), &[1; 100]);
    pair.host().shutdown(id, Shutdown::Read);
    assert_eq!(pair.host().take(id, &mut [0; 10]), 0);
    let (header, _) = pair.guest_receives().unwrap();
    assert_eq!((header.op, header.flags), (OP_SHUTDOWN, SHUTDOWN_RECEIVE));

    for _ in 0..2 * BUFFER_BYTES / PACKET_BYTES_MAX {
        pair.guest_sends(from_guest(ports, OP_RW), &vec![1; PACKET_BYTES_MAX as usize]);
    }

    assert_eq!(pair.device.rejected(), 0);
    let (header, _) = pair.guest_receives().unwrap();
    assert_eq!((header.op, header.forwarded), (OP_CREDIT_UPDATE, 100 + 2 * BUFFER_BYTES));
}

#[test]
fn a_reset_by_the_host_is_heard_by_the_guest_and_forgotten() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    pair.host().send(id, b"dropped");
    pair.guest_sends(from_guest(ports, OP_RW), b"dropped too");
    pair.host().reset(id);
    pair.host().reset(id);

    assert_eq!(pair.guest_receives_op(), Some(OP_RST));
    assert_eq!((pair.guest_receives_op(), pair.events()), (None, vec![]));
    assert_eq!(pair.host().received, 0);
    pair.guest_sends(from_guest(ports, OP_RW), b"in flight");
    assert_eq!(pair.guest_receives_op(), Some(OP_RST), "there is no such connection");
    assert_eq!(pair.device.rejected(), 0);
}

#[test]
fn packets_that_no_connection_wants_are_reset_but_resets_are_not() {
    let mut pair = Pair::new();
    let ports = Ports { host: 4, guest: 5 };
    for op in [OP_RESPONSE, OP_RW, OP_SHUTDOWN, OP_CREDIT_UPDATE, 0, 8, u16::MAX] {
        pair.guest_sends(from_guest(ports, op), &[]);
        let (header, _) = pair.guest_receives().unwrap();
        assert_eq!((header.op, header.source_port, header.target_port), (OP_RST, 4, 5));
    }
    pair.guest_sends(from_guest(ports, OP_RST), &[]);
    assert_eq!(pair.guest_receives_op(), None);
}

#[test]
fn sockets_of_another_kind_are_reset_as_that_kind() {
    let mut pair = Pair::new();
    let ports = Ports { host: 4, guest: 5 };
    pair.guest_sends(Header { kind: 2, ..from_guest(ports, OP_REQUEST) }, &[]);

    let (header, _) = pair.guest_receives().unwrap();
    assert_eq!((header.op, header.kind), (OP_RST, 2));
    assert_eq!((pair.device.rejected(), pair.events()), (1, vec![]));
}

#[test]
fn packets_that_do_not_fit_their_connection_reset_it() {
    for op in [OP_REQUEST, OP_RESPONSE, 0, 8] {
        let mut pair = Pair::new();
        let (id, ports) = pair.connected();
        pair.guest_sends(from_guest(ports, op), &[]);

        assert_eq!(pair.guest_receives_op(), Some(OP_RST), "{op}");
        assert_eq!(pair.events(), [VsockEvent::Closed(id)], "{op}");
        assert_eq!(pair.device.rejected(), 1, "{op}");
    }
}

#[test]
fn bytes_before_an_answer_or_after_the_end_of_sending_reset_the_connection() {
    let mut pair = Pair::new();
    let id = pair.host().open(PORT).unwrap();
    let ports = pair.host().status(id).unwrap().ports;
    pair.guest_sends(from_guest(ports, OP_RW), b"early");
    assert_eq!(pair.events(), [VsockEvent::Closed(id)]);
    assert_eq!(pair.guest_receives_op(), Some(OP_RST));

    let (id, ports) = pair.connected();
    let done = Header { flags: SHUTDOWN_SEND, ..from_guest(ports, OP_SHUTDOWN) };
    pair.guest_sends(done, &[]);
    pair.guest_sends(from_guest(ports, OP_RW), b"late");
    assert_eq!(pair.events(), [half_closed(id, true, true), VsockEvent::Closed(id)]);
}

#[test]
fn packets_with_a_wrong_address_or_length_are_dropped() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    let good = from_guest(ports, OP_RW);
    let bad = [
        Header { source_cid: 4, ..good },
        Header { target_cid: 1, ..good },
        Header { source_cid: GUEST_CID | 1 << 32, ..good },
        Header { length: 1, ..good },
        Header { length: u32::MAX, ..good },
    ];
    for header in bad {
        pair.guest_sends_raw(&header.to_bytes());
    }
    pair.guest_sends_raw(&good.to_bytes()[..43]);
    let long = Header { length: PACKET_BYTES_MAX + 1, ..good };
    let payload = vec![0; PACKET_BYTES_MAX as usize + 1];
    pair.guest_sends_raw(&[&long.to_bytes()[..], &payload].concat());

    assert_eq!((pair.device.rejected(), pair.events()), (7, vec![]));
    assert_eq!(pair.host().status(id).unwrap().readable, 0);
    assert_eq!(pair.guest_receives_op(), None);
}

#[test]
fn connections_have_a_limit_from_either_side() {
    let mut pair = Pair::new();
    for _ in 0..CONNECTIONS_MAX - 1 {
        pair.host().open(PORT).unwrap();
    }
    let last = Ports { host: 1, guest: 1 };
    pair.guest_sends(from_guest(last, OP_REQUEST), &[]);

    assert_eq!(pair.host().open(PORT), Err(Full));
    pair.guest_sends(from_guest(Ports { host: 1, guest: 2 }, OP_REQUEST), &[]);
    assert_eq!(pair.device.rejected(), 1);
    let (header, _) = pair.guest_receives().unwrap();
    assert_eq!((header.op, header.target_port), (OP_RST, 2));
    assert_eq!(pair.events().len(), 1);
    pair.guest_sends(from_guest(last, OP_RST), &[]);
    assert_eq!(pair.host().open(PORT), Err(Full), "until the host has heard");
    assert_eq!(pair.events().len(), 1);
    assert!(pair.host().open(PORT).is_ok());
}

#[test]
fn resets_have_a_limit_and_those_past_it_are_dropped() {
    let mut pair = Pair::new();
    for guest in 0..=u32::try_from(TABLE_MAX).unwrap() {
        let stray = Header { length: 0, ..from_guest(Ports { host: 1, guest }, OP_RW) };
        pair.guest_sends(stray, &[]);
    }

    assert_eq!((pair.device.rejected(), pair.host().resets.len()), (1, TABLE_MAX));
    assert_eq!(pair.host().open(PORT), Err(Full));
    assert_eq!(pair.guest_receives_op(), Some(OP_RST));
    assert!(pair.host().open(PORT).is_ok());
}

#[test]
fn connections_take_turns() {
    let mut pair = Pair::new();
    let (one, one_ports) = pair.connected();
    let (other, other_ports) = pair.connected();
    pair.host().send(one, &vec![1; 40_000]);
    pair.host().send(other, &vec![2; 40_000]);

    let order: Vec<u32> = (0..4).map(|_| pair.guest_receives().unwrap().0.source_port).collect();

    assert_eq!(order, [one_ports.host, other_ports.host, one_ports.host, other_ports.host]);
}

#[test]
fn a_buffer_too_small_is_returned_empty_and_the_packet_kept() {
    let mut pair = Pair::new();
    let (id, _) = pair.connected();
    pair.host().send(id, b"kept");
    for length in [0, 43, 44] {
        pair.driver.push(RX_QUEUE, &[(RX_DATA, length, true)]);
        pair.device.process(&pair.driver.memory, RX_QUEUE);
        assert_eq!(pair.driver.used(RX_QUEUE).map(|(_, bytes)| bytes), Some(0), "{length}");
    }

    assert_eq!(pair.device.rejected(), 3);
    assert_eq!(pair.guest_receives().unwrap().1, b"kept");
}

#[test]
fn a_buffer_outside_memory_costs_the_guest_its_connection() {
    let mut pair = Pair::new();
    let (id, _) = pair.connected();
    pair.host().send(id, b"lost");
    pair.driver.push(RX_QUEUE, &[(1 << 40, 100, true)]);
    pair.device.process(&pair.driver.memory, RX_QUEUE);

    assert_eq!(pair.driver.used(RX_QUEUE).map(|(_, bytes)| bytes), Some(0));
    assert_eq!(pair.events(), [VsockEvent::Closed(id)]);
    assert_eq!(pair.guest_receives_op(), Some(OP_RST));
}

#[test]
fn a_restored_guest_first_hears_that_its_connections_are_gone() {
    let mut pair = Pair::new();
    let (_, first) = pair.connected();
    let incoming = Ports { host: 1025, guest: 9 };
    pair.guest_sends(from_guest(incoming, OP_REQUEST), &[]);
    pair.guest_sends(from_guest(Ports { host: 3, guest: 3 }, OP_RW), &[]);
    let state = pair.host().save();

    let mut restored = Pair::over(Vsock::restore(&state).unwrap());
    assert_eq!(restored.host().save(), state, "and again, if it is saved before it ran");
    let id = restored.host().open(PORT).unwrap();
    let mut heard = Vec::new();
    while let Some((header, _)) = restored.guest_receives() {
        heard.push((header.op, header.source_port, header.target_port));
    }

    let next = first.host + 1;
    assert_eq!(
        heard,
        [(OP_RST, 3, 3), (OP_RST, 1025, 9), (OP_RST, first.host, PORT), (OP_REQUEST, next, PORT)]
    );
    assert_eq!(restored.events(), []);
    assert_eq!(restored.host().status(id).unwrap().ports.host, next);
    restored.guest_sends(from_guest(first, OP_RW), b"from before");
    assert_eq!(restored.guest_receives_op(), Some(OP_RST));
}

#[test]
fn states_that_could_not_have_been_saved_are_refused() {
    let ports = Ports { host: 1, guest: 1 };
    let state = |next_port, count| VsockState { next_port, connections: vec![ports; count] };
    let refuse = |state| Vsock::restore(&state).unwrap_err();

    assert_eq!(refuse(state(HOST_PORT_MIN - 1, 0)), RestoreError::NextPort(HOST_PORT_MIN - 1));
    assert_eq!(
        refuse(state(HOST_PORT_MIN, TABLE_MAX + 1)),
        RestoreError::Connections(TABLE_MAX + 1)
    );
    let mut fullest = Vsock::restore(&state(u32::MAX, TABLE_MAX)).unwrap();
    assert_eq!(fullest.open(PORT), Err(Full));
    assert_eq!(fullest.save().connections.len(), TABLE_MAX);
}

#[test]
fn ports_start_again_after_the_last_and_skip_those_in_use() {
    let state = VsockState { next_port: u32::MAX, connections: Vec::new() };
    let mut vsock = Vsock::restore(&state).unwrap();
    let ports: Vec<u32> = (0..3)
        .map(|_| {
            let id = vsock.open(PORT).unwrap();
            vsock.status(id).unwrap().ports.host
        })
        .collect();
    vsock.next_port = u32::MAX;
    let id = vsock.open(PORT).unwrap();

    assert_eq!(ports, [u32::MAX, HOST_PORT_MIN, HOST_PORT_MIN + 1]);
    assert_eq!(vsock.status(id).unwrap().ports.host, HOST_PORT_MIN + 2);
}

#[test]
fn a_reset_of_the_device_closes_every_connection() {
    let mut pair = Pair::new();
    let (id, _) = pair.connected();
    pair.guest_sends(from_guest(Ports { host: 1, guest: 1 }, OP_RW), &[]);
    pair.device.write(0x70, &[0; 4]);

    assert_eq!(pair.events(), [VsockEvent::Closed(id)]);
    assert!(!pair.host().has_pending());
    assert_eq!(pair.host().save().connections, []);
}

#[test]
fn an_idle_device_holds_no_buffers() {
    let mut pair = Pair::new();
    let (id, ports) = pair.connected();
    pair.host().send(id, &[1; 5_000]);
    pair.guest_sends(from_guest(ports, OP_RW), &[1; 5_000]);
    while pair.guest_receives().is_some() {}
    pair.host().take(id, &mut [0; 5_000]);

    assert_eq!(pair.host().connections[&id].buffer_capacity(), 0);
    assert_eq!(pair.host().received, 0);
}
