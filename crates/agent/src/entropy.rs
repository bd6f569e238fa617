//! Fresh randomness for the kernel of a forked guest.
//!
//! Almost all `unsafe` of this crate: two ioctls on the kernel's pool, for which neither std nor
//! any crate has a safe call. Writing to `/dev/urandom` would mix the seed in, but neither credit
//! it nor make the kernel draw a new key from it, and until it does all siblings hand out the same
//! numbers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use forkd_proto::guest::Seed;
use forkd_proto::limits::SEED_BYTES;

/// `struct rand_pool_info` with a seed in it.
#[repr(C)]
struct PoolInfo {
    entropy_bits: i32,
    buffer_bytes: i32,
    buffer: [u8; SEED_BYTES],
}

const SEED_BYTES_I32: i32 = 64;
const _: () = assert!(SEED_BYTES_I32.unsigned_abs() as usize == SEED_BYTES);

/// The kernel's pool, opened at boot so that a fork need not look anything up.
#[derive(Debug)]
pub struct Pool(File);

impl Pool {
    /// Opens the pool.
    ///
    /// # Errors
    ///
    /// There is no `/dev/urandom`.
    pub fn open() -> io::Result<Self> {
        Ok(Self(File::options().read(true).write(true).open("/dev/urandom")?))
    }

    /// Mixes `seed` in, credits all of it, and makes the kernel draw a new key now.
    ///
    /// # Errors
    ///
    /// The kernel refused: this process has not `CAP_SYS_ADMIN`.
    pub fn reseed(&self, seed: &Seed) -> io::Result<()> {
        let info = PoolInfo {
            entropy_bits: SEED_BYTES_I32 * 8,
            buffer_bytes: SEED_BYTES_I32,
            buffer: seed.0,
        };
        ioctls::add_entropy(&self.0, &info)?;
        ioctls::reseed(&self.0)
    }
}

#[expect(unsafe_code, reason = "two ioctls without a safe wrapper anywhere; see the module's page")]
mod ioctls {
    use super::{AsRawFd, File, PoolInfo, io};

    nix::ioctl_write_ptr!(rnd_add_entropy, b'R', 0x03, [i32; 2]);
    nix::ioctl_none!(rnd_reseed_crng, b'R', 0x07);

    pub(super) fn add_entropy(pool: &File, info: &PoolInfo) -> io::Result<()> {
        // SAFETY: the descriptor is open for as long as `pool` is borrowed.  The kernel reads
        // `buffer_bytes` bytes behind the two integers; `PoolInfo` is `repr(C)`, has exactly that
        // many there, and is borrowed until the call returns.
        unsafe { rnd_add_entropy(pool.as_raw_fd(), std::ptr::from_ref(info).cast()) }?;
        Ok(())
    }

    pub(super) fn reseed(pool: &File) -> io::Result<()> {
        // SAFETY: the descriptor is open for as long as `pool` is borrowed; the call has no
        // argument.
        unsafe { rnd_reseed_crng(pool.as_raw_fd()) }?;
        Ok(())
    }
}
