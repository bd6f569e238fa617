use super::*;
use crate::limits::{
    CMDLINE_MAX, DISK_MAX_BYTES, JAIL_FOLDERS_MAX, JAIL_USERS_MAX, MEMORY_ALIGN_BYTES,
    MEMORY_MAX_BYTES, MEMORY_MIN_BYTES, VCPUS_MAX,
};

fn machine() -> MachineConfig {
    MachineConfig {
        directory: "/run/m".into(),
        kernel: "/k".into(),
        initramfs: None,
        cmdline: None,
        vcpus: 1,
        cpu: Cpu::Host,
        memory_bytes: MEMORY_MIN_BYTES,
        disk: None,
        network: None,
        agent: true,
        jail: None,
    }
}

fn refused(change: impl FnOnce(&mut MachineConfig)) -> Option<String> {
    let mut config = machine();
    change(&mut config);
    let json = serde_json::to_vec(&config).unwrap();
    MachineConfig::parse(&json).err().and_then(|error| error.field)
}

#[test]
fn a_machine_within_its_limits_is_accepted() {
    assert_eq!(refused(|_| ()), None);
    assert_eq!(refused(|m| m.vcpus = VCPUS_MAX), None);
    assert_eq!(refused(|m| m.memory_bytes = MEMORY_MAX_BYTES), None);
}

#[test]
fn a_machine_one_past_a_limit_is_refused_by_name() {
    assert_eq!(refused(|m| m.vcpus = 0).as_deref(), Some("vcpus"));
    assert_eq!(refused(|m| m.vcpus = VCPUS_MAX + 1).as_deref(), Some("vcpus"));
    for bytes in [
        MEMORY_MIN_BYTES - MEMORY_ALIGN_BYTES,
        MEMORY_MIN_BYTES + 4096,
        MEMORY_MAX_BYTES + MEMORY_ALIGN_BYTES,
    ] {
        assert_eq!(refused(|m| m.memory_bytes = bytes).as_deref(), Some("memory_bytes"));
    }
    let long = "x".repeat(CMDLINE_MAX + 1);
    assert_eq!(refused(|m| m.cmdline = Some(long)).as_deref(), Some("cmdline"));
    assert_eq!(refused(|m| m.kernel = "k".into()).as_deref(), Some("kernel"));
}

const NO_JAIL: JailConfig = JailConfig {
    uid: None,
    users: Vec::new(),
    cgroups: None,
    group: 0,
    rootless: false,
    folders: Vec::new(),
    read_only: Vec::new(),
};

#[test]
fn a_zygote_of_roots_is_one_of_the_users_that_it_may_make_others_of() {
    let jail = |more: &str| {
        let json = format!(
            r#"{{"directory": "/z", "state": "/s", "memory": ["/m"],
                "jail": {{"folders": ["/run/m"], {more}}}}}"#
        );
        ZygoteConfig::parse(json.as_bytes()).err().and_then(|refused| refused.field)
    };
    let cgroups = r#""cgroups": {"path": "/c", "group": 8, "own": "/c/z"}"#;
    assert_eq!(jail(r#""group": 7, "uid": 11, "users": [[10, 2]]"#), None);
    assert_eq!(jail(&format!(r#""group": 7, "uid": 11, "users": [[10, 2]], {cgroups}"#)), None);
    assert_eq!(jail(r#""rootless": true, "cgroups": {"path": "/c"}"#), None);
    assert_eq!(jail(r#""group": 7, "uid": 21, "users": [[10, 2], [20, 2]]"#), None);
    let runs = |count| vec!["[10, 2]"; count].join(", ");
    let many = |count| jail(&format!(r#""group": 7, "uid": 11, "users": [{}]"#, runs(count)));
    assert_eq!(many(JAIL_USERS_MAX), None);
    assert_eq!(many(JAIL_USERS_MAX + 1).as_deref(), Some("jail"));
    for wrong in [
        r#""group": 7"#,
        r#""group": 7, "users": [[10, 2]]"#,
        r#""group": 7, "uid": 12, "users": [[10, 2]]"#,
        r#""group": 7, "uid": 9, "users": [[10, 2]]"#,
        r#""group": 7, "uid": 1, "users": [[0, 2]]"#,
        r#""group": 7, "uid": 10, "users": [[10, 0]]"#,
        r#""group": 7, "uid": 10, "users": [[10, 4294967286]]"#,
        r#""rootless": true, "users": [[10, 2]]"#,
        r#""rootless": true, "cgroups": {"path": "/c", "group": 8, "own": "/c/z"}"#,
        r#""group": 7, "uid": 11, "users": [[10, 2]], "cgroups": {"path": "/c"}"#,
        r#""group": 7, "uid": 9, "users": [[9, 2]], "cgroups": {"path":"c","group":8,"own":"/"}"#,
    ] {
        assert_eq!(jail(wrong).as_deref(), Some("jail"), "{wrong}");
    }
}

#[test]
fn a_jail_is_one_of_root_with_a_group_or_one_of_a_user_without_one() {
    let jail = |uid, group, rootless| {
        let (folders, read_only) = (vec!["/run/m".into()], Vec::new());
        refused(|m| {
            m.jail = Some(JailConfig { uid, group, rootless, folders, read_only, ..NO_JAIL });
        })
    };
    assert_eq!(jail(Some(7), 7, false), None);
    assert_eq!(jail(None, 0, true), None);
    assert_eq!(jail(None, 0, false).as_deref(), Some("jail"));
    assert_eq!(jail(Some(0), 7, false).as_deref(), Some("jail"));
    assert_eq!(jail(None, 7, true).as_deref(), Some("jail"));
    assert_eq!(jail(Some(7), 0, true).as_deref(), Some("jail"));

    let json = br#"{"directory": "/m", "kernel": "/k", "vcpus": 1, "memory_bytes": 134217728,
        "jail": {"folders": ["/run/m"], "rootless": true}}"#;
    assert!(MachineConfig::parse(json).unwrap().jail.unwrap().rootless);
}

#[test]
fn a_jail_has_one_folder_to_sixteen_of_both_kinds_together() {
    let jail = |folders: &[&str], read_only: &[&str]| {
        let of = |paths: &[&str]| paths.iter().map(Into::into).collect();
        let (folders, read_only) = (of(folders), of(read_only));
        let (uid, group, rootless) = (Some(7), 7, false);
        refused(|m| {
            m.jail = Some(JailConfig { uid, group, rootless, folders, read_only, ..NO_JAIL });
        })
    };
    let many = ["/run/m"; JAIL_FOLDERS_MAX + 1];
    assert_eq!(jail(&many[..1], &many[2..]), None);
    assert_eq!(jail(&many[..1], &many[1..]).as_deref(), Some("jail"));
    assert_eq!(jail(&many, &[]).as_deref(), Some("jail"));
    assert_eq!(jail(&[], &many[..1]).as_deref(), Some("jail"));
    assert_eq!(jail(&many[..1], &["snapshots"]).as_deref(), Some("jail"), "a relative path");
}

#[test]
fn a_disk_one_block_too_large_is_refused() {
    let of = |size_bytes| DiskConfig {
        layers: vec!["/image".into()],
        size_bytes,
        top_limit_bytes: None,
        top_directory: None,
        top_reserve_bytes: 0,
    };

    assert_eq!(refused(|m| m.disk = Some(of(DISK_MAX_BYTES))), None);
    for bytes in [0, 4095, DISK_MAX_BYTES + 4096] {
        assert_eq!(refused(|m| m.disk = Some(of(bytes))).as_deref(), Some("disk"));
    }
}

#[test]
fn a_guest_sees_what_the_host_has_unless_it_is_to_be_portable() {
    let parse = |cpu: &str| {
        let json = format!(
            r#"{{"directory":"/d","kernel":"/k","vcpus":1,"memory_bytes":134217728{cpu}}}"#
        );
        MachineConfig::parse(json.as_bytes()).map(|config| config.cpu)
    };

    assert_eq!(parse("").unwrap(), Cpu::Host);
    assert_eq!(parse(r#","cpu":"portable""#).unwrap(), Cpu::Portable);
    assert!(parse(r#","cpu":"i386""#).unwrap_err().to_string().contains("i386"));
}

#[test]
fn waiting_for_the_agent_is_the_default() {
    let json = br#"{"directory":"/d","kernel":"/k","vcpus":1,"memory_bytes":134217728}"#;
    assert!(MachineConfig::parse(json).unwrap().agent);
}

#[test]
fn a_fork_of_none_or_too_many_is_refused() {
    let child = Child {
        id: "a".to_owned(),
        directory: "/d".into(),
        hostname: "h".to_owned(),
        machine_id: "0".repeat(32),
        boot_id: "b".to_owned(),
        uid: None,
        cgroup: None,
        network: None,
        guest_memory_bytes: None,
        top_limit_bytes: None,
        top_directory: None,
        top_reserve_bytes: 0,
    };
    let fork = |count| Fork { children: vec![child.clone(); count], users: None, deadline_s: 1.0 };
    assert!(fork(0).check().is_err());
    assert!(fork(CHILDREN_MAX).check().is_ok());
    assert!(fork(CHILDREN_MAX + 1).check().is_err());
}

#[test]
fn a_link_above_one_file_too_many_is_refused() {
    let save = |files| SaveLink {
        directory: "/d".into(),
        memory: vec!["/m".into(); files],
        disk_layers: 1,
    };

    assert!(save(0).check().is_ok());
    assert!(save(MEMORY_FILES_MAX).check().is_ok());
    assert!(save(MEMORY_FILES_MAX + 1).check().is_err());
}

#[test]
fn branch_save_derive_and_reset_take_absolute_paths_and_known_members_only() {
    let machine = |text: &str| MachineRequest::parse(text.as_bytes()).err().and_then(|e| e.field);
    let zygote = |text: &str| ZygoteRequest::parse(text.as_bytes()).err().and_then(|e| e.field);

    assert_eq!(machine(r#"{"op":"branch","directory":"/d"}"#), None);
    assert_eq!(machine(r#"{"op":"branch","directory":"d"}"#).as_deref(), Some("directory"));
    let reset = r#"{"op":"reset","hostname":"h","machine_id":"m","boot_id":"b""#;
    assert_eq!(machine(&format!("{reset}}}")), None);
    let field = machine(&format!("{reset},\"deadline_s\":0}}"));
    assert_eq!(field.as_deref(), Some("deadline_s"));
    assert_eq!(zygote(r#"{"op":"save","directory":"/d"}"#), None);
    let field = zygote(r#"{"op":"derive","directory":"/d","state":"/s","memory":"m"}"#);
    assert_eq!(field.as_deref(), Some("memory"));
}

#[test]
fn requests_without_members_refuse_members() {
    let error = MachineRequest::parse(br#"{"op": "stop", "gently": true}"#).unwrap_err();
    assert_eq!(error.field.as_deref(), Some("gently"));
    let error = ZygoteRequest::parse(br#"{"op": "stop", "gently": true}"#).unwrap_err();
    assert_eq!(error.field.as_deref(), Some("gently"));
}
