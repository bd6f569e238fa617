//! The host's entropy, for the guest's entropy device.

use std::io;

use forkd_devices::virtio::rng::Entropy;

/// `getrandom(2)`.
#[derive(Clone, Copy, Debug)]
pub struct KernelEntropy;

impl Entropy for KernelEntropy {
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        crate::sys::process::random(buffer)
    }
}
