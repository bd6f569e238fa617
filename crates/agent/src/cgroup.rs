//! A cgroup for each process that the agent starts, to kill it with all that it has started.
//!
//! A process is born in its parent's cgroup.  So the agent is in the one that the next process will
//! have, and goes on to another as soon as that has been started.  Nothing has to be done between
//! fork and exec, and the process need not wait for anything.
//!
//! A cgroup whose processes have all ended serves again, so a guest that runs one command after the
//! other needs two.
//!
//! The runtime is in the root of the hierarchy, and so is the agent when a snapshot is taken: the
//! kernel keeps accounts of every other cgroup and adds them up every two seconds, and each fork
//! would pay for both with pages of its own.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use crate::log;

/// Where cgroups are.
pub const MOUNTED_AT: &str = "/sys/fs/cgroup";

/// Most cgroups of the agent.  Processes beyond them have none of their own.
const CGROUPS_MAX: usize = 1024;

/// How much of a cgroup's accounts is read; what they say is of no use.
const ACCOUNTS_READ: usize = 64;

/// How many cgroups are looked at for one that is empty, before another is made.
const LOOKS_MAX: usize = 16;

/// The cgroup of one process.  It does not serve again as long as somebody has this.
#[derive(Clone, Debug)]
pub struct Cgroup(Arc<PathBuf>);

impl Cgroup {
    /// Kills every process in it.
    ///
    /// # Errors
    ///
    /// The kernel refused; before Linux 5.14 it cannot.
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.0.join("cgroup.kill"), "1")
    }

    fn is_free(&self) -> bool {
        let events = || fs::read_to_string(self.0.join("cgroup.events"));
        Arc::strong_count(&self.0) == 1 && events().is_ok_and(|text| text.contains("populated 0"))
    }
}

/// The agent's cgroups.
#[derive(Debug)]
pub struct Cgroups {
    /// Below which ours are.
    root: PathBuf,
    /// What the agent rests by; see [`rest`](Self::rest).
    rest: Rest,
    all: Vec<Cgroup>,
    /// Which one the agent is in; none of ours at rest.
    here: Option<usize>,
    /// A process was started in that one which could not be told apart from the next.
    shared: bool,
    /// Which one was looked at last.
    looked: usize,
}

/// Files that stay open: what the kernel frees late of a file of its own that was closed just
/// before a snapshot wakes each fork, five seconds after.
#[derive(Debug)]
struct Rest {
    /// By which one enters the root of the hierarchy.
    way_back: File,
    /// Whoever reads it has the accounts of ours added up
    /// (Documentation/admin-guide/cgroup-v2.rst).
    accounts: File,
}

impl Rest {
    fn open(base: &Path, root: &Path) -> io::Result<Self> {
        let way_back = File::options().write(true).open(base.join("cgroup.procs"))?;
        Ok(Self { way_back, accounts: File::open(root.join("cpu.stat"))? })
    }
}

impl Cgroups {
    /// Makes the first ones below `base`, where the agent is and stays.
    ///
    /// # Errors
    ///
    /// There is no cgroup2 at `base`, or the kernel refused.
    pub fn prepare(base: &Path) -> io::Result<Self> {
        if statfs(base)?.filesystem_type() != CGROUP2_SUPER_MAGIC {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "not a cgroup2 file system"));
        }
        let (root, all) = (base.join("forkd"), Vec::new());
        fs::create_dir_all(&root)?;
        let rest = Rest::open(base, &root)?;
        let mut cgroups = Self { root, rest, all, here: None, shared: false, looked: 0 };
        cgroups.make()?;
        // Another at once: else each fork of this guest would make it.
        cgroups.make()?;
        Ok(cgroups)
    }

    /// Has the next process start in a cgroup of ours, if the agent is at rest.
    pub fn rouse(&mut self) {
        if self.here.is_some() {
            return;
        }
        match self.go_on() {
            Ok(()) => self.shared = false,
            Err(error) => log::line(&format!("no cgroup for a process: {error}")),
        }
    }

    /// Goes back to where nobody keeps accounts, and has those of ours added up.
    pub fn rest(&mut self) {
        if self.here.take().is_some()
            && let Err(error) = self.rest.way_back.write_at(b"0", 0)
        {
            log::line(&format!("no way back to the root cgroup: {error}"));
        }
        drop(self.rest.accounts.read_at(&mut [0; ACCOUNTS_READ], 0));
    }

    /// A process has been started: goes on to another cgroup.  Returns the one that the process is
    /// in and the agent was; `None` if there is no other, or not for this process alone.
    pub fn leave(&mut self) -> Option<Cgroup> {
        let here = self.here?;
        match self.go_on() {
            Ok(()) => {
                let alone = !std::mem::take(&mut self.shared);
                self.all.get(here).filter(|_| alone).cloned()
            }
            Err(error) => {
                log::line(&format!("no cgroup for the next process: {error}"));
                self.shared = true;
                None
            }
        }
    }

    /// Moves the agent to a cgroup that nobody uses.
    fn go_on(&mut self) -> io::Result<()> {
        let next = self.free().map_or_else(|| self.make(), Ok)?;
        self.enter(next)?;
        self.here = Some(next);
        Ok(())
    }

    /// One that nobody uses.
    fn free(&mut self) -> Option<usize> {
        for _ in 0..self.all.len().min(LOOKS_MAX) {
            self.looked = (self.looked + 1) % self.all.len();
            let free = self.all.get(self.looked).is_some_and(Cgroup::is_free);
            if free && Some(self.looked) != self.here {
                return Some(self.looked);
            }
        }
        None
    }

    fn make(&mut self) -> io::Result<usize> {
        let number = self.all.len();
        if number >= CGROUPS_MAX {
            return Err(io::Error::other(format!("there are {CGROUPS_MAX}")));
        }
        let path = self.root.join(number.to_string());
        fs::create_dir_all(&path)?;
        self.all.push(Cgroup(Arc::new(path)));
        Ok(number)
    }

    fn enter(&self, number: usize) -> io::Result<()> {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let Cgroup(path) = self.all.get(number).ok_or_else(missing)?;
        fs::write(path.join("cgroup.procs"), "0")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cgroups in a plain folder, where what the kernel would say is what was written last.
    struct Plain {
        cgroups: Cgroups,
    }

    impl Plain {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("forkd-{}-{name}", std::process::id()));
            fs::create_dir_all(&root).unwrap();
            for file in ["cgroup.procs", "cpu.stat"] {
                fs::write(root.join(file), "").unwrap();
            }
            let (rest, all) = (Rest::open(&root, &root).unwrap(), Vec::new());
            let cgroups = Cgroups { root, rest, all, here: None, shared: false, looked: 0 };
            let mut plain = Self { cgroups };
            for number in 0..2 {
                plain.cgroups.make().unwrap();
                plain.set(number, "populated 0");
            }
            plain.cgroups.looked = 1;
            plain
        }

        fn set(&self, number: usize, events: &str) {
            let path = self.cgroups.root.join(number.to_string());
            fs::write(path.join("cgroup.events"), events).unwrap();
        }

        /// The number of the cgroup of a process that is started now.
        fn start(&mut self) -> (Option<usize>, Option<Cgroup>) {
            self.cgroups.rouse();
            let cgroup = self.cgroups.leave();
            let name = cgroup.as_ref().and_then(|cgroup| cgroup.0.file_name());
            (name.map(|name| name.to_str().unwrap().parse().unwrap()), cgroup)
        }
    }

    impl Drop for Plain {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.cgroups.root).unwrap();
        }
    }

    #[test]
    fn processes_one_after_the_other_take_turns_with_two_cgroups() {
        let mut plain = Plain::new("turns");

        let numbers = [(); 4].map(|()| plain.start().0);

        assert_eq!(numbers, [Some(0), Some(1), Some(0), Some(1)]);
    }

    #[test]
    fn a_cgroup_serves_again_when_it_is_empty_and_nobody_has_it() {
        let mut plain = Plain::new("again");
        let (_, held) = plain.start();
        plain.set(1, "populated 1");
        assert_eq!(plain.start().0, Some(1));
        plain.set(2, "populated 0");
        assert_eq!(plain.start().0, Some(2), "the first is held, the second populated");

        assert!(![(); 4].map(|()| plain.start().0).contains(&Some(0)));
        drop(held);

        assert!([(); 4].map(|()| plain.start().0).contains(&Some(0)));
    }

    #[test]
    fn at_rest_the_agent_is_in_the_root_and_the_next_process_in_a_cgroup_of_its_own() {
        let mut plain = Plain::new("rest");
        let procs = plain.cgroups.root.join("cgroup.procs");
        assert_eq!(plain.start().0, Some(0));
        assert_eq!(fs::read_to_string(&procs).unwrap(), "");

        plain.cgroups.rest();

        assert_eq!(fs::read_to_string(&procs).unwrap(), "0");
        assert_eq!(plain.cgroups.leave().map(|_| ()), None, "of a process that starts at rest");
        assert_eq!([(); 2].map(|()| plain.start().0), [Some(0), Some(1)]);
    }

    #[test]
    fn processes_that_could_not_be_told_apart_have_no_cgroup() {
        let mut plain = Plain::new("apart");
        let shut = plain.cgroups.root.join("1/cgroup.procs");
        fs::create_dir(&shut).unwrap();

        let first = plain.start().0;
        fs::remove_dir(shut).unwrap();
        let numbers = [(); 2].map(|()| plain.start().0);

        assert_eq!((first, numbers), (None, [None, Some(1)]));
    }
}
