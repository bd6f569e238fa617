//! `exec` on a terminal: keys, the end of input, jobs.

use std::process::Command;

use crate::support::{Agent, Client, eventually};
use forkd_proto::Kind;
use serde_json::{Value, json};

/// What a program on a terminal is asked for, with input to come.
fn on_terminal(script: &str) -> Value {
    let size = json!({"rows": 24, "columns": 80});
    json!({"op": "exec", "args": ["sh", "-c", script], "tty": size, "stdin": true})
}

/// How often what two programs do at the same time is tried.
const ROUNDS: usize = 8;

/// Reads what a program says until it has said `ready`.
fn wait_until_ready(client: &mut Client) {
    let mut seen = String::new();
    while !seen.contains("ready") {
        let frame = client.next().expect("a frame");
        seen.push_str(&String::from_utf8_lossy(&frame.payload));
    }
}

/// The answer of a program on a terminal that says `ready` before it gets input and its end.
fn typed(agent: &Agent, script: &str, input: &[u8]) -> crate::support::Answer {
    let mut client = agent.connect();
    client.send(Kind::Request, &on_terminal(script));
    wait_until_ready(&mut client);
    client.send_bytes(Kind::Stdin, input);
    client.send_bytes(Kind::StdinEof, b"");
    client.finish()
}

#[test]
fn the_end_of_input_on_a_terminal_ends_whoever_reads_it() {
    let agent = Agent::start();
    for (what, script, input, wanted) in [
        ("a line", "stty -echo; echo ready; cat", "line\n", "line\r\n"),
        ("a part of a line", "stty -echo; echo ready; cat", "part", "part"),
        ("nothing", "stty -echo; echo ready; cat", "", ""),
        ("the next one, too", "stty -echo; echo ready; cat; cat; echo end", "x\n", "x\r\nend\r\n"),
        ("another key", "stty -echo eof ^B; echo ready; cat", "x\n", "x\r\n"),
    ] {
        let answer = typed(&agent, script, input.as_bytes());
        assert!(answer.text().ends_with(wanted), "{what}: {:?}", answer.text());
        assert_eq!(answer.reply["exit_code"], 0, "{what}");
    }
}

/// Whether a program on a terminal in raw mode has read so many bytes, and the key for the end or
/// not: it finds the end alone if it does not wait for input at that moment.
fn read_to_the_end(answer: &crate::support::Answer, count: usize) -> bool {
    let said = answer.text();
    let read: usize = said.split_whitespace().last().unwrap_or_default().parse().expect("a count");
    read == count || read == count + 1
}

#[test]
fn the_end_of_input_in_raw_mode_ends_whoever_waits_and_whoever_reads_next() {
    let agent = Agent::start();
    for _ in 0..ROUNDS {
        for (script, input) in [
            ("stty -icanon -echo; echo ready; cat | wc -c", "12345"),
            ("stty raw -echo; echo ready; cat | wc -c", ""),
        ] {
            let answer = typed(&agent, script, input.as_bytes());
            assert!(read_to_the_end(&answer, input.len()), "{script}: {:?}", answer.text());
            assert_eq!(answer.reply["exit_code"], 0, "{script}");
        }
    }
}

#[test]
fn what_was_typed_in_raw_mode_is_read_before_its_end() {
    let agent = Agent::start();
    let slow = "stty -icanon -echo; echo ready; while c=$(dd bs=500 count=1 2>/dev/null | wc -c); \
                test $c -gt 0; do sleep 0.02; n=$((n + c)); done; echo $n";
    let answer = typed(&agent, slow, &vec![b'a'; 20_000]);
    assert!(read_to_the_end(&answer, 20_000), "{:?}", answer.text());
}

#[test]
fn a_terminal_has_its_status_its_keys_and_clean_signals() {
    let agent = Agent::start();
    let status = "grep -E 'Sig(Ign|Blk)' /proc/self/status; seq 100000 | tail -1; exit 7";
    // Whatever started this test may have left something behind, too.
    let ours = Command::new("sh").args(["-c", status]).output().expect("a shell").stdout;
    let answer = agent.connect().ask(&on_terminal(status));
    let wanted = String::from_utf8_lossy(&ours).replace('\n', "\r\n");
    assert_eq!((answer.text(), &answer.reply["exit_code"]), (wanted, &json!(7)));
    for (key, name) in [(3, "INT"), (28, "QUIT")] {
        let script = format!(
            "trap 'exit {key}' {name}; stty -echo; echo ready; while :; do sleep 0.01; done"
        );
        let mut client = agent.connect();
        client.send(Kind::Request, &on_terminal(&script));
        wait_until_ready(&mut client);
        client.send_bytes(Kind::Stdin, &[key]);
        assert_eq!(client.finish().reply["exit_code"], key, "SIG{name}");
    }
}

/// What the kernel says of a process after its name: its state first.
fn stat(process: u64) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ").map(|(_, after)| after.to_owned())
}

/// The group of processes that a terminal's keys go to, as its shell's status says.
fn foreground(shell: u64) -> Option<u64> {
    stat(shell)?.split(' ').nth(5)?.parse().ok()
}

/// Whether a job is in the foreground that a key can stop.
///
/// A job that has not executed its program yet ignores the key, as its shell does; of one that is
/// not continued yet, the continuation would take the key back.
fn heeds_keys(shell: u64, program: &str) -> bool {
    let Some(job) = foreground(shell).filter(|group| *group != shell) else { return false };
    let name = std::fs::read_to_string(format!("/proc/{job}/comm")).unwrap_or_default();
    name.trim_end() == program && stat(job).is_some_and(|after| after.starts_with('S'))
}

#[test]
fn a_shell_stops_a_job_and_takes_it_up_again() {
    let agent = Agent::start();
    let size = json!({"rows": 24, "columns": 80});
    let request = json!({"op": "exec", "args": ["sh", "-i"], "tty": size, "stdin": true});
    let mut client = agent.connect();
    client.send(Kind::Request, &request);
    let started = client.next().map(|frame| frame.payload).unwrap_or_default();
    let started: Value = serde_json::from_slice(&started).expect("JSON");
    let shell = started["pid"].as_u64().expect("a process");
    let at_prompt = || foreground(shell) == Some(shell);
    let job_runs = || heeds_keys(shell, "sleep");

    eventually("the shell has its terminal", at_prompt);
    for (keys, what) in [("sleep 97\n", "a job runs"), ("fg\n", "the job runs again")] {
        client.send_bytes(Kind::Stdin, keys.as_bytes());
        eventually(what, job_runs);
        client.send_bytes(Kind::Stdin, b"\x1a");
        eventually("the job is stopped", at_prompt);
    }
    client.send_bytes(Kind::Stdin, b"fg\n");
    eventually("the job runs at last", job_runs);
    client.send_bytes(Kind::Stdin, b"\x03");
    eventually("the job has ended", at_prompt);
    client.send_bytes(Kind::Stdin, b"exit $?\n");

    assert_eq!(client.finish().reply["exit_code"], 130);
}

#[test]
fn a_terminal_is_found_under_its_own_name_and_another_session_has_none() {
    let agent = Agent::start();
    let script = "tty; stty size </dev/tty; test -t 0 && echo typed; setsid -w sh -c ': </dev/tty'";
    let answer = agent.connect().ask(&on_terminal(script));

    let said = answer.text();
    assert!(said.starts_with("/dev/pts/"), "{said:?}");
    assert!(said.contains("\r\n24 80\r\ntyped\r\n"), "{said:?}");
    assert!(said.contains("No such device or address"), "{said:?}");
}
