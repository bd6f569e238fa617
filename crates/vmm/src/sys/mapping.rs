//! Memory as the kernel maps it: system calls that neither `std` nor the rust-vmm crates wrap.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use crate::error::Error;

/// Maps `bytes` of zeros privately, readable and writable, not reserved.
///
/// The address is a multiple of `align`, a power of two.  KVM can use a huge page only where guest
/// and host address agree below its size, and `mmap` by itself aligns to small pages.
///
/// # Errors
///
/// [`Error::Io`] if the address space does not hold it.
pub fn map_zeros(bytes: u64, align: u64) -> Result<*mut u8, Error> {
    let (start, length) = reserve(bytes, align)?;
    let kind = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_ANONYMOUS;
    map_fixed(start, length, kind, -1, 0)
}

/// Puts a private view of `file`, from `offset`, in the place of what is mapped at `start`.
///
/// # Errors
///
/// [`Error::Io`] if the kernel has no room for another mapping.
pub fn cover(start: *mut u8, bytes: u64, file: &File, offset: u64) -> Result<(), Error> {
    let kind = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    map_fixed(start, length_of(bytes)?, kind, file.as_raw_fd(), offset).map(drop)
}

/// Reserves address space; returns its aligned start and its length.
///
/// What alignment takes on either side is given back: a fork copies every mapping there is.
fn reserve(bytes: u64, align: u64) -> Result<(*mut u8, usize), Error> {
    let (length, align) = (length_of(bytes)?, length_of(align)?);
    let kind = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_ANONYMOUS;
    // SAFETY: without MAP_FIXED a new mapping replaces nothing.
    let reserved =
        unsafe { libc::mmap(std::ptr::null_mut(), length + align, libc::PROT_NONE, kind, -1, 0) };
    if reserved == libc::MAP_FAILED {
        return Err(Error::last_os("reserve address space for guest memory"));
    }
    let before = reserved.align_offset(align);
    let start = reserved.wrapping_byte_add(before);
    for (spare, bytes) in [(reserved, before), (start.wrapping_byte_add(length), align - before)] {
        // SAFETY: both ends of what was reserved just now, which nothing refers to; if there is
        // nothing at an end, the call fails and changes nothing.
        unsafe { libc::munmap(spare, bytes) };
    }
    Ok((start.cast(), length))
}

fn map_fixed(
    start: *mut u8,
    length: usize,
    kind: i32,
    fd: i32,
    offset: u64,
) -> Result<*mut u8, Error> {
    let offset = libc::off_t::try_from(offset).map_err(Error::guest_memory)?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = kind | libc::MAP_FIXED;
    // SAFETY: replaces what this module's callers mapped or reserved for guest memory, which is
    // accessed only through raw pointers that stay valid.
    let mapped = unsafe { libc::mmap(start.cast(), length, access, kind, fd, offset) };
    if mapped == libc::MAP_FAILED {
        return Err(Error::last_os("map guest memory"));
    }
    Ok(mapped.cast())
}

fn length_of(bytes: u64) -> Result<usize, Error> {
    usize::try_from(bytes).map_err(Error::guest_memory)
}

/// A file in memory, of zeros, of which nothing exists yet.  It can be sealed ([`seal`]), and never
/// executed: a host with `vm.memfd_noexec=2` has no others.
///
/// # Errors
///
/// [`Error::Io`].
pub fn memory_file(bytes: u64) -> Result<File, Error> {
    const SEALABLE: u32 = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let create = |flags| {
        // SAFETY: the name is a NUL-terminated constant; the call has no other requirement.
        unsafe { libc::memfd_create(c"forkd-memory".as_ptr(), flags) }
    };
    let mut fd = create(SEALABLE | libc::MFD_NOEXEC_SEAL);
    // Before Linux 6.3.
    if fd < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
        fd = create(SEALABLE);
    }
    if fd < 0 {
        return Err(Error::last_os("memfd_create"));
    }
    // SAFETY: the kernel opened `fd` for us just now, and nothing else knows its number.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes).map_err(Error::io("size the memory image"))?;
    Ok(file)
}

/// Makes a file in memory what it is for ever: no descriptor of it, whoever has it and however it
/// was opened, can change its bytes or its size any more.
///
/// Private mappings of it are as before.  A shared one that can be written ([`Shared`]) must be
/// gone: this seals what is mapped and written from now on, which costs nothing, where
/// `F_SEAL_WRITE` would look at every page for one that a device still writes to.
///
/// # Errors
///
/// [`Error::Io`] if the kernel is older than Linux 5.1.
pub fn seal(file: &File) -> Result<(), Error> {
    const SEALS: i32 =
        libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: F_ADD_SEALS on an open descriptor of ours; the call takes no pointers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } < 0 {
        return Err(Error::last_os("seal a file in memory"));
    }
    Ok(())
}

/// A file in memory, mapped for writing to the file itself; unmapped when dropped.
#[derive(Debug)]
pub struct Shared {
    start: *mut u8,
    length: usize,
}

impl Shared {
    /// Maps all of `file`, aligned to and asking for huge pages.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the address space does not hold it.
    pub fn map(file: &File, bytes: u64, align: u64) -> Result<Self, Error> {
        let (start, length) = reserve(bytes, align)?;
        map_fixed(start, length, libc::MAP_SHARED, file.as_raw_fd(), 0)?;
        advise_huge_pages(start, bytes);
        Ok(Self { start, length })
    }

    /// Stores `data` at `offset` of the file.
    ///
    /// # Errors
    ///
    /// [`Error::GuestMemory`] if it does not fit.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let offset = length_of(offset)?;
        if offset.checked_add(data.len()).is_none_or(|end| end > self.length) {
            return Err(Error::GuestMemory("a page beyond the end of the image".into()));
        }
        let target = self.start.wrapping_add(offset);
        // SAFETY: the range lies in the mapping, as was checked, which only this value knows.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), target, data.len()) };
        Ok(())
    }

    /// Makes every page of the file exist, so that nobody who maps it pays for one.
    pub fn populate(&self) {
        // Where the kernel refuses (before Linux 5.14), a page is made when it is read.
        advise(self.start.cast(), self.length as u64, libc::MADV_POPULATE_WRITE);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: this value mapped the range, and nothing refers to it any more.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}

/// Asks for huge pages in a mapped range.  A kernel that has none to give uses small ones.
pub fn advise_huge_pages(start: *mut u8, bytes: u64) {
    advise(start.cast(), bytes, libc::MADV_HUGEPAGE);
}

/// Drops the private pages of a mapped range: it reads as its file, or as zeros, from then on.
///
/// # Errors
///
/// [`Error::Io`] if a part of it is not mapped.
pub fn drop_private(start: u64, bytes: u64) -> Result<(), Error> {
    let start = std::ptr::without_provenance_mut(usize::try_from(start).unwrap_or(0));
    if advise(start, bytes, libc::MADV_DONTNEED) {
        Ok(())
    } else {
        Err(Error::last_os("drop private pages"))
    }
}

/// Keeps a mapped range out of processes that this one forks.
///
/// # Errors
///
/// [`Error::Io`] if a part of it is not mapped.
pub fn keep_from_forks(start: *mut u8, bytes: u64) -> Result<(), Error> {
    if advise(start.cast(), bytes, libc::MADV_DONTFORK) {
        Ok(())
    } else {
        Err(Error::last_os("keep a mapping from forks"))
    }
}

/// Makes writable, private copies of the pages in a mapped range (`MADV_POPULATE_WRITE`), as
/// writing to each would.  Returns whether the kernel did.
#[must_use]
pub fn populate_for_writing(start: u64, bytes: u64) -> bool {
    let start = usize::try_from(start).unwrap_or(0);
    advise(std::ptr::without_provenance_mut(start), bytes, libc::MADV_POPULATE_WRITE)
}

fn advise(start: *mut libc::c_void, bytes: u64, what: i32) -> bool {
    let Ok(length) = usize::try_from(bytes) else { return false };
    // SAFETY: the callers' ranges are guest memory or pages shared with KVM, which are accessed
    // through raw pointers only; a range that is not mapped is refused with ENOMEM.
    unsafe { libc::madvise(start, length, what) == 0 }
}

#[cfg(test)]
mod tests {
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule, TargetArch,
    };

    use super::*;
    use crate::sys::process::{Forked, exit_now, fork_into, wait};

    /// The status of a process that makes a file in memory where the kernel refuses those whose
    /// flag not to be executed is set, or is not.
    fn made_where(executable: bool, refused: i32) -> i32 {
        let flag = u64::from(libc::MFD_NOEXEC_SEAL);
        let value = if executable { 0 } else { flag };
        let of_flag = SeccompCmpOp::MaskedEq(flag);
        let has = SeccompCondition::new(1, SeccompCmpArgLen::Dword, of_flag, value).unwrap();
        let rules = [(libc::SYS_memfd_create, vec![SeccompRule::new(vec![has]).unwrap()])].into();
        let refuse = SeccompAction::Errno(refused.cast_unsigned());
        let kernel: BpfProgram =
            SeccompFilter::new(rules, SeccompAction::Allow, refuse, TargetArch::x86_64)
                .and_then(TryInto::try_into)
                .unwrap();
        let Forked::Parent(pid) = fork_into(None).unwrap() else {
            let ready = seccompiler::apply_filter(&kernel).is_ok();
            exit_now(if ready { i32::from(memory_file(0).is_ok()) } else { 7 });
        };
        libc::WEXITSTATUS(wait(pid).unwrap().1)
    }

    #[test]
    fn a_host_that_wants_files_in_memory_not_to_be_executable_has_them() {
        assert_eq!(made_where(true, libc::EACCES), 1);
    }

    #[test]
    fn a_kernel_that_does_not_know_of_that_has_them_as_ever() {
        assert_eq!(made_where(false, libc::EINVAL), 1);
        assert_eq!(made_where(false, libc::ENOMEM), 0);
    }

    #[test]
    fn a_write_one_byte_past_the_file_is_refused() {
        let file = memory_file(4096).unwrap();
        let mut shared = Shared::map(&file, 4096, 4096).unwrap();

        assert!(shared.write(4095, &[1]).is_ok());
        assert!(shared.write(4096, &[1]).is_err());
    }
}
