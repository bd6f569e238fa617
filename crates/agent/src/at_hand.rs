//! Whether a program starts without waiting for a disk or a server.
//!
//! The poll loop waits until a process that it starts has become its program.  So it starts
//! only what the kernel has in memory: the folders on the way, the first page of the program and
//! that of its loader.  File systems without a block device (FUSE, NFS) may ask somebody even for
//! what they have, and are never taken.

use std::ffi::OsStr;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::spawn::{EXECUTABLE, candidates};

/// How much of a program is looked at; the kernel reads no less.
const PAGE: usize = 4096;

const PT_INTERP: u64 = 3;

/// How many loaders of loaders are looked at; the kernel gives up there, too.
const LOADERS_MAX: usize = 5;

/// Whether `program` starts at once in `cwd`, or cannot start for a reason that is known at once.
pub fn starts(program: &OsStr, search: &OsStr, cwd: &Path) -> bool {
    match look_up(cwd) {
        Found::Here(mode) if FileType::from_raw_mode(mode) == FileType::Directory => {}
        Found::Here(_) | Found::Nothing => return true,
        Found::Unknown => return false,
    }
    for path in candidates(program, search, cwd) {
        match look_up(&path) {
            Found::Here(mode) if is_program(mode) => return loads(&path),
            Found::Here(_) | Found::Nothing => {}
            Found::Unknown => return false,
        }
    }
    true
}

/// What memory knows of a path.
enum Found {
    /// Something on a block device, with its type and permissions.
    Here(u32),
    /// That there is nothing, or nothing for us.
    Nothing,
    /// Too little.
    Unknown,
}

fn look_up(path: &Path) -> Found {
    let found = open(path, OFlags::PATH).and_then(|file| {
        let wanted = StatxFlags::TYPE | StatxFlags::MODE;
        statx(&file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, wanted)
    });
    match found {
        Ok(found) if found.stx_dev_major == 0 => Found::Unknown,
        Ok(found) => Found::Here(found.stx_mode.into()),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP | Errno::NAMETOOLONG) => {
            Found::Nothing
        }
        Err(_) => Found::Unknown,
    }
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    openat2(CWD, path, flags | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::CACHED)
}

fn is_program(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::RegularFile && mode & EXECUTABLE != 0
}

/// Whether all is in memory that the kernel reads before the program has a memory of its own.
fn loads(path: &Path) -> bool {
    let mut path = path.to_owned();
    for _ in 0..LOADERS_MAX {
        let mut page = [0; PAGE];
        let Some(header) = first_page(&path, &mut page) else { return false };
        match loader(header) {
            Loader::None => return true,
            Loader::At(loader) if matches!(look_up(loader), Found::Here(_)) => {
                path = loader.to_owned();
            }
            Loader::At(_) | Loader::Unknown => return false,
        }
    }
    true
}

fn first_page<'a>(path: &Path, page: &'a mut [u8]) -> Option<&'a [u8]> {
    let file = open(path, OFlags::RDONLY | OFlags::NOCTTY | OFlags::NONBLOCK).ok()?;
    let count = preadv2(&file, &mut [IoSliceMut::new(page)], 0, ReadWriteFlags::NOWAIT).ok()?;
    page.get(..count)
}

/// What a program needs to be loaded.
enum Loader<'a> {
    /// Nothing; or the kernel refuses to load it.
    None,
    At(&'a Path),
    /// Something that its first page does not say.
    Unknown,
}

fn loader(header: &[u8]) -> Loader<'_> {
    if let Some(line) = header.strip_prefix(b"#!") {
        let mut words = line.split(|byte| b" \t\n".contains(byte)).filter(|word| !word.is_empty());
        return words.next().map_or(Loader::None, at);
    }
    // 64 bits, the lower ones first.
    if header.starts_with(b"\x7fELF\x02\x01") {
        return interpreter(header).unwrap_or(Loader::Unknown);
    }
    Loader::None
}

fn at(path: &[u8]) -> Loader<'_> {
    let path = Path::new(OsStr::from_bytes(path));
    if path.is_absolute() { Loader::At(path) } else { Loader::Unknown }
}

/// What an ELF file names; `None` past the page.
fn interpreter(header: &[u8]) -> Option<Loader<'_>> {
    let number = |at: u64, size: usize| -> Option<u64> {
        let start = usize::try_from(at).ok()?;
        let bytes = header.get(start..start.checked_add(size)?)?;
        let mut value = [0; 8];
        value.get_mut(..size)?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(value))
    };
    let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        let entry = start.checked_add(index.checked_mul(size)?)?;
        if number(entry, 4)? == PT_INTERP {
            let offset = usize::try_from(number(entry.checked_add(8)?, 8)?).ok()?;
            let length = usize::try_from(number(entry.checked_add(32)?, 8)?).ok()?;
            let path = header.get(offset..offset.checked_add(length)?)?;
            return path.strip_suffix(b"\0").map(at);
        }
    }
    Some(Loader::None)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;

    use super::*;

    fn starts_in_root(program: &str) -> bool {
        starts(program.as_ref(), "/no/such/folder:/bin".as_ref(), Path::new("/"))
    }

    #[test]
    fn what_has_just_run_starts_at_once_and_so_does_an_error() {
        let on_a_device = |path| rustix::fs::major(fs::metadata(path).unwrap().dev()) != 0;
        for program in ["sh", "/bin/sh"] {
            Command::new(program).args(["-c", ":"]).status().unwrap();
            assert_eq!(starts_in_root(program), on_a_device("/bin/sh"), "{program}");
        }
        let missing = "/no-such-program";
        drop(fs::metadata(missing));
        assert_eq!(starts_in_root(missing), on_a_device("/"));
    }

    #[test]
    fn without_a_block_device_nothing_is_at_hand() {
        drop(fs::metadata("/proc/self/exe"));
        assert!(!starts_in_root("/proc/self/status"));
        assert!(!starts("sh".as_ref(), "/bin".as_ref(), Path::new("/proc")));
    }

    #[test]
    fn a_loader_is_found_in_a_header_of_any_bytes() {
        let mut header = vec![0; PAGE];
        header[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let says = |header: &[u8]| match loader(header) {
            Loader::None => "none".to_owned(),
            Loader::At(path) => path.display().to_string(),
            Loader::Unknown => "unknown".to_owned(),
        };
        assert_eq!(says(b"#!/bin/sh\n"), "/bin/sh");
        assert_eq!(says(b"#! \t/usr/bin/env python3\n"), "/usr/bin/env");
        assert_eq!(says(b"#!bin/sh"), "unknown", "relative");
        assert_eq!((says(b"#!").as_str(), says(b"text").as_str()), ("none", "none"));
        assert_eq!(says(b"\x7fELF\x02\x01"), "unknown", "cut");
        assert_eq!(says(&header), "none");
        header[32] = 64;
        header[54] = 56;
        header[56] = 2;
        header[120] = 3;
        header[128..130].copy_from_slice(&[0, 4]);
        header[152] = 4;
        header[1024..1028].copy_from_slice(b"/ld\0");
        assert_eq!(says(&header), "/ld");
        assert_eq!(says(&header[..1027]), "unknown", "past the page");
        header[152] = 3;
        assert_eq!(says(&header), "unknown", "no end");
        header[32..40].fill(0xff);
        assert_eq!(says(&header), "unknown", "entries past all memory");
    }
}
