//! A process that was taken over, for tests: tries to get at everything that is not its own.
//!
//! Built with the feature `captive` only, which no program that is shipped has.  It runs in the
//! place of a child, after that was jailed, with what the child has, or in that of the zygote or
//! seed that would fork it.  Each try is one thing that somebody would do there; what came of it
//! goes to [`REPORT`] in the child's folder.

use std::ffi::CString;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::parent_id;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use serde_json::json;

use crate::error::Error;
use crate::sys::descriptors;
use crate::sys::process::{self, Forked};
use crate::sys::urgency;

/// The hostname of a child that runs as it should: it has captives for siblings.
pub const HONEST: &str = "honest";
/// How the hostname of a child begins that has its zygote, or seed, be the captive.
pub const ABOVE: &str = "above:";
/// Where it says what came of each try.
const REPORT: &str = "captive.json";
/// One past the greatest process number that is tried.
const PIDS: usize = 1 << 15;
/// One past the greatest descriptor that is tried.
const DESCRIPTORS: usize = 1 << 10;

/// What came of a try: nothing, or what it got.
type Tried = Result<String, std::io::Error>;

/// Makes every try, and says what came of them; `others` are the names of the folders of
/// another sandbox and of a zygote, which for a zygote is another one, and the sandbox's user, with
/// colons between.  What is `known` may be reached: it is the captive's own.
///
/// # Errors
///
/// [`Error::Io`] if the report cannot be written.
pub fn run(directory: &Path, others: &str, known: &[i32]) -> Result<(), Error> {
    let captive = std::process::id().cast_signed();
    ORIGIN.store(parent_id(), Ordering::Relaxed);
    *KNOWN.lock().unwrap_or_else(PoisonError::into_inner) = [known, &[captive]].concat();
    let mut tries = Vec::new();
    for (group, name, attempt) in list(directory, others) {
        let said = match apart(&attempt)? {
            Ok(what) => json!({"group": group, "try": name, "got": what}),
            Err(error) => json!({"group": group, "try": name, "refused": error}),
        };
        tries.push(said);
    }
    std::fs::write(directory.join(REPORT), json!(tries).to_string())
        .map_err(Error::io("write the report of a captive"))
}

/// What came of a try in a process of its own: one that succeeds changes nothing for the others.
fn apart(attempt: &dyn Fn() -> Tried) -> Result<Result<String, String>, Error> {
    let (mut read, mut write) = descriptors::pipe()?;
    let pid = match process::fork_into(None)? {
        Forked::Parent(pid) => pid,
        Forked::Child => {
            drop(read);
            let (mark, text) = match attempt() {
                Ok(text) => ("+", text),
                Err(error) => ("-", error.to_string()),
            };
            drop(write.write_all(format!("{mark}{text}").as_bytes()));
            process::exit_now(0)
        }
    };
    drop(write);
    let mut said = String::new();
    read.read_to_string(&mut said).map_err(Error::io("hear of a try"))?;
    // A seed's children vanish by themselves.
    drop(process::wait(pid));
    Ok(match said.split_at_checked(1) {
        Some(("+", text)) => Ok(text.to_owned()),
        Some((_, text)) => Err(text.to_owned()),
        None => Err("the kernel ended it".to_owned()),
    })
}

/// A system call with whatever arguments.
fn call(number: libc::c_long, arguments: &[usize]) -> Result<usize, std::io::Error> {
    let at = |index: usize| arguments.get(index).copied().unwrap_or(0);
    // SAFETY: pointers among the arguments are null, or of strings and structures of the caller's,
    // which outlive the call; this process does nothing else, and ends afterwards.
    let result = unsafe { libc::syscall(number, at(0), at(1), at(2), at(3), at(4), at(5)) };
    usize::try_from(result).map_err(|_| std::io::Error::last_os_error())
}

fn did(number: libc::c_long, arguments: &[usize]) -> Tried {
    call(number, arguments).map(|result| format!("{result}"))
}

/// As [`did`], with paths in front of the other arguments.
fn did_with(number: libc::c_long, paths: &[&str], arguments: &[usize]) -> Tried {
    let texts: Vec<_> = paths.iter().filter_map(|path| CString::new(*path).ok()).collect();
    let mut all: Vec<usize> = texts.iter().map(|text| text.as_ptr() as usize).collect();
    all.extend_from_slice(arguments);
    did(number, &all)
}

fn did_with_at(folder: usize, path: &str, flags: libc::c_int) -> Tried {
    let path = CString::new(path)?;
    did(libc::SYS_openat, &[folder, path.as_ptr() as usize, flag(flags)])
}

fn open(path: &str, write: bool) -> Tried {
    let file = std::fs::File::options().read(true).write(write).open(path)?;
    Ok(format!("{file:?}"))
}

/// Whether any of many is not refused.
fn any(of: impl Iterator<Item = usize>, attempt: impl Fn(usize) -> Tried) -> Tried {
    let mut last = std::io::Error::from_raw_os_error(libc::ENOENT);
    for each in of {
        match attempt(each) {
            Ok(got) => return Ok(format!("{each}: {got}")),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Processes that may be reached, the captive's own among them.
static KNOWN: Mutex<Vec<i32>> = Mutex::new(Vec::new());

fn others() -> impl Iterator<Item = usize> {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    known.push(std::process::id().cast_signed());
    let is_thread_of = |known: i32, id: usize| {
        let known = usize::try_from(known).unwrap_or(0);
        known == id || call(libc::SYS_tgkill, &[known, id, 0]).is_ok()
    };
    (1..PIDS).filter(move |id| !known.iter().any(|known| is_thread_of(*known, *id)))
}

/// What the captive was forked of.
static ORIGIN: AtomicU32 = AtomicU32::new(1);

fn connect(family: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> Tried {
    let socket = call(libc::SYS_socket, &[flag(family), flag(kind), flag(protocol)])?;
    // An address of documentation (RFC 5737, RFC 3849), port 80.
    let mut address = [0_u8; 28];
    address[..2].copy_from_slice(&u16::try_from(family).unwrap_or(0).to_ne_bytes());
    address[2..4].copy_from_slice(&80_u16.to_be_bytes());
    let length = if family == libc::AF_INET {
        address[4..8].copy_from_slice(&[192, 0, 2, 1]);
        16
    } else {
        address[8..12].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]);
        28
    };
    let tried = did(libc::SYS_connect, &[socket, address.as_ptr() as usize, length]);
    call(libc::SYS_close, &[socket])?;
    tried
}

fn flag(value: libc::c_int) -> usize {
    value.cast_unsigned() as usize
}

fn unix(path: &str) -> Tried {
    std::os::unix::net::UnixStream::connect(path).map(|_| path.to_owned())
}

fn abstract_socket(name: &str) -> Tried {
    use std::os::linux::net::SocketAddrExt;
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    std::os::unix::net::UnixStream::connect_addr(&address).map(|_| name.to_owned())
}

fn listed(path: &Path) -> Tried {
    let entries = std::fs::read_dir(path)?;
    Ok(format!("{} entries", entries.count()))
}

/// The folder of a descriptor of ours that leads out of the jail.
fn escape(descriptor: usize) -> Tried {
    let up = Path::new("/proc/self/fd").join(descriptor.to_string()).join("..");
    let found = std::fs::read_link(format!("/proc/self/fd/{descriptor}"))?;
    let identity = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino()));
    if identity(&up)? == identity(&Path::new("/proc/self/fd").join(descriptor.to_string()))? {
        return Err(std::io::Error::from_raw_os_error(libc::EXDEV)); // nothing is above it
    }
    let outside = std::fs::read_dir(up)?;
    Ok(format!("{}: {} entries above", found.display(), outside.count()))
}

type Try = (&'static str, &'static str, Box<dyn Fn() -> Tried>);

fn list(directory: &Path, others: &str) -> Vec<Try> {
    let mut words = others.split(':');
    let mut word = || words.next().unwrap_or("");
    let (sibling, zygote, uid) = (word(), word(), word().parse().unwrap_or(0));
    let mut all = files(directory, sibling, zygote);
    all.extend(processes(uid));
    all.extend(rights(uid));
    all.extend(kernel());
    all.extend(network());
    all
}

macro_rules! tries {
    ($group:literal, $($name:literal => $attempt:expr),+ $(,)?) => {
        vec![$(($group, $name, Box::new(move || $attempt) as Box<dyn Fn() -> Tried>)),+]
    };
}

fn files(directory: &Path, sibling: &str, zygote: &str) -> Vec<Try> {
    let sandboxes = directory.parent().unwrap_or(directory).to_path_buf();
    let (sibling, run) = (sandboxes.join(sibling), sandboxes.clone());
    let of = move |name: &str| sibling.join(name).display().to_string();
    let (a, b, c, d) = (of.clone(), of.clone(), of.clone(), of.clone());
    let daemon = run.parent().unwrap_or(&run).to_path_buf();
    let (e, f, g) = (daemon.clone(), daemon.clone(), daemon.join("z"));
    let own_zygote = g.join(zygote).join("zygote.sock").display().to_string();
    let made = run.join("made").display().to_string();
    tries!["files",
        "read /etc/passwd" => open("/etc/passwd", false),
        "read /etc/shadow" => open("/etc/shadow", false),
        "list the host's root" => match std::fs::read_dir("/etc") {
            Ok(_) => Ok("/etc".to_owned()), Err(error) => Err(error) },
        "read the daemon's database" => open("/var/lib/forkd/forkd.db", false),
        "read the daemon's token" => open("/var/lib/forkd/token", false),
        "list folders of sandboxes" => listed(&run),
        "make a file among them" => open_new(&made),
        "list folders of zygotes and seeds" => listed(&g),
        "connect to a zygote" => unix(&own_zygote),
        "list a sibling's folder" => listed(Path::new(&a("."))),
        "read a sibling's console" => open(&b("console.log"), false),
        "connect to a sibling's control socket" => unix(&c("control.sock")),
        "connect to a sibling's guest" => unix(&d("vsock.sock")),
        "connect to the daemon" => unix(&e.join("forkd.sock").display().to_string()),
        "read the daemon's lock" => open(&f.join("daemon.lock").display().to_string(), true),
        "write to the root of the jail" => open_new("/made"),
        "make a folder in it" => did_with(libc::SYS_mkdir, &["/made"], &[0o755]),
        "make a device" => did_with(libc::SYS_mknod, &["made"],
            &[(libc::S_IFCHR | 0o666) as usize, 0x0103]),
        "open /dev/kvm" => open("/dev/kvm", true),
        "open /dev/mem" => open("/dev/mem", true),
        "open /dev/net/tun" => open("/dev/net/tun", true),
        "list /sys" => listed(Path::new("/sys/kernel")),
        "leave by a descriptor" => any(0..DESCRIPTORS, escape),
        "open /etc/passwd above a descriptor" => any(0..DESCRIPTORS, |descriptor| {
            did_with_at(descriptor, "../../../../etc/passwd", libc::O_RDONLY)
        }),
        "write to a file below a descriptor" => any(0..DESCRIPTORS, |descriptor| {
            did_with_at(descriptor, "cgroup.subtree_control", libc::O_WRONLY)
        }),
        "open a file by its handle" => did(libc::SYS_open_by_handle_at, &[3, 0, 0]),
        "leave by chroot" => did_with(libc::SYS_chroot, &["."], &[]),
    ]
}

fn open_new(path: &str) -> Tried {
    std::fs::File::create_new(path).map(|file| format!("{file:?}"))
}

fn processes(siblings_uid: usize) -> Vec<Try> {
    let parent = ORIGIN.load(Ordering::Relaxed);
    let of_parent = move |name: &str| format!("/proc/{parent}/{name}");
    tries!["processes",
        "signal any process" => any(others(), |pid| did(libc::SYS_kill, &[pid, 0])),
        "signal any thread" => any(others(), |pid| did(libc::SYS_tkill, &[pid, 0])),
        "signal by a pidfd" => any(others(), |pid| {
            let pidfd = call(libc::SYS_pidfd_open, &[pid, 0])?;
            let sent = did(libc::SYS_pidfd_send_signal, &[pidfd, 0, 0, 0]);
            call(libc::SYS_close, &[pidfd])?;
            sent
        }),
        "take a descriptor of any process" => any(others(), |pid| {
            let pidfd = call(libc::SYS_pidfd_open, &[pid, 0])?;
            let taken = did(libc::SYS_pidfd_getfd, &[pidfd, 0, 0]);
            call(libc::SYS_close, &[pidfd])?;
            taken
        }),
        "trace any process" => any(others(), |pid| did(libc::SYS_ptrace,
            &[libc::PTRACE_SEIZE as usize, pid, 0, 0])),
        "read the memory of any process" => any(others(), |pid| {
            let mut byte = 0_u8;
            let part = [&raw mut byte as usize, 1];
            let other = [0x40_0000_usize, 1];
            did(libc::SYS_process_vm_readv,
                &[pid, part.as_ptr() as usize, 1, other.as_ptr() as usize, 1, 0])
        }),
        "write the memory of any process" => any(others(), |pid| {
            let byte = 0_u8;
            let part = [&raw const byte as usize, 1];
            let other = [0x40_0000_usize, 1];
            did(libc::SYS_process_vm_writev,
                &[pid, part.as_ptr() as usize, 1, other.as_ptr() as usize, 1, 0])
        }),
        "read the host's files by a process's root" => any(others(), |pid|
            open(&format!("/proc/{pid}/root/etc/passwd"), false)),
        "open the memory of any process" => any(others(), |pid|
            open(&format!("/proc/{pid}/mem"), true)),
        "signal any process as a sibling's user" => {
            did(libc::SYS_setresuid, &[siblings_uid; 3])?;
            any(others(), |pid| did(libc::SYS_kill, &[pid, 0]))
        },
        "see any process" => any(others(), |pid| listed(Path::new(&format!("/proc/{pid}")))),
        "open the zygote's memory" => open(&of_parent("mem"), false),
        "list the zygote's descriptors" => listed(Path::new(&of_parent("fd"))),
        "enter the zygote's namespaces" => open(&of_parent("ns/mnt"), false),
        "change limits of any process" => any(others(), |pid| {
            let limit = [0_u64, 0];
            did(libc::SYS_prlimit64, &[pid, libc::RLIMIT_NOFILE as usize, limit.as_ptr() as usize])
        }),
        "change the priority of any process" => any(others(), |pid|
            did(libc::SYS_setpriority, &[0, pid, 19])),
        "compare files with the zygote" => did(libc::SYS_kcmp,
            &[parent as usize, std::process::id() as usize, 0, 0, 0]),
    ]
}

fn rights(siblings_uid: usize) -> Vec<Try> {
    tries!["rights",
        "become root" => did(libc::SYS_setresuid, &[0, 0, 0]),
        "become another sandbox's user" => did(libc::SYS_setresuid, &[siblings_uid; 3]),
        "become another sandbox's group" => did(libc::SYS_setresgid, &[siblings_uid; 3]),
        "become an ordinary user of the host" => did(libc::SYS_setresuid, &[1_000; 3]),
        "become a group of the host" => did(libc::SYS_setresgid, &[6; 3]),
        "become root's group" => did(libc::SYS_setresgid, &[0, 0, 0]),
        "join root's group" => did(libc::SYS_setgroups, &[1, (&raw const ZERO) as usize]),
        "leave all groups" => did(libc::SYS_setgroups, &[0, 0]),
        "regain capabilities" => {
            let header = [0x2008_0522_u32, 0];
            let all = [u32::MAX; 6];
            did(libc::SYS_capset, &[header.as_ptr() as usize, all.as_ptr() as usize])
        },
        "change the securebits" => did(libc::SYS_prctl,
            &[flag(libc::PR_SET_SECUREBITS), 0, 0, 0, 0]),
        "raise an ambient capability" => did(libc::SYS_prctl,
            &[flag(libc::PR_CAP_AMBIENT), flag(libc::PR_CAP_AMBIENT_RAISE), 1, 0, 0]),
        "take back no_new_privs" => did(libc::SYS_prctl,
            &[flag(libc::PR_SET_NO_NEW_PRIVS), 0, 0, 0, 0]),
        "raise the limit of real-time priorities" => {
            let limit = [99_u64, 99];
            did(libc::SYS_prlimit64,
                &[0, libc::RLIMIT_RTPRIO as usize, limit.as_ptr() as usize, 0])
        },
        "come before all others on a processor" => {
            let priority = 1_i32;
            let policy = urgency::URGENT.cast_unsigned() as usize;
            did(libc::SYS_sched_setscheduler, &[0, policy, (&raw const priority) as usize])
        },
        "raise the limit of locked memory" => {
            let limit = [u64::MAX, u64::MAX];
            did(libc::SYS_prlimit64,
                &[0, libc::RLIMIT_MEMLOCK as usize, limit.as_ptr() as usize, 0])
        },
        "leave a core dump" => {
            let limit = [u64::MAX, u64::MAX];
            did(libc::SYS_prlimit64, &[0, libc::RLIMIT_CORE as usize, limit.as_ptr() as usize, 0])
        },
    ]
}

static ZERO: u32 = 0;

fn kernel() -> Vec<Try> {
    tries!["kernel",
        "mount" => did_with(libc::SYS_mount, &["none", "/proc", "tmpfs"], &[0, 0]),
        "unmount /proc" => did_with(libc::SYS_umount2, &["/proc"], &[flag(libc::MNT_DETACH)]),
        "remount the root for writing" => did_with(libc::SYS_mount, &["none", "/", "none"],
            &[(libc::MS_REMOUNT | libc::MS_BIND).try_into().unwrap_or(0), 0]),
        "pivot_root" => did_with(libc::SYS_pivot_root, &["/", "/proc"], &[]),
        "open a file system" => did_with(libc::SYS_fsopen, &["tmpfs"], &[0]),
        "clone a mount" => did(libc::SYS_open_tree,
            &[flag(libc::AT_FDCWD), c"/".as_ptr() as usize, 1]),
        "make a mount namespace" => did(libc::SYS_unshare, &[flag(libc::CLONE_NEWNS)]),
        "make a network namespace" => did(libc::SYS_unshare, &[flag(libc::CLONE_NEWNET)]),
        "make a pid namespace" => did(libc::SYS_unshare, &[flag(libc::CLONE_NEWPID)]),
        "make a cgroup namespace" => did(libc::SYS_unshare, &[flag(libc::CLONE_NEWCGROUP)]),
        "make a user namespace" => did(libc::SYS_unshare, &[flag(libc::CLONE_NEWUSER)]),
        "load a program into the kernel" => {
            let attributes = [0_u64; 16];
            did(libc::SYS_bpf, &[5, attributes.as_ptr() as usize, 48])
        },
        "watch the processor" => {
            let mut attributes = [0_u64; 16];
            attributes[0] = 112 << 32;
            did(libc::SYS_perf_event_open,
                &[attributes.as_ptr() as usize, usize::MAX, 0, usize::MAX, 0])
        },
        "handle faults of the kernel" => did(libc::SYS_userfaultfd, &[0]),
        "load a module" => did(libc::SYS_init_module, &[0, 0, 0]),
        "load a module of a file" => did(libc::SYS_finit_module, &[0, 0, 0]),
        "start another kernel" => did(libc::SYS_kexec_load, &[0, 0, 0, 0]),
        "restart the host" => did(libc::SYS_reboot, &[0xfee1_dead, 672_274_793, 0x89ab_cdef, 0]),
        "change the clock" => did(libc::SYS_clock_settime, &[0, (&raw const TIME) as usize]),
        "change the host's name" => did_with(libc::SYS_sethostname, &["captive"], &[7]),
        "read the kernel's log" => did(libc::SYS_syslog, &[3, 0, 0]),
        "use the processor's ports" => did(libc::SYS_iopl, &[3]),
        "use one of them" => did(libc::SYS_ioperm, &[0x80, 1, 1]),
        "swap" => did_with(libc::SYS_swapon, &["made"], &[0]),
        "account for processes" => did_with(libc::SYS_acct, &["made"], &[]),
        "set quotas" => did_with(libc::SYS_quotactl, &[], &[0x80_0002 << 8, 0, 0, 0]),
        "enter a cgroup" => open("/sys/fs/cgroup/cgroup.procs", true),
        "move a process by a descriptor" => any(0..DESCRIPTORS, moved_by),
        "change a setting of the kernel" => open("/proc/sys/kernel/core_pattern", true),
        "trigger the kernel" => open("/proc/sysrq-trigger", true),
        "read where the kernel is" => open("/proc/kallsyms", false),
        "read physical memory" => open("/proc/kcore", false),
    ]
}

/// Whether a descriptor moves the first process of the host to another cgroup.
fn moved_by(descriptor: usize) -> Tried {
    let found = std::fs::read_link(format!("/proc/self/fd/{descriptor}"))?;
    if found.file_name().is_none_or(|name| name != "cgroup.procs") {
        return Err(std::io::Error::from_raw_os_error(libc::EBADF));
    }
    did(libc::SYS_write, &[descriptor, c"1".as_ptr() as usize, 1])
}

static TIME: [u64; 2] = [1, 0];

fn network() -> Vec<Try> {
    tries!["network",
        "reach IPv4 by TCP" => connect(libc::AF_INET, libc::SOCK_STREAM, 0),
        "reach IPv4 by UDP" => connect(libc::AF_INET, libc::SOCK_DGRAM, 0),
        "reach IPv6 by TCP" => connect(libc::AF_INET6, libc::SOCK_STREAM, 0),
        "reach IPv6 by UDP" => connect(libc::AF_INET6, libc::SOCK_DGRAM, 0),
        "send raw packets" => did(libc::SYS_socket,
            &[flag(libc::AF_INET), flag(libc::SOCK_RAW), flag(libc::IPPROTO_ICMP)]),
        "listen to a network" => did(libc::SYS_socket,
            &[flag(libc::AF_PACKET), flag(libc::SOCK_RAW), 0x0300]),
        "reach a system bus by its abstract name" =>
            abstract_socket("/org/freedesktop/systemd1/private"),
        "reach a daemon by its abstract name" => abstract_socket("forkd/addresses/10.200.0.0/16"),
    ]
}
