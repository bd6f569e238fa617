use std::io::Write;

use forkd_devices::virtio::VirtioDevice;

use super::*;
use crate::io::client::GREETING_BYTES_MAX;

fn listening(name: &str) -> VsockHost {
    let path = std::env::temp_dir().join(format!("forkd-{}-{name}", std::process::id()));
    let epoll = Arc::new(Epoll::new().unwrap());
    let mut host = VsockHost::new(Mmio::new(Vsock::new()), path, epoll, 0);
    host.listen().unwrap();
    host
}

/// A host whose own connection, to port 7, was passed on; and what that is called.
fn passed_on(name: &str) -> (VsockHost, Id, u32) {
    let mut host = listening(name);
    let (stream, id) = host.connect(7).unwrap();
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
    let (_stream, id) = host.connect(7).unwrap();
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
