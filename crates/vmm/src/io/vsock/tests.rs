use std::io::Write;
use std::sync::mpsc;
use std::thread;

use forkd_devices::virtio::VirtioDevice;
use forkd_devices::virtio::mmio::{MmioState, QueueState, Registers};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::io::client::GREETING_BYTES_MAX;

fn listening(name: &str) -> VsockHost {
    let path = std::env::temp_dir().join(format!("forkd-{}-{name}", std::process::id()));
    let epoll = Arc::new(Epoll::new().unwrap());
    let mut host = VsockHost::new(Mmio::new(Vsock::new()), path, epoll, 0);
    host.listen().unwrap();
    host
}

/// The stream of a connection to port 7, and what that is called.
fn connect(host: &mut VsockHost) -> (UnixStream, Id) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (theirs, host.connect(7, ours).unwrap())
}

/// A host whose own connection, to port 7, was passed on; and what that is called.
fn passed_on(name: &str) -> (VsockHost, Id, u32) {
    let mut host = listening(name);
    let (stream, id) = connect(&mut host);
    let ports = host.device.device().status(id).unwrap().ports;
    host.pass_on(id);
    drop(stream);
    (host, id, ports.host)
}

/// A client that has said which port it wants.
fn client(host: &mut VsockHost, port: u32) -> UnixStream {
    let mut client = UnixStream::connect(&host.path).unwrap();
    client.set_nonblocking(true).unwrap();
    writeln!(client, "CONNECT {port}").unwrap();
    let token = host.next_token;
    host.on_socket(LISTENER);
    host.on_socket(token);
    client
}

fn heard(mut client: &UnixStream) -> Option<String> {
    let mut line = [0; GREETING_BYTES_MAX];
    let length = client.read(&mut line).ok()?;
    Some(String::from_utf8_lossy(&line[..length]).into_owned())
}

#[test]
fn a_connection_that_was_passed_on_is_the_next_clients_of_its_port() {
    let (mut host, id, host_port) = passed_on("next");

    let other = client(&mut host, 8);
    let first = client(&mut host, 7);
    let second = client(&mut host, 7);

    assert_eq!(heard(&first), Some(format!("OK {host_port}\n")));
    assert_eq!(host.by_id[&id], 3);
    assert_eq!([&other, &second].map(heard), [None, None], "the guest has not accepted them");
}

#[test]
fn a_connection_that_the_guest_closes_before_its_next_client_is_forgotten() {
    let (mut host, id, _) = passed_on("closed");

    host.on_event(VsockEvent::HalfClosed { id, done: true, deaf: true });

    assert_eq!(host.device.device().status(id), None);
    assert_eq!(heard(&client(&mut host, 7)), None, "the guest has yet to accept another");
}

#[test]
fn a_connection_that_is_over_before_it_is_passed_on_is_nobodys() {
    let mut host = listening("over");
    let (_stream, id) = connect(&mut host);
    VirtioDevice::reset(host.device.device_mut());

    host.pass_on(id);

    assert_eq!(host.device.device().status(id), None);
    assert_eq!(heard(&client(&mut host, 7)), None, "the guest has yet to accept another");
}

#[test]
fn clients_past_the_most_that_are_greeted_wait_for_one_of_them() {
    let mut host = listening("crowd");
    let connect = |host: &VsockHost| UnixStream::connect(&host.path).unwrap();
    let mut clients: Vec<_> = (0..=GREETINGS_MAX).map(|_| connect(&host)).collect();
    host.on_socket(LISTENER);
    assert_eq!((host.greetings.len(), host.accept_waiting()), (GREETINGS_MAX, None));

    writeln!(clients[0], "CONNECT 7").unwrap();
    host.on_socket(1);
    host.accept_waiting();

    assert_eq!((host.greetings.len(), host.links.len()), (GREETINGS_MAX, 1));
    clients[GREETINGS_MAX].set_nonblocking(true).unwrap();
    assert_eq!(heard(&clients[GREETINGS_MAX]), None, "it is neither refused nor answered");
}

#[test]
fn a_client_is_accepted_once_there_is_a_connection_for_it() {
    let mut host = listening("full");
    let ids: Vec<Id> = std::iter::from_fn(|| host.device.device_mut().open(7).ok()).collect();
    let _client = UnixStream::connect(&host.path).unwrap();
    host.on_socket(LISTENER);
    assert_eq!(host.greetings.len(), 0);

    host.device.device_mut().reset(ids[0]);
    VirtioDevice::reset(host.device.device_mut());
    host.accept_waiting();

    assert_eq!(host.greetings.len(), 1);
}

/// Where queue `index` has its descriptors, both of its rings, and its buffers.
fn places(index: usize) -> [u64; 3] {
    [1, 2, 3].map(|page| (index as u64 * 4 + page) << 12)
}

const QUEUE_SIZE: u16 = 16;
/// A packet's header, and no payload.
const HEADER_BYTES: u32 = 44;
const BUFFER_BYTES: u64 = 128;

/// A guest whose driver is ready, with one buffer in each queue.  Both rings of the one that is
/// `endless` are at one place, so that a buffer is made available with each that is used.
fn driven(host: &mut VsockHost, endless: Option<usize>) -> GuestMemoryMmap {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let queues = [RX_QUEUE, TX_QUEUE, 2].map(|index| {
        let [descriptors, rings, buffers] = places(index);
        let device_writes = u16::from(index == RX_QUEUE) * 2;
        for entry in 0..u64::from(QUEUE_SIZE) {
            let at = descriptors + entry * 16;
            memory.write_obj(buffers + entry * BUFFER_BYTES, GuestAddress(at)).unwrap();
            memory.write_obj(HEADER_BYTES, GuestAddress(at + 8)).unwrap();
            memory.write_obj(device_writes, GuestAddress(at + 12)).unwrap();
        }
        memory.write_obj(1_u16, GuestAddress(rings + 2)).unwrap();
        let one_place = endless == Some(index);
        QueueState {
            size: QUEUE_SIZE,
            ready: true,
            descriptors,
            driver_ring: rings,
            device_ring: if one_place { rings } else { rings + 0x800 },
            next_avail: 0,
            next_used: u16::from(one_place),
        }
    });
    let driver_features = 1 << 32;
    let registers = Registers { driver_features, status: 15, ..Registers::default() };
    let state = MmioState { device_type: 19, registers, queues: queues.into() };
    host.device.reload(&state).unwrap();
    memory
}

/// Buffers of a queue that were used, counted with 16 bits.
fn used(memory: &GuestMemoryMmap, queue: usize) -> u16 {
    memory.read_obj(GuestAddress(places(queue)[1] + 2)).unwrap()
}

/// The id of the VMM's call of the agent.
fn call(host: &VsockHost) -> Option<Id> {
    host.agent.as_ref().and_then(|agent| agent.call)
}

/// Ends the call under way, as a guest does in which nobody listens, and then calls again.
fn refuse(host: &mut VsockHost) {
    let id = call(host).unwrap();
    host.on_event(VsockEvent::Closed(id));
    assert!(host.agent_due_in().is_some_and(|left| left <= CALL_AGAIN));
    host.agent.as_mut().unwrap().due = Some(Instant::now() + Duration::from_hours(1));
    assert!(!host.agent_is_due());
    host.agent.as_mut().unwrap().due = Some(Instant::now());
    assert!(host.agent_is_due());
    host.call_agent();
    assert_eq!(host.agent_due_in(), None, "it is called now");
}

#[test]
fn an_agent_is_called_when_nobody_has_a_connection_to_it_any_more() {
    let (mut host, id, _) = passed_on("called");
    let memory = driven(&mut host, None);
    host.pump(&memory);
    assert_eq!(call(&host), None, "it has one that nobody uses");
    let first = client(&mut host, 7);
    let other = client(&mut host, 8);
    host.pump(&memory);
    assert_eq!((call(&host), host.spare), (None, None), "a client has it");

    host.on_event(VsockEvent::HalfClosed { id, done: true, deaf: true });
    host.pump(&memory);

    let called = call(&host).unwrap();
    assert_eq!(host.device.device().status(called).unwrap().ports.guest, 7);
    host.on_event(VsockEvent::Connected(called));
    assert_eq!((call(&host), host.spare), (None, Some((called, 7))));
    drop((first, other));
}

#[test]
fn an_agent_is_called_once_by_a_machine_without_a_connection() {
    let (mut host, id, _) = passed_on("once");
    host.call_agent();
    assert_eq!(call(&host), None, "it has one that nobody uses");

    host.on_event(VsockEvent::Closed(id));
    host.call_agent();
    let called = call(&host);
    host.call_agent();

    assert!(called.is_some());
    assert_eq!(call(&host), called);
}

#[test]
fn an_agent_is_called_though_there_is_a_connection_to_another_port() {
    let (mut host, ..) = passed_on("port");
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let other = host.connect(8, ours).unwrap();
    host.pass_on(other);

    host.call_agent();

    let called = call(&host).unwrap();
    assert_eq!(host.device.device().status(called).unwrap().ports.guest, 7);
}

#[test]
fn an_agent_is_called_when_the_connection_of_its_client_is_reset() {
    let (mut host, id, _) = passed_on("reset");
    let memory = driven(&mut host, None);
    let first = client(&mut host, 7);

    host.on_event(VsockEvent::Closed(id));
    host.pump(&memory);

    assert!(call(&host).is_some());
    drop(first);
}

#[test]
fn an_agent_is_called_when_its_client_breaks_off() {
    let mut host = listening("breaks");
    let (stream, id) = connect(&mut host);
    let memory = driven(&mut host, None);
    let ports = host.device.device().status(id).unwrap().ports;
    let accepted = [3, 0, 2, 0, ports.guest, ports.host, 0, 1 | 2 << 16, 0, 1 << 16, 0];
    let packet = accepted.map(u32::to_le_bytes).concat();
    memory.write_slice(&packet, GuestAddress(places(TX_QUEUE)[2])).unwrap();
    host.write(&memory, 0x50, &1_u32.to_le_bytes());
    host.pass_on(id);
    drop(stream);
    let first = client(&mut host, 7);

    drop(first); // with a greeting that it has not read
    host.on_socket(host.by_id[&id]);
    host.pump(&memory);

    assert!(call(&host).is_some());
}

#[test]
fn an_agent_is_looked_for_if_a_connection_is_over_before_it_is_passed_on() {
    let (mut host, ..) = passed_on("early");
    let (_stream, id) = connect(&mut host);
    VirtioDevice::reset(host.device.device_mut());

    host.pass_on(id);

    assert!(host.agent.as_ref().is_some_and(|agent| agent.look));
}

#[test]
fn an_agent_for_whose_call_there_is_no_room_is_called_later() {
    let (mut host, id, _) = passed_on("room");
    host.on_event(VsockEvent::Closed(id));
    while host.device.device_mut().open(8).is_ok() {}

    host.call_agent();

    assert_eq!(call(&host), None);
    assert!(host.agent_due_in().is_some() && !host.agent_is_gone());
}

#[test]
fn a_call_that_ends_without_an_answer_or_is_not_needed_any_more_leaves_no_connection() {
    let (mut host, id, _) = passed_on("leaves");
    host.on_event(VsockEvent::Closed(id));
    host.call_agent();
    let refused = call(&host).unwrap();
    host.on_event(VsockEvent::HalfClosed { id: refused, done: true, deaf: true });
    assert_eq!((call(&host), host.device.device().status(refused)), (None, None));
    assert!(host.agent_due_in().is_some());

    host.call_agent();
    let called = call(&host).unwrap();
    let (_stream, passed) = connect(&mut host);
    host.pass_on(passed);
    host.on_event(VsockEvent::Connected(called));

    assert_eq!(host.device.device().status(called), None);
    assert_eq!((call(&host), host.spare), (None, Some((passed, 7))));
}

#[test]
fn an_agent_is_not_called_while_another_client_waits_for_it() {
    let (mut host, id, _) = passed_on("waits");
    let memory = driven(&mut host, None);
    let first = client(&mut host, 7);
    let waits = client(&mut host, 7);
    host.on_event(VsockEvent::Closed(id));
    host.pump(&memory);
    assert_eq!(call(&host), None, "another client waits for one");

    let (second, _) = host.by_id.pop_last().unwrap();
    host.device.device_mut().reset(second);
    host.look_for_agent();
    host.pump(&memory);

    assert!(call(&host).is_some());
    drop((first, waits));
}

#[test]
fn an_agent_that_refuses_for_five_seconds_is_gone_and_one_that_then_answers_is_not() {
    let (mut host, id, _) = passed_on("gone");
    host.on_event(VsockEvent::HalfClosed { id, done: true, deaf: true });
    host.call_agent();
    for _ in 1..REFUSALS_MAX {
        refuse(&mut host);
    }
    assert!(!host.agent_is_gone());

    let called = call(&host).unwrap();
    host.on_event(VsockEvent::Connected(called));
    host.on_event(VsockEvent::Closed(called));
    host.call_agent();
    for _ in 1..REFUSALS_MAX {
        refuse(&mut host);
    }
    assert!(!host.agent_is_gone(), "refusals in a row count");
    refuse(&mut host);

    assert!(host.agent_is_gone());
    let (_stream, met) = connect(&mut host);
    host.pass_on(met);
    assert!(!host.agent_is_gone(), "it was met again");
    assert_eq!(CALL_AGAIN * REFUSALS_MAX, Duration::from_secs(5));
}

#[test]
fn a_refusal_wakes_the_thread_that_is_to_call_again() {
    let (mut host, id, _) = passed_on("wakes");
    let memory = driven(&mut host, None);
    host.on_event(VsockEvent::HalfClosed { id, done: true, deaf: true });
    host.pump(&memory);
    let called = host.device.device().status(call(&host).unwrap()).unwrap().ports;
    let memory = driven(&mut host, None);
    let refused = [3, 0, 2, 0, called.guest, called.host, 0, 1 | 3 << 16, 0, 0, 0];
    let packet = refused.map(u32::to_le_bytes).concat();
    memory.write_slice(&packet, GuestAddress(places(TX_QUEUE)[2])).unwrap();

    host.write(&memory, 0x50, &1_u32.to_le_bytes());

    assert!(host.has_rest() && host.agent_due_in().is_some() && call(&host).is_none());
    host.pump(&memory);
    assert!(!host.has_rest());
}

#[test]
fn a_guest_that_was_rewound_has_no_agent_until_it_is_met() {
    let (mut host, id, _) = passed_on("rewound");
    host.on_event(VsockEvent::HalfClosed { id, done: true, deaf: true });
    host.rewind(Mmio::new(Vsock::new()));

    host.call_agent();

    assert_eq!((call(&host), host.agent_due_in()), (None, None));
}

#[test]
fn a_guest_that_was_rewound_has_no_connection_for_its_next_client() {
    let (mut host, ..) = passed_on("forgets");
    host.rewind(Mmio::new(Vsock::new()));

    assert_eq!(heard(&client(&mut host, 7)), None, "the guest has yet to accept it");
}

#[test]
fn a_connection_that_is_passed_on_takes_the_place_of_one_that_nobody_used() {
    let (mut host, older, _) = passed_on("older");
    let (_stream, id) = connect(&mut host);

    host.pass_on(id);

    assert_eq!(host.device.device().status(older), None);
    assert_eq!(host.spare, Some((id, 7)));
}

/// Does `work`, which has an end.
fn ends<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let (say, said) = mpsc::channel();
    thread::spawn(move || say.send(work()));
    said.recv_timeout(Duration::from_mins(1)).expect("it works for ever")
}

#[test]
fn a_guest_with_useless_buffers_for_ever_keeps_nobody_for_ever() {
    let mut host = listening("useless");
    let (mut stream, id) = connect(&mut host);
    let memory = driven(&mut host, None);
    let ports = host.device.device().status(id).unwrap().ports;
    let accepted = [3, 0, 2, 0, ports.guest, ports.host, 0, 1 | 2 << 16, 0, 1 << 16, 0];
    let packet = accepted.map(u32::to_le_bytes).concat();
    memory.write_slice(&packet, GuestAddress(places(TX_QUEUE)[2])).unwrap();
    host.write(&memory, 0x50, &1_u32.to_le_bytes());
    let memory = driven(&mut host, Some(RX_QUEUE));
    stream.write_all(b"more than fits").unwrap();

    let rest = ends(move || {
        host.on_socket(host.by_id[&id]);
        host.pump(&memory);
        host.has_rest()
    });

    assert!(rest);
}

#[test]
fn packets_that_are_not_taken_in_one_turn_are_taken_in_the_next() {
    let mut host = listening("packets");
    let memory = driven(&mut host, Some(TX_QUEUE));

    let (first, rest, second) = ends(move || {
        host.write(&memory, 0x50, &1_u32.to_le_bytes());
        let (first, rest) = (used(&memory, TX_QUEUE), host.has_rest());
        host.pump(&memory);
        (first, rest, used(&memory, TX_QUEUE))
    });

    assert!(rest, "nobody would ring for them");
    assert_ne!(first, second);
}
