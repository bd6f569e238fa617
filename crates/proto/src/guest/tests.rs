use super::*;

fn field_of(json: &str) -> Option<String> {
    Request::parse(json.as_bytes()).unwrap_err().field
}

fn post_fork() -> PostFork {
    PostFork {
        sandbox_id: "s1".to_owned(),
        hostname: "child-1".to_owned(),
        machine_id: "0123456789abcdef0123456789abcdef".to_owned(),
        boot_id: "01234567-89ab-4cde-8123-456789abcdef".to_owned(),
        seed: Seed([0xa5; SEED_BYTES]),
        realtime_ns: 1,
        network: Some(Network {
            mac: "02:00:0a:00:00:02".to_owned(),
            address: "10.0.0.2/30".to_owned(),
            gateway: Some("10.0.0.1".to_owned()),
            address_v6: Some("fd00::2/64".to_owned()),
            gateway_v6: Some("fd00::1".to_owned()),
            dns: vec!["10.0.0.1".to_owned()],
        }),
        disk: Some(DiskLimit { free_bytes: 1 << 26, used_bytes: 1 << 30 }),
        memory_bytes: Some(1 << 28),
    }
}

fn refused(change: impl FnOnce(&mut PostFork)) -> Option<String> {
    let mut request = post_fork();
    change(&mut request);
    let json = serde_json::to_vec(&Request::PostFork(Box::new(request))).unwrap();
    Request::parse(&json).unwrap_err().field
}

#[test]
fn what_a_client_serialises_the_agent_parses() {
    let request = Request::PostFork(Box::new(post_fork()));
    let json = serde_json::to_vec(&request).unwrap();
    assert_eq!(Request::parse(&json).unwrap(), request);
    assert_eq!(Request::parse(br#"{"op": "quiesce"}"#).unwrap(), Request::Quiesce);
    assert_eq!(Request::parse(br#"{"op": "freeze"}"#).unwrap(), Request::Freeze);
}

#[test]
fn operations_without_members_refuse_members() {
    assert_eq!(field_of(r#"{"op": "ping", "loud": true}"#).as_deref(), Some("loud"));
}

#[test]
fn an_unknown_or_missing_op_is_named() {
    assert_eq!(field_of(r#"{"op": "explode"}"#).as_deref(), Some("op"));
    assert_eq!(field_of("{}").as_deref(), Some("op"));
    assert_eq!(field_of(r#"{"op": 3}"#).as_deref(), Some("op"));
}

#[test]
fn the_member_out_of_range_is_named() {
    for (json, field) in [
        (r#"{"op": "connect"}"#, "port"),
        (r#"{"op": "connect", "port": 0}"#, "port"),
        (r#"{"op": "connect", "port": 65536}"#, "port"),
        (r#"{"op": "connect", "port": "80"}"#, "port"),
        (r#"{"op": "exec", "args": []}"#, "args"),
        (r#"{"op": "exec", "args": [""]}"#, "args"),
        (r#"{"op": "exec", "args": ["a\u0000b"]}"#, "args"),
        (r#"{"op": "exec", "args": ["a"], "env": {"A=B": ""}}"#, "env"),
        (r#"{"op": "exec", "args": ["a"], "cwd": "relative"}"#, "cwd"),
        (r#"{"op": "exec", "args": ["a"], "timeout_s": 0}"#, "timeout_s"),
        (r#"{"op": "exec", "args": ["a"], "timeout_s": 604801}"#, "timeout_s"),
        (r#"{"op": "exec", "args": ["a"], "tty": {"rows": 70000, "columns": 1}}"#, "tty"),
        (r#"{"op": "read_file", "path": "etc"}"#, "path"),
        (r#"{"op": "read_file", "path": "/etc", "offset": -1}"#, "offset"),
        (r#"{"op": "write_file", "path": "/a", "mode": 4096}"#, "mode"),
        (r#"{"op": "move", "source": "/a", "target": "b"}"#, "target"),
        (r#"{"op": "set_time", "realtime_ns": 1.5}"#, "realtime_ns"),
        (r#"{"op": "warm", "timeout_s": 1, "ready": {"command": []}}"#, "ready"),
    ] {
        assert_eq!(field_of(json).as_deref(), Some(field), "{json}");
    }
}

#[test]
fn limits_hold_and_one_past_them_is_refused() {
    let exec =
        |count: usize| Request::Exec(Exec { args: vec!["x".into(); count], ..Exec::default() });
    assert!(exec(ARGS_MAX).check().is_ok());
    assert!(exec(ARGS_MAX + 1).check().is_err());
    let stat = |bytes: usize| Request::Stat(PathOnly { path: "/".repeat(bytes).into() });
    assert!(stat(PATH_MAX).check().is_ok());
    assert!(stat(PATH_MAX + 1).check().is_err());
    let env = |count: usize| (0..count).map(|n| (format!("V{n}"), "".into())).collect();
    assert!(check_surroundings(&env(ENV_MAX), None).is_ok());
    assert!(check_surroundings(&env(ENV_MAX + 1), None).is_err());
}

#[test]
fn an_identity_that_is_none_is_refused() {
    assert_eq!(refused(|r| r.hostname = String::new()).as_deref(), Some("hostname"));
    assert_eq!(refused(|r| r.hostname = "a\nb".to_owned()).as_deref(), Some("hostname"));
    assert_eq!(refused(|r| r.hostname = "a".repeat(HOSTNAME_MAX + 1)).as_deref(), Some("hostname"));
    assert_eq!(refused(|r| r.machine_id.push('0')).as_deref(), Some("machine_id"));
    assert_eq!(refused(|r| r.boot_id.replace_range(8..9, "0")).as_deref(), Some("boot_id"));
    assert_eq!(refused(|r| r.realtime_ns = -1).as_deref(), Some("realtime_ns"));
    let network = |change: fn(&mut Network)| {
        refused(|r| r.network.as_mut().into_iter().for_each(change)).as_deref() == Some("network")
    };
    assert!(network(|n| n.mac = "02:00:0a:00:00".to_owned()));
    assert!(network(|n| n.mac = "02:00:0a:00:00:0g".to_owned()));
    assert!(network(|n| n.address = "10.0.0.2".to_owned()));
    assert!(network(|n| n.address = "10.0.0.2/33".to_owned()));
    assert!(network(|n| n.gateway = Some("x".to_owned())));
    for wrong in ["fd00::2", "fd00::2/129", "10.0.0.2/30", "/64"] {
        let told = refused(|r| {
            r.network.as_mut().into_iter().for_each(|n| n.address_v6 = Some(wrong.to_owned()));
        });
        assert_eq!(told.as_deref(), Some("network"), "{wrong}");
    }
    assert!(network(|n| n.gateway_v6 = Some("10.0.0.1".to_owned())));
    assert!(network(|n| n.dns = vec!["x".to_owned()]));
}

#[test]
fn a_seed_of_another_length_is_refused_and_none_is_ever_printed() {
    let json = serde_json::to_string(&Request::PostFork(Box::new(post_fork()))).unwrap();
    assert_eq!(field_of(&json.replace("a5a5", "a5")).as_deref(), Some("seed"));
    assert_eq!(field_of(&json.replacen("a5", "zz", 1)).as_deref(), Some("seed"));
    assert!(!format!("{:?}", post_fork()).contains("a5a5"));
}

#[test]
fn control_messages_are_signals_and_sizes_only() {
    assert_eq!(Control::parse(br#"{"signal": 15}"#).unwrap(), Control::Signal(15));
    assert_eq!(
        Control::parse(br#"{"resize": {"rows": 24, "columns": 80}}"#).unwrap(),
        Control::Resize(WindowSize { rows: 24, columns: 80 })
    );
    for bad in [r#"{"signal": 0}"#, r#"{"signal": 65}"#, r#"{"kill": 9}"#, "{}", "9"] {
        assert!(Control::parse(bad.as_bytes()).is_err(), "{bad}");
    }
}

#[test]
fn an_error_code_of_a_later_version_is_still_an_error() {
    let body: ErrorBody = serde_json::from_str(r#"{"code": "novel", "message": "m"}"#).unwrap();
    assert_eq!(body.code, ErrorCode::Unknown);
}
