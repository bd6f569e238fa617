//! Serving a device's queues on the thread that rang, for a bounded time.

use forkd_devices::virtio::VirtioDevice;
use forkd_devices::virtio::mmio::{Effect, Mmio};
use vm_memory::GuestMemoryMmap;

/// Passes over one queue for one ring: a guest that refills its queue faster than it is emptied
/// must not keep the thread for ever.  What is left is served by the I/O thread, in
/// [`Bus::serve_rest`](super::bus::Bus::serve_rest); the guest would not ring for it again.
pub const PASSES_MAX: usize = 64;

/// Writes a register, and serves what that asks for.  Returns whether an interrupt is due.
pub fn write_and_serve<D: VirtioDevice>(
    device: &mut Mmio<D>,
    memory: &GuestMemoryMmap,
    offset: u64,
    data: &[u8],
) -> bool {
    match device.write(offset, data) {
        Effect::Notify(queue) => serve(device, memory, queue),
        _ => false,
    }
}

/// Serves a queue until it is empty, or until this thread has done its share.  Returns whether an
/// interrupt is due.
pub fn serve<D: VirtioDevice>(
    device: &mut Mmio<D>,
    memory: &GuestMemoryMmap,
    queue: usize,
) -> bool {
    let mut interrupt = false;
    for _ in 0..PASSES_MAX {
        interrupt |= device.process(memory, queue);
        if !device.is_unfinished(queue) {
            break;
        }
    }
    interrupt
}

/// As [`serve`], each of the first `queues` queues.
pub fn serve_all<D: VirtioDevice>(
    device: &mut Mmio<D>,
    memory: &GuestMemoryMmap,
    queues: usize,
) -> bool {
    (0..queues).fold(false, |interrupt, queue| interrupt | serve(device, memory, queue))
}
