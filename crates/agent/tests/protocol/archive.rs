//! Trees over the real protocol: links, odd names, holes, and what cannot be copied.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use crate::support::{Agent, Answer, Client};
use forkd_proto::Kind;
use serde_json::{Value, json};

fn unpack(client: &mut Client, request: &Value, archive: &[u8]) -> Answer {
    client.send(Kind::Request, request);
    for piece in archive.chunks(100_000) {
        client.send_bytes(Kind::Data, piece);
    }
    client.send_bytes(Kind::DataEof, b"");
    client.finish()
}

fn paths_in(answer: &Answer) -> Vec<&str> {
    let skipped = answer.reply["skipped"].as_array().expect("a list");
    skipped.iter().map(|each| each["path"].as_str().expect("a path")).collect()
}

#[test]
fn a_tree_goes_out_and_comes_in_as_it_was() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let (tree, copy) = (agent.path("tree"), agent.path("some/where/copy"));
    let odd = OsStr::from_bytes(b"caf\xe9 \n-");
    let deep = tree.join("x/".repeat(300));
    fs::create_dir_all(&deep).expect("made");
    fs::write(deep.join("file"), b"deep").expect("written");
    fs::write(tree.join(odd), b"odd").expect("written");
    fs::write(tree.join("empty"), b"").expect("written");
    fs::set_permissions(tree.join("empty"), fs::Permissions::from_mode(0o4701)).expect("set");
    symlink("empty", tree.join("link")).expect("linked");
    symlink("/no/where", tree.join("dangling")).expect("linked");
    nix::unistd::mkfifo(&tree.join("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("made");
    let sparse = fs::File::create(tree.join("sparse")).expect("made");
    sparse.write_all_at(b"middle", 1 << 30).expect("written");
    sparse.set_len(3 << 30).expect("sized");
    fs::create_dir(tree.join("many")).expect("made");
    for number in 0..10_100 {
        fs::write(tree.join(format!("many/{number}")), b"").expect("written");
    }

    let packed = client.ask(&json!({"op": "read_archive", "path": tree}));
    assert_eq!(packed.events, [json!({"event": "archive"})]);
    assert_eq!(paths_in(&packed), ["pipe"]);
    assert!(packed.data.len() < 16 << 20, "{} bytes", packed.data.len());

    let request = json!({"op": "write_archive", "path": copy});
    let unpacked = unpack(&mut client, &request, &packed.data);
    assert_eq!(unpacked.reply["skipped"], json!([]));
    assert_eq!(fs::read(copy.join("x/".repeat(300)).join("file")).expect("there"), b"deep");
    assert_eq!(fs::read(copy.join(odd)).expect("there"), b"odd");
    assert_eq!(fs::metadata(copy.join("empty")).expect("there").mode() & 0o7777, 0o4701);
    assert_eq!(fs::read_link(copy.join("link")).expect("a link"), Path::new("empty"));
    assert_eq!(fs::read_link(copy.join("dangling")).expect("a link"), Path::new("/no/where"));
    assert!(fs::symlink_metadata(copy.join("pipe")).is_err());
    assert_eq!(fs::read_dir(copy.join("many")).expect("there").count(), 10_100);
    let came = fs::File::open(copy.join("sparse")).expect("there");
    let (found, mut middle) = (came.metadata().expect("known"), [0; 6]);
    came.read_exact_at(&mut middle, 1 << 30).expect("read");
    assert_eq!((found.len(), &middle), (3 << 30, b"middle"));
    assert!(found.blocks() < 1 << 12, "{} blocks", found.blocks());
    let mtime = |path: &Path| fs::metadata(path).expect("there").mtime();
    assert_eq!(mtime(&copy.join("empty")), mtime(&tree.join("empty")));

    let again = unpack(&mut client, &request, &packed.data);
    assert_eq!(again.reply["skipped"], json!([]));
}

#[test]
fn an_archive_of_tars_is_read_and_ours_is_read_by_tar() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let (tree, copy, third) = (agent.path("tree"), agent.path("copy"), agent.path("third"));
    fs::create_dir_all(tree.join("n".repeat(150))).expect("made");
    fs::write(tree.join("n".repeat(150)).join("m".repeat(200)), b"long").expect("written");
    symlink("t".repeat(300), tree.join("link")).expect("linked");
    fs::write(tree.join("one"), b"1").expect("written");
    fs::hard_link(tree.join("one"), tree.join("two")).expect("linked");
    let sparse = fs::File::create(tree.join("sparse")).expect("made");
    sparse.write_all_at(b"end", 1 << 24).expect("written");
    for format in ["gnu", "posix"] {
        let made = std::process::Command::new("tar")
            .args(["--format", format, "-cC"])
            .arg(&tree)
            .arg(".")
            .output()
            .expect("tar");
        let request = json!({"op": "write_archive", "path": copy});
        let unpacked = unpack(&mut client, &request, &made.stdout);
        assert_eq!(unpacked.reply["skipped"], json!([]), "{format}");
    }
    let inode = |name: &str| fs::metadata(copy.join(name)).expect("there").ino();
    assert_eq!(inode("one"), inode("two"));

    let packed = client.ask(&json!({"op": "read_archive", "path": copy}));
    fs::create_dir(&third).expect("made");
    fs::write(agent.path("packed"), &packed.data).expect("written");
    let mut tar = std::process::Command::new("tar");
    tar.arg("-xf").arg(agent.path("packed")).arg("-C").arg(&third);
    assert!(tar.status().expect("tar").success());
    let mut diff = std::process::Command::new("diff");
    diff.args(["-r", "--no-dereference"]).arg(&tree).arg(&third);
    assert!(diff.status().expect("diff").success());
}

#[test]
fn one_member_that_fails_stops_no_other_and_none_leaves_the_folder() {
    let agent = Agent::start();
    let mut client = agent.connect();
    let (tree, copy) = (agent.path("tree"), agent.path("copy"));
    fs::create_dir(&tree).expect("made");
    for name in ["a", "b", "c"] {
        fs::write(tree.join(name), vec![b'x'; 1_000]).expect("written");
    }
    let mut packed = client.ask(&json!({"op": "read_archive", "path": tree})).data;
    fs::create_dir_all(copy.join("b")).expect("made");
    let request = json!({"op": "write_archive", "path": copy});
    let unpacked = unpack(&mut client, &request, &packed);
    assert_eq!(paths_in(&unpacked), ["b"]);
    assert!(copy.join("c").is_file());

    let start = 512;
    packed[start..start + 5].copy_from_slice(b"../a\0");
    let sum: u32 = packed[start..start + 512].iter().map(|byte| u32::from(*byte)).sum();
    let own: u32 = packed[start + 148..start + 156].iter().map(|byte| u32::from(*byte)).sum();
    let text = format!("{:06o}\0 ", sum - own + 8 * 32);
    packed[start + 148..start + 156].copy_from_slice(text.as_bytes());
    let unpacked = unpack(&mut client, &request, &packed);
    assert_eq!(paths_in(&unpacked), ["../a", "b"]);
    assert!(!agent.path("a").exists());

    for bad in [&packed[..700], &packed[..5_000], b"no archive".repeat(100).as_slice()] {
        let refused = unpack(&mut client, &request, bad);
        assert_eq!(refused.code(), "invalid_request");
    }
    assert_eq!(client.ask(&json!({"op": "read_archive", "path": "/no/such"})).code(), "not_found");
    let null = client.ask(&json!({"op": "read_archive", "path": "/dev/null"}));
    assert_eq!(null.code(), "io");
}

#[test]
fn what_is_unpacked_belongs_to_whom_it_is_for_or_to_whom_it_belonged() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let agent = Agent::start();
    let mut client = agent.connect();
    let (tree, copy) = (agent.path("tree"), agent.path("new/copy"));
    fs::create_dir(&tree).expect("made");
    fs::write(tree.join("file"), b"x").expect("written");
    symlink("file", tree.join("link")).expect("linked");
    std::os::unix::fs::chown(tree.join("file"), Some(4711), Some(4712)).expect("given");
    let packed = client.ask(&json!({"op": "read_archive", "path": tree})).data;
    let owner = |path: &Path| fs::symlink_metadata(path).map(|it| (it.uid(), it.gid()));
    let mut request = json!({"op": "write_archive", "path": copy, "user": "33:34"});
    unpack(&mut client, &request, &packed);
    for path in [agent.path("new"), copy.clone(), copy.join("file"), copy.join("link")] {
        assert_eq!(owner(&path).expect("there"), (33, 34), "{}", path.display());
    }
    request["keep_owner"] = true.into();
    unpack(&mut client, &request, &packed);
    assert_eq!(owner(&copy.join("file")).expect("there"), (4711, 4712));
    assert_eq!(owner(&copy.join("link")).expect("there"), (0, 0));
}
