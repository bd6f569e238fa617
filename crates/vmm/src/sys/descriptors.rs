//! Descriptors: pipes, taps, who is at the other end, and which ones a fork keeps.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use forkd_proto::limits::FILES_MAX;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::error::Error;
use crate::sys::handed;

/// The way to KVM.
pub const KVM: &str = "/dev/kvm";

/// A pipe, read end first, that no exec'ed process inherits.
///
/// # Errors
///
/// [`Error::Io`].
pub fn pipe() -> Result<(File, File), Error> {
    pipe_with(0)
}

/// As [`pipe`]; neither end waits.
///
/// # Errors
///
/// [`Error::Io`].
pub fn nonblocking_pipe() -> Result<(File, File), Error> {
    pipe_with(libc::O_NONBLOCK)
}

fn pipe_with(flags: i32) -> Result<(File, File), Error> {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for the two descriptors.
    if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | flags) } < 0 {
        return Err(Error::last_os("pipe2"));
    }
    // SAFETY: the kernel opened it for us just now, and nothing else knows its number.
    let read = unsafe { File::from_raw_fd(fds[0]) };
    // SAFETY: as above.
    let write = unsafe { File::from_raw_fd(fds[1]) };
    Ok((read, write))
}

/// Reads from a stream, with the files that come with it, which no exec'ed process inherits.
///
/// # Errors
///
/// The kernel's.
pub fn receive(
    stream: &UnixStream,
    buffer: &mut [u8],
    files: &mut VecDeque<File>,
) -> io::Result<usize> {
    let mut numbers = [-1; FILES_MAX];
    let mut parts = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }];
    // SAFETY: the one part is `buffer`, which outlives the call.
    let received = unsafe { stream.recv_with_fds(&mut parts, &mut numbers) };
    let (read, count) = received.map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
    for number in &numbers[..count] {
        // SAFETY: the kernel opened it for us just now, and nothing else knows its number.
        let file = unsafe { File::from_raw_fd(*number) };
        close_on_exec(*number);
        files.push_back(file);
    }
    Ok(read)
}

fn close_on_exec(fd: i32) {
    // SAFETY: F_SETFD on an open descriptor of ours; nothing is ever executed where it fails.
    unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
}

/// User id of the process at the other end of a Unix socket (`SO_PEERCRED`).
///
/// # Errors
///
/// [`Error::Io`].
pub fn peer_uid(stream: &UnixStream) -> Result<u32, Error> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = libc::socklen_t::try_from(std::mem::size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the buffer is a `ucred` and `length` its size, as SO_PEERCRED wants.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if result < 0 { Err(Error::last_os("SO_PEERCRED")) } else { Ok(credentials.uid) }
}

/// Raises the limit of open files as far as it goes: a zygote's service has a socket per child.
pub fn raise_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0 {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: `limit` is initialised.  Where the kernel refuses, the old limit holds.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
}

/// Opens KVM, by its path or as it was handed over.
///
/// # Errors
///
/// [`Error::Io`].
pub fn open_kvm() -> Result<File, Error> {
    let path = Path::new(KVM);
    let opened = handed::duplicate(path)
        .unwrap_or_else(|| File::options().read(true).write(true).open(path));
    opened.map_err(Error::io(format!("open {KVM}")))
}

/// Opens the tap device `name`, which must exist, without packet information; or takes the one that
/// was handed over by that name.
///
/// # Errors
///
/// [`Error::Invalid`] if the name is longer than the kernel's 15 bytes, [`Error::Io`] otherwise.
pub fn open_tap(name: &str) -> Result<File, Error> {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    if let Some(file) = handed::take(Path::new(name)) {
        set_nonblocking(file.as_raw_fd())?;
        return Ok(file);
    }
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() >= libc::IFNAMSIZ || bytes.contains(&0) {
        return Err(Error::Invalid {
            field: "tap",
            problem: format!("{name:?} is no interface name (1 to {} bytes)", libc::IFNAMSIZ - 1),
        });
    }
    // SAFETY: all-zero is a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(bytes) {
        *slot = byte.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).unwrap_or(0);
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .map_err(Error::io("open /dev/net/tun"))?;
    // SAFETY: TUNSETIFF takes a pointer to an `ifreq`, which outlives the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) } < 0 {
        return Err(Error::last_os(format!("attach to tap {name}")));
    }
    set_nonblocking(file.as_raw_fd())?;
    Ok(file)
}

fn set_nonblocking(fd: i32) -> Result<(), Error> {
    // SAFETY: F_SETFL on an open descriptor of ours.
    if unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
        return Err(Error::last_os("fcntl"));
    }
    Ok(())
}

/// Closes a descriptor that a forked child inherited and that its parent's objects still name.
///
/// The objects are the parent's; the child never drops them (`process::exit_now`).
///
/// # Errors
///
/// [`Error::Io`] if it was not open.
pub fn close_in_child(fd: i32) -> Result<(), Error> {
    // SAFETY: nothing in the child uses the descriptor any more.
    if unsafe { libc::close(fd) } < 0 { Err(Error::last_os("close")) } else { Ok(()) }
}

/// Closes every descriptor of this process but those in `keep`.
///
/// For a forked child, whose memory holds objects of its parent that it never drops.  Needs no
/// descriptor itself: the parent may have as many as it can.
///
/// # Errors
///
/// [`Error::Io`] if the kernel is older than Linux 5.9.
pub fn close_all_but(keep: &[i32]) -> Result<(), Error> {
    let mut first = 0;
    let kept = || keep.iter().filter_map(|fd| u32::try_from(*fd).ok());
    while let Some(fd) = kept().filter(|fd| *fd >= first).min() {
        if first < fd {
            close_range(first, fd - 1)?;
        }
        first = fd + 1;
    }
    close_range(first, u32::MAX)
}

fn close_range(first: u32, last: u32) -> Result<(), Error> {
    // SAFETY: nothing in the child uses the descriptors any more; the call takes no pointers.
    if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } < 0 {
        return Err(Error::last_os("close_range"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::process::{Forked, exit_now, fork_into};
    use std::io::{Read, Write};

    #[test]
    fn a_fork_keeps_the_descriptors_that_it_is_told_to_and_no_other() {
        let (mut said, mut say) = pipe().unwrap();
        let (kept, other) = (File::open("/dev/null").unwrap(), File::open("/dev/null").unwrap());
        let numbers = [say.as_raw_fd(), kept.as_raw_fd()];

        let Forked::Parent(pid) = fork_into(None).unwrap() else {
            // Nothing here may allocate: another thread may have held the allocator.
            let closed = close_all_but(&numbers).is_ok();
            let open = [kept.metadata().is_ok(), other.metadata().is_ok()];
            let told = say.write_all(&[closed, open[0], open[1]].map(u8::from));
            exit_now(i32::from(told.is_err()));
        };

        let mut told = [0; 3];
        said.read_exact(&mut told).unwrap();
        assert_eq!(told, [1, 1, 0]);
        // SAFETY: no status is asked for.
        assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
    }

    #[test]
    fn an_interface_name_one_byte_too_long_is_refused() {
        let error = open_tap(&"x".repeat(libc::IFNAMSIZ)).unwrap_err();

        assert_eq!(error.code(), forkd_proto::control::ErrorCode::InvalidRequest);
    }
}
