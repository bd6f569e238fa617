//! Memory that another process holds: the seed that a branch's siblings were forked of.
//!
//! What a machine had written when it was branched is in no file.  The seed has it, and never
//! changes it; a sibling that goes back reads it there.  Both ways in, `/proc/self/mem` for reading
//! and `/proc/self/pagemap`, are opened by the seed for itself and inherited by its forks: such a
//! descriptor stays one of the seed's memory, whoever holds it, and reads as empty once the
//! seed has ended (`fs/proc/base.c`, `mem_rw`).  So nobody needs a right, or a process id that may
//! mean somebody else by then.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::Error;
use crate::jail::rights;
use crate::sys::pagemap::Pagemap;

const MEMORY: &str = "/proc/self/mem";

/// The memory of a process, to be read.
#[derive(Debug)]
pub struct SeedMemory {
    memory: File,
    pagemap: Pagemap,
}

impl SeedMemory {
    /// This process's own, for those that it will fork.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if `/proc` does not show it.
    pub fn own() -> Result<Self, Error> {
        let memory = rights::open_own(Path::new(MEMORY))?;
        Ok(Self { memory, pagemap: Pagemap::own()? })
    }

    /// Which pages the process has as its own.
    #[must_use]
    pub fn pagemap(&self) -> &Pagemap {
        &self.pagemap
    }

    /// Fills `bytes` from `address` on.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], for one because the process has ended.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.memory.read_exact_at(bytes, address).map_err(Error::io("read the fork point's memory"))
    }

    /// Makes sure that the process lives.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if it has ended; [`Error::Io`] if the kernel does not say.
    pub fn check(&self) -> Result<(), Error> {
        if self.pagemap.lives()? {
            return Ok(());
        }
        Err(Error::State("the seed of its branch, which has its fork point, has ended"))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sys::descriptors;
    use crate::sys::process::{self, Forked};
    use std::io::{Read, Write};

    /// A process that has what this one had when it was made, until it is dropped.
    #[derive(Debug)]
    pub(crate) struct Seed {
        pid: i32,
        _alive: File,
    }

    impl Seed {
        pub(crate) fn fork() -> Self {
            let (mut wait, alive) = descriptors::pipe().unwrap();
            match process::fork_into(None).unwrap() {
                Forked::Parent(pid) => Self { pid, _alive: alive },
                Forked::Child => {
                    descriptors::close_in_child(std::os::fd::AsRawFd::as_raw_fd(&alive)).unwrap();
                    drop(wait.read(&mut [0]));
                    process::exit_now(0);
                }
            }
        }

        pub(crate) fn memory(&self) -> SeedMemory {
            let memory = File::open(format!("/proc/{}/mem", self.pid)).unwrap();
            let pagemap = File::open(format!("/proc/{}/pagemap", self.pid)).unwrap();
            SeedMemory { memory, pagemap: pagemap.into() }
        }
    }

    impl Drop for Seed {
        fn drop(&mut self) {
            process::kill(self.pid);
            await_end(self.pid);
        }
    }

    fn await_end(pid: i32) {
        // SAFETY: no status is asked for.
        assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
    }

    #[test]
    fn a_fork_reads_what_its_parent_has_and_not_what_itself_has_written() {
        let seed = SeedMemory::own().unwrap();
        let (mut said, mut say) = descriptors::pipe().unwrap();
        let mut word = Box::new([7_u8]);
        let address = std::ptr::from_ref(&*word) as u64;

        let Forked::Parent(pid) = process::fork_into(None).unwrap() else {
            // Nothing here may allocate: another thread may have held the allocator.
            **std::hint::black_box(&mut word) = [8];
            let mut found = [0];
            let read = seed.memory.read_at(&mut found, address);
            let told = say.write_all(&[u8::from(read.is_ok()), found[0], word[0]]);
            process::exit_now(i32::from(told.is_err()));
        };

        let mut told = [0; 3];
        said.read_exact(&mut told).unwrap();
        assert_eq!(told, [1, 7, 8]);
        await_end(pid);
    }

    #[test]
    fn what_a_process_held_is_gone_with_it() {
        let word = Box::new([7_u8]);
        let address = std::ptr::from_ref(&*word) as u64;
        let process = Seed::fork();
        let seed = process.memory();
        let mut found = [0];
        seed.check().unwrap();
        seed.read(address, &mut found).unwrap();
        assert_eq!(found, [7]);

        drop(process);

        assert_eq!(seed.check().unwrap_err().code(), forkd_proto::control::ErrorCode::State);
        assert!(seed.read(address, &mut found).is_err());
    }
}
