//! More clients than the agent has descriptors for.

use crate::support::{Agent, Client, eventually};
use forkd_proto::Kind;
use serde_json::json;

const DESCRIPTORS: u32 = 32;
const LOOKS: usize = 100;

/// Whether the agent slept whenever it was looked at.
fn is_asleep(agent: &Agent) -> bool {
    (0..LOOKS).all(|_| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", agent.pid()));
        stat.is_ok_and(|text| text.contains(") S "))
    })
}

#[test]
fn a_client_for_whom_there_is_no_descriptor_waits_and_keeps_nobody_awake() {
    let agent = Agent::start_with_descriptors(DESCRIPTORS);
    let mut clients: Vec<Client> = (0..DESCRIPTORS).map(|_| agent.connect()).collect();
    let echo = json!({"op": "echo", "data": "here"});
    assert_eq!(clients[0].ask(&echo).reply["data"], "here");
    eventually("the agent sleeps", || is_asleep(&agent));

    let mut last = clients.pop().expect("a client");
    clients.clear();

    assert_eq!(last.ask(&echo).reply["data"], "here");
}

#[test]
fn so_many_connections_are_served_and_one_more_is_told_to_come_again() {
    let agent = Agent::start();
    let echo = json!({"op": "echo", "data": "here"});
    let mut clients: Vec<Client> = (0..512)
        .map(|_| {
            let mut client = agent.connect();
            assert_eq!(client.ask(&echo).reply["data"], "here");
            client
        })
        .collect();

    let mut refused = agent.connect();

    assert_eq!(refused.finish().code(), "busy");
    assert!(refused.next().is_none());
    drop(clients.pop());
    eventually("there is a place again", || agent.connect().served(&echo));
}

#[test]
fn a_crowd_of_commands_leaves_room_for_one_more() {
    let agent = Agent::start();
    let sleep = json!({"op": "exec", "args": ["sleep", "99"]});
    let clients: Vec<Client> = (0..300)
        .map(|_| {
            let mut client = agent.connect();
            client.send(Kind::Request, &sleep);
            assert_eq!(client.next().map(|frame| frame.kind), Some(Kind::Event));
            client
        })
        .collect();

    assert_eq!(agent.connect().sh("echo ok").text(), "ok\n");
    drop(clients);
}

#[test]
fn a_command_for_which_there_is_no_descriptor_may_be_tried_again() {
    let agent = Agent::start_with_descriptors(DESCRIPTORS);
    let mut clients: Vec<Client> = (0..DESCRIPTORS / 2).map(|_| agent.connect()).collect();
    let sleep = json!({"op": "exec", "args": ["sleep", "99"]});
    let refused = clients.iter_mut().find_map(|client| {
        client.send(Kind::Request, &sleep);
        let first = client.next().expect("a frame");
        (first.kind == Kind::Error).then_some(first.payload)
    });
    let refused: serde_json::Value = serde_json::from_slice(&refused.expect("a refusal")).unwrap();
    assert_eq!(refused["code"], "busy");
    clients.truncate(2);

    eventually("one more runs", || agent.connect().sh("echo ok").text() == "ok\n");
}
