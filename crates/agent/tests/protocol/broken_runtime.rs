//! Runtimes that break their contract: each is ended, and one error says which it was and why.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use crate::support::{Agent, Answer, Client};

/// A runtime in so far as it answers; `ON_EVAL` and `FIRST` are what a test puts in.
const PROGRAM: &str = r#"#!/usr/bin/env python3
import json, os, signal, struct, sys, time

signal.signal(signal.SIGINT, lambda *_: None)
fd = int(sys.argv[-1])


def send(kind, payload, length=None):
    length = len(payload) if length is None else length
    os.write(fd, struct.pack("<IB3x", length, kind) + payload)


def take():
    header = os.read(fd, 8)
    if not header:
        sys.exit(0)
    length, kind = struct.unpack("<IB3x", header)
    return kind, os.read(fd, length)


def reply(**body):
    send(2, json.dumps(body).encode())


FIRST
while True:
    kind, payload = take()
    if kind == 32:
        code = payload.decode()
        if code == "good":
            reply(has_value=False)
        else:
            exec(code)
    elif kind == 1:
        is_hello = json.loads(payload)["op"] == "hello"
        reply(**({"contract": 1, "language": "Nonsense"} if is_hello else {}))
"#;

/// Has a program take the place of Node.js, which does this first, and returns what comes of it.
fn warm(agent: &Agent, first: &str, timeout_s: f64) -> Answer {
    let program = agent.path("node");
    fs::write(&program, PROGRAM.replace("FIRST", first)).expect("a file");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("its mode");
    let folder = program.parent().expect("a folder").display();
    let path = std::env::var("PATH").expect("a path");
    let runtime = json!({"name": "node", "code": ""});
    let env = json!({"PATH": format!("{folder}:{path}")});
    let request = json!({"op": "warm", "runtime": runtime, "env": env, "timeout_s": timeout_s});
    agent.connect().ask(&request)
}

fn eval(client: &mut Client, code: &str) -> Answer {
    client.ask(&json!({"op": "eval", "code": code, "timeout_s": 20}))
}

fn check(answer: &Answer, code: &str, words: &str) {
    let message = answer.error["message"].as_str().unwrap_or_default();
    assert_eq!(answer.code(), code, "{message}");
    assert!(message.contains("the node runtime") && message.contains(words), "{message}");
}

#[test]
fn what_is_no_runtime_fails_the_warm_up_and_says_why() {
    for (first, words) in [
        ("sys.exit(2)", "has ended with exit status 2 before it said that it is one"),
        ("os.kill(os.getpid(), 9)", "before it said that it is one"),
        ("os.write(fd, b'Welcome to Nonsense 1.0!\\n')", "it sent what is no frame"),
        ("send(2, b'', length=1048577)", "it sent what is no frame"),
        ("reply(contract=2)", "it speaks another version than 1 of the contract: 2"),
        ("reply(language='Nonsense')", "its answer to hello names no contract"),
        ("send(2, b'hello')", "its answer to hello is no JSON"),
        ("send(3, b'{\"code\": \"protocol\", \"message\": \"no\"}')", "it refused hello"),
        ("send(32, b'1 + 1')", "it sent a frame of kind"),
    ] {
        let agent = Agent::start();
        check(&warm(&agent, first, 20.0), "warm_up_failed", words);
    }
}

#[test]
fn a_runtime_that_does_not_answer_hello_is_named_when_the_time_is_over() {
    for first in ["time.sleep(600)", "while True: os.write(1, b'x' * 4096)"] {
        let answer = warm(&Agent::start(), first, 1.0);
        check(&answer, "warm_up_timeout", "has not answered hello");
    }
}

#[test]
fn a_runtime_that_breaks_its_contract_later_is_ended_and_another_takes_its_place() {
    let agent = Agent::start();
    assert_eq!(warm(&agent, "", 20.0).error, Value::Null);
    let mut client = agent.connect();
    for (code, words) in [
        ("reply()", "missing field `has_value`"),
        ("reply(has_value='yes')", "its answer to an evaluation is not as it should be"),
        ("send(2, b'42 is the answer')", "its answer to an evaluation is not as it should be"),
        ("send(3, b'{}')", "its error is not as it should be"),
        ("send(1, b'{}')", "it sent a frame of kind"),
        ("os.write(fd, b'\\xff' * 8)", "it sent what is no frame"),
        ("send(2, b'', length=1048577)", "it sent what is no frame"),
        ("while True: send(5, b'{\"on_fork\": true}')", "without an answer"),
    ] {
        let broken = eval(&mut client, code);
        check(&broken, "runtime_broken", words);
        check(&broken, "runtime_broken", "its namespace is lost");
        assert_eq!(eval(&mut client, "good").error, Value::Null, "after {code}");
    }
}

#[test]
fn an_answer_to_no_call_is_told_to_the_next_which_does_not_run() {
    let agent = Agent::start();
    assert_eq!(warm(&agent, "", 20.0).error, Value::Null);
    let mut client = agent.connect();
    // In one piece, so that the second answer has come when the first is passed on.
    let twice = "frame = struct.pack('<IB3x', 20, 2) + b'{\"has_value\": false}'\n\
                 os.write(fd, frame * 2)";
    assert_eq!(eval(&mut client, twice).error, Value::Null);
    let made = agent.path("made");
    let touch = format!("open({:?}, 'w'); reply(has_value=False)", made.display().to_string());
    let told = eval(&mut client, &touch);
    check(&told, "runtime_broken", "without a request");
    assert!(!made.exists(), "the code of an evaluation that failed has run");
    assert_eq!(eval(&mut client, "good").error, Value::Null);
}
