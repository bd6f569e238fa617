//! What becomes of a process that makes a call which its filter refuses: it says which, and dies.
//!
//! The kernel does not make the call; it sends SIGSYS to the thread instead (`SECCOMP_RET_TRAP`),
//! whose handler is here.  The handler writes a line to the log in the machine's folder, where the
//! daemon looks for a machine's last words, and to standard error.  Then it makes a call that every
//! filter refuses: SIGSYS is blocked while it is handled, so the kernel ends the process.
//!
//! SIGBUS is named likewise.  With `split_lock_detect=fatal` the kernel sends it to the thread of a
//! vCPU whose guest makes an atomic access across two cache lines, and nothing else here has its
//! code.
//!
//! Nothing here allocates or takes a lock: the thread was stopped anywhere.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::names::name_of;
use crate::error::Error;

/// The file that a violation is written to besides standard error; null until there is one.
static LOG: AtomicPtr<libc::c_char> = AtomicPtr::new(ptr::null_mut());

/// The status of a process that the kernel did not end.
const STATUS: i32 = 128 + libc::SIGSYS;
const BUS_STATUS: i32 = 128 + libc::SIGBUS;
/// Longest line.
const LINE_BYTES: usize = 128;

/// Has a violation named from now on, in this process and in those that it forks.
///
/// # Errors
///
/// [`Error::Io`] if the handler cannot be set.
pub(super) fn handle() -> Result<(), Error> {
    set_handler(libc::SIGSYS, on_violation)?;
    set_handler(libc::SIGBUS, on_bus_error)
}

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

fn set_handler(signal: libc::c_int, handler: Handler) -> Result<(), Error> {
    // SAFETY: all-zero is a valid `sigaction`: empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: `action` is initialised, and its handler calls nothing that is not signal-safe.
    let set = unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) };
    if set < 0 { Err(Error::last_os("sigaction")) } else { Ok(()) }
}

/// Has a violation of this process, and of those that it forks, written to `file` as well; or to
/// standard error alone.
pub fn log_to(file: Option<&Path>) {
    let path = file.and_then(|file| CString::new(file.as_os_str().as_bytes()).ok());
    let path = path.map_or(ptr::null_mut(), CString::into_raw);
    // What was there belongs to the process that this one was forked from, and stays.
    LOG.store(path, Ordering::Release);
}

/// How a violation is described.
struct Line {
    bytes: [u8; LINE_BYTES],
    length: usize,
}

impl Line {
    const fn empty() -> Self {
        Self { bytes: [0; LINE_BYTES], length: 0 }
    }

    /// What a SIGBUS of that code means.
    fn of_bus_error(code: i32) -> Self {
        let mut line = Self::empty();
        line.add(b"its VMM was killed by SIGBUS");
        if code == libc::BUS_ADRALN {
            line.add(b": its guest split a lock, and this host has split_lock_detect=fatal\n");
        } else {
            line.add(b" (code ");
            line.add_number(code.unsigned_abs());
            line.add(b")\n");
        }
        line
    }

    fn of(call: i32) -> Self {
        let mut line = Self::empty();
        line.add(b"its VMM was killed by the filter: system call ");
        line.add(name_of(call).unwrap_or("unknown").as_bytes());
        line.add(b" (");
        line.add_number(call.cast_unsigned());
        line.add(b")\n");
        line
    }

    fn add(&mut self, text: &[u8]) {
        for (slot, byte) in self.bytes[self.length..].iter_mut().zip(text) {
            *slot = *byte;
            self.length += 1;
        }
    }

    fn add_number(&mut self, number: u32) {
        if number >= 10 {
            self.add_number(number / 10);
        }
        self.add(&[b"0123456789"[(number % 10) as usize]]);
    }

    fn write_to(&self, descriptor: i32) {
        // SAFETY: pointer and length are those of the line.
        unsafe { libc::write(descriptor, self.bytes.as_ptr().cast(), self.length) };
    }

    /// Writes it where the daemon looks for last words.
    fn log(&self) {
        self.write_to(libc::STDERR_FILENO);
        let path = LOG.load(Ordering::Acquire);
        if !path.is_null() {
            let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | libc::O_CLOEXEC;
            // SAFETY: the path is NUL-terminated, and never freed.  A filter without `openat` ends
            // the process here, which standard error has been told.
            let file = unsafe { libc::open(path, flags | libc::O_NOFOLLOW, 0o600) };
            self.write_to(file);
        }
    }
}

extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives the handler a valid structure.
    Line::of_bus_error(unsafe { (*info).si_code }).log();
    // SAFETY: ends the process.
    unsafe { libc::_exit(BUS_STATUS) }
}

extern "C" fn on_violation(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    Line::of(call_of(info)).log();
    // SAFETY: every filter refuses it, and sets no handler back to the default in the meantime.
    unsafe { libc::signal(libc::SIGSYS, libc::SIG_DFL) };
    // SAFETY: ends the process, had the kernel not.
    unsafe { libc::_exit(STATUS) }
}

/// The call that was refused.
fn call_of(info: *mut libc::siginfo_t) -> i32 {
    /// `siginfo_t` of SIGSYS as `include/uapi/asm-generic/siginfo.h` has it; libc does not.
    #[repr(C)]
    struct Refused {
        signal: [i32; 4],
        address: *const libc::c_void,
        call: i32,
        architecture: u32,
    }
    // SAFETY: the kernel gives the handler of SIGSYS a valid structure, of which this is a prefix.
    unsafe { (*info.cast::<Refused>()).call }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_violation_is_described_by_name_and_number() {
        let said = |call| {
            let line = Line::of(call);
            String::from_utf8(line.bytes[..line.length].to_vec()).unwrap()
        };

        assert_eq!(said(101), "its VMM was killed by the filter: system call ptrace (101)\n");
        assert!(said(0x4000_0065).ends_with("system call unknown (1073741925)\n"));
        assert!(said(-1).ends_with("system call unknown (4294967295)\n"));
    }
}
