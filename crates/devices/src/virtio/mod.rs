//! What every virtio device shares.
//!
//! A device implements [`VirtioDevice`]; [`mmio::Mmio`] gives it registers and
//! queues.  The split follows the specification: a device knows its features,
//! its configuration space and what a buffer means, never where its registers
//! are or how an interrupt is raised.

pub mod block;
mod chain;
pub mod mmio;
pub mod net;
pub mod rng;
pub mod vsock;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::Queue;
use vm_memory::GuestMemory;

pub use chain::PASS_CHAINS_MAX;

/// Longest queue any device offers, in descriptors.
pub const QUEUE_SIZE_MAX: u16 = 256;

/// Features every device offers: the current interface, and event indexes,
/// which spare most notifications in both directions.
pub const TRANSPORT_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX;

/// A device behind a virtio transport.
pub trait VirtioDevice {
    /// Its type in the specification's list (2 is a block device).
    fn device_type(&self) -> u32;

    /// Every feature bit offered, those of the transport included.
    fn device_features(&self) -> u64;

    /// The largest size of each queue, a power of two up to [`QUEUE_SIZE_MAX`].
    fn queue_max_sizes(&self) -> &'static [u16];

    /// Guest load from the configuration space.  Fills all of `data`; what
    /// lies outside reads as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Guest store to the configuration space.
    fn write_config(&mut self, offset: u64, data: &[u8]);

    /// Forget everything the driver did.
    fn reset(&mut self);

    /// Serve queue `index`, because the guest rang or the host has news.
    ///
    /// # Errors
    ///
    /// [`Broken`] if the rings themselves are unusable: the device then needs
    /// a reset.  A bad buffer is not an error; it is answered and counted.
    fn process<M: GuestMemory>(
        &mut self,
        memory: &M,
        queues: &mut [Queue],
        index: usize,
    ) -> Result<Progress, Broken>;

    /// Guest accesses and requests dropped or refused so far.
    fn rejected(&self) -> u64;
}

/// What one pass over a queue came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The used ring advanced and the guest wants to hear of it.
    pub interrupt: bool,
    /// The pass ended at its limit with buffers left: call again.
    pub unfinished: bool,
}

impl Progress {
    /// What two passes came to together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            interrupt: self.interrupt || other.interrupt,
            unfinished: self.unfinished || other.unfinished,
        }
    }
}

/// The guest has put a queue's rings where they cannot be, or filled them with
/// indexes that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// Copies the part of `space` at `offset` into `data`; zeros beyond its end.
fn read_space(space: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let rest = usize::try_from(offset).ok().and_then(|start| space.get(start..)).unwrap_or(&[]);
    let length = rest.len().min(data.len());
    data[..length].copy_from_slice(&rest[..length]);
}

#[cfg(test)]
mod testing;
