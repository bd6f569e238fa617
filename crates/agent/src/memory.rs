//! A memory limit that the guest's own kernel keeps.
//!
//! The host kills a machine that takes more memory than its limit, and a guest fills all its memory
//! with page cache.  So the agent takes the memory beyond the limit away from the guest's kernel.
//! The kernel then reclaims its caches first, and kills one process if that does not suffice.
//!
//! The agent takes the memory as huge pages, and mounts a file system that reserves them, so that
//! no program gets them.  The kernel does not write to these pages as long as it does not clear
//! what it allocates (`init_on_alloc=0`).  It writes to their descriptors: a 64th of their size.
//!
//! The agent of a dormant guest takes the memory before the guest is first used.  A fork of a
//! limited sandbox begins with the limit of that sandbox, and gets its own.

use std::fs;
use std::io;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::boot::FOLDER;
use crate::log;

const POOL: &str = "/proc/sys/vm/nr_hugepages";
const PAGE_BYTES: u64 = 2 << 20;

/// What a guest keeps available, however low its limit is: with less it could only kill.
const AVAILABLE_MIN: u64 = 48 << 20;
/// Most memory that is taken from a guest, as a multiple of its limit: the descriptors of that
/// memory use an eighth of the limit then.
const TAKEN_RATIO_MAX: u64 = 8;
/// What part of a page its descriptor in the kernel is.
const DESCRIPTOR_SHARE: u64 = 64;

/// Memory that is taken from the guest.
#[derive(Debug, Default)]
pub struct Limit {
    /// How many huge pages.
    taken: u64,
    /// The limit that the guest gets when it is first used.
    put_off: Option<u64>,
}

/// What `/proc/meminfo` says, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    total: u64,
    available: u64,
    huge_page: u64,
}

impl Limit {
    /// Sets a limit by the next [`rouse`](Self::rouse), or none at once.
    pub fn put_off(&mut self, bytes: Option<u64>) {
        if bytes.is_none() {
            self.set(None);
        }
        self.put_off = bytes;
    }

    /// Sets the limit that was put off.
    pub fn rouse(&mut self) {
        if self.put_off.is_some() {
            self.set(self.put_off);
        }
    }

    /// Leaves the guest so much of its memory, or all of it.
    ///
    /// If its kernel cannot, only the host keeps the limit; the console says so.
    pub fn set(&mut self, bytes: Option<u64>) {
        self.put_off = None;
        if bytes.is_none() && self.taken == 0 {
            return;
        }
        if let Err(error) = self.try_set(bytes) {
            log::line(&format!("only the host keeps the memory limit: {error}"));
        }
    }

    fn try_set(&mut self, bytes: Option<u64>) -> io::Result<()> {
        let wanted = match bytes {
            Some(bytes) => {
                check_command_line(&fs::read_to_string("/proc/cmdline")?)?;
                let memory = Memory::parse(&fs::read_to_string("/proc/meminfo")?)
                    .filter(|memory| memory.huge_page == PAGE_BYTES)
                    .ok_or_else(|| io::Error::other("there are no huge pages of 2 MiB"))?;
                pages_to_take(memory, self.taken, bytes).ok_or_else(|| {
                    let (mib, of) = (bytes >> 20, memory.total >> 20);
                    io::Error::other(format!("{mib} MiB are too few for a guest of {of} MiB"))
                })?
            }
            None => 0,
        };
        if wanted == self.taken {
            return Ok(());
        }
        let folder = Path::new(FOLDER).join("unused");
        if self.taken > 0 {
            umount2(&folder, MntFlags::MNT_DETACH)?;
        }
        let others = pool()?.saturating_sub(self.taken);
        fs::write(POOL, (others + wanted).to_string())?;
        self.taken = pool()?.saturating_sub(others);
        if self.taken == 0 {
            return Ok(());
        }
        fs::create_dir_all(&folder)?;
        let size = self.taken * PAGE_BYTES;
        let options = format!("mode=0700,pagesize=2M,size={size},min_size={size}");
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let kind = Some("hugetlbfs");
        Ok(mount(kind, &folder, kind, flags, Some(options.as_str()))?)
    }
}

impl Memory {
    fn parse(text: &str) -> Option<Self> {
        let bytes = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 =
                line.strip_prefix(':')?.trim().strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        };
        let (total, available) = (bytes("MemTotal")?, bytes("MemAvailable")?);
        Some(Self { total, available, huge_page: bytes("Hugepagesize")? })
    }
}

/// How many huge pages to take, so that the guest uses at most `bytes` with their descriptors.
///
/// `None` if these would use too much of it.
fn pages_to_take(memory: Memory, taken: u64, bytes: u64) -> Option<u64> {
    let beyond = memory.total.saturating_sub(bytes);
    if beyond > bytes.saturating_mul(TAKEN_RATIO_MAX) {
        return None;
    }
    let with_descriptors = beyond + beyond.div_ceil(DESCRIPTOR_SHARE - 1);
    let most = (memory.available + taken * PAGE_BYTES).saturating_sub(AVAILABLE_MIN);
    Some(with_descriptors.div_ceil(PAGE_BYTES).min(most / PAGE_BYTES))
}

/// Refuses a kernel that clears what it allocates: to take memory would be to write to all of it.
fn check_command_line(text: &str) -> io::Result<()> {
    let words = text.split_ascii_whitespace();
    let last = words.filter_map(|word| word.strip_prefix("init_on_alloc=")).next_back();
    match last {
        Some("0" | "off" | "n") => Ok(()),
        _ => Err(io::Error::other("the kernel was not started with init_on_alloc=0")),
    }
}

fn pool() -> io::Result<u64> {
    fs::read_to_string(POOL)?.trim().parse().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const MEMORY: Memory = Memory { total: 480 * MIB, available: 400 * MIB, huge_page: PAGE_BYTES };

    #[test]
    fn what_is_beyond_the_limit_is_taken() {
        // 126 pages, and two for the descriptors of all.
        assert_eq!(pages_to_take(MEMORY, 0, 228 * MIB), Some(128));
        assert_eq!(pages_to_take(MEMORY, 0, 227 * MIB), Some(129), "rather more than less");
        assert_eq!(pages_to_take(MEMORY, 0, 512 * MIB), Some(0));
    }

    #[test]
    fn what_is_in_use_is_left_and_some_more() {
        assert_eq!(pages_to_take(MEMORY, 0, 64 * MIB), Some(176));
    }

    #[test]
    fn what_is_taken_already_can_be_taken_again() {
        let limited = Memory { available: 120 * MIB, ..MEMORY };
        assert_eq!(pages_to_take(limited, 128, 228 * MIB), Some(128));
    }

    #[test]
    fn a_limit_that_descriptors_would_use_up_is_left_to_the_host() {
        let large = Memory { total: 900 * MIB, available: 850 * MIB, ..MEMORY };
        assert_eq!(pages_to_take(large, 0, 100 * MIB), Some(401));
        assert_eq!(pages_to_take(large, 0, 99 * MIB), None);
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "MemTotal: 480 kB\nMemFree: 1 kB\nMemAvailable: 12 kB\nHugepagesize: 2048 kB\n";
        let found = Memory { total: 480 << 10, available: 12 << 10, huge_page: PAGE_BYTES };
        assert_eq!(Memory::parse(text), Some(found));
        assert_eq!(Memory::parse("MemTotal: 480 kB\nMemAvailable: 12 kB\n"), None);
    }

    #[test]
    fn a_kernel_that_clears_memory_is_left_alone_and_the_last_word_counts() {
        assert!(check_command_line("quiet init_on_alloc=0 x=1\n").is_ok());
        assert!(check_command_line("quiet").is_err());
        assert!(check_command_line("init_on_alloc=0 init_on_alloc=1").is_err());
    }
}
