//! File systems made by `mke2fs`, changed by `debugfs`, compared.

#![expect(clippy::unwrap_used, reason = "a helper of a test that panics is a test that fails")]

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use forkd_ext4::compare::{Change, Differences, Limits, PATH_BYTES_MAX, Side, compare};
use forkd_ext4::{Disk, Error, Volume};

const BLOCK: usize = 4096;
const LIMITS: Limits = Limits { entries_max: 10_000, changes_max: 1_000 };

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("forkd-ext4-{}-{name}", std::process::id()));
        drop(fs::remove_dir_all(&path));
        fs::create_dir_all(path.join("tree")).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, data: impl AsRef<[u8]>) -> PathBuf {
        let path = self.tree().join(name);
        fs::write(&path, data).unwrap();
        date(&path);
        path
    }

    fn tree(&self) -> PathBuf {
        self.0.join("tree")
    }

    /// The bytes of a file system with what is in the tree.
    fn image(&self, options: &[&str]) -> Vec<u8> {
        let image = self.0.join("image");
        drop(fs::remove_file(&image));
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-O", "^has_journal"])
            .args(options)
            .arg("-d")
            .arg(self.tree())
            .arg(&image)
            .arg("4096k")
            .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
            .status()
            .unwrap();
        assert!(made.success());
        fs::read(image).unwrap()
    }

    /// `image` after commands of `debugfs`.
    fn debugfs(&self, image: &[u8], commands: &[&str]) -> Vec<u8> {
        let path = self.0.join("changed");
        fs::write(&path, image).unwrap();
        for command in commands {
            let done = Command::new("debugfs")
                .args(["-w", "-R", command])
                .arg(&path)
                .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
                .output()
                .unwrap();
            assert!(done.status.success(), "{command}");
        }
        fs::read(path).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn date(path: &Path) {
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    fs::File::open(path).unwrap().set_modified(then).unwrap();
}

fn differing(one: &[u8], other: &[u8]) -> Vec<bool> {
    one.chunks(BLOCK).zip(other.chunks(BLOCK)).map(|(a, b)| a != b).collect()
}

fn between(one: &[u8], other: &[u8]) -> Result<Differences, Side> {
    let differing = differing(one, other);
    let may_differ = |block| differing[usize::try_from(block).unwrap()];
    let before = Volume::open(one).map_err(Side::Before)?;
    let after = Volume::open(other).map_err(Side::After)?;
    compare(before, after, &may_differ, LIMITS)
}

fn lines(found: &Differences) -> Vec<String> {
    let line = |change: &forkd_ext4::compare::FileChange| {
        let mark = match change.change {
            Change::Added => '+',
            Change::Changed => '~',
            Change::Removed => '-',
        };
        let path = String::from_utf8_lossy(&change.path);
        format!("{mark} {} {path} {}", change.kind.letter(), change.size_bytes)
    };
    found.changes.iter().map(line).collect()
}

#[test]
fn what_was_added_changed_and_removed_is_named() {
    let (one, two) = (Folder::new("named-1"), Folder::new("named-2"));
    for folder in [&one, &two] {
        folder.file("same", "as it was");
        folder.file("mode", "x");
        folder.file("moved", vec![7; 3 * BLOCK]);
        fs::create_dir(folder.tree().join("dir")).unwrap();
    }
    one.file("content", "before");
    two.file("content", "after!");
    fs::set_permissions(two.tree().join("mode"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(two.tree().join("moved"), two.tree().join("dir/moved")).unwrap();
    fs::create_dir_all(one.tree().join("gone/below")).unwrap();
    one.file("gone/below/deep", "d");
    one.file("kind", "k");
    symlink("dir", two.tree().join("kind")).unwrap();
    for (folder, target) in [(&one, "a".repeat(70)), (&two, "b".repeat(70))] {
        symlink(target, folder.tree().join("link")).unwrap();
    }
    fs::hard_link(two.tree().join("same"), two.tree().join("other name")).unwrap();
    two.file("big", vec![1; 300 * BLOCK + 1]);
    let (one, two) = (one.image(&[]), two.image(&[]));

    let found = between(&one, &two).unwrap();

    assert_eq!(
        lines(&found),
        [
            "+ f /big 1228801",
            "~ f /content 6",
            "+ f /dir/moved 12288",
            "- d /gone 4096",
            "- d /gone/below 4096",
            "- f /gone/below/deep 1",
            "~ l /kind 3",
            "~ l /link 70",
            "~ f /mode 1",
            "- f /moved 12288",
            "+ f /other name 9",
        ]
    );
    assert_eq!(between(&two, &two).unwrap(), Differences::default());
}

#[test]
fn contents_of_the_same_length_and_date_differ_in_their_last_byte_alone() {
    let (one, two) = (Folder::new("last-1"), Folder::new("last-2"));
    let mut data = vec![5; 200 * BLOCK + 17];
    one.file("file", &data);
    two.file("file", &data);
    let (first, same) = (one.image(&[]), two.image(&[]));
    *data.last_mut().unwrap() = 6;
    two.file("file", &data);
    let other = two.image(&[]);

    assert_eq!(lines(&between(&first, &same).unwrap()), [""; 0]);
    assert_eq!(lines(&between(&first, &other).unwrap()), ["~ f /file 819217"]);
}

#[test]
fn holes_are_zeros_and_cost_nothing() {
    let (one, two) = (Folder::new("holes-1"), Folder::new("holes-2"));
    one.file("zeros", vec![0; 16 * BLOCK]);
    two.file("zeros", []);
    let file = fs::File::options().write(true).open(two.tree().join("zeros")).unwrap();
    file.set_len(16 * BLOCK as u64).unwrap();
    for folder in [&one, &two] {
        let path = folder.file("vast", "begin");
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 43).unwrap();
    }
    for path in [one.tree().join("vast"), two.tree().join("vast"), two.tree().join("zeros")] {
        date(&path);
    }

    let found = between(&one.image(&[]), &two.image(&[])).unwrap();

    assert_eq!(lines(&found), [""; 0]);
}

/// A disk that counts how often what a file holds is read of it.
struct Watched<'a> {
    bytes: &'a [u8],
    reads: &'a Cell<usize>,
}

impl Disk for Watched<'_> {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.bytes.read_at(offset, buffer)?;
        self.reads.set(self.reads.get() + usize::from(buffer.starts_with(&[9; BLOCK])));
        Ok(())
    }
}

#[test]
fn a_file_is_read_only_if_its_blocks_may_differ() {
    let folder = Folder::new("unread");
    folder.file("large", vec![9; 256 * BLOCK]);
    let image = folder.image(&[]);
    let reads = Cell::new(0);
    let open = || Volume::open(Watched { bytes: &image, reads: &reads }).unwrap();

    let found = compare(open(), open(), &|_| false, LIMITS).unwrap();
    assert_eq!((found, reads.get()), (Differences::default(), 0));

    let one = image.chunks(BLOCK).position(|block| block == [9; BLOCK]).unwrap() as u64;
    let found = compare(open(), open(), &|block| block == one, LIMITS).unwrap();
    assert_eq!((found, reads.get()), (Differences::default(), 2));
}

#[test]
fn a_block_that_was_changed_behind_the_file_systems_back_is_found() {
    let folder = Folder::new("behind");
    folder.file("file", vec![9; 8 * BLOCK]);
    let image = folder.image(&[]);
    let mut other = image.clone();
    let at = other.chunks(BLOCK).position(|block| block == [9; BLOCK]).unwrap() * BLOCK;
    other[at + 5 * BLOCK] = 8;

    assert_eq!(lines(&between(&image, &other).unwrap()), ["~ f /file 32768"]);
}

#[test]
fn an_owner_a_device_and_an_attribute_are_compared() {
    let folder = Folder::new("access");
    folder.file("file", "x");
    folder.file("owned", "x");
    let image = folder.debugfs(&folder.image(&[]), &["mknod dev c 1 3", "mknod pipe p"]);
    let other = folder.debugfs(
        &image,
        &[
            "ea_set /file user.note hello",
            "set_inode_field /owned uid 70000",
            "rm /dev",
            "mknod dev c 1 5",
        ],
    );

    let found = between(&image, &other).unwrap();

    assert_eq!(lines(&found), ["~ c /dev 0", "~ f /file 1", "~ f /owned 1"]);
}

#[test]
fn a_folder_with_an_index_is_listed_whole() {
    let (one, two) = (Folder::new("index-1"), Folder::new("index-2"));
    for number in 0..700 {
        let name = format!("a-rather-long-name-for-a-file-{number:04}");
        one.file(&name, "");
        two.file(&name, "");
    }
    two.file("one more", "");
    let found = between(&one.image(&["-N", "1024"]), &two.image(&["-N", "1024"])).unwrap();

    assert_eq!(lines(&found), ["+ f /one more 0"]);
}

#[test]
fn limits_hold_one_past_them() {
    let folder = Folder::new("limits");
    let empty = folder.image(&[]);
    for number in 0..4 {
        folder.file(&number.to_string(), "");
    }
    let full = folder.image(&[]);
    let with = |entries_max, changes_max| {
        let open = |bytes| Volume::open(bytes).unwrap();
        let limits = Limits { entries_max, changes_max };
        compare(open(&*empty), open(&*full), &|_| true, limits)
    };

    // With lost+found there are five.
    let found = with(5, 3).unwrap();
    assert_eq!((found.changes.len(), found.more), (3, 1));
    assert!(matches!(with(4, 3), Err(Side::After(Error::TooMuch(_)))));
}

#[test]
fn a_path_is_as_long_as_linux_has_them_and_no_longer() {
    let folder = Folder::new("path");
    let image = folder.image(&["-N", "64"]);
    let name = "n".repeat(255);
    let mut commands = Vec::new();
    for _ in 0..PATH_BYTES_MAX / 256 {
        commands.push(format!("mkdir {name}"));
        commands.push(format!("cd {name}"));
    }
    let deep = |more: &[&str]| {
        let script = folder.0.join("script");
        let all: Vec<&str> = commands.iter().map(String::as_str).chain(more.to_vec()).collect();
        fs::write(&script, all.join("\n")).unwrap();
        let path = folder.0.join("deep");
        fs::write(&path, &image).unwrap();
        let done = Command::new("/usr/sbin/debugfs")
            .args(["-w", "-f"])
            .args([&script, &path])
            .output()
            .unwrap();
        assert!(done.status.success());
        fs::read(path).unwrap()
    };

    let longest = between(&image, &deep(&[])).unwrap().changes.pop().unwrap();
    assert_eq!(longest.path.len(), PATH_BYTES_MAX);
    let error = between(&image, &deep(&["mkdir x"])).unwrap_err();
    assert!(matches!(error, Side::After(Error::TooMuch(_))), "{error:?}");
}

#[test]
fn a_folder_that_contains_itself_ends() {
    let folder = Folder::new("circle");
    fs::create_dir(folder.tree().join("d")).unwrap();
    let image = folder.image(&[]);
    let circle = folder.debugfs(&image, &["ln d d/d"]);

    let error = between(&image, &circle).unwrap_err();

    assert!(matches!(error, Side::After(_)), "{error:?}");
}

#[test]
fn what_this_does_not_read_is_said() {
    let folder = Folder::new("foreign");
    let image = folder.image(&[]);
    let refusal = |bytes: &[u8]| Volume::open(bytes).err().unwrap().to_string();
    let with = |at: usize, value: u8| {
        let mut bytes = image.clone();
        bytes[1024 + at] |= value;
        bytes
    };

    assert_eq!(refusal(&[0; 8192]), "it is not ext4");
    assert!(refusal(&[0; 10]).starts_with("it cannot be read"));
    assert_eq!(refusal(&with(24, 1)), "its blocks are not of 4 KiB");
    assert_eq!(refusal(&with(96, 4)), "its journal was not written back");
    assert_eq!(refusal(&with(97, 0x80)), "it has features 0x8000");
    assert_eq!(refusal(&with(0x153, 0xff)), "it is damaged: the superblock's numbers cannot be");
}

/// As many as ever so hostile disks: bytes that a file system is made of, changed at random.
#[test]
fn whatever_is_on_the_disk_ends_in_an_answer_or_an_error() {
    let folder = Folder::new("hostile");
    folder.file("file", vec![3; 5 * BLOCK]);
    fs::create_dir(folder.tree().join("d")).unwrap();
    folder.file("d/below", "b");
    symlink("t".repeat(70), folder.tree().join("link")).unwrap();
    let image = folder.image(&["-N", "64"]);
    let used: Vec<usize> =
        (0..image.len()).filter(|at| ![0, 3, 0xff].contains(&image[*at])).collect();
    let mut random = 0x1234_5678_9abc_def0_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random % below as u64).unwrap()
    };
    let mut refused = 0;

    for _ in 0..4_000 {
        let mut other = image.clone();
        for _ in 0..=next(8) {
            // Near what is used there are fields that say how much more is.
            let at = (used[next(used.len())] + next(16)).min(other.len() - 1);
            other[at] = [0, 1, 0x7f, 0x80, 0xff, u8::try_from(next(256)).unwrap()][next(6)];
        }
        let before = Volume::open(&*image).unwrap();
        let Ok(after) = Volume::open(&*other) else {
            refused += 1;
            continue;
        };
        refused += usize::from(compare(before, after, &|_| true, LIMITS).is_err());
    }

    assert!((200..3_900).contains(&refused), "{refused}");
}
