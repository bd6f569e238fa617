//! Connections to programs that listen, over real sockets.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv6Addr, Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use forkd_proto::{Kind, write_frame};
use serde_json::{Value, json};

use crate::support::{Agent, Client, eventually};

const DEADLINE: Duration = Duration::from_secs(30);

fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    (listener, port)
}

fn accept(listener: &TcpListener) -> TcpStream {
    let (program, _) = listener.accept().expect("a connection");
    program.set_read_timeout(Some(DEADLINE)).expect("a deadline");
    program
}

/// A client and the program that it is connected to.
fn connected(agent: &Agent) -> (Client, TcpStream) {
    let (listener, port) = listener();
    let mut client = agent.connect();
    begin(&mut client, port);
    (client, accept(&listener))
}

fn begin(client: &mut Client, port: u16) {
    client.send(Kind::Request, &json!({"op": "connect", "port": port}));
    let first = client.next().expect("a frame");
    let said: Value = serde_json::from_slice(&first.payload).expect("JSON");
    assert_eq!((first.kind, said), (Kind::Event, json!({"event": "connected"})));
}

#[test]
fn bytes_go_both_ways_and_each_direction_ends_by_itself() {
    let agent = Agent::start();
    let (mut client, mut program) = connected(&agent);

    client.send_bytes(Kind::Data, b"question");
    client.send_bytes(Kind::DataEof, b"");
    let mut question = Vec::new();
    program.read_to_end(&mut question).expect("all of it");
    program.write_all(b"answer").expect("it is taken");
    drop(program);

    assert_eq!(question, b"question");
    let answer = client.finish();
    assert_eq!((answer.data.as_slice(), &answer.reply), (b"answer".as_slice(), &json!({})));
    assert_eq!(client.ask(&json!({"op": "echo", "data": "next"})).reply["data"], "next");
}

#[test]
fn a_program_that_ends_first_still_gets_what_its_client_says() {
    let agent = Agent::start();
    let (mut client, mut program) = connected(&agent);

    program.write_all(b"hello").expect("it is taken");
    program.shutdown(Shutdown::Write).expect("the end");
    let data = client.next().expect("a frame");
    assert_eq!((data.kind, data.payload.as_slice()), (Kind::Data, b"hello".as_slice()));
    assert_eq!(client.next().map(|frame| frame.kind), Some(Kind::DataEof));
    client.send_bytes(Kind::Data, b"late");
    client.send_bytes(Kind::DataEof, b"");

    let mut late = Vec::new();
    program.read_to_end(&mut late).expect("all of it");
    assert_eq!(late, b"late");
    assert_eq!(client.finish().reply, json!({}));
}

#[test]
fn a_program_that_listens_for_ipv6_alone_is_found() {
    let agent = Agent::start();
    let Ok(listener) = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) else { return };
    let mut client = agent.connect();
    begin(&mut client, listener.local_addr().expect("an address").port());
    client.send_bytes(Kind::Data, b"six");
    let mut said = [0; 3];
    accept(&listener).read_exact(&mut said).expect("all of it");
    assert_eq!(&said, b"six");
}

#[test]
fn a_port_where_nothing_listens_is_refused_and_the_connection_goes_on() {
    let agent = Agent::start();
    let (listener, port) = listener();
    drop(listener);
    let mut client = agent.connect();

    let answer = client.ask(&json!({"op": "connect", "port": port}));

    assert_eq!(answer.code(), "refused");
    let message = answer.error["message"].as_str().expect("words");
    assert!(message.contains(&format!("port {port} ")), "{message}");
    assert_eq!(client.ask(&json!({"op": "connect", "port": 0})).error["field"], "port");
    assert_eq!(client.ask(&json!({"op": "connect", "port": 65536})).error["field"], "port");
}

#[test]
fn a_client_that_goes_resets_the_connection() {
    let agent = Agent::start();
    let (mut client, mut program) = connected(&agent);
    client.send_bytes(Kind::Data, b"half of a requ");
    let mut half = [0; 14];
    program.read_exact(&mut half).expect("what was sent");

    drop(client);

    let end = program.read(&mut half).expect_err("no end, but a reset");
    assert_eq!(end.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_connection_that_its_program_resets_is_an_error() {
    let agent = Agent::start();
    let (mut client, program) = connected(&agent);
    client.send_bytes(Kind::Data, b"never read");
    eventually("it has arrived", || program.peek(&mut [0; 10]).is_ok_and(|count| count == 10));

    drop(program);

    assert_eq!(client.finish().code(), "io");
}

#[test]
fn a_client_that_does_not_read_holds_its_program_back_and_nobody_else() {
    let agent = Agent::start();
    let (mut client, mut program) = connected(&agent);
    program.set_write_timeout(Some(Duration::from_millis(300))).expect("a deadline");

    let mut taken = 0;
    while let Ok(count) = program.write(&[7; 16384]) {
        taken += count;
        assert!(taken < 64 << 20, "the agent takes all of it");
    }

    assert_eq!(agent.connect().ask(&json!({"op": "echo", "data": "here"})).reply["data"], "here");
    drop(program);
    client.send_bytes(Kind::DataEof, b"");
    let answer = client.finish();
    assert!(answer.data.iter().all(|byte| *byte == 7));
    assert_eq!(answer.data.len(), taken);
}

#[test]
fn a_program_that_does_not_read_holds_its_client_back() {
    let agent = Agent::start();
    let (mut client, mut program) = connected(&agent);
    client.stream.set_nonblocking(true).expect("a setting");
    let mut sent = 0;
    while write_frame(&mut client.stream, Kind::Data, &[7; 4096]).is_ok() {
        sent += 4096;
        assert!(sent < 64 << 20, "the agent takes all of it");
    }
    // The last frame may have left in part: what came whole is there, in order.
    drop(client);
    let mut got = Vec::new();
    drop(program.read_to_end(&mut got));
    assert!(got.iter().all(|byte| *byte == 7));
}

#[test]
fn a_quiet_connection_costs_nothing() {
    let agent = Agent::start();
    let (mut client, mut program) = connected(&agent);
    client.send_bytes(Kind::Data, b"x");
    program.read_exact(&mut [0]).expect("a byte");
    eventually("the agent sleeps", || agent.slept_for(Duration::from_millis(100)));
}

#[test]
fn only_data_is_taken_while_connected() {
    let agent = Agent::start();
    let (mut client, _program) = connected(&agent);
    client.send(Kind::Request, &json!({"op": "ping"}));
    assert_eq!(client.finish().code(), "protocol");
    assert!(client.next().is_none());
}
