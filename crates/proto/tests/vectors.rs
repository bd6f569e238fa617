//! Replays the golden frames of `protocol/*/vectors`, as the Python side does.

#![expect(clippy::expect_used, reason = "a helper of a test that panics is a test that fails")]

use std::path::{Path, PathBuf};

use forkd_proto::control::{self, MachineRequest, ZygoteRequest};
use forkd_proto::guest::{self, Request};
use forkd_proto::{FrameError, InvalidRequest, Kind, ReadError, encode, read_frame};
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Vector {
    name: String,
    #[serde(rename = "description")]
    _description: String,
    hex: String,
    kind: String,
    payload: Value,
    valid: bool,
    error: Option<String>,
    reason: Option<String>,
    field: Option<String>,
}

impl Vector {
    fn bytes(&self) -> Vec<u8> {
        from_hex(&self.hex)
    }

    /// The payload's bytes, where they are given as such.
    fn payload_bytes(&self) -> Option<Vec<u8>> {
        self.payload.get("bytes_hex").and_then(Value::as_str).map(from_hex)
    }

    fn wanted_kind(&self) -> Kind {
        Kind::ALL.into_iter().find(|kind| name_of(*kind) == self.kind).expect("a kind")
    }
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits = |index| u8::from_str_radix(&text[index..index + 2], 16).expect("hex");
    (0..text.len()).step_by(2).map(digits).collect()
}

/// `StdinEof` as `stdin_eof`.
fn name_of(kind: Kind) -> String {
    let mut name = String::new();
    for letter in format!("{kind:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_lowercase());
    }
    name
}

fn vectors(protocol: &str) -> Vec<Vector> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../protocol");
    let folder = root.join(protocol).join("vectors");
    let mut paths: Vec<PathBuf> =
        folder.read_dir().expect("vectors").map(|entry| entry.expect("entry").path()).collect();
    paths.sort();
    assert!(paths.len() > 20, "only {} vectors in {}", paths.len(), folder.display());
    paths
        .iter()
        .map(|path| {
            let json = std::fs::read(path).expect("readable");
            let vector: Vector = serde_json::from_slice(&json).expect("a vector");
            assert_eq!(path.file_stem().and_then(|stem| stem.to_str()), Some(&*vector.name));
            vector
        })
        .collect()
}

/// The reason why `bytes` are no frame.
fn frame_reason(error: &ReadError) -> &'static str {
    match error {
        ReadError::Io(_) => "truncated",
        ReadError::Frame(FrameError::TooLong(_)) => "too_long",
        ReadError::Frame(FrameError::UnknownKind(_)) => "unknown_kind",
        ReadError::Frame(FrameError::Reserved) => "reserved",
    }
}

fn assert_refused(vector: &Vector, parsed: Result<(), InvalidRequest>) {
    let error = parsed.expect_err(&vector.name);
    assert_eq!(vector.error.as_deref(), Some("invalid_request"), "{}", vector.name);
    assert_eq!(error.field, vector.field, "{}: {error}", vector.name);
}

/// Checks the frame; hands the payload of an intact one back.
fn unframed(vector: &Vector) -> Option<Vec<u8>> {
    match read_frame(&mut vector.bytes().as_slice()) {
        Ok(frame) => {
            let frame = frame.expect("a frame");
            assert_eq!(frame.kind, vector.wanted_kind(), "{}", vector.name);
            let mut again = Vec::new();
            encode(frame.kind, &frame.payload, &mut again).expect("within the limit");
            assert_eq!(again, vector.bytes(), "{}", vector.name);
            if let Some(bytes) = vector.payload_bytes() {
                assert_eq!(frame.payload, bytes, "{}", vector.name);
            } else {
                let json: Value = serde_json::from_slice(&frame.payload).expect("JSON");
                assert_eq!(json, vector.payload, "{}", vector.name);
            }
            Some(frame.payload)
        }
        Err(error) => {
            assert!(!vector.valid, "{}: {error}", vector.name);
            assert_eq!(vector.error.as_deref(), Some("protocol"), "{}", vector.name);
            assert_eq!(vector.reason.as_deref(), Some(frame_reason(&error)), "{}", vector.name);
            None
        }
    }
}

/// What `T` writes says all that it has read.
fn assert_kept<T: for<'de> Deserialize<'de> + Serialize>(vector: &Vector, payload: &[u8]) {
    let value: T = serde_json::from_slice(payload).expect(&vector.name);
    assert_contains(&vector.name, &serde_json::to_value(&value).expect("JSON"), &vector.payload);
}

/// Every member of `part` is in `whole`, with the same value (1 and 1.0 being one number).
fn assert_contains(name: &str, whole: &Value, part: &Value) {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            for (member, value) in part {
                assert_contains(name, whole.get(member).unwrap_or(&Value::Null), value);
            }
        }
        (Value::Array(whole), Value::Array(part)) => {
            assert_eq!(whole.len(), part.len(), "{name}");
            whole.iter().zip(part).for_each(|(a, b)| assert_contains(name, a, b));
        }
        (Value::Number(whole), Value::Number(part)) => {
            assert_eq!(whole.as_f64(), part.as_f64(), "{name}");
        }
        _ => assert_eq!(whole, part, "{name}"),
    }
}

#[test]
fn guest_frames_are_read_and_written_as_recorded() {
    for vector in vectors("guest") {
        let Some(payload) = unframed(&vector) else { continue };
        match vector.wanted_kind() {
            Kind::Request if !vector.valid => {
                assert_refused(&vector, Request::parse(&payload).map(drop));
            }
            Kind::Request => {
                let request = Request::parse(&payload).expect(&vector.name);
                let json = serde_json::to_value(&request).expect("JSON");
                assert_contains(&vector.name, &json, &vector.payload);
            }
            Kind::Control => assert!(guest::Control::parse(&payload).is_ok(), "{}", vector.name),
            Kind::Event => assert_kept::<guest::Event>(&vector, &payload),
            Kind::Error => assert_kept::<guest::ErrorBody>(&vector, &payload),
            _ => {}
        }
    }
}

#[test]
fn replies_of_the_agent_are_read_and_written_as_recorded() {
    for vector in vectors("guest").iter().filter(|vector| vector.kind == "reply") {
        let payload = unframed(vector).expect("a frame");
        match vector.name.as_str() {
            "reply_ping" => assert_kept::<guest::Pong>(vector, &payload),
            "reply_exec" | "reply_exec_truncated" => {
                assert_kept::<guest::ExecReply>(vector, &payload);
            }
            "reply_eval" | "reply_eval_error" | "reply_eval_results" => {
                assert_kept::<guest::EvalReply>(vector, &payload);
            }
            "reply_entries" | "reply_entries_bytes" => {
                assert_kept::<guest::Entries>(vector, &payload);
            }
            "reply_archive" => assert_kept::<guest::ArchiveReply>(vector, &payload),
            "reply_watched" => assert_kept::<guest::WatchedReply>(vector, &payload),
            "reply_post_fork" | "reply_post_fork_v6" | "reply_post_fork_generation" => {
                assert_kept::<guest::PostForkReply>(vector, &payload);
            }
            "reply_later_member" => {
                let reply: guest::BytesReply = serde_json::from_slice(&payload).expect("lenient");
                assert_eq!(reply.bytes, 3);
            }
            name => panic!("{name} has no type here"),
        }
    }
}

#[test]
fn control_frames_are_read_and_written_as_recorded() {
    for vector in vectors("control") {
        let Some(payload) = unframed(&vector) else { continue };
        let machine = MachineRequest::parse(&payload);
        let zygote = ZygoteRequest::parse(&payload);
        match vector.wanted_kind() {
            Kind::Request if !vector.valid => {
                // A request of the one is unknown to the other, so the better of two refusals
                // counts.
                let unknown = |error: &InvalidRequest| error.field.as_deref() == Some("op");
                let refusal = match (machine.map(drop), zygote.map(drop)) {
                    (Err(error), other) if unknown(&error) => other,
                    (machine, _) => machine,
                };
                assert_refused(&vector, refusal);
            }
            Kind::Request => {
                let json = match vector.name.split_once('_') {
                    Some(("machine", _)) => serde_json::to_value(machine.expect(&vector.name)),
                    _ => serde_json::to_value(zygote.expect(&vector.name)),
                };
                assert_contains(&vector.name, &json.expect("JSON"), &vector.payload);
            }
            Kind::Event => assert_kept::<control::Event>(&vector, &payload),
            Kind::Error => assert_kept::<control::ErrorBody>(&vector, &payload),
            _ => {}
        }
    }
}
