//! The warm runtime over the real protocol: one namespace, values, errors as data, interruption.

use std::time::{Duration, Instant};

use forkd_proto::Kind;
use serde_json::{Value, json};

use crate::support::{Agent, Answer, Client, eventually};

fn warm(agent: &Agent, code: &str) -> Client {
    let mut client = agent.connect();
    let answer = client.ask(&json!({"op": "warm", "python": {"code": code}, "timeout_s": 30}));
    assert_eq!(answer.error, Value::Null);
    client
}

fn eval(client: &mut Client, code: &str) -> Answer {
    client.ask(&json!({"op": "eval", "code": code}))
}

fn value(client: &mut Client, code: &str) -> Value {
    let answer = eval(client, code);
    assert_eq!((&answer.reply["error"], &answer.error), (&Value::Null, &Value::Null), "{code}");
    answer.reply["value"].clone()
}

fn post_fork(seed: &str) -> Value {
    json!({
        "op": "post_fork",
        "sandbox_id": "s",
        "hostname": "h",
        "machine_id": "0".repeat(32),
        "boot_id": "01234567-89ab-4cde-8123-456789abcdef",
        "seed": seed.repeat(64),
        "realtime_ns": 1,
    })
}

#[test]
fn without_a_warm_up_there_is_no_runtime() {
    let agent = Agent::start();
    let mut client = agent.connect();
    assert_eq!(client.ask(&json!({"op": "ping"})).reply["runtime"], "none");
    assert_eq!(eval(&mut client, "1").code(), "no_runtime");
    let answer = client.ask(&json!({"op": "warm", "timeout_s": 5}));
    assert!(answer.reply["duration_s"].as_f64().is_some_and(|seconds| seconds < 5.0));
}

#[test]
fn statements_share_one_namespace_and_the_last_expression_is_the_value() {
    let agent = Agent::start();
    let mut client = warm(&agent, "base = 40");
    assert_eq!(client.ask(&json!({"op": "ping"})).reply["runtime"], "ready");
    let answer = eval(&mut client, "x = base + 2\nx");
    assert_eq!(
        answer.reply,
        json!({"has_value": true, "repr": "42", "value": 42, "value_is_json": true, "error": null,
            "timed_out": false})
    );
    assert_eq!(eval(&mut agent.connect(), "y = x").reply["has_value"], false);
    assert_eq!(value(&mut client, "def f(n):\n    return n * y\n\nf(2)"), 84);
}

#[test]
fn code_that_is_run_again_runs_again() {
    let agent = Agent::start();
    let mut client = warm(&agent, "x = 0");
    for wanted in 1..4 {
        assert_eq!(value(&mut client, "x += 1\nx"), wanted);
        let error = eval(&mut client, "x +").reply["error"].clone();
        assert_eq!(error["type"], "SyntaxError");
        let traceback = eval(&mut client, "[\n    x,\n    nowhere,\n]").reply["error"].clone();
        assert!(traceback["traceback"].as_str().is_some_and(|text| text.contains("    nowhere,")));
    }
}

#[test]
fn more_cells_than_are_kept_run_all_the_same() {
    let agent = Agent::start();
    let mut client = warm(&agent, "");
    for number in (0..100).chain(0..100) {
        assert_eq!(value(&mut client, &format!("{number} + 1")), number + 1);
    }
    let kept = "import linecache\nsum(name.startswith('<cell') for name in linecache.cache)";
    assert_eq!(value(&mut client, kept), 64);
}

#[test]
fn values_come_as_json_where_json_can_say_them() {
    let agent = Agent::start();
    let mut client = warm(&agent, "");
    for (code, wanted) in [
        ("[1, 2.5, 'é', None, True]", json!([1, 2.5, "é", null, true])),
        ("{'a': {'b': (1, 2)}}", json!({"a": {"b": [1, 2]}})),
        ("'x' * 262142", json!("x".repeat(262_142))),
    ] {
        assert_eq!(value(&mut client, code), wanted, "{code:.40}");
    }
    for code in [
        "object()",
        "{1, 2}",
        "float('nan')",
        "[float('inf')]",
        "b'x'",
        "'x' * 262143",
        "list(range(100_000))",
        "a = []\na.append(a)\na",
    ] {
        let reply = eval(&mut client, code).reply;
        let is_json = (&reply["has_value"], &reply["value_is_json"], &reply["value"]);
        assert_eq!(is_json, (&json!(true), &json!(false), &Value::Null), "{code}");
    }
}

#[test]
fn a_long_repr_is_cut_at_its_limit() {
    let agent = Agent::start();
    let mut client = warm(&agent, "");
    let length = |reply: &Value| reply["repr"].as_str().map(|text| text.chars().count());
    assert_eq!(length(&eval(&mut client, "'x' * 65534").reply), Some(65_536));
    assert_eq!(length(&eval(&mut client, "'x' * 65535").reply), Some(65_536));
    let worst = eval(&mut client, "'\\U0001f600' * 400_000");
    assert_eq!(length(&worst.reply), Some(65_536));
    assert_eq!(worst.reply["value_is_json"], false);
}

#[test]
fn errors_are_data_with_the_users_frames_only() {
    let agent = Agent::start();
    let mut client = warm(&agent, "");
    let error = |answer: Answer| answer.reply["error"].clone();
    let raised = error(eval(&mut client, "def f():\n    return 1 / 0\n\nf()"));
    assert_eq!(
        (&raised["type"], &raised["message"]),
        (&json!("ZeroDivisionError"), &json!("division by zero"))
    );
    let traceback = raised["traceback"].as_str().expect("text");
    assert!(traceback.contains("return 1 / 0"), "{traceback}");
    assert!(!traceback.contains("runtime.py"), "{traceback}");
    assert_eq!(error(eval(&mut client, "1 +"))["type"], "SyntaxError");
    assert_eq!(error(eval(&mut client, "exit(3)"))["type"], "SystemExit");
    let mute = "class E(Exception):\n    def __str__(self): 1 / 0\nraise E";
    assert_eq!(error(eval(&mut client, mute))["type"], "E");
    assert_eq!(value(&mut client, "'still here'"), "still here");
}

#[test]
fn output_of_python_of_processes_and_of_c_is_streamed() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os, subprocess, sys");
    let code = "print('one')\nsubprocess.run(['echo', 'two'])\nos.write(1, b'three\\n')\n\
                print('oops', file=sys.stderr)\nsys.stdout.write('four')";
    let answer = eval(&mut client, code);
    assert_eq!(answer.text(), "one\ntwo\nthree\nfour");
    assert_eq!(answer.stderr, b"oops\n");
    let answer = eval(&mut client, "print('x' * 10_000_000)");
    assert_eq!(answer.stdout.len(), 10_000_001);
}

#[test]
fn output_comes_while_the_code_runs() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import time");
    client.send(Kind::Request, &json!({"op": "eval", "code": "print('now')\ntime.sleep(3600)"}));
    let frame = client.next().expect("a frame");
    assert_eq!((frame.kind, frame.payload.as_slice()), (Kind::Stdout, &b"now\n"[..]));
}

#[test]
fn a_time_limit_interrupts_and_keeps_the_namespace() {
    let agent = Agent::start();
    let mut client = warm(&agent, "kept = 'kept'");
    for code in ["while True: pass", "import time\ntime.sleep(3600)"] {
        let answer = client.ask(&json!({"op": "eval", "code": code, "timeout_s": 0.3}));
        assert_eq!(answer.reply["timed_out"], true, "{code}");
        assert_eq!(answer.reply["error"]["type"], "KeyboardInterrupt", "{code}");
    }
    assert_eq!(value(&mut client, "kept"), "kept");
}

#[test]
fn code_that_ignores_interrupts_does_not_protect_what_comes_after_it() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)");
    let request = json!({"op": "eval", "code": "while True: pass", "timeout_s": 0.2});
    assert_eq!(client.ask(&request).reply["timed_out"], true);
}

#[test]
fn an_interrupt_that_nobody_asked_for_is_not_a_time_limit() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os, signal, time");
    let answer = eval(&mut client, "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)");
    assert_eq!(answer.reply["timed_out"], false);
    assert_eq!(answer.reply["error"]["type"], "KeyboardInterrupt");
}

#[test]
fn code_that_cannot_be_interrupted_costs_the_runtime_and_says_so() {
    let agent = Agent::start();
    let mut client = warm(&agent, "");
    let code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass";
    let answer = client.ask(&json!({"op": "eval", "code": code, "timeout_s": 0.1}));
    assert_eq!(answer.code(), "runtime_failed");
    let message = answer.error["message"].as_str().expect("text");
    assert!(message.contains("namespace is lost"), "{message}");
    assert_eq!(client.ask(&json!({"op": "ping"})).reply["runtime"], "failed");
    assert_eq!(value(&mut client, "'again'"), "again");
    assert_eq!(client.ask(&json!({"op": "ping"})).reply["runtime"], "ready");
}

#[test]
fn a_client_that_goes_away_interrupts_its_evaluation() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import time");
    let mut other = agent.connect();
    other.send(Kind::Request, &json!({"op": "eval", "code": "print(1)\ntime.sleep(3600)"}));
    assert_eq!(other.next().map(|frame| frame.kind), Some(Kind::Stdout));
    drop(other);
    let begun = Instant::now();
    assert_eq!(value(&mut client, "'mine'"), "mine");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_runtime_that_dies_fails_everybody_who_waits() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os");
    let mut waiting = agent.connect();
    client.send(
        Kind::Request,
        &json!({"op": "eval", "code": "print(1)\nimport time\ntime.sleep(0.5)\n\
                                       os.write(1, b'last')\nos._exit(7)"}),
    );
    assert_eq!(client.next().map(|frame| frame.kind), Some(Kind::Stdout));
    assert_eq!(eval(&mut waiting, "1").code(), "runtime_failed");
    let answer = client.finish();
    assert_eq!((answer.code(), answer.text().as_str()), ("runtime_failed", "last"));
    let message = answer.error["message"].as_str().expect("text");
    assert!(message.starts_with("the runtime exited with status 7"), "{message}");
}

#[test]
fn the_queue_takes_its_limit_and_refuses_one_past_it() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import time\norder = []");
    client.send(Kind::Request, &json!({"op": "eval", "code": "print(1)\ntime.sleep(1)"}));
    assert_eq!(client.next().map(|frame| frame.kind), Some(Kind::Stdout));
    let mut waiting: Vec<Client> = (0..16).map(|_| agent.connect()).collect();
    for (number, one) in waiting.iter_mut().enumerate() {
        let code = format!("order.append({number})");
        one.send(Kind::Request, &json!({"op": "eval", "code": code}));
        // The answer to a second client shows that the agent has read the first one's request.
        agent.connect().ask(&json!({"op": "ping"}));
    }
    assert_eq!(eval(&mut agent.connect(), "1").code(), "busy");
    for one in &mut waiting {
        assert_eq!(one.finish().error, Value::Null);
    }
    client.finish();
    assert_eq!(value(&mut client, "order == sorted(order) and len(order)"), 16);
}

#[test]
fn a_fork_in_the_code_answers_once() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os");
    for _ in 0..5 {
        assert_eq!(eval(&mut client, "os.fork() > 0").error, Value::Null);
    }
    assert_eq!(value(&mut client, "'one answer each'"), "one answer each");
}

/// What has a thread of its own is never dormant.
const THREAD: &str = "import threading\nwait = threading.Event().wait\n\
                      threading.Thread(target=wait, daemon=True).start()";

#[test]
fn a_fork_of_the_guest_reseeds_what_is_loaded() {
    let agent = Agent::start();
    let mut client = warm(&agent, &format!("import random, tempfile, uuid\n{THREAD}"));
    let mut draw = |seed: &str| {
        let answer = client.ask(&post_fork(seed));
        let reseeded = answer.reply["reseeded"].as_array().expect("a list").clone();
        assert!(reseeded.contains(&json!("python.random")), "{reseeded:?}");
        assert_eq!(answer.reply["hook"], "none");
        value(&mut client, "random.random()").to_string()
    };
    let (one, other, again) = (draw("a1"), draw("b2"), draw("a1"));
    assert_ne!(one, other);
    assert_eq!(one, again);
}

#[test]
fn a_dormant_runtime_reseeds_itself_before_its_first_job() {
    let agent = Agent::start();
    let draw = |seed: &str| {
        let mut client = warm(&agent, "import random\nrandom.seed(1)");
        assert_eq!(client.ask(&post_fork(seed)).reply["reseeded"], json!([]));
        value(&mut client, "random.random()").to_string()
    };
    let (one, other, again) = (draw("a1"), draw("b2"), draw("a1"));
    assert_ne!(one, other);
    assert_eq!(one, again);
}

#[test]
fn a_dormant_runtime_that_cannot_reseed_itself_runs_nothing() {
    let agent = Agent::start();
    let warm_up = "import random\nrandom.seed = lambda seed, *, rehearsed=[]: \
                   rehearsed.append(seed) or (len(rehearsed) > 16 and 1 / 0)";
    let mut client = warm(&agent, warm_up);
    assert_eq!(client.ask(&post_fork("a1")).reply["hook"], "none");
    let answer = eval(&mut client, "random.random()");
    assert_eq!(answer.code(), "runtime_failed");
    let said = answer.error["message"].to_string();
    assert!(said.contains("could not reseed itself"), "{said}");
    // What runs next has nothing of what the siblings share.
    assert_eq!(value(&mut client, "'random' in globals()"), false);
}

#[test]
fn a_runtime_that_waits_for_its_next_job_is_as_dormant_as_before_its_first() {
    let agent = Agent::start();
    let draw = |seed: &str| {
        let mut client = warm(&agent, "import random");
        value(&mut client, "random.seed(1)");
        assert_eq!(client.ask(&post_fork(seed)).reply["reseeded"], json!([]));
        value(&mut client, "random.random()").to_string()
    };
    let (one, other, again) = (draw("a1"), draw("b2"), draw("a1"));
    assert_ne!(one, other);
    assert_eq!(one, again);
}

#[test]
fn a_runtime_that_can_act_by_itself_reseeds_itself_at_once() {
    for code in [
        THREAD,
        "import signal\nsignal.signal(signal.SIGALRM, print)",
        "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1)",
        "import forkd\nforkd.on_fork(list)",
    ] {
        let agent = Agent::start();
        let mut client = warm(&agent, &format!("import random\n{code}"));
        let answer = client.ask(&post_fork("a1"));
        assert_eq!(answer.reply["reseeded"], json!(["python.random"]), "warmed up with {code}");

        let agent = Agent::start();
        let mut client = warm(&agent, "import random");
        assert_eq!(eval(&mut client, code).error, Value::Null);
        let answer = client.ask(&post_fork("a1"));
        assert_eq!(answer.reply["reseeded"], json!(["python.random"]), "after {code}");
    }
}

#[test]
fn what_the_code_made_of_the_interrupt_does_not_outlast_its_job() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os, signal");
    let pid = value(&mut client, "os.getpid()").as_i64().expect("a pid");
    // No job after this one: each begins by setting the handler that it needs.
    eval(&mut client, "said = []\nsignal.signal(signal.SIGINT, lambda *_: said.append(1))");
    let sent = std::process::Command::new("kill").args(["-INT", &pid.to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()));
    assert_eq!(value(&mut client, "said"), json!([]));
}

#[test]
fn the_images_hooks_run_in_each_fork() {
    let agent = Agent::start();
    let mut client = warm(
        &agent,
        "import forkd\nforks = []\n@forkd.on_fork\ndef noted():\n    forks.append('callback')",
    );
    let touched = agent.path("touched");
    client.ask(&json!({"op": "configure", "post_fork": "forks.append('code')",
        "post_fork_command": ["touch", touched]}));
    assert_eq!(client.ask(&post_fork("00")).reply["hook"], "ran");
    assert_eq!(value(&mut client, "forks"), json!(["callback", "code"]));
    assert!(touched.exists());
}

#[test]
fn a_hook_that_fails_fails_the_fork_with_its_words() {
    let agent = Agent::start();
    let mut client = warm(&agent, "");
    client.ask(&json!({"op": "configure", "post_fork": "raise ValueError('not me')"}));
    let answer = client.ask(&post_fork("00"));
    assert_eq!(answer.code(), "hook_failed");
    assert!(answer.error["message"].as_str().is_some_and(|m| m.contains("not me")));
    client.ask(&json!({"op": "configure", "post_fork": "pass",
        "post_fork_command": ["sh", "-c", "echo no way >&2; exit 4"]}));
    let answer = client.ask(&post_fork("00"));
    assert_eq!(answer.code(), "hook_failed");
    assert_eq!(answer.error["message"], "sh ended with exit status 4; it said: no way");
}

#[test]
fn a_hook_without_its_runtime_fails_the_fork() {
    let agent = Agent::start();
    let mut client = agent.connect();
    assert_eq!(client.ask(&post_fork("00")).reply["hook"], "none");
    client.ask(&json!({"op": "configure", "post_fork": "pass"}));
    assert_eq!(client.ask(&post_fork("00")).code(), "hook_failed");
}

#[test]
fn a_warm_up_that_fails_says_why_and_leaves_no_runtime() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let code = "print('so far')\nimport nowhere";
    let answer = client.ask(&json!({"op": "warm", "python": {"code": code}, "timeout_s": 30}));
    assert_eq!((answer.code(), answer.text().as_str()), ("warm_up_failed", "so far\n"));
    let message = answer.error["message"].as_str().expect("text");
    assert!(message.contains("ModuleNotFoundError"), "{message}");
    eventually("the runtime is gone", || {
        client.ask(&json!({"op": "ping"})).reply["runtime"] == "failed"
    });
}

#[test]
fn a_warm_up_that_never_ends_is_given_up() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let request = json!({"op": "warm", "python": {"code": "while True: pass"}, "timeout_s": 0.5});
    assert_eq!(client.ask(&request).code(), "warm_up_timeout");
    // The second run says nothing before the time is over.
    let speaks_once = "test -e $0 && exec sleep 99; touch $0; echo not yet; exit 1";
    let request = json!({"op": "warm", "timeout_s": 2,
        "ready": {"command": ["sh", "-c", speaks_once, agent.path("spoken")]}});
    let answer = client.ask(&request);
    assert_eq!(answer.code(), "warm_up_timeout");
    assert!(answer.error["message"].as_str().is_some_and(|m| m.contains("it said: not yet")));
    let request = json!({"op": "warm", "timeout_s": 9, "ready": {"command": ["no-such-program"]}});
    assert_eq!(client.ask(&request).code(), "warm_up_failed");
}

#[test]
fn a_warm_up_ends_when_the_image_says_that_it_is_ready() {
    let agent = Agent::start();
    let ready = agent.path("ready");
    let code =
        format!("import threading\nthreading.Timer(0.3, lambda: open({ready:?}, 'w')).start()");
    let answer =
        agent.connect().ask(&json!({"op": "warm", "python": {"code": code}, "timeout_s": 30,
        "ready": {"command": ["test", "-e", ready]}}));
    assert!(answer.reply["duration_s"].as_f64().is_some_and(|seconds| seconds > 0.25));
}

#[test]
fn the_runtime_may_be_another_user() {
    let agent = Agent::start();
    let mut client = agent.connect();
    // Its script lies in the agent's folder, which only root can enter until this is said.
    client.sh(&format!("chmod -R a+rX {}", agent.path("").display()));
    let answer = client
        .ask(&json!({"op": "warm", "python": {"code": "import os"}, "user": "daemon",
        "timeout_s": 30}));
    assert_eq!(answer.error, Value::Null);
    assert_eq!(value(&mut client, "os.getuid()"), 1);
}

#[test]
fn a_guest_can_be_made_quiet() {
    let agent = Agent::start();
    let answer = agent.connect().ask(&json!({"op": "quiesce"}));
    assert!(answer.reply["available_bytes"].as_u64().is_some_and(|bytes| bytes > 0));
}

/// Ends the runtime by `code`, says why it ended, and checks that the next evaluation works.
fn died(client: &mut Client, code: &str) -> String {
    let answer = eval(client, code);
    assert_eq!(answer.code(), "runtime_failed", "{code}");
    let message = answer.error["message"].as_str().expect("text").to_owned();
    assert!(message.contains("namespace is lost"), "{message}");
    assert!(message.contains("the next evaluation starts with an empty one"), "{message}");
    assert_eq!(value(client, "'kept' in globals()"), false, "{code}");
    assert_eq!(value(client, "x = 20\nx + 1"), 21, "{code}");
    message
}

#[test]
fn a_runtime_that_died_is_started_again_and_says_why() {
    let agent = Agent::start();
    let mut client = warm(&agent, "kept = 1");
    for (code, reason) in [
        ("import os\nos._exit(3)", "exited with status 3"),
        ("import os\nos.abort()", "crashed with SIGABRT"),
        ("import ctypes\nctypes.string_at(0)", "crashed with SIGSEGV"),
        ("import os\nos.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os\nos.kill(os.getpid(), 15)", "ended by SIGTERM"),
    ] {
        let message = died(&mut client, code);
        assert!(message.contains(reason), "{code}: {message}");
    }
}

#[test]
fn recursion_without_end_costs_the_namespace_and_not_the_runtime() {
    let agent = Agent::start();
    let mut client = warm(&agent, "kept = 1");
    // Through C at each level, so that it is the stack that ends and not the memory.
    let code = "import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 20, -1))\n\
                sys.setrecursionlimit(10**6)\n\
                class G:\n    def __repr__(self): return repr(self)\nrepr(G())";
    let answer = eval(&mut client, code);
    let raised = &answer.reply["error"]["type"];
    assert!(answer.code() == "runtime_failed" || *raised == "RecursionError", "{answer:?}");
    assert_eq!(value(&mut client, "1 + 1"), 2);
}

#[test]
fn a_runtime_that_was_killed_while_idle_says_so_once() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os\nkept = 1");
    let pid = value(&mut client, "os.getpid()").as_i64().expect("a pid");
    assert_eq!(client.sh(&format!("kill -9 {pid}")).reply["exit_code"], 0);
    eventually("its end is noticed", || {
        client.ask(&json!({"op": "ping"})).reply["runtime"] == "failed"
    });

    let told = eval(&mut client, "kept");

    assert_eq!(told.code(), "runtime_failed");
    let message = told.error["message"].as_str().expect("text");
    assert!(message.contains("killed by SIGKILL") && message.contains("did not run"), "{message}");
    assert_eq!(value(&mut agent.connect(), "'kept' in globals()"), false);
}

#[test]
fn a_guest_whose_runtime_died_can_be_forked() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os\nmodel = object()");
    client.ask(&json!({"op": "configure", "post_fork": "model.reseed()"}));
    assert_eq!(eval(&mut client, "os._exit(1)").code(), "runtime_failed");
    for _ in 0..2 {
        // There is no runtime in the first, and one with an empty namespace in the second.
        let forked = client.ask(&post_fork("a1"));
        assert_eq!((&forked.reply["hook"], &forked.error), (&json!("none"), &Value::Null));
        assert_eq!(value(&mut client, "import random\n1"), 1);
    }
    let forked = client.ask(&post_fork("a1"));
    assert_eq!(forked.error, Value::Null);
}

#[test]
fn what_the_runtime_left_in_the_background_outlives_it() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os, subprocess");
    let marks = agent.path("marks");
    // It ends with the agent's folder, whatever becomes of this test.
    let write =
        format!("while echo tick && head -c 100 /dev/zero >>{}; do :; done", marks.display());
    let left = format!("subprocess.Popen(['sh', '-c', {write:?}], start_new_session=True)");
    assert_eq!(eval(&mut client, &format!("{left}\nos._exit(1)")).code(), "runtime_failed");

    let size = || std::fs::metadata(&marks).map_or(0, |found| found.len());
    let before = size();
    eventually("what it left goes on", || size() > before + 1000);
}

#[test]
fn a_client_that_leaves_without_reading_its_answer_does_not_stop_the_others() {
    let agent = Agent::start();
    let mut client = warm(&agent, "kept = 1");
    let mut other = agent.connect();
    other.send(Kind::Request, &json!({"op": "eval", "code": "print('x' * 3_000_000)"}));
    assert_eq!(other.next().map(|frame| frame.kind), Some(Kind::Stdout));
    eventually("the agent waits for the client", || agent.slept_for(Duration::from_millis(50)));
    drop(other);
    assert_eq!(value(&mut client, "kept"), 1);
}

#[test]
fn a_signal_between_two_cells_does_not_end_the_runtime() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os, signal, threading\nkept = 1\npid = os.getpid()");
    let handler = "def late(*_):\n    raise TimeoutError('late')\n\
                   signal.signal(signal.SIGALRM, late)\npid";
    for thread in ["", "threading.Thread(target=threading.Event().wait, daemon=True).start()"] {
        let pid = value(&mut client, &format!("{thread}\n{handler}"));
        for _ in 0..20 {
            assert_eq!(client.sh(&format!("kill -ALRM {pid}")).reply["exit_code"], 0);
        }
        // The handler runs when code of its owner's does, once as signals are.
        assert_eq!(eval(&mut client, "kept").reply["error"]["type"], "TimeoutError");
        assert_eq!(
            value(&mut client, "kept, signal.getsignal(signal.SIGALRM) is late"),
            json!([1, true])
        );
    }
}

#[test]
fn a_cell_may_await() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import asyncio\nkept = 'kept'");
    assert_eq!(value(&mut client, "await asyncio.sleep(0, 41) + 1"), 42);
    let code = "async def double(n):\n    print('doubling')\n    await asyncio.sleep(0)\n    \
                return 2 * n\ny = await double(21)\nasync with asyncio.Lock() as _:\n    pass\n\
                [await double(n) async for n in numbers()], y";
    let numbers = "async def numbers():\n    for n in (1, 2):\n        yield n\n";
    let answer = eval(&mut client, &format!("{numbers}{code}"));
    assert_eq!(answer.reply["value"], json!([[2, 4], 42]), "{answer:?}");
    assert_eq!(answer.text(), "doubling\n".repeat(3));
    // One loop for all cells: what belongs to it goes on.
    let code = "event = asyncio.Event()\ntask = asyncio.create_task(event.wait())\n\
                await asyncio.sleep(0)";
    assert_eq!(eval(&mut client, code).reply["error"], Value::Null);
    assert_eq!(value(&mut client, "event.set()\nawait task"), true);
    assert_eq!(value(&mut client, "async def main():\n    return 7\nasyncio.run(main())"), 7);
    assert_eq!(value(&mut client, "await asyncio.sleep(0, kept)"), "kept");
    let raised = eval(&mut client, "await asyncio.sleep(0)\n1 / 0").reply["error"].clone();
    assert_eq!(raised["type"], "ZeroDivisionError");
    let raised =
        eval(&mut client, "async def f():\n    return 1 / 0\nawait f()").reply["error"].clone();
    let traceback = raised["traceback"].as_str().expect("text");
    assert!(
        traceback.contains("return 1 / 0") && !traceback.contains("base_events"),
        "{traceback}"
    );
    let plain = "def f():\n    await x";
    assert_eq!(eval(&mut client, plain).reply["error"]["type"], "SyntaxError");
}

#[test]
fn awaiting_is_interrupted_and_keeps_the_namespace() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import asyncio\nkept = 'kept'\nseen = []");
    for code in [
        "await asyncio.sleep(3600)",
        "async def spin():\n    while True: pass\nawait spin()",
        "async def spin():\n    while True: pass\nt = asyncio.create_task(spin())\n\
         await asyncio.sleep(9)",
        "try:\n    await asyncio.sleep(3600)\nfinally:\n    seen.append('cleaned up')",
        "while True:\n    try: await asyncio.sleep(3600)\n    except asyncio.CancelledError: pass",
    ] {
        let answer = client.ask(&json!({"op": "eval", "code": code, "timeout_s": 0.3}));
        assert_eq!(answer.reply["timed_out"], true, "{code}: {answer:?}");
        assert_eq!(answer.reply["error"]["type"], "KeyboardInterrupt", "{code}");
        assert_eq!(value(&mut client, "await asyncio.sleep(0, kept)"), "kept", "after {code}");
    }
    assert_eq!(value(&mut client, "seen"), json!(["cleaned up"]));
    client.send(
        Kind::Request,
        &json!({"op": "eval", "code": "print('now')\nawait asyncio.sleep(9)"}),
    );
    assert_eq!(client.next().map(|frame| frame.payload), Some(b"now\n".to_vec()));
}

fn eval_in(client: &mut Client, context: &str, code: &str) -> Answer {
    client.ask(&json!({"op": "eval", "code": code, "context": context}))
}

#[test]
fn what_the_code_shows_comes_with_its_answer() {
    let agent = Agent::start();
    let mut client = warm(&agent, "");
    let html = "class Html:\n    def _repr_html_(self): return '<b>1</b>'\n";
    let answer = eval(&mut client, &format!("{html}display(2)\nHtml()"));
    let results = &answer.reply["results"];
    assert_eq!(results[0]["data"], json!({"text/plain": "2"}));
    assert_eq!(
        results[1],
        json!({"is_main": true, "data": {"text/html": "<b>1</b>"},
        "omitted": {}})
    );
}

#[test]
fn a_context_has_names_of_its_own_that_outlive_a_freeze_and_a_fork() {
    let agent = Agent::start();
    let mut client = warm(&agent, "x = 'warm'");
    assert_eq!(eval_in(&mut client, "a", "x = 'a'").reply["error"], Value::Null);
    assert_eq!(eval_in(&mut client, "b", "x").reply["error"]["type"], "NameError");
    assert_eq!(client.ask(&post_fork("0a")).error, Value::Null);
    assert_eq!(eval_in(&mut client, "a", "x").reply["value"], "a");
    assert_eq!(value(&mut client, "x"), "warm");
    let refused = eval_in(&mut client, "No", "1");
    assert_eq!((refused.code(), &refused.error["field"]), ("invalid_request", &json!("context")));
}

#[test]
fn an_evaluation_in_a_context_is_interrupted_like_any_other() {
    let agent = Agent::start();
    let mut client = warm(&agent, "");
    let endless = json!({"op": "eval", "code": "x = 1\nwhile True: pass", "context": "a",
        "timeout_s": 0.2});
    assert_eq!(client.ask(&endless).reply["timed_out"], true);
    assert_eq!(eval_in(&mut client, "a", "x").reply["value"], 1);
    assert_eq!(eval(&mut client, "x").reply["error"]["type"], "NameError");
}

#[test]
fn variables_hold_for_one_evaluation_and_its_context() {
    let agent = Agent::start();
    let mut client = warm(&agent, "import os");
    let code = "__import__('os').environ.get('MINE')";
    let mine = json!({"op": "eval", "code": code, "env": {"MINE": "yes"}});
    assert_eq!(client.ask(&mine).reply["value"], "yes");
    assert_eq!(value(&mut client, code), Value::Null);
    let there = json!({"op": "eval", "code": code, "env": {"MINE": "yes"}, "context": "a"});
    assert_eq!(client.ask(&there).reply["value"], "yes");
    assert_eq!(eval_in(&mut client, "a", code).reply["value"], Value::Null);
    for wrong in [json!({"A=B": ""}), json!({"": "x"}), json!({"A": "\0"})] {
        let refused = client.ask(&json!({"op": "eval", "code": "1", "env": wrong}));
        assert_eq!((refused.code(), &refused.error["field"]), ("invalid_request", &json!("env")));
    }
}

#[test]
fn a_runtime_without_contexts_refuses_them() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let shell = json!({"op": "warm", "runtime": {"name": "shell"}, "timeout_s": 30});
    assert_eq!(client.ask(&shell).error, Value::Null);
    let refused = eval_in(&mut client, "a", "true");
    assert_eq!(refused.code(), "no_runtime");
    assert_eq!(refused.error["message"], "the shell runtime has no contexts");
    let refused = client.ask(&json!({"op": "eval", "code": "true", "env": {"A": "b"}}));
    assert_eq!(refused.code(), "no_runtime");
    let message = "the shell runtime has no variables for one evaluation";
    assert_eq!(refused.error["message"], message);
    assert_eq!(eval(&mut client, "true").error, Value::Null);
}

#[test]
fn the_shell_is_a_runtime_like_python() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let shell = json!({"name": "shell", "code": "cd /\nword=kept"});
    let answer = client.ask(&json!({"op": "warm", "runtime": shell, "timeout_s": 30}));
    assert_eq!(answer.error, Value::Null);
    assert_eq!(eval(&mut client, "echo $word in $PWD").text(), "kept in /\n");

    let other = json!({"op": "eval", "code": "touch x", "runtime": "python"});
    let refused = client.ask(&other);
    assert_eq!(refused.code(), "no_runtime");
    let message = refused.error["message"].as_str().expect("text");
    assert!(message.contains("'python'") && message.contains("is shell"), "{message}");

    let request = json!({"op": "eval", "code": "sleep 60", "timeout_s": 0.3, "runtime": "shell"});
    assert_eq!(client.ask(&request).reply["timed_out"], true);
    assert_eq!(eval(&mut client, "echo $word").text(), "kept\n");

    let ended = eval(&mut client, "exit 3");
    assert_eq!(ended.code(), "runtime_failed");
    let message = ended.error["message"].as_str().expect("text");
    assert!(message.contains("the shell runtime exited with status 3;"), "{message}");
    assert_eq!(eval(&mut client, "echo ${word-new}").text(), "new\n");
}

#[test]
fn a_runtime_that_there_is_not_fails_the_warm_up() {
    let agent = Agent::start();
    let wanted = json!({"op": "warm", "runtime": {"name": "cobol"}, "timeout_s": 5});
    let answer = agent.connect().ask(&wanted);
    assert_eq!(answer.code(), "warm_up_failed");
    let message = answer.error["message"].as_str().expect("text");
    assert!(message.contains("'cobol'") && message.contains("python, node, shell"), "{message}");
}
