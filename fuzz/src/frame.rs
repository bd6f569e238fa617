//! Frames, however the bytes arrive.

use forkd_proto::control::{MachineConfig, MachineRequest, ZygoteConfig, ZygoteRequest};
use forkd_proto::frame::{Decoder, encode, read_frame};
use forkd_proto::guest::{Control, Request};

/// Whatever a payload is, reading it as a message ends in a value or an error.
fn parse(payload: &[u8]) {
    drop(Request::parse(payload));
    drop(Control::parse(payload));
    drop(MachineRequest::parse(payload));
    drop(ZygoteRequest::parse(payload));
    drop(MachineConfig::parse(payload));
    drop(ZygoteConfig::parse(payload));
}

/// Frames of which most are sound, put together from anything.
fn assemble(mut data: &[u8]) -> Vec<u8> {
    const KINDS: [u8; 12] = [1, 2, 3, 4, 5, 16, 17, 18, 19, 32, 33, 77];
    let mut bytes = Vec::new();
    while let [kind, length, wild, rest @ ..] = data {
        let (payload, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        let mut header = [*length, 0, 0, 0, KINDS[usize::from(kind % 12)], 0, 0, 0];
        if *wild >= 0xf0 {
            header[usize::from(wild & 7)] ^= kind;
        }
        bytes.extend(header);
        bytes.extend(payload);
        data = rest;
    }
    bytes
}

pub(crate) fn run(data: &[u8]) {
    let Some((&step, bytes)) = data.split_first() else {
        return;
    };
    check(step, bytes);
    check(step, &assemble(bytes));
}

fn check(step: u8, bytes: &[u8]) {
    parse(bytes);
    let mut decoder = Decoder::new();
    let mut again = Vec::new();
    let mut refused = false;
    'stream: for piece in bytes.chunks(usize::from(step) + 1) {
        decoder.push(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some((kind, payload))) => {
                    encode(kind, payload, &mut again).expect("what was decoded can be encoded");
                    parse(payload);
                }
                Ok(None) => break,
                Err(_) => {
                    refused = true;
                    break 'stream;
                }
            }
        }
    }
    assert!(bytes.starts_with(&again), "decoding loses nothing");
    let mut rest = bytes;
    let mut whole = Vec::new();
    let end = loop {
        match read_frame(&mut rest) {
            Ok(Some(frame)) => encode(frame.kind, &frame.payload, &mut whole).expect("as above"),
            other => break other,
        }
    };
    assert_eq!(whole, again, "in pieces or whole is the same");
    if !refused {
        let clean = decoder.pending() == 0;
        assert_eq!(end.is_ok(), clean, "a stream that was cut is not a clean end");
    }
}
