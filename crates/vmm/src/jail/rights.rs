//! Users, groups and capabilities of a jailed process (capabilities(7), credentials(7)).

use std::fs::File;
use std::path::Path;

use crate::error::Error;
use crate::sys::process;

const CAP_CHOWN: u32 = 0;
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_DAC_READ_SEARCH: u32 = 2;
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
const CAP_KILL: u32 = 5;
const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;
const CAP_SETPCAP: u32 = 8;
const CAP_SYS_CHROOT: u32 = 18;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SETFCAP: u32 = 31;
/// One past the last that a kernel may know.
const CAPABILITIES: u32 = 64;

/// What a zygote keeps in the user namespace of its children, and a seed in that of its siblings:
/// to have them become others, to tidy their folders and to end them.
const OF_KEEPERS: [u32; 4] = [CAP_DAC_OVERRIDE, CAP_KILL, CAP_SETGID, CAP_SETUID];

/// What root of a builder's user namespace keeps, over what is in that namespace: files of any
/// owner, other users, chroot, and mounts.
const OF_BUILDERS: [u32; 12] = [
    CAP_CHOWN,
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    CAP_FOWNER,
    CAP_FSETID,
    CAP_KILL,
    CAP_SETGID,
    CAP_SETUID,
    CAP_SETPCAP,
    CAP_SYS_CHROOT,
    CAP_SYS_ADMIN,
    CAP_SETFCAP,
];
/// How many user namespaces may be made in this one.
const USER_NAMESPACES: &str = "/proc/sys/user/max_user_namespaces";

/// `linux/securebits.h`: root is nobody special, changing users changes no capabilities, and all of
/// it stays so.
pub(super) const SECUREBITS: libc::c_ulong = 0b1110_1111;
/// Of these, the one by which who becomes another user keeps its rights.
const KEEPING: libc::c_ulong = 0b0100;
/// `linux/capability.h`.
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

/// Real-time priorities that a machine may give its threads: none.  What the daemon gives them
/// while the guest is paused ([`crate::sys::urgency`]) they have for so long, in microseconds of
/// processor time, before the machine is ended.
const URGENT_PRIORITY_MAX: u64 = 0;
const URGENT_MAX_US: u64 = 2_000_000;

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Gives up, for this process and all that it forks, ever getting rights again, and all groups but
/// `group`.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn give_up(group: u32) -> Result<(), Error> {
    share(group, None)?;
    give_up_ways()
}

/// Gives up all groups but `group`, for this process and all that it forks, and `own`, for as long
/// as it becomes no other user.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn share(group: u32, own: Option<u32>) -> Result<(), Error> {
    limit_urgency()?;
    // SAFETY: one group, whose number outlives the call.
    if unsafe { libc::setgroups(1, &raw const group) } < 0 {
        return Err(Error::last_os("give up groups"));
    }
    become_gid(own.unwrap_or(group))
}

/// Gives up ever getting rights again, and all that there are; groups stay, as a user without
/// privileges may not leave them.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn give_up_all() -> Result<(), Error> {
    limit_urgency()?;
    give_up_ways()?;
    keep(&[])
}

/// Before the rights go that raising a limit takes.
fn limit_urgency() -> Result<(), Error> {
    limit(libc::RLIMIT_RTPRIO, URGENT_PRIORITY_MAX)?;
    limit(libc::RLIMIT_RTTIME, URGENT_MAX_US)
}

/// Gives up every way to rights that this process does not have, for it and all that it forks.
pub(super) fn give_up_ways() -> Result<(), Error> {
    (0..CAPABILITIES).try_for_each(drop_for_good)?;
    set(
        libc::PR_CAP_AMBIENT,
        libc::PR_CAP_AMBIENT_CLEAR_ALL.cast_unsigned().into(),
        "clear ambient capabilities",
    )?;
    set(libc::PR_SET_SECUREBITS, SECUREBITS, "lock the securebits")?;
    set(libc::PR_SET_NO_NEW_PRIVS, 1, "give up new privileges")?;
    hide()
}

/// Keeps these capabilities and no others.
///
/// # Errors
///
/// [`Error::Io`].
pub fn keep(capabilities: &[u32]) -> Result<(), Error> {
    let header = Header { version: CAPABILITY_VERSION_3, pid: 0 };
    let mut data = [Data::default(); 2];
    for capability in capabilities {
        let word = &mut data[usize::from(*capability >= 32)];
        word.effective |= 1 << (capability % 32);
        word.permitted |= 1 << (capability % 32);
    }
    // SAFETY: version 3 takes a header and two structures, which outlive the call.
    let done = unsafe {
        libc::syscall(libc::SYS_capset, &raw const header, (&raw const data).cast::<Data>())
    };
    if done < 0 { Err(Error::last_os("give up capabilities")) } else { Ok(()) }
}

/// Becomes the user `uid`, in the group of that number, without any capability.
///
/// Who is that user already, without a right to become another, stays as it is.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn become_user(uid: u32) -> Result<(), Error> {
    become_gid(uid)?;
    become_uid(uid)?;
    keep(&[])?;
    hide()
}

/// Gives up, in a user namespace that was just entered with every right there is in it, all but
/// what having children become others takes.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn become_keeper() -> Result<(), Error> {
    (0..CAPABILITIES).try_for_each(drop_for_good)?;
    set(libc::PR_SET_SECUREBITS, SECUREBITS, "lock the securebits")?;
    keep(&OF_KEEPERS)?;
    hide()
}

/// Becomes the user `uid`, in the group of that number and no other, with the rights of before, so
/// that a namespace is that user's.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn become_owner(uid: u32) -> Result<(), Error> {
    set(libc::PR_SET_SECUREBITS, KEEPING, "keep rights")?;
    become_ids(uid, uid)
}

/// Becomes the user `uid` of a user namespace that was just entered, and keeps every right that
/// there is in it.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn become_uid(uid: u32) -> Result<(), Error> {
    // SAFETY: changes numbers of this process, which has one thread; no pointers.
    if unsafe { libc::setresuid(uid, uid, uid) } < 0 {
        return Err(Error::last_os(format!("become user {uid}")));
    }
    Ok(())
}

/// Becomes root of the user namespace that this process is in, with the rights that installing
/// packages takes and no way to others.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn become_root_inside() -> Result<(), Error> {
    become_ids(0, 0)?;
    std::fs::write(USER_NAMESPACES, "0").map_err(Error::io("allow no user namespaces"))?;
    for capability in (0..CAPABILITIES).filter(|each| !OF_BUILDERS.contains(each)) {
        drop_for_good(capability)?;
    }
    set(libc::PR_SET_NO_NEW_PRIVS, 1, "give up new privileges")
}

/// Becomes the user `uid`, in the group of that number and no other, for good and without rights.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn become_inmate(uid: u32) -> Result<(), Error> {
    (0..CAPABILITIES).try_for_each(drop_for_good)?;
    become_ids(uid, uid)?;
    keep(&[])?;
    set(libc::PR_SET_NO_NEW_PRIVS, 1, "give up new privileges")
}

fn become_ids(uid: u32, gid: u32) -> Result<(), Error> {
    // SAFETY: an empty list needs no memory.
    if unsafe { libc::setgroups(0, std::ptr::null()) } < 0 {
        return Err(Error::last_os("give up groups"));
    }
    become_gid(gid)?;
    become_uid(uid)
}

fn become_gid(gid: u32) -> Result<(), Error> {
    // SAFETY: changes numbers of this process, which has one thread; no pointers.
    if unsafe { libc::setresgid(gid, gid, gid) } < 0 {
        return Err(Error::last_os(format!("become group {gid}")));
    }
    Ok(())
}

fn drop_for_good(capability: u32) -> Result<(), Error> {
    let read = prctl(libc::PR_CAPBSET_READ, capability.into());
    if read == 1 && prctl(libc::PR_CAPBSET_DROP, capability.into()) < 0 {
        return Err(Error::last_os(format!("give up capability {capability} for good")));
    }
    Ok(())
}

/// Whether other processes, and this one by way of `/proc`, are kept from looking into this one.
#[must_use]
pub fn is_hidden() -> bool {
    process::own_uid() != 0 && prctl(libc::PR_GET_DUMPABLE, 0) == 0
}

/// Opens a file of this process's folder in `/proc`.
///
/// Those of a process that is hidden are root's, so it shows itself as long as that takes: to
/// processes of the same user, of which there is none but itself, or its like.  To be called while
/// there is one thread.
///
/// # Errors
///
/// [`Error::Io`] naming it.
pub fn open_own(path: &Path) -> Result<File, Error> {
    let hidden = is_hidden();
    if hidden {
        set(libc::PR_SET_DUMPABLE, 1, "show ourselves")?;
    }
    let file = File::open(path);
    if hidden {
        hide()?;
    }
    file.map_err(Error::io(format!("open {}", path.display())))
}

fn hide() -> Result<(), Error> {
    set(libc::PR_SET_DUMPABLE, 0, "hide from other processes")
}

pub(super) fn set(what: libc::c_int, value: libc::c_ulong, name: &str) -> Result<(), Error> {
    if prctl(what, value) < 0 { Err(Error::last_os(name)) } else { Ok(()) }
}

pub(super) fn prctl(what: libc::c_int, value: libc::c_ulong) -> libc::c_int {
    // SAFETY: those used here take numbers only.
    unsafe { libc::prctl(what, value, 0, 0, 0) }
}

/// Sets a limit to `most`; one that is lower, and that we may not raise, stays.
fn limit(what: libc::__rlimit_resource_t, most: u64) -> Result<(), Error> {
    let mut limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: `limit` is a valid structure that outlives the call.
    if unsafe { libc::setrlimit(what, &raw const limit) } == 0 {
        return Ok(());
    }
    let refused = Error::last_os("limit real-time priorities");
    // SAFETY: as above.
    let known = unsafe { libc::getrlimit(what, &raw mut limit) } == 0;
    if known && limit.rlim_max <= most { Ok(()) } else { Err(refused) }
}
