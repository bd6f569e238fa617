//! More clients than the agent has descriptors for.

use crate::support::{Agent, Client, eventually};
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
