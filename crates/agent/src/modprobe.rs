//! Kernel modules of a running guest: `modprobe` where the image has none, and the device nodes
//! that have a module loaded when they are opened.
//!
//! The kernel asks `/sbin/modprobe` for what is missing.  An image with kmod or busybox answers by
//! itself; any other has this program under that name.  It loads a module, or whatever has the
//! alias, with all it needs, as the tables in `/lib/modules/<release>` say.  It knows no
//! configuration (`/etc/modprobe.d`) and removes nothing.

use std::collections::HashMap;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::log;

/// What the kernel calls unless told otherwise.
const KERNELS_CHOICE: &str = "/sbin/modprobe";
const HELPER_SETTING: &str = "/proc/sys/kernel/modprobe";

/// `MODULE_INIT_COMPRESSED_FILE`: the kernel unpacks it.
const COMPRESSED: u32 = 4;

/// Device nodes that everybody may open, as udev has them; others are root's.
const FOR_EVERYBODY: [&str; 2] = ["fuse", "net/tun"];

/// Makes this program, at `helper`, what the kernel asks if the image has nothing that it could
/// ask, and makes the device nodes of modules that are not loaded yet.
pub fn prepare(helper: &str) {
    if !Path::new(KERNELS_CHOICE).exists()
        && let Err(error) = fs::write(HELPER_SETTING, helper)
        // A kernel without modules asks nobody.
        && error.kind() != io::ErrorKind::NotFound
    {
        log::line(&format!("{HELPER_SETTING}: {error}"));
    }
    make_nodes();
    open_to_everybody(Path::new("/dev"));
}

fn make_nodes() {
    let Ok(folder) = folder() else { return };
    // An image without modules has no nodes that would load them.
    let Ok(table) = fs::read_to_string(folder.join("modules.devname")) else { return };
    for node in table.lines().filter_map(Node::parse) {
        if let Err(error) = node.make() {
            log::line(&format!("/dev/{}: {error}", node.name));
        }
    }
}

/// The kernel makes the nodes of what is built in, for root alone: FUSE from 6.12 on in Debian.
fn open_to_everybody(devices: &Path) {
    for name in FOR_EVERYBODY {
        let path = devices.join(name);
        if let Err(error) = fs::set_permissions(&path, Permissions::from_mode(0o666))
            // A kernel without it.
            && error.kind() != io::ErrorKind::NotFound
        {
            log::line(&format!("{}: {error}", path.display()));
        }
    }
}

/// A line of `modules.devname`: `fuse fuse c10:229`.
#[derive(Debug, PartialEq, Eq)]
struct Node<'a> {
    name: &'a str,
    kind: SFlag,
    major: u64,
    minor: u64,
}

impl<'a> Node<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (name, device) = (words.next()?, words.next()?);
        let kind = match device.get(..1)? {
            "c" => SFlag::S_IFCHR,
            "b" => SFlag::S_IFBLK,
            _ => return None,
        };
        let (major, minor) = device.get(1..)?.split_once(':')?;
        Some(Self { name, kind, major: major.parse().ok()?, minor: minor.parse().ok()? })
    }

    fn make(&self) -> io::Result<()> {
        let path = Path::new("/dev").join(self.name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let device = makedev(self.major, self.minor);
        match mknod(&path, self.kind, Mode::S_IRUSR | Mode::S_IWUSR, device) {
            // Of a module that is loaded or built in.
            Ok(()) | Err(Errno::EEXIST) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// `modprobe [-q] [-a] NAME…`, or `modprobe NAME PARAMETER=VALUE…`.
pub fn run(args: &[&str]) -> ExitCode {
    let Some(wanted) = Wanted::parse(args) else {
        eprintln!("usage: modprobe [-qv] [-a] NAME…; for anything else, install kmod");
        return ExitCode::from(2);
    };
    let failed = wanted.names.iter().filter(|name| {
        let loaded = folder().and_then(|folder| load(&folder, name, &wanted.parameters));
        if let Err(error) = &loaded
            && !wanted.quiet
        {
            eprintln!("modprobe: {name}: {error}");
        }
        loaded.is_err()
    });
    if failed.count() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Wanted {
    quiet: bool,
    names: Vec<String>,
    parameters: String,
}

impl Wanted {
    fn parse(args: &[&str]) -> Option<Self> {
        let (mut quiet, mut all, mut words, mut options) = (false, false, Vec::new(), true);
        for arg in args {
            match *arg {
                "--" if options => options = false,
                "--quiet" if options => quiet = true,
                "--all" if options => all = true,
                "--verbose" if options => {}
                flags if options && flags.starts_with('-') => {
                    for flag in flags.chars().skip(1) {
                        match flag {
                            'q' => quiet = true,
                            'a' => all = true,
                            'v' | 'b' => {}
                            _ => return None,
                        }
                    }
                }
                word => words.push(word.to_owned()),
            }
        }
        let names = if all { words.len() } else { 1.min(words.len()) };
        let parameters = words.split_off(names).join(" ");
        (!words.is_empty()).then_some(Self { quiet, names: words, parameters })
    }
}

fn folder() -> io::Result<PathBuf> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    Ok(Path::new("/lib/modules").join(release.trim()))
}

/// Loads what is called `name`, or every module that has that alias.
fn load(folder: &Path, name: &str, parameters: &str) -> io::Result<()> {
    let read = |table: &str| fs::read_to_string(folder.join(table));
    let text = read("modules.dep")?;
    let tables = Tables::parse(&text);
    let wanted = canonical(name);
    if tables.modules.contains_key(&wanted) {
        return tables.load(folder, &wanted, parameters);
    }
    let built_in = read("modules.builtin").unwrap_or_default();
    if built_in.lines().any(|path| module_name(path) == wanted) {
        return Ok(());
    }
    let aliases = read("modules.alias").unwrap_or_default();
    let mut answered = Err(io::Error::new(io::ErrorKind::NotFound, "no such module"));
    for module in with_alias(&aliases, &wanted) {
        // One that serves is enough, as several may be there for the same thing.
        let loaded = tables.load(folder, module, parameters);
        if answered.is_err() {
            answered = loaded;
        }
    }
    answered
}

/// What `modules.dep` says, by module name: its file, and those that it needs.
struct Tables<'a> {
    modules: HashMap<String, (&'a str, &'a str)>,
}

impl<'a> Tables<'a> {
    fn parse(text: &'a str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        Self { modules: lines.map(|(path, needs)| (module_name(path), (path, needs))).collect() }
    }

    /// Loads a module after all that it needs, which the table has in reverse order.
    fn load(&self, folder: &Path, name: &str, parameters: &str) -> io::Result<()> {
        let Some((path, needs)) = self.modules.get(&canonical(name)) else {
            return Err(io::Error::new(io::ErrorKind::NotFound, "no such module"));
        };
        for needed in needs.split_ascii_whitespace().rev() {
            insert_new(&folder.join(needed), "")?;
        }
        insert_new(&folder.join(path), parameters)
    }
}

fn insert_new(path: &Path, parameters: &str) -> io::Result<()> {
    let name = module_name(&path.to_string_lossy());
    if Path::new("/sys/module").join(name).join("initstate").exists() {
        return Ok(());
    }
    insert(path, parameters)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Loads the module in the file `path`, unless it is loaded.
///
/// # Errors
///
/// The file cannot be read, or the kernel refused.
pub fn insert(path: &Path, parameters: &str) -> io::Result<()> {
    let compressed = path.extension().is_some_and(|ending| ending != "ko");
    let flags = ModuleInitFlags::from_bits_retain(if compressed { COMPRESSED } else { 0 });
    let parameters = std::ffi::CString::new(parameters)?;
    match finit_module(&File::open(path)?, &parameters, flags) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// A module's name: its file's without suffixes, and with `_` for `-`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or_default();
    canonical(file.split(".ko").next().unwrap_or_default())
}

fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// The modules that have an alias, of the lines `alias PATTERN MODULE`.
fn with_alias<'a>(table: &'a str, alias: &str) -> impl Iterator<Item = &'a str> {
    table.lines().filter_map(move |line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (pattern, module) = (words.next()?, words.next()?);
        // Most are of hardware, and begin otherwise.
        let (first, wanted) = (pattern.as_bytes().first()?, alias.as_bytes().first()?);
        (first == wanted && matches(canonical(pattern).as_bytes(), alias.as_bytes()))
            .then_some(module)
    })
}

/// Whether `text` is what `pattern` stands for; `*` is any text and `?` any byte, as in glob(7).
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut done, mut star) = (0, 0, None);
    while let Some(byte) = text.get(done) {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, done));
                at += 1;
            }
            Some(wanted) if *wanted == b'?' || wanted == byte => {
                at += 1;
                done += 1;
            }
            // The last star stands for one byte more.
            _ => match star {
                Some((place, from)) => {
                    star = Some((place, from + 1));
                    at = place + 1;
                    done = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern.get(at..).is_some_and(|rest| rest.iter().all(|byte| *byte == b'*'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Option<Wanted> {
        Wanted::parse(&line.split(' ').collect::<Vec<_>>())
    }

    #[test]
    fn the_kernels_own_call_is_understood() {
        let wanted = parsed("-q -- net-pf-16-proto-4-type-2").unwrap();

        assert!(wanted.quiet);
        assert_eq!(wanted.names, ["net-pf-16-proto-4-type-2"]);
    }

    #[test]
    fn words_behind_a_name_are_parameters_unless_all_are_names() {
        let one = parsed("loop max_loop=8 max_part=3").unwrap();
        assert_eq!((one.names.len(), one.parameters.as_str()), (1, "max_loop=8 max_part=3"));
        let all = parsed("-va loop fuse").unwrap();
        assert_eq!((all.names.len(), all.parameters.as_str()), (2, ""));
    }

    #[test]
    fn what_this_modprobe_cannot_do_is_refused() {
        assert_eq!(parsed("-r loop"), None);
        assert_eq!(parsed("--show-depends loop"), None);
        assert_eq!(parsed("-q"), None);
    }

    #[test]
    fn a_module_has_a_file_and_what_it_needs() {
        let tables = Tables::parse("kernel/net/br-nf.ko.xz: kernel/net/bridge.ko kernel/llc.ko\n");

        let (path, needs) = tables.modules.get("br_nf").unwrap();

        assert_eq!(*path, "kernel/net/br-nf.ko.xz");
        assert_eq!(needs.trim(), "kernel/net/bridge.ko kernel/llc.ko");
    }

    #[test]
    fn an_alias_is_a_pattern_and_a_dash_is_as_good_as_an_underscore() {
        let table = "# Aliases\nalias char-major-10-229 fuse\nalias fs-vfat vfat\n\
                     alias crypto-sha256 sha256_a\nalias crypto-sha256 sha256_b\n\
                     alias net-pf-16-proto-*-type-2 inet_diag\n";
        let found = |alias: &str| with_alias(table, &canonical(alias)).collect::<Vec<_>>();

        assert_eq!(found("char-major-10-229"), ["fuse"]);
        assert_eq!(found("crypto-sha256"), ["sha256_a", "sha256_b"]);
        assert_eq!(found("net-pf-16-proto-4-type-2"), ["inet_diag"]);
        assert_eq!(found("fs-vfa"), [""; 0]);
    }

    #[test]
    fn a_pattern_matches_as_a_glob_does() {
        for (pattern, text, right) in [
            ("a*c", "abbc", true),
            ("a*c", "abcb", false),
            ("a*b*c", "axbxbxc", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), right, "{pattern} {text}");
        }
    }

    #[test]
    fn what_everybody_may_open_is_so_also_if_the_kernel_has_made_it_or_has_it_not() {
        let devices = std::env::temp_dir().join(format!("forkd-nodes-{}", std::process::id()));
        fs::create_dir(&devices).unwrap();
        for name in ["fuse", "kmsg"] {
            let node = File::create(devices.join(name)).unwrap();
            node.set_permissions(Permissions::from_mode(0o600)).unwrap();
        }

        open_to_everybody(&devices);

        let mode = |name| fs::metadata(devices.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!([mode("fuse"), mode("kmsg")], [0o666, 0o600]);
        fs::remove_dir_all(devices).unwrap();
    }

    #[test]
    fn a_device_node_is_read_from_the_table() {
        let tun = Node { name: "net/tun", kind: SFlag::S_IFCHR, major: 10, minor: 200 };
        assert_eq!(Node::parse("tun net/tun c10:200"), Some(tun));
        assert_eq!(Node::parse("# Device nodes to trigger loading"), None);
        assert_eq!(Node::parse("tun net/tun x10:200"), None);
    }
}
