//! Watching for times at which the guest is paused.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Agent, eventually};

fn signal(agent: &Agent, name: &str) {
    let words = [format!("-{name}"), agent.pid().to_string()];
    assert!(Command::new("kill").args(words).status().expect("kill runs").success());
}

fn seconds(seen: &Value, name: &str) -> f64 {
    seen[name].as_f64().expect("a number")
}

#[test]
fn a_watch_sees_that_the_agent_stood_still() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.ask(&json!({"op": "watch", "for_s": 60}));

    signal(&agent, "STOP");
    let stopped = Instant::now();
    eventually("it stood for a while", || stopped.elapsed() > Duration::from_millis(200));
    signal(&agent, "CONT");
    let seen = client.ask(&json!({"op": "watched"})).reply;

    let longest_s = seconds(&seen, "longest_s");
    assert!((0.19..30.0).contains(&longest_s), "{seen}");
    assert!(seconds(&seen, "watched_s") >= longest_s, "{seen}");
}

#[test]
fn the_answer_waits_until_it_was_watched_for_so_long_or_the_watch_is_over() {
    let agent = Agent::start();
    let mut client = agent.connect();
    for (for_s, at_least_s, least_s) in [(60.0, 0.1, 0.1), (0.1, 60.0, 0.1), (0.0, 60.0, 0.0)] {
        client.ask(&json!({"op": "watch", "for_s": for_s}));

        let seen = client.ask(&json!({"op": "watched", "at_least_s": at_least_s})).reply;

        assert!((least_s..30.0).contains(&seconds(&seen, "watched_s")), "{seen}");
    }
}

#[test]
fn nobody_is_told_what_was_not_watched() {
    let agent = Agent::start();
    let mut client = agent.connect();

    assert_eq!(client.ask(&json!({"op": "watched"})).code(), "not_found");
}
