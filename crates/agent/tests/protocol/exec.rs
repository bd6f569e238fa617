//! `exec` over the real protocol: streams, signals, terminals, time limits, errors.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{Agent, Client, eventually, is_alive};
use forkd_proto::Kind;
use serde_json::{Value, json};

#[test]
fn a_process_runs_and_its_streams_are_kept_apart() {
    let agent = Agent::start();
    let answer = agent.connect().sh("echo out; echo err >&2; exit 3");
    assert_eq!(answer.events[0]["event"], "started");
    assert_eq!(
        (answer.stdout.as_slice(), answer.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
    assert_eq!(answer.reply["exit_code"], 3);
    assert_eq!(answer.reply["signal"], Value::Null);
    assert_eq!(answer.reply["timed_out"], false);
}

#[test]
fn environment_and_directory_are_as_asked() {
    let agent = Agent::start();
    let request = json!({"op": "exec", "args": ["sh", "-c", "echo $A $HOME; pwd"],
        "env": {"A": "x", "HOME": "/h"}, "cwd": "/usr"});
    assert_eq!(agent.connect().ask(&request).text(), "x /h\n/usr\n");
}

#[test]
fn operations_follow_each_other_on_one_connection() {
    let agent = Agent::start();
    let mut client = agent.connect();
    for number in 0..20 {
        assert_eq!(client.sh(&format!("echo {number}")).text(), format!("{number}\n"));
    }
}

#[test]
fn requests_sent_ahead_are_answered_in_their_order() {
    let agent = Agent::start();
    let mut client = agent.connect();
    for data in ["a", "b", "c"] {
        client.send(Kind::Request, &json!({"op": "stat", "path": "/etc"}));
        client.send(Kind::Request, &json!({"op": "echo", "data": data}));
    }
    for data in ["a", "b", "c"] {
        assert_eq!(client.finish().reply["name"], "etc");
        assert_eq!(client.finish().reply["data"], data);
    }
}

#[test]
fn a_request_in_the_middle_of_an_exec_is_not_the_protocol() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.send(Kind::Request, &json!({"op": "exec", "args": ["sleep", "99"]}));
    let event = client.next().map(|frame| frame.payload).unwrap_or_default();
    let event: Value = serde_json::from_slice(&event).expect("JSON");
    client.send(Kind::Request, &json!({"op": "ping"}));
    assert_eq!(client.finish().code(), "protocol");
    assert!(client.next().is_none());
    eventually("the process is killed", || !is_alive(event["pid"].as_u64().unwrap_or_default()));
}

#[test]
fn standard_input_goes_in_and_ends() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.send(Kind::Request, &json!({"op": "exec", "args": ["cat"], "stdin": true}));
    client.send_bytes(Kind::Stdin, b"one ");
    client.send_bytes(Kind::Stdin, b"two");
    client.send_bytes(Kind::StdinEof, b"");
    let answer = client.finish();
    assert_eq!(answer.text(), "one two");
    assert_eq!(answer.reply["exit_code"], 0);
}

#[test]
fn without_stdin_there_is_nothing_to_read() {
    let agent = Agent::start();
    let answer = agent.connect().ask(&json!({"op": "exec", "args": ["cat"]}));
    assert_eq!((answer.text().as_str(), &answer.reply["exit_code"]), ("", &json!(0)));
}

/// A command that says the number of a process in a session of its own, which it waits for.
const SESSIONS: &str = "setsid sh -c 'echo $$; sleep 99; true' & wait";

#[test]
fn what_a_process_started_in_another_session_ends_with_its_time() {
    let agent = Agent::start();
    let request = json!({"op": "exec", "args": ["sh", "-c", SESSIONS], "timeout_s": 0.5});

    let answer = agent.connect().ask(&request);

    assert_eq!(answer.reply["timed_out"], true);
    let pid = answer.text().trim().parse().expect("a number");
    eventually("the other session is killed", || !is_alive(pid));
}

#[test]
fn what_a_process_started_in_another_session_ends_with_its_client() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.send(Kind::Request, &json!({"op": "exec", "args": ["sh", "-c", SESSIONS]}));
    let said = std::iter::from_fn(|| client.next()).find(|frame| frame.kind == Kind::Stdout);
    let text = String::from_utf8(said.expect("its number").payload).expect("text");
    let pid = text.trim().parse().expect("a number");

    drop(client);

    eventually("the other session is killed", || !is_alive(pid));
}

#[test]
fn input_for_a_process_that_does_not_read_is_no_error() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.send(Kind::Request, &json!({"op": "exec", "args": ["true"], "stdin": true}));
    client.send_bytes(Kind::Stdin, &vec![0; 100_000]);
    client.send_bytes(Kind::StdinEof, b"");
    assert_eq!(client.finish().reply["exit_code"], 0);
    assert_eq!(client.ask(&json!({"op": "echo", "data": "on"})).reply["data"], "on");
}

#[test]
fn much_output_arrives_whole() {
    let agent = Agent::start();
    let answer = agent.connect().sh("head -c 50000000 /dev/zero; echo end");
    assert_eq!(answer.stdout.len(), 50_000_004);
    assert!(answer.stdout.ends_with(b"\0end\n"));
}

#[test]
fn much_input_comes_back_whole() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.send(Kind::Request, &json!({"op": "exec", "args": ["cat"], "stdin": true}));
    let mut writer = client.stream.try_clone().expect("a second handle");
    let sent = std::thread::spawn(move || {
        for _ in 0..40 {
            forkd_proto::write_frame(&mut writer, Kind::Stdin, &vec![7; 1 << 20]).expect("sent");
        }
        forkd_proto::write_frame(&mut writer, Kind::StdinEof, b"").expect("sent");
    });
    let answer = client.finish();
    sent.join().expect("all was taken");
    assert_eq!(answer.stdout.len(), 40 << 20);
    assert!(answer.stdout.iter().all(|byte| *byte == 7));
}

#[test]
fn a_client_that_does_not_read_stops_its_process_and_nobody_else() {
    let agent = Agent::start();
    let mut slow = agent.connect();
    slow.send(Kind::Request, &json!({"op": "exec", "args": ["cat", "/dev/zero"]}));
    assert_eq!(slow.next().map(|frame| frame.kind), Some(Kind::Event));
    let mut other = agent.connect();
    for _ in 0..100 {
        assert_eq!(other.ask(&json!({"op": "echo", "data": "x"})).reply["data"], "x");
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).expect("status");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    let kib: u64 = peak.trim().trim_end_matches(" kB").trim().parse().expect("a number");
    assert!(kib < 16_384, "the agent holds {kib} KiB");
}

#[test]
fn a_signal_reaches_the_process_group() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.send(Kind::Request, &json!({"op": "exec", "args": ["sh", "-c", "sleep 100; exit 1"]}));
    assert_eq!(client.next().map(|frame| frame.kind), Some(Kind::Event));
    client.send(Kind::Control, &json!({"signal": 15}));
    let answer = client.finish();
    assert_eq!((&answer.reply["exit_code"], &answer.reply["signal"]), (&Value::Null, &json!(15)));
}

#[test]
fn a_time_limit_kills_the_whole_group() {
    let agent = Agent::start();
    let request = json!({"op": "exec", "args": ["sh", "-c", "sleep 99 & echo $!; wait"],
        "timeout_s": 0.2});
    let begun = Instant::now();
    let answer = agent.connect().ask(&request);
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!((&answer.reply["timed_out"], &answer.reply["signal"]), (&json!(true), &json!(9)));
    let grandchild: u64 = answer.text().trim().parse().expect("a number");
    eventually("the grandchild is killed", || !is_alive(grandchild));
}

#[test]
fn closing_the_connection_kills_the_whole_group() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let script = "sleep 99 & echo $!; wait";
    client.send(Kind::Request, &json!({"op": "exec", "args": ["sh", "-c", script]}));
    let pid = loop {
        let frame = client.next().expect("a frame");
        if frame.kind == Kind::Stdout {
            break String::from_utf8_lossy(&frame.payload).trim().parse().expect("a number");
        }
    };
    assert!(is_alive(pid));
    drop(client);
    eventually("the grandchild is killed", || !is_alive(pid));
}

#[test]
fn a_process_in_the_background_does_not_hold_the_answer_up() {
    let agent = Agent::start();
    let begun = Instant::now();
    let answer = agent.connect().sh("sleep 20 & echo front");
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!((answer.text().as_str(), &answer.reply["exit_code"]), ("front\n", &json!(0)));
}

#[test]
fn what_cannot_be_run_says_why() {
    let agent = Agent::start();
    let mut client = agent.connect();
    for (request, code, field) in [
        (json!({"op": "exec", "args": ["no-such-program"]}), "not_found", Value::Null),
        (json!({"op": "exec", "args": ["/etc/passwd"]}), "permission_denied", Value::Null),
        (
            json!({"op": "exec", "args": ["true"], "cwd": "/no/such"}),
            "invalid_request",
            json!("cwd"),
        ),
        (
            json!({"op": "exec", "args": ["true"], "user": "nobody-here"}),
            "invalid_request",
            json!("user"),
        ),
        (json!({"op": "exec", "args": [], "x": 1}), "invalid_request", json!("x")),
    ] {
        let answer = client.ask(&request);
        assert_eq!((answer.code(), &answer.error["field"]), (code, &field), "{request}");
    }
}

#[test]
fn a_file_that_is_no_program_is_exec_failed() {
    let agent = Agent::start();
    let path = agent.path("garbage");
    std::fs::write(&path, [0x7f; 64]).expect("written");
    agent.connect().sh(&format!("chmod +x {}", path.display()));
    let answer = agent.connect().ask(&json!({"op": "exec", "args": [path]}));
    assert_eq!(answer.code(), "exec_failed");
}

#[test]
fn another_user_has_its_own_numbers_home_and_groups() {
    let agent = Agent::start();
    let script = "id -u; id -g; echo $HOME $USER";
    let request = |user| json!({"op": "exec", "args": ["sh", "-c", script], "user": user});
    let answer = agent.connect().ask(&request("daemon"));
    assert_eq!(answer.text(), "1\n1\n/usr/sbin daemon\n");
    assert_eq!(answer.events[0]["event"], "started");
    assert_eq!(agent.connect().ask(&request("4711:4712")).text(), "4711\n4712\n/\n");
}

#[test]
fn another_users_errors_are_as_precise() {
    let agent = Agent::start();
    let mut client = agent.connect();
    for (args, code) in [("no-such-program", "not_found"), ("/root/x", "permission_denied")] {
        let request = json!({"op": "exec", "args": [args], "user": "daemon"});
        assert_eq!(client.ask(&request).code(), code, "{args}");
    }
    assert_eq!(client.sh("echo on").text(), "on\n");
}

#[test]
fn a_terminal_has_a_size_that_can_change() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let script = "test -t 0 && test -t 1 && stty size; trap 'stty size; exit' WINCH; \
                  echo ready; while :; do sleep 0.01; done";
    client.send(
        Kind::Request,
        &json!({"op": "exec", "args": ["sh", "-c", script], "tty": {"rows": 24, "columns": 80}}),
    );
    let mut seen = String::new();
    while !seen.contains("ready") {
        let frame = client.next().expect("a frame");
        if frame.kind == Kind::Stdout {
            seen.push_str(&String::from_utf8_lossy(&frame.payload));
        }
    }
    assert!(seen.starts_with("24 80\r\n"), "{seen}");
    client.send(Kind::Control, &json!({"resize": {"rows": 50, "columns": 132}}));
    assert_eq!(client.finish().text(), "50 132\r\n");
}

#[test]
fn a_terminal_takes_input_and_its_end() {
    let agent = Agent::start();
    let mut client = agent.connect();
    client.send(
        Kind::Request,
        &json!({"op": "exec", "args": ["cat"], "tty": {"rows": 24, "columns": 80}}),
    );
    client.send_bytes(Kind::Stdin, b"typed\n");
    client.send_bytes(Kind::StdinEof, b"");
    let answer = client.finish();
    assert_eq!(answer.text(), "typed\r\ntyped\r\n");
    assert_eq!(answer.reply["exit_code"], 0);
}

#[test]
fn children_start_with_default_signals_and_no_stray_descriptors() {
    let script = "grep -E 'Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd | wc -l";
    // Whatever started this test may have left something behind, too.
    let ours = Command::new("sh").args(["-c", script]).output().expect("a shell").stdout;
    let agent = Agent::start();
    let _other = agent.connect();
    let mut client = agent.connect();
    for user in ["", "daemon"] {
        let request = json!({"op": "exec", "user": user, "args": ["sh", "-c", script]});
        assert_eq!(client.ask(&request).text(), String::from_utf8_lossy(&ours), "{user}");
    }
}

#[test]
fn what_is_not_the_protocol_ends_the_connection_with_an_error() {
    use std::io::Write;
    let agent = Agent::start();
    for bytes in [[1, 0, 16, 0, 1, 0, 0, 0], [0, 0, 0, 0, 99, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0]] {
        let mut client = agent.connect();
        client.stream.write_all(&bytes).expect("sent");
        assert_eq!(client.finish().code(), "protocol");
        assert!(client.next().is_none());
    }
    let mut client = agent.connect();
    client.send(Kind::Reply, &json!({}));
    assert_eq!(client.finish().code(), "protocol");
}

#[test]
fn output_goes_on_after_a_client_that_did_not_read() {
    const BYTES: usize = 20_000_000;
    let agent = Agent::start();
    for _ in 0..5 {
        let mut client = agent.connect();
        let args = ["head", "-c", &BYTES.to_string(), "/dev/zero"].map(str::to_owned);
        client.send(Kind::Request, &json!({"op": "exec", "args": args}));
        let event = client.next().map(|frame| frame.payload).unwrap_or_default();
        let event: Value = serde_json::from_slice(&event).unwrap();
        let status = format!("/proc/{}/wchan", event["pid"]);
        eventually("the process waits for its reader", || {
            std::fs::read_to_string(&status).is_ok_and(|wait| wait.contains("pipe_w"))
        });

        let answer = client.finish();

        assert_eq!((answer.stdout.len(), &answer.reply["exit_code"]), (BYTES, &json!(0)));
    }
}

/// Whether a process that writes again and again has written since the client's answer.
fn goes_on_writing(client: &mut Client, marks: &std::path::Path) {
    let size = || std::fs::metadata(marks).map_or(0, |found| found.len());
    let before = size();
    eventually("what runs in the background goes on", || size() > before + 1000);
    assert_eq!(client.sh("echo on").text(), "on\n");
}

#[test]
fn a_process_in_the_background_may_write_after_its_command_has_ended() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let marks = agent.path("marks");
    // Both streams; each round writes more than a pipe holds before it leaves its mark.
    let script = format!(
        "(while head -c 100000 /dev/zero && head -c 100000 /dev/zero >&2; do head -c 100 /dev/zero \
         >>{}; done) &\nsleep 0.01",
        marks.display()
    );
    let answer = client.sh(&script);
    assert_eq!((&answer.reply["exit_code"], &answer.reply["truncated"]), (&json!(0), &json!(true)));

    goes_on_writing(&mut client, &marks);
}

#[test]
fn a_process_in_the_background_survives_a_client_that_leaves_at_the_end() {
    let agent = Agent::start();
    let marks = agent.path("marks");
    let pid = agent.path("pid");
    let script = format!(
        "echo $$ >{}; (while echo tick; do head -c 100 /dev/zero >>{}; done) & exit 0",
        pid.display(),
        marks.display()
    );
    let mut client = agent.connect();
    client.send(Kind::Request, &json!({"op": "exec", "args": ["sh", "-c", script]}));
    eventually("the command has ended", || {
        let pid = std::fs::read_to_string(&pid).ok().and_then(|text| text.trim().parse().ok());
        pid.is_some_and(|pid| !is_alive(pid)) && marks.exists()
    });
    // Within the grace, or the answer is there already: both must be the same to the writer.
    assert_eq!(agent.connect().sh("echo on").text(), "on\n");
    drop(client);

    goes_on_writing(&mut agent.connect(), &marks);
}

#[test]
fn pipes_that_nobody_holds_any_more_are_given_back() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let descriptors = || {
        let folder = std::fs::read_dir(format!("/proc/{}/fd", agent.pid()));
        folder.map_or(0, Iterator::count)
    };
    // The agent has accepted who has an answer.
    assert_eq!(client.sh("echo on").text(), "on\n");
    let before = descriptors();
    let gate = agent.path("gate");
    let wait = format!("mkfifo {0}; cat {0} & echo $!", gate.display());
    assert_eq!(client.sh(&wait).reply["truncated"], true);
    assert!(descriptors() > before);

    client.sh(&format!("echo open >{}", gate.display()));

    eventually("its pipes are closed", || descriptors() == before);
}

#[test]
fn output_that_comes_in_drops_after_the_end_is_whole_or_said_not_to_be() {
    let agent = Agent::start();
    let script = "exec > >(while read -r line; do sleep 0.05; echo \"$line\"; done); seq 12";
    let answer = agent.connect().ask(&json!({"op": "exec", "args": ["bash", "-c", script]}));
    let lines = "1 2 3 4 5 6 7 8 9 10 11 12 ".replace(' ', "\n");
    // How far it comes within `DRAIN_MAX` depends on how busy this host is.
    assert_eq!(answer.reply["truncated"] != true, answer.text() == lines, "{answer:?}");
    assert!(lines.starts_with(&answer.text()), "{answer:?}");
}

#[test]
fn output_that_comes_too_late_is_said_to_be_missing() {
    let agent = Agent::start();
    let answer = agent.connect().sh("(sleep 5; echo late) & echo early");
    assert_eq!((answer.text().as_str(), &answer.reply["truncated"]), ("early\n", &json!(true)));
    let redirected = agent.connect().sh("sleep 20 >/dev/null 2>&1 & echo early");
    assert_eq!(redirected.reply["truncated"], Value::Null);
}

#[test]
fn what_never_stops_writing_does_not_hold_the_answer_up() {
    let agent = Agent::start();
    let begun = Instant::now();
    let answer = agent.connect().sh("(while echo x; do sleep 0.05; done) & exit 3");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!((&answer.reply["exit_code"], &answer.reply["truncated"]), (&json!(3), &json!(true)));
}

#[test]
fn a_program_that_ended_in_time_is_not_timed_out() {
    let agent = Agent::start();
    let request =
        json!({"op": "exec", "args": ["sh", "-c", "sleep 60 & exit 0"], "timeout_s": 0.1});
    let answer = agent.connect().ask(&request);
    assert_eq!(
        (&answer.reply["exit_code"], &answer.reply["timed_out"]),
        (&json!(0), &json!(false))
    );
}

#[test]
fn a_client_that_does_not_read_the_end_keeps_nobody_awake() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let script = "head -c 20000000 /dev/zero & head -c 20000000 /dev/zero";
    let request = json!({"op": "exec", "args": ["sh", "-c", script], "timeout_s": 0.5});
    client.send(Kind::Request, &request);
    let event = client.next().map(|frame| frame.payload).unwrap_or_default();
    let event: Value = serde_json::from_slice(&event).expect("JSON");
    eventually("its time is over", || !is_alive(event["pid"].as_u64().unwrap_or_default()));
    // Past the grace, which is when it would begin to spin.
    eventually("the agent sleeps", || agent.slept_for(Duration::from_millis(400)));

    assert_eq!(client.finish().reply["timed_out"], true);
}

#[test]
fn words_that_are_no_text_arrive_as_they_are() {
    let agent = Agent::start();
    let users = if nix::unistd::geteuid().is_root() { vec!["root", "1:1"] } else { vec![""] };
    for user in users {
        let script = "printf '%s|%s' \"$1\" \"$V\"";
        let request = json!({
            "op": "exec", "args": ["sh", "-c", script, "-", {"b64": "//4="}],
            "env": {"V": {"b64": "6Q=="}}, "user": user,
        });
        assert_eq!(agent.connect().ask(&request).stdout, b"\xff\xfe|\xe9", "{user}");
    }
}
