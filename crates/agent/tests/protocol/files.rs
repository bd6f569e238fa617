//! Files over the real protocol: whole or not at all, and larger than any buffer.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use crate::support::{Agent, Answer, Client, eventually};
use forkd_proto::Kind;
use serde_json::{Value, json};

fn write(client: &mut Client, request: &Value, chunks: &[&[u8]]) -> Answer {
    client.send(Kind::Request, request);
    for chunk in chunks {
        client.send_bytes(Kind::Data, chunk);
    }
    client.send_bytes(Kind::DataEof, b"");
    client.finish()
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("entry").file_name();
    entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect()
}

#[test]
fn a_file_goes_in_and_comes_out_as_it_was() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let path = agent.path("file");
    let answer = write(&mut client, &json!({"op": "write_file", "path": path}), &[b"one ", b"two"]);
    assert_eq!(answer.reply["bytes"], 7);
    assert_eq!(fs::metadata(&path).expect("there").mode() & 0o7777, 0o644);
    let answer = client.ask(&json!({"op": "read_file", "path": path}));
    assert_eq!(answer.data, b"one two");
    assert_eq!(answer.events, [json!({"event": "file", "size_bytes": 7, "mode": 0o644})]);
    assert_eq!(answer.reply["bytes"], 7);
}

#[test]
fn a_part_of_a_file_can_be_read() {
    let agent = Agent::start();
    let path = agent.path("file");
    fs::write(&path, b"0123456789").expect("written");
    let mut client = agent.connect();
    let part = |offset: u64, length: u64| {
        let mut request = json!({"op": "read_file", "path": path});
        request["offset"] = offset.into();
        request["length"] = length.into();
        request
    };
    assert_eq!(client.ask(&part(3, 4)).data, b"3456");
    assert_eq!(client.ask(&part(8, 100)).data, b"89");
    assert_eq!(client.ask(&part(100, 1)).data, b"");
    assert_eq!(client.ask(&part(0, 0)).reply["bytes"], 0);
}

#[test]
fn a_large_file_passes_through_a_small_agent() {
    let agent = Agent::start();
    let (path, copy) = (agent.path("large"), agent.path("copy"));
    let file = fs::File::create(&path).expect("created");
    file.set_len(200 << 20).expect("sized");
    let (mut reader, mut writer) = (agent.connect(), agent.connect());
    reader.send(Kind::Request, &json!({"op": "read_file", "path": path}));
    writer.send(Kind::Request, &json!({"op": "write_file", "path": copy}));
    let total = loop {
        let frame = reader.next().expect("a frame");
        match frame.kind {
            Kind::Data => writer.send_bytes(Kind::Data, &frame.payload),
            Kind::Reply => break frame.payload,
            _ => {}
        }
    };
    writer.send_bytes(Kind::DataEof, b"");
    assert_eq!(writer.finish().reply["bytes"], 200 << 20);
    assert_eq!(total, br#"{"bytes":209715200}"#);
    let status = fs::read_to_string(format!("/proc/{}/status", agent.pid())).expect("status");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a size");
    let kib: u64 = peak.trim().trim_end_matches(" kB").trim().parse().expect("a number");
    assert!(kib < 16_384, "the agent held {kib} KiB");
}

#[test]
fn a_file_that_is_replaced_keeps_its_mode_unless_another_is_asked_for() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let path = agent.path("file");
    fs::write(&path, b"old").expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4750)).expect("set");
    write(&mut client, &json!({"op": "write_file", "path": path}), &[b"new"]);
    assert_eq!(fs::metadata(&path).expect("there").mode() & 0o7777, 0o4750);
    write(&mut client, &json!({"op": "write_file", "path": path, "mode": 0o600}), &[b"new"]);
    assert_eq!(fs::metadata(&path).expect("there").mode() & 0o7777, 0o600);
}

#[test]
fn a_write_that_is_broken_off_leaves_the_old_file_and_nothing_else() {
    let agent = Agent::start();
    let folder = agent.path("folder");
    fs::create_dir(&folder).expect("made");
    let path = folder.join("file");
    fs::write(&path, b"old").expect("written");
    let mut client = agent.connect();
    client.send(Kind::Request, &json!({"op": "write_file", "path": path}));
    client.send_bytes(Kind::Data, b"half of the new");
    eventually("the draft is begun", || names_in(&folder).len() == 2);
    drop(client);
    eventually("the draft is removed", || names_in(&folder) == ["file"]);
    assert_eq!(fs::read(&path).expect("there"), b"old");
}

#[test]
fn a_write_through_a_link_leaves_the_link() {
    let agent = Agent::start();
    let (link, target) = (agent.path("link"), agent.path("target"));
    fs::write(&target, b"old").expect("written");
    symlink(&target, &link).expect("linked");
    write(&mut agent.connect(), &json!({"op": "write_file", "path": link}), &[b"new"]);
    assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
    assert_eq!(fs::read(&target).expect("there"), b"new");
}

#[test]
fn a_refused_write_takes_what_was_sent_and_serves_on() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let path = agent.path("no/such/folder/file");
    let request = json!({"op": "write_file", "path": path});
    assert_eq!(write(&mut client, &request, &[&vec![0; 100_000], b"more"]).code(), "not_found");
    let request = json!({"op": "write_file", "path": path, "make_parents": true});
    assert_eq!(write(&mut client, &request, &[b"x"]).reply["bytes"], 1);
}

#[test]
fn a_disk_that_is_full_is_said_to_be_full() {
    let agent = Agent::start();
    let answer = agent.connect().ask(&json!({"op": "read_file", "path": "/dev/full"}));
    assert_eq!((answer.code(), &answer.error["field"]), ("invalid_request", &json!("path")));
}

#[test]
fn a_directory_is_listed_by_name_with_what_each_entry_is() {
    let agent = Agent::start();
    let folder = agent.path("folder");
    fs::create_dir(&folder).expect("made");
    fs::write(folder.join("b"), b"123").expect("written");
    fs::create_dir(folder.join("a")).expect("made");
    symlink("b", folder.join("c")).expect("linked");
    let answer = agent.connect().ask(&json!({"op": "list_dir", "path": folder}));
    let entries = answer.reply["entries"].as_array().expect("a list");
    let kinds: Vec<_> = entries.iter().map(|e| (&e["name"], &e["kind"])).collect();
    assert_eq!(
        kinds,
        [
            (&json!("a"), &json!("directory")),
            (&json!("b"), &json!("file")),
            (&json!("c"), &json!("symlink"))
        ]
    );
    assert_eq!((&entries[1]["size_bytes"], &entries[2]["target"]), (&json!(3), &json!("b")));
    assert!(entries[1]["modified_at_ns"].as_i64().expect("a number") > 1_600_000_000_000_000_000);
}

#[test]
fn a_directory_at_the_limit_is_listed_if_it_fits_and_one_past_it_refused() {
    let agent = Agent::start();
    let folder = agent.path("folder");
    fs::create_dir(&folder).expect("made");
    for number in 0..5_000 {
        fs::write(folder.join(number.to_string()), b"").expect("written");
    }
    let request = json!({"op": "list_dir", "path": folder});
    let answer = agent.connect().ask(&request);
    assert_eq!(answer.reply["entries"].as_array().map(Vec::len), Some(5_000));
    for number in 5_000..10_001 {
        fs::write(folder.join(number.to_string()), b"").expect("written");
    }
    assert_eq!(agent.connect().ask(&request).code(), "too_large");
}

#[test]
fn directories_are_made_moved_and_removed() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let (deep, top, moved) = (agent.path("a/b/c"), agent.path("a"), agent.path("z"));
    assert_eq!(client.ask(&json!({"op": "make_dir", "path": deep})).code(), "not_found");
    let make = json!({"op": "make_dir", "path": deep, "parents": true, "mode": 0o700});
    assert_eq!(client.ask(&make).reply, json!({}));
    assert_eq!(client.ask(&make).reply, json!({}));
    assert_eq!(fs::metadata(&deep).expect("there").mode() & 0o777, 0o700);
    assert_eq!(client.ask(&json!({"op": "make_dir", "path": deep})).code(), "exists");
    let answer = client.ask(&json!({"op": "move", "source": top, "target": moved}));
    assert_eq!(answer.reply, json!({}));
    assert_eq!(client.ask(&json!({"op": "stat", "path": top})).code(), "not_found");
    assert_eq!(client.ask(&json!({"op": "stat", "path": moved})).reply["name"], "z");
    assert_eq!(client.ask(&json!({"op": "remove", "path": moved})).code(), "not_empty");
    let remove = json!({"op": "remove", "path": moved, "recursive": true});
    assert_eq!(client.ask(&remove).reply, json!({}));
    assert_eq!(client.ask(&remove).code(), "not_found");
}

#[test]
fn removing_a_link_spares_what_it_points_at() {
    let agent = Agent::start();
    let (folder, link) = (agent.path("folder"), agent.path("link"));
    fs::create_dir(&folder).expect("made");
    fs::write(folder.join("kept"), b"").expect("written");
    symlink(&folder, &link).expect("linked");
    agent.connect().ask(&json!({"op": "remove", "path": link, "recursive": true}));
    assert_eq!(names_in(&folder), ["kept"]);
    assert!(!link.exists());
}

#[test]
fn what_is_no_file_says_so() {
    let agent = Agent::start();
    let mut client = agent.connect();
    for (request, code) in [
        (json!({"op": "read_file", "path": "/no/such"}), "not_found"),
        (json!({"op": "read_file", "path": "/etc"}), "is_a_directory"),
        (json!({"op": "read_file", "path": "/etc/passwd/x"}), "not_a_directory"),
        (json!({"op": "write_file", "path": "/etc"}), "is_a_directory"),
        (json!({"op": "list_dir", "path": "/etc/passwd"}), "not_a_directory"),
    ] {
        assert_eq!(client.ask(&request).code(), code, "{request}");
    }
}

#[test]
fn a_write_through_a_link_that_leads_nowhere_makes_what_it_names() {
    let agent = Agent::start();
    let (link, second) = (agent.path("link"), agent.path("second"));
    symlink("second", &link).expect("linked");
    symlink(agent.path("target"), &second).expect("linked");
    write(&mut agent.connect(), &json!({"op": "write_file", "path": link}), &[b"new"]);
    assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
    assert!(fs::symlink_metadata(&second).expect("there").is_symlink());
    assert_eq!(fs::read(agent.path("target")).expect("there"), b"new");

    symlink("circle", agent.path("circle")).expect("linked");
    let request = json!({"op": "write_file", "path": agent.path("circle")});
    assert_eq!(write(&mut agent.connect(), &request, &[b"new"]).code(), "io");
}

#[test]
fn what_has_no_end_is_refused_or_has_a_limit() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let pipe = agent.path("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("made");
    for path in [pipe.as_path(), Path::new("/dev/zero")] {
        let refused = client.ask(&json!({"op": "read_file", "path": path}));
        assert_eq!((refused.code(), &refused.error["field"]), ("invalid_request", &json!("path")));
    }

    // Eight bytes for each page that a process could have: 256 GiB.
    let unsized_file = format!("/proc/{}/pagemap", agent.pid());
    let cut = client.ask(&json!({"op": "read_file", "path": unsized_file}));
    assert_eq!((cut.code(), cut.data.len() >> 20), ("too_large", 64));
    let part = json!({"op": "read_file", "path": unsized_file, "length": 65 << 20});
    assert_eq!(client.ask(&part).reply["bytes"], 65 << 20);
}

#[test]
fn a_device_and_a_pipe_are_written_to_and_stay_what_they_are() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let pipe = agent.path("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("made");
    let request = json!({"op": "write_file", "path": pipe, "mode": 0o644});
    let refused = write(&mut client, &request, &[b"lost"]);
    assert_eq!((refused.code(), &refused.error["field"]), ("invalid_request", &json!("path")));

    let flags = nix::fcntl::OFlag::O_RDONLY | nix::fcntl::OFlag::O_NONBLOCK;
    let reader = nix::fcntl::open(&pipe, flags, nix::sys::stat::Mode::empty()).expect("opened");
    assert_eq!(write(&mut client, &request, &[b"read"]).reply["bytes"], 4);
    let mut read = [0; 8];
    assert_eq!(nix::unistd::read(&reader, &mut read).expect("readable"), 4);
    assert!(!fs::metadata(&pipe).expect("there").is_file());

    // Devices of the test's own: a broken agent must not spoil those of the host.
    let (empty, full) = (agent.path("empty"), agent.path("full"));
    if !(make_device(&empty, 3) && make_device(&full, 7)) {
        return;
    }
    let request = json!({"op": "write_file", "path": empty, "mode": 0o600});
    assert_eq!(write(&mut client, &request, &[&vec![0; 100_000]]).reply["bytes"], 100_000);
    let found = fs::metadata(&empty).expect("there");
    assert!(!found.is_file());
    assert_ne!(found.mode() & 0o7777, 0o600);
    let request = json!({"op": "write_file", "path": full});
    assert_eq!(write(&mut client, &request, &[b"x"]).code(), "no_space");
}

/// Makes a device of the kernel's memory driver; false where that is not allowed.
fn make_device(path: &Path, minor: u64) -> bool {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let mode = Mode::from_bits_truncate(0o666);
    mknod(path, SFlag::S_IFCHR, mode, makedev(1, minor)).is_ok()
        && fs::File::options().write(true).open(path).is_ok()
}

#[test]
fn a_file_of_the_kernels_is_written_where_it_is() {
    let agent = Agent::start();
    let path = format!("/proc/{}/comm", agent.pid());
    let request = json!({"op": "write_file", "path": path, "mode": 0o600});
    let answer = write(&mut agent.connect(), &request, &[b"ren", b"amed"]);
    assert_eq!(answer.reply["bytes"], 7);
    assert_eq!(fs::read_to_string(path).expect("there"), "renamed\n");
}

#[test]
fn a_file_that_is_replaced_keeps_its_attributes_and_spares_its_other_names() {
    let agent = Agent::start();
    let (path, other) = (agent.path("file"), agent.path("other"));
    fs::write(&path, b"old").expect("written");
    fs::hard_link(&path, &other).expect("linked");
    let status = std::process::Command::new("setfattr")
        .args(["-n", "user.kept", "-v", "yes"])
        .arg(&path)
        .status();
    let has_attribute = status.is_ok_and(|status| status.success());
    write(&mut agent.connect(), &json!({"op": "write_file", "path": path}), &[b"new"]);
    assert_eq!(fs::read(&other).expect("there"), b"old");
    if has_attribute {
        let mut names = [0_u8; 256];
        let length = rustix::fs::listxattr(&path, &mut names).expect("listed");
        assert_eq!(&names[..length], b"user.kept\0");
    }
}

#[test]
fn what_is_made_new_belongs_to_whom_it_is_for_and_what_exists_keeps_its_owner() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let agent = Agent::start();
    let mut client = agent.connect();
    let owner = |path: &Path| fs::metadata(path).map(|it| (it.uid(), it.gid())).expect("there");
    client.ask(&json!({"op": "configure", "user": "4711:4712"}));
    let path = agent.path("a/b/file");
    let mut request = json!({"op": "write_file", "path": path, "make_parents": true});
    write(&mut client, &request, &[b"x"]);
    for made in ["a", "a/b", "a/b/file"] {
        assert_eq!(owner(&agent.path(made)), (4711, 4712), "{made}");
    }
    request["user"] = "4713:0".into();
    write(&mut client, &request, &[b"y"]);
    assert_eq!(owner(&path), (4711, 4712));

    let folder = agent.path("c/d");
    let make = json!({"op": "make_dir", "path": folder, "parents": true, "user": "4713:4714"});
    assert_eq!(client.ask(&make).reply, json!({}));
    assert_eq!(owner(&agent.path("c")), (4713, 4714));
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o2777)).expect("set");
    write(&mut client, &json!({"op": "write_file", "path": folder.join("file")}), &[b"x"]);
    assert_eq!(owner(&folder.join("file")), (4711, 4714));

    request["user"] = "no-such-user".into();
    let refused = write(&mut client, &request, &[b"y"]);
    assert_eq!((refused.code(), &refused.error["field"]), ("invalid_request", &json!("user")));
    client.ask(&json!({"op": "configure", "user": "no-such-user"}));
    let orphan = agent.path("orphan");
    write(&mut client, &json!({"op": "write_file", "path": orphan}), &[b"x"]);
    assert_eq!(owner(&orphan), (0, 0));
}

#[test]
fn a_tree_deeper_than_any_path_is_removed() {
    let agent = Agent::start();
    let mut client = agent.connect();
    // In memory: thousands of folders take a busy disk longer than the deadline of an answer.
    let memory = Path::new("/dev/shm").join(format!("forkd-deep-{}", std::process::id()));
    let top = memory.join("top");
    fs::create_dir_all(&top).expect("made");
    let mut folder: std::os::fd::OwnedFd = fs::File::open(&top).expect("opened").into();
    let name = CString::new("d").expect("a name");
    for _ in 0..5_000 {
        let mode = nix::sys::stat::Mode::S_IRWXU;
        nix::sys::stat::mkdirat(&folder, name.as_c_str(), mode).expect("made");
        let flags = nix::fcntl::OFlag::O_DIRECTORY;
        folder = nix::fcntl::openat(&folder, name.as_c_str(), flags, mode).expect("opened");
    }
    drop(folder);
    let remove = json!({"op": "remove", "path": top, "recursive": true});
    assert_eq!(client.ask(&remove).reply, json!({}));
    assert!(!top.exists());

    let deep = memory.join("d/".repeat(1_900));
    let make = json!({"op": "make_dir", "path": deep, "parents": true});
    assert_eq!(client.ask(&make).reply, json!({}));
    let remove = json!({"op": "remove", "path": memory.join("d"), "recursive": true});
    assert_eq!(client.ask(&remove).reply, json!({}));
    fs::remove_dir(memory).expect("empty");
}

#[test]
fn a_name_that_is_no_text_is_used_and_listed() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let mut bytes = agent.path("").into_os_string().into_vec();
    bytes.extend_from_slice(b"caf\xe9");
    let path = json!({"b64": forkd_proto::text::to_base64(&bytes)});
    assert_eq!(
        write(&mut client, &json!({"op": "write_file", "path": path}), &[b"x"]).reply["bytes"],
        1
    );
    symlink(std::ffi::OsStr::from_bytes(b"caf\xe9"), agent.path("link")).expect("linked");
    let found = client.ask(&json!({"op": "stat", "path": path})).reply;
    assert_eq!((&found["name"], &found["name_b64"]), (&json!("caf\u{fffd}"), &json!("Y2Fm6Q==")));
    let listed = client.ask(&json!({"op": "list_dir", "path": agent.path("")})).reply;
    assert!(listed["entries"].as_array().expect("a list").contains(&found));
    let link = client.ask(&json!({"op": "stat", "path": agent.path("link")})).reply;
    assert_eq!((&link["target_b64"], &link["name_b64"]), (&json!("Y2Fm6Q=="), &Value::Null));
    assert_eq!(client.ask(&json!({"op": "read_file", "path": path})).data, b"x");
    let moved = agent.path("plain");
    client.ask(&json!({"op": "move", "source": path, "target": moved}));
    assert_eq!(fs::read(moved).expect("there"), b"x");
    let zero = json!({"op": "stat", "path": {"b64": "L3gA"}});
    assert_eq!(client.ask(&zero).code(), "invalid_request");
}
