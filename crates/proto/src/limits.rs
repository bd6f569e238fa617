//! Every limit of the two protocols, once, with its reason.

/// Bytes before the payload of each frame.
pub const FRAME_HEADER_BYTES: usize = 8;

/// Largest payload of one frame, in bytes: what a peer must be ready to hold for one connection.
pub const FRAME_PAYLOAD_MAX: u32 = 1 << 20;

/// vsock port on which the agent listens.
pub const AGENT_PORT: u32 = 1024;

/// vsock port of the host (CID 2) to which the agent reports that it is ready.
pub const HOST_PORT: u32 = 1025;

/// Most entries in the answer to `list_dir`; more is an error, not a silent cut.
pub const ENTRIES_MAX: usize = 10_000;

/// Most evaluations waiting for the runtime; the next one is told `busy` rather than left hanging.
pub const EVAL_QUEUE_MAX: usize = 16;

/// Longest name of a runtime, in bytes.
pub const RUNTIME_NAME_MAX: usize = 32;

/// Longest name of a context of evaluations, in bytes.
pub const EVAL_CONTEXT_MAX: usize = 63;

/// Longest `repr` of a value, in characters.
pub const REPR_MAX: usize = 65_536;

/// Largest JSON form of a value, in bytes.
pub const VALUE_MAX: usize = 262_144;

/// Most arguments of one `exec`; the kernel's own limit is on their bytes, and comes first in
/// practice.
pub const ARGS_MAX: usize = 4_096;

/// Most environment variables given with one request.
pub const ENV_MAX: usize = 4_096;

/// Longest path, in bytes: the kernel's `PATH_MAX`, with its final zero.
pub const PATH_MAX: usize = 4_095;

/// Longest host name, in bytes: the kernel's `__NEW_UTS_LEN`.
pub const HOSTNAME_MAX: usize = 64;

/// Bytes of the seed that `post_fork` carries: the kernel's pool is 256 bits, user-space generators
/// get the rest.
pub const SEED_BYTES: usize = 64;

/// Longest time that a request may ask for, in seconds: a week.
pub const TIMEOUT_MAX_S: f64 = 604_800.0;

/// Longest time that an agent watches for stalls, in seconds: it wakes up each millisecond
/// meanwhile.
pub const WATCH_MAX_S: f64 = 60.0;

/// Most children of one `fork`.
pub const CHILDREN_MAX: usize = 10_000;

/// Most vCPUs of a machine.
pub const VCPUS_MAX: u8 = 32;

/// Least memory of a machine, in bytes: what a stock kernel with its initramfs needs to boot.
pub const MEMORY_MIN_BYTES: u64 = 128 << 20;

/// Most memory of a machine, in bytes.
pub const MEMORY_MAX_BYTES: u64 = 1 << 40;

/// Memory is a multiple of this many bytes, so that huge pages can back all of it.
pub const MEMORY_ALIGN_BYTES: u64 = 2 << 20;

/// Largest disk, in bytes: the limit of ext4 with blocks of 4 KiB.
pub const DISK_MAX_BYTES: u64 = 16 << 40;

/// Longest kernel command line, in bytes: x86's `COMMAND_LINE_SIZE`, with its final zero.
pub const CMDLINE_MAX: usize = 2_047;

/// Most memory files of one chain: a base and as many deltas as a snapshot may depend on.
pub const MEMORY_FILES_MAX: usize = 65;

/// Most files that come with one request: what the kernel passes with one message.
pub const FILES_MAX: usize = 253;

/// Most folders that a jail has.
pub const JAIL_FOLDERS_MAX: usize = 16;

/// Most runs of users that a zygote's jail has: what the kernel takes for one namespace.
pub const JAIL_USERS_MAX: usize = 340;
