//! How much memory there is: of the host, and of the groups that this process is in.
//!
//! In a container the group that ends it for want of memory is the container's, and the host may
//! have much more.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::Error;
use crate::sys::handed::{self, Keep};

/// Where the kernel says.
const FILE: &str = "/proc/meminfo";

/// Where cgroup v2 is mounted.
const GROUPS: &str = "/sys/fs/cgroup";
/// Which group this process is in.
const OWN_GROUP: &str = "/proc/self/cgroup";
/// What a group says of its memory.
const OF_GROUP: [&str; 3] = ["memory.max", "memory.current", "memory.stat"];

/// Bytes that can be taken without others having to give any up, by the kernel's own estimate, and
/// within the limits of this process's groups.
///
/// # Errors
///
/// [`Error::Io`] if the kernel does not say what the host has.
pub fn available_bytes() -> Result<u64, Error> {
    let text = read(Path::new(FILE)).map_err(Error::io(format!("read {FILE}")))?;
    let host = available_in(&text);
    let host = host.ok_or_else(|| Error::Damaged(format!("{FILE} has no MemAvailable")))?;
    Ok(groups().iter().filter_map(|group| left_of(group)).fold(host, u64::min))
}

/// Opens what [`available_bytes`] reads, for when this process sees nothing of it any more.
///
/// # Errors
///
/// The kernel's.
pub fn keep_open() -> std::io::Result<()> {
    handed::open_and_keep(Path::new(FILE), Keep::Zygote)?;
    for group in groups() {
        // The hierarchy's own group has no limit, and not each group has the controller.
        if group.join(OF_GROUP[0]).exists() {
            for name in OF_GROUP {
                handed::open_and_keep(&group.join(name), Keep::Zygote)?;
            }
        }
    }
    Ok(())
}

/// The groups that this process was in when it asked first.
fn groups() -> &'static [PathBuf] {
    static FOUND: OnceLock<Vec<PathBuf>> = OnceLock::new();
    FOUND.get_or_init(|| groups_in(&std::fs::read_to_string(OWN_GROUP).unwrap_or_default()))
}

/// A group and all above it, as far as they are seen.
fn groups_in(text: &str) -> Vec<PathBuf> {
    let own = text.lines().find_map(|line| line.strip_prefix("0::/"));
    // One that is outside of this process's namespace is not seen, nor are those above it.
    let own = own.filter(|path| !path.split('/').any(|part| part == ".."));
    let own = own.map(|path| Path::new(GROUPS).join(path));
    let above = own.iter().flat_map(|own| own.ancestors());
    above.take_while(|group| group.starts_with(GROUPS)).map(Path::to_path_buf).collect()
}

/// What is left of a group's limit; `None` if it has none, or has ended.
fn left_of(group: &Path) -> Option<u64> {
    let [most, used, stat] = OF_GROUP.map(|name| read(&group.join(name)).ok());
    left_in(&most?, &used?, &stat?)
}

/// A file that was not used for longest is given up before memory is refused.
fn left_in(most: &str, used: &str, stat: &str) -> Option<u64> {
    let most: u64 = most.trim().parse().ok()?;
    let used: u64 = used.trim().parse().ok()?;
    let unused = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let unused = unused.and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
    Some(most.saturating_sub(used.saturating_sub(unused)))
}

fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    handed::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

fn available_in(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_estimate_is_in_kibibytes() {
        let text = "MemTotal:  24000 kB\nMemFree: 1 kB\nMemAvailable:   12345 kB\n";

        assert_eq!(available_in(text), Some(12345 << 10));
        assert_eq!(available_in("MemTotal: 24000 kB\n"), None);
        assert!(available_bytes().unwrap() > 0);
    }

    #[test]
    fn groups_are_those_that_this_process_is_in_and_sees() {
        let of =
            |text| groups_in(text).iter().map(|it| it.display().to_string()).collect::<Vec<_>>();

        let own = of("1:name=systemd:/x\n0::/a.slice/b\n");

        assert_eq!(own, ["/sys/fs/cgroup/a.slice/b", "/sys/fs/cgroup/a.slice", "/sys/fs/cgroup"]);
        assert_eq!(of("0::/\n"), ["/sys/fs/cgroup/"]);
        assert_eq!(of("0::/../other\n"), [""; 0]);
        assert_eq!(of(""), [""; 0]);
    }

    #[test]
    fn of_a_group_that_is_left_which_its_limit_leaves_and_files_that_nobody_uses() {
        let stat = "anon 1\nfile 900\ninactive_file 200\nactive_file 700\n";

        assert_eq!(left_in("1000\n", "900\n", stat), Some(300));
        assert_eq!(left_in("1000\n", "1500\n", "anon 1500\n"), Some(0));
        assert_eq!(left_in("max\n", "900\n", stat), None);
    }

    #[test]
    fn the_files_of_a_group_are_read_and_a_group_without_them_has_no_limit() {
        let group = std::env::temp_dir().join(format!("forkd-group-{}", std::process::id()));
        std::fs::create_dir(&group).unwrap();
        assert_eq!(left_of(&group), None);
        for (name, text) in OF_GROUP.iter().zip(["4096\n", "1096\n", "inactive_file 96\n"]) {
            std::fs::write(group.join(name), text).unwrap();
        }

        assert_eq!(left_of(&group), Some(3096));
        std::fs::remove_dir_all(group).unwrap();
    }
}
