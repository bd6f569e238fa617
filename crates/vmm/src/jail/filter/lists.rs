//! Which system calls each kind of thread may make, and with which arguments.
//!
//! What the kernel takes as a pointer a filter cannot look at: `clone3` is allowed whole, and paths
//! are whatever the thread may open.  Numbers are restricted where a value that we do not use would
//! give more than one that we do.

use std::mem::size_of;

use kvm_bindings::{
    kvm_clock_data, kvm_cpuid2, kvm_debugregs, kvm_device_attr, kvm_irq_level, kvm_irqchip,
    kvm_lapic_state, kvm_mp_state, kvm_msr_list, kvm_msrs, kvm_pre_fault_memory, kvm_regs,
    kvm_sregs, kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};

use super::Role;
use crate::jail::rights;
use crate::sys::{pagemap, urgency};

/// A call, and the ways in which it may be made; with none, any way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    pub(super) call: i64,
    pub(super) ways: &'static [Way],
}

/// Tests that all have to hold, of arguments as 32-bit numbers.
pub(super) type Way = &'static [Test];

/// A test of the argument with that number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Test {
    /// It is this.
    Is(u8, u32),
    /// It is not this.
    IsNot(u8, u32),
    /// It has none of these bits.
    Lacks(u8, u32),
    /// It is at least the one and at most the other.
    Within(u8, u32, u32),
    /// It is this process's id.
    OwnPid(u8),
}

use Test::{Is, IsNot, Lacks, OwnPid, Within};

impl Role {
    /// The parts of this kind's list.
    pub(super) fn list(self) -> &'static [&'static [Allowed]] {
        match self {
            Self::Process => &[EVERY_THREAD, DEVICES, PROCESS, FILES],
            Self::Vcpu => &[EVERY_THREAD, DEVICES, VCPU],
            Self::Writer => &[EVERY_THREAD, FILES, WRITER, ENDING],
            Self::Holder => &[HOLDER],
            Self::Comparer => &[EVERY_THREAD, ENDING],
        }
    }
}

const fn any(call: i64) -> Allowed {
    Allowed { call, ways: &[] }
}

const fn only(call: i64, ways: &'static [Way]) -> Allowed {
    Allowed { call, ways }
}

const NO_CODE: &[Way] = &[&[Lacks(2, libc::PROT_EXEC.cast_unsigned())]];
const SIGNAL_ABORT: u32 = libc::SIGABRT.cast_unsigned();
/// Stops a vCPU: the first real-time signal that glibc leaves to us.
const SIGNAL_STOP: u32 = 34;
/// By which glibc has all threads become another user; what a seed forks still has threads in
/// glibc's books that only its source had.
const SIGNAL_USER: u32 = 33;
#[expect(clippy::cast_possible_truncation, reason = "there are eight")]
const SECUREBITS: u32 = rights::SECUREBITS as u32;
/// No process id of Linux is as large.
const PIDS_END: u32 = 1 << 22;

/// The allocator, locks, the clock, and reading and writing what is open.
const EVERY_THREAD: &[Allowed] = &[
    any(libc::SYS_futex),
    any(libc::SYS_read),
    any(libc::SYS_write),
    any(libc::SYS_readv),
    any(libc::SYS_writev),
    any(libc::SYS_pread64),
    any(libc::SYS_close),
    any(libc::SYS_lseek),
    any(libc::SYS_fstat),
    any(libc::SYS_newfstatat),
    any(libc::SYS_statx),
    any(libc::SYS_brk),
    only(libc::SYS_mmap, NO_CODE),
    only(libc::SYS_mprotect, NO_CODE),
    any(libc::SYS_mremap),
    any(libc::SYS_munmap),
    only(libc::SYS_madvise, ADVICE),
    any(libc::SYS_clock_gettime),
    any(libc::SYS_getrandom),
    any(libc::SYS_getpid),
    any(libc::SYS_gettid),
    any(libc::SYS_rt_sigprocmask),
    any(libc::SYS_rt_sigreturn),
    any(libc::SYS_sigaltstack),
    any(libc::SYS_sched_yield),
    any(libc::SYS_restart_syscall),
    any(libc::SYS_exit),
    any(libc::SYS_exit_group),
];

const ADVICE: &[Way] = &[
    &[Is(2, libc::MADV_DONTNEED.cast_unsigned())],
    &[Is(2, libc::MADV_POPULATE_WRITE.cast_unsigned())],
    &[Is(2, libc::MADV_HUGEPAGE.cast_unsigned())],
    &[Is(2, libc::MADV_DONTFORK.cast_unsigned())],
    &[Is(2, libc::MADV_FREE.cast_unsigned())],
];

/// What serving a guest's devices takes: its disk's top, its console, the sockets of its vsock.
const DEVICES: &[Allowed] = &[
    any(libc::SYS_openat),
    any(libc::SYS_pwrite64),
    any(libc::SYS_preadv),
    any(libc::SYS_pwritev),
    any(libc::SYS_ftruncate),
    any(libc::SYS_fallocate),
    any(libc::SYS_fdatasync),
    any(libc::SYS_fstatfs),
    any(libc::SYS_rename),
    any(libc::SYS_unlink),
    only(libc::SYS_fcntl, FILE_COMMANDS),
    only(libc::SYS_socket, &[&[Is(0, libc::AF_UNIX.cast_unsigned())]]),
    any(libc::SYS_connect),
    any(libc::SYS_accept4),
    any(libc::SYS_recvfrom),
    any(libc::SYS_sendto),
    any(libc::SYS_shutdown),
    any(libc::SYS_epoll_ctl),
    any(libc::SYS_sched_getscheduler),
    // A thread goes on after a pause as one like all others, and makes itself nothing else.
    only(libc::SYS_sched_setscheduler, &[&[Is(1, urgency::CALM.cast_unsigned())]]),
];

/// Besides [`DEVICES`], a vCPU's thread only runs the guest, and reads and writes its vCPU.
const VCPU: &[Allowed] = &[
    only(libc::SYS_ioctl, VCPU_REQUESTS),
    only(libc::SYS_tgkill, &[&[OwnPid(0), Is(2, SIGNAL_ABORT)]]),
];

/// What a process does before and besides serving devices: load, fork, listen, watch.
const PROCESS: &[Allowed] = &[
    only(libc::SYS_ioctl, PROCESS_REQUESTS),
    any(libc::SYS_epoll_create1),
    any(libc::SYS_epoll_wait),
    any(libc::SYS_epoll_pwait),
    any(libc::SYS_poll),
    any(libc::SYS_ppoll),
    any(libc::SYS_eventfd2),
    any(libc::SYS_pipe2),
    any(libc::SYS_signalfd4),
    only(libc::SYS_socketpair, &[&[Is(0, libc::AF_UNIX.cast_unsigned())]]),
    any(libc::SYS_bind),
    any(libc::SYS_listen),
    only(libc::SYS_getsockopt, &[&[Is(1, libc::SOL_SOCKET.cast_unsigned())]]),
    only(libc::SYS_setsockopt, &[&[Is(1, libc::SOL_SOCKET.cast_unsigned())]]),
    any(libc::SYS_recvmsg),
    // A child passes its page map on.
    any(libc::SYS_sendmsg),
    any(libc::SYS_memfd_create),
    any(libc::SYS_close_range),
    any(libc::SYS_clone3),
    only(libc::SYS_clone, WITHOUT_CLONE3),
    any(libc::SYS_set_robust_list),
    any(libc::SYS_rseq),
    any(libc::SYS_sched_getaffinity),
    any(libc::SYS_wait4),
    any(libc::SYS_waitid),
    any(libc::SYS_setsid),
    any(libc::SYS_getppid),
    any(libc::SYS_geteuid),
    only(libc::SYS_prlimit64, &[&[Is(0, 0)]]),
    only(libc::SYS_kill, &[&[Within(0, 2, PIDS_END), Is(1, libc::SIGKILL.cast_unsigned())]]),
    only(libc::SYS_tgkill, &[&[Is(2, SIGNAL_STOP)], &[Is(2, SIGNAL_ABORT)], &[Is(2, SIGNAL_USER)]]),
    // The handler that names violations stays.
    only(libc::SYS_rt_sigaction, &[&[IsNot(0, libc::SIGSYS.cast_unsigned())]]),
    // A child becomes a user of its own, which is not root.
    only(libc::SYS_setresgid, &[&[NOT_ROOT[0], NOT_ROOT[1], NOT_ROOT[2]]]),
    only(libc::SYS_setresuid, &[&[NOT_ROOT[0], NOT_ROOT[1], NOT_ROOT[2]]]),
    any(libc::SYS_capset),
    // A seed enters the namespace in which its siblings become others.
    only(libc::SYS_setns, &[&[Is(1, libc::CLONE_NEWUSER.cast_unsigned())]]),
    only(libc::SYS_prctl, PROCESS_CONTROLS),
    only(libc::SYS_seccomp, &[&[Is(0, libc::SECCOMP_SET_MODE_FILTER)]]),
];

/// Also keeps any of them from staying what it is, which `u32::MAX` would say.
const NOT_ROOT: [Test; 3] =
    [Within(0, 1, u32::MAX - 1), Within(1, 1, u32::MAX - 1), Within(2, 1, u32::MAX - 1)];

/// Where a container's seccomp profile hides `clone3`: a fork, and a thread as glibc makes one.
const WITHOUT_CLONE3: &[Way] =
    &[&[Is(0, libc::SIGCHLD.cast_unsigned())], &[Is(0, THREAD.cast_unsigned())]];
const THREAD: libc::c_int = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

const PROCESS_CONTROLS: &[Way] = &[
    &[Is(0, libc::PR_GET_DUMPABLE.cast_unsigned())],
    &[Is(0, libc::PR_SET_DUMPABLE.cast_unsigned())],
    &[Is(0, libc::PR_SET_NAME.cast_unsigned())],
    &[Is(0, libc::PR_SET_PDEATHSIG.cast_unsigned())],
    &[Is(0, libc::PR_SET_NO_NEW_PRIVS.cast_unsigned())],
    // A child takes a core of its own: pid 0 is itself.
    &[Is(0, libc::PR_SCHED_CORE.cast_unsigned()), Is(1, CREATE_COOKIE), Is(2, 0)],
    // What gives rights up.
    &[Is(0, libc::PR_CAPBSET_READ.cast_unsigned())],
    &[Is(0, libc::PR_CAPBSET_DROP.cast_unsigned())],
    &[Is(0, libc::PR_SET_SECUREBITS.cast_unsigned()), Is(1, SECUREBITS)],
];

const CREATE_COOKIE: u32 = libc::PR_SCHED_CORE_CREATE.cast_unsigned();

const FILE_COMMANDS: &[Way] = &[
    &[Is(1, libc::F_GETFL.cast_unsigned())],
    &[Is(1, libc::F_SETFL.cast_unsigned())],
    &[Is(1, libc::F_GETFD.cast_unsigned())],
    &[Is(1, libc::F_SETFD.cast_unsigned())],
    &[Is(1, libc::F_DUPFD_CLOEXEC.cast_unsigned())],
    &[Is(1, libc::F_ADD_SEALS.cast_unsigned())],
    &[Is(1, libc::F_GET_SEALS.cast_unsigned())],
];

/// Asking where a process's pages are.
const SCAN: Way = &[Is(1, pagemap::PAGEMAP_SCAN)];

/// Reading and writing the files of snapshots.
const FILES: &[Allowed] = &[
    any(libc::SYS_openat),
    any(libc::SYS_pwrite64),
    any(libc::SYS_ftruncate),
    any(libc::SYS_fsync),
    any(libc::SYS_fdatasync),
    any(libc::SYS_getdents64),
    any(libc::SYS_rename),
    any(libc::SYS_unlink),
    only(libc::SYS_fcntl, FILE_COMMANDS),
];

/// It looks for what its zygote, or its machine, has written.
const WRITER: &[Allowed] = &[only(libc::SYS_ioctl, &[SCAN])];

/// A thread that ends its process by `abort` says so by a signal to itself.
const ENDING: &[Allowed] = &[only(libc::SYS_tgkill, &[&[OwnPid(0), Is(2, SIGNAL_ABORT)]])];

/// A seed that only holds memory waits for its children.
const HOLDER: &[Allowed] = &[
    // The allocator gives back what making the filter took.
    any(libc::SYS_brk),
    any(libc::SYS_munmap),
    any(libc::SYS_wait4),
    any(libc::SYS_restart_syscall),
    any(libc::SYS_rt_sigreturn),
    any(libc::SYS_exit_group),
];

const VCPU_REQUESTS: &[Way] = &[
    // First, since the kernel compares in this order.
    &[Is(1, KVM_RUN)],
    &[Is(1, iow::<kvm_irq_level>(0x61))],
    &[Is(1, FIONBIO)],
    &[Is(1, ior::<kvm_regs>(0x81))],
    &[Is(1, iow::<kvm_regs>(0x82))],
    &[Is(1, ior::<kvm_sregs>(0x83))],
    &[Is(1, iow::<kvm_sregs>(0x84))],
    &[Is(1, iowr::<kvm_msrs>(0x88))],
    &[Is(1, iow::<kvm_msrs>(0x89))],
    &[Is(1, ior::<kvm_lapic_state>(0x8e))],
    &[Is(1, iow::<kvm_lapic_state>(0x8f))],
    &[Is(1, iowr::<kvm_cpuid2>(0x91))],
    &[Is(1, ior::<kvm_mp_state>(0x98))],
    &[Is(1, iow::<kvm_mp_state>(0x99))],
    &[Is(1, ior::<kvm_vcpu_events>(0x9f))],
    &[Is(1, iow::<kvm_vcpu_events>(0xa0))],
    &[Is(1, ior::<kvm_debugregs>(0xa1))],
    &[Is(1, iow::<kvm_debugregs>(0xa2))],
    &[Is(1, io(0xa3))], // KVM_GET_TSC_KHZ
    &[Is(1, ior::<kvm_xsave>(0xa4))],
    &[Is(1, iow::<kvm_xsave>(0xa5))],
    &[Is(1, ior::<kvm_xcrs>(0xa6))],
    &[Is(1, iow::<kvm_xcrs>(0xa7))],
    &[Is(1, io(0xad))], // KVM_KVMCLOCK_CTRL
    // Of vCPUs it is their TSC's offset; of what else we have open there is nothing to get or set.
    &[Is(1, iow::<kvm_device_attr>(0xe1))],
    &[Is(1, iow::<kvm_device_attr>(0xe2))],
    SCAN,
];

/// Those of its own, and all of [`VCPU_REQUESTS`]: a thread's filter adds to its process's.
const PROCESS_REQUESTS: &[Way] = &join::<{ VCPU_REQUESTS.len() + OWN_REQUESTS.len() }>();

const OWN_REQUESTS: &[Way] = &[
    &[Is(1, TUNSETIFF)],
    &[Is(1, io(0x00))], // KVM_GET_API_VERSION
    &[Is(1, io(0x01))], // KVM_CREATE_VM
    &[Is(1, iowr::<kvm_msr_list>(0x02))],
    &[Is(1, io(0x03))], // KVM_CHECK_EXTENSION
    &[Is(1, io(0x04))], // KVM_GET_VCPU_MMAP_SIZE
    &[Is(1, iowr::<kvm_cpuid2>(0x05))],
    &[Is(1, io(0x41))], // KVM_CREATE_VCPU
    &[Is(1, iow::<kvm_userspace_memory_region>(0x46))],
    &[Is(1, io(0x47))],         // KVM_SET_TSS_ADDR
    &[Is(1, iow::<u64>(0x48))], // KVM_SET_IDENTITY_MAP_ADDR
    &[Is(1, io(0x60))],         // KVM_CREATE_IRQCHIP
    &[Is(1, iowr::<kvm_irqchip>(0x62))],
    &[Is(1, ior::<kvm_irqchip>(0x63))], // which is KVM_SET_IRQCHIP
    &[Is(1, iow::<kvm_clock_data>(0x7b))],
    &[Is(1, ior::<kvm_clock_data>(0x7c))],
    &[Is(1, iow::<kvm_cpuid2>(0x90))],
    &[Is(1, io(0xa2))], // KVM_SET_TSC_KHZ
    &[Is(1, iowr::<kvm_pre_fault_memory>(0xd5))],
];

const fn join<const COUNT: usize>() -> [Way; COUNT] {
    let mut all = [VCPU_REQUESTS[0]; COUNT];
    let mut at = 0;
    while at < COUNT {
        all[at] = if at < VCPU_REQUESTS.len() {
            VCPU_REQUESTS[at]
        } else {
            OWN_REQUESTS[at - VCPU_REQUESTS.len()]
        };
        at += 1;
    }
    all
}

const KVM_RUN: u32 = io(0x80);
const FIONBIO: u32 = 0x5421;
const TUNSETIFF: u32 = 0x4004_54ca;

/// A request of KVM's that passes nothing by pointer.
const fn io(number: u32) -> u32 {
    request(0, number, 0)
}

/// One by which KVM reads a `T`.
const fn iow<T>(number: u32) -> u32 {
    request(1, number, size_of::<T>())
}

/// One by which KVM writes a `T`.
const fn ior<T>(number: u32) -> u32 {
    request(2, number, size_of::<T>())
}

/// One by which it does both.
const fn iowr<T>(number: u32) -> u32 {
    request(3, number, size_of::<T>())
}

/// As `include/uapi/asm-generic/ioctl.h` puts them together.
const fn request(way: u32, number: u32, bytes: usize) -> u32 {
    assert!(bytes < 1 << 14);
    #[expect(clippy::cast_possible_truncation, reason = "it is below 2^14")]
    let bytes = bytes as u32;
    way << 30 | bytes << 16 | 0xae << 8 | number
}
