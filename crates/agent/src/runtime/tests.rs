//! Tests of the warm runtime that need no interpreter.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;
use crate::exec::output_pipe;

const QUIET: &str = "Threads:\t1\nSigCgt:\t0000000000000002\n";
const BUSY: &str = "Threads:\t2\nSigCgt:\t0000000000000002\n";

/// A runtime that is ready, the interpreter's end of its socket, what the kernel says of it.
fn ready() -> (Runtime, Stream, File) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let status = File::from(memfd_create("status", MFdFlags::empty()).unwrap());
    let process = Process {
        pid: Pid::from_raw(i32::MAX),
        stream: Stream::new(ours.into()),
        outputs: [(None, Kind::Stdout), (None, Kind::Stderr)],
        rest: [0; 2],
        verdict: None,
        status: Some(status.try_clone().unwrap()),
        hooked: false,
        controls: 0,
        broken: None,
    };
    let mut runtime = Runtime { process: Some(process), ..Runtime::none() };
    runtime.state = RuntimeState::Ready;
    (runtime, Stream::new(theirs.into()), status)
}

fn submit(runtime: &mut Runtime, purpose: Purpose, now: Instant) {
    runtime.submit(Job { owner: 1, purpose, payload: Vec::new(), timeout: None }, now).unwrap();
}

fn reply(runtime: &mut Runtime, interpreter: &mut Stream) {
    interpreter.wait_send(Kind::Reply, b"{}").unwrap();
    runtime.stream().unwrap().readable = true;
}

fn answer(runtime: &mut Runtime, now: Instant) -> Option<Answer> {
    runtime.drive(None, &mut [0; 64], now).0
}

/// One of which the kernel says so, and that has evaluated something until now.
fn evaluated(said: &str, now: Instant) -> (Runtime, Stream, File) {
    let (mut runtime, mut interpreter, status) = ready();
    status.write_all_at(said.as_bytes(), 0).unwrap();
    submit(&mut runtime, Purpose::Eval, now);
    assert_eq!(runtime.wake_at(), None);
    reply(&mut runtime, &mut interpreter);
    assert!(answer(&mut runtime, now).is_some());
    (runtime, interpreter, status)
}

#[test]
fn what_waits_for_its_next_job_is_looked_at_once_before_it_is_forked() {
    let now = Instant::now();
    let (mut runtime, _interpreter, status) = evaluated(QUIET, now);

    let due = runtime.wake_at().unwrap();
    runtime.on_time(due);

    assert_eq!((due, runtime.wake_at()), (now + LOOK_AFTER, None));
    // A fork believes what was seen then, and does not look again.
    status.write_all_at(BUSY.as_bytes(), 0).unwrap();
    assert!(runtime.put_off(b"{}"));
}

#[test]
fn what_is_forked_before_it_was_looked_at_is_looked_at_once() {
    let (mut runtime, _interpreter, _) = evaluated(QUIET, Instant::now());

    assert!(runtime.put_off(b"{}"));

    assert_eq!(runtime.wake_at(), None);
}

#[test]
fn what_has_its_next_job_already_is_not_looked_at() {
    let (mut runtime, mut interpreter, _) = ready();
    let now = Instant::now();
    submit(&mut runtime, Purpose::Eval, now);
    submit(&mut runtime, Purpose::Eval, now);

    reply(&mut runtime, &mut interpreter);
    assert!(answer(&mut runtime, now).is_some());

    assert_eq!(runtime.wake_at(), None);
}

#[test]
fn what_got_a_job_meanwhile_is_not_looked_at() {
    for purpose in [Purpose::Eval, Purpose::PostFork] {
        let now = Instant::now();
        let (mut runtime, mut interpreter, _) = evaluated(BUSY, now);

        submit(&mut runtime, purpose, now);
        reply(&mut runtime, &mut interpreter);
        runtime.on_time(now + LOOK_AFTER);

        let answered = answer(&mut runtime, now);
        assert!(answered.is_some(), "the answer to {purpose:?} was lost");
    }
}

#[test]
fn an_answer_goes_after_what_was_written_before_it_and_not_after_what_comes_later() {
    let now = Instant::now();
    let (mut runtime, mut interpreter, _) = ready();
    let (read, write) = output_pipe().unwrap();
    let mut write = File::from(write);
    runtime.process.as_mut().unwrap().outputs[0].0 = Some(read);
    let timeout = Some(Duration::from_secs(1));
    let job = Job { owner: 1, purpose: Purpose::Eval, payload: Vec::new(), timeout };
    runtime.submit(job, now).unwrap();
    write.write_all(&[1; 300]).unwrap();
    reply(&mut runtime, &mut interpreter);
    let mut client = Stream::new(UnixStream::pair().unwrap().0.into());

    let mut answered = None;
    for _ in 0..10 {
        // Somebody in the background prints as fast as it is read.
        answered = answered.or_else(|| runtime.drive(Some(&mut client), &mut [0; 64], now).0);
        write.write_all(&[2; 64]).unwrap();
        // And the time is over, of code that has ended.
        assert!(answered.is_some() || runtime.wake_at().is_none());
        runtime.on_time(now + Duration::from_secs(9));
    }

    assert!(answered.is_some(), "the answer waits for what was written later");
    assert!((300..1000).contains(&client.backlog()), "{} bytes", client.backlog());
}

/// A ready one, which is another one than Python, that has been asked to evaluate something.
fn asked(now: Instant) -> (Runtime, Stream) {
    let (mut runtime, interpreter, _) = ready();
    let mut spec = Spec::python();
    "ruby".clone_into(&mut spec.name);
    let surroundings =
        Surroundings { env: forkd_proto::guest::Env::new(), cwd: "/".into(), user: String::new() };
    runtime.origin = Some((spec, surroundings, PathBuf::from("/run/forkd")));
    runtime.namespace = Namespace::Warm;
    submit(&mut runtime, Purpose::Eval, now);
    (runtime, interpreter)
}

#[test]
fn a_runtime_that_breaks_its_contract_is_ended_and_named() {
    let now = Instant::now();
    let raw = |kind: u8, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap();
        [&length.to_le_bytes()[..], &[kind, 0, 0, 0], payload].concat()
    };
    for (sent, what) in [
        (raw(2, b"{}"), "not as it should be"),
        (raw(2, b"value"), "not as it should be"),
        (raw(3, b"{}"), "its error"),
        (raw(4, b"{}"), "of kind Event"),
        (raw(99, b"{}"), "no frame"),
        (vec![255; 8], "no frame"),
    ] {
        let (mut runtime, interpreter) = asked(now);
        nix::unistd::write(&interpreter, &sent).unwrap();
        runtime.stream().unwrap().readable = true;
        assert!(answer(&mut runtime, now).is_none(), "{what}: its answer was passed on");

        let ended = Ended { exit_code: None, signal: Some(9) };
        let [told] = runtime.on_exit(ended).try_into().unwrap();

        let body = told.result.unwrap_err();
        assert_eq!(body.code, ErrorCode::RuntimeBroken);
        assert!(body.message.starts_with("the ruby runtime broke its contract"), "{body:?}");
        assert!(body.message.contains(what), "{}", body.message);
    }
}

#[test]
fn an_answer_that_nobody_asked_for_breaks_the_contract() {
    let now = Instant::now();
    let (mut runtime, mut interpreter) = asked(now);
    reply_eval(&mut runtime, &mut interpreter);
    assert!(answer(&mut runtime, now).is_some());

    reply_eval(&mut runtime, &mut interpreter);
    assert!(answer(&mut runtime, now).is_none());
    assert!(runtime.on_exit(Ended { exit_code: None, signal: Some(9) }).is_empty());

    let said = runtime.untold.unwrap();
    assert_eq!(said.code, ErrorCode::RuntimeBroken);
    assert!(said.message.contains("without a request"), "{}", said.message);
}

fn reply_eval(runtime: &mut Runtime, interpreter: &mut Stream) {
    interpreter.wait_send(Kind::Reply, br#"{"has_value": false}"#).unwrap();
    runtime.stream().unwrap().readable = true;
}
