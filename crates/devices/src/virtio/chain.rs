//! Taking buffers off a queue, safely and within bounds.
//!
//! [`serve`] is the loop every device runs.  It hands out one [`Chain`] at a
//! time, already checked, and does the accounting: used ring, notification
//! suppression in both directions, and a limit on how long one pass may last.
//!
//! # Trust
//!
//! The guest writes descriptors while we read them.  Each is therefore read
//! once, into a [`Segment`]; its address is only used through guest memory's
//! checked accessors, at the moment of copying.

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory};

use super::{Broken, Progress};

/// Most chains served in one pass, so that a guest that refills its queue as
/// fast as we drain it cannot keep the caller from anything else, a pause say.
pub const PASS_CHAINS_MAX: usize = 64;

/// One piece of guest memory, as a descriptor names it; not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    address: GuestAddress,
    length: u32,
}

/// A buffer of the guest's: what we may read, and then what we may write.
///
/// A chain that breaks the rules (a loop, an index or table out of range, a
/// readable part after a writable one, too many descriptors) has no segments,
/// and so fails the device's own check for what it needs.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    head: u16,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

/// What became of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// It is done; this many bytes were written to it.
    Used(u32),
    /// There is nothing to put into it: leave it, and end the pass.
    Waiting,
}

/// An access outside guest memory or past the end of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault;

/// Runs `serve_one` on the available chains of `queue`.
///
/// # Errors
///
/// [`Broken`] if the rings are unusable.
pub(crate) fn serve<M: GuestMemory>(
    memory: &M,
    queue: &mut Queue,
    mut serve_one: impl FnMut(&Chain) -> Served,
) -> Result<Progress, Broken> {
    if !queue.ready() {
        return Ok(Progress::default());
    }
    if !queue.is_valid(memory) {
        return Err(Broken);
    }
    let mut chain = Chain::default();
    let mut advanced = false;
    let mut unfinished = true;
    queue.disable_notification(memory)?;
    for _ in 0..PASS_CHAINS_MAX {
        let Some(descriptors) = queue.iter(memory)?.next() else {
            // The guest may have added a chain before it saw that we wish to
            // be told; then there is no notification, and we look again.
            if queue.enable_notification(memory)? {
                continue;
            }
            unfinished = false;
            break;
        };
        chain.load(descriptors, queue.size());
        match serve_one(&chain) {
            Served::Used(bytes) => queue.add_used(memory, chain.head, bytes)?,
            Served::Waiting => {
                queue.go_to_previous_position();
                unfinished = false;
                break;
            }
        }
        advanced = true;
    }
    Ok(Progress { interrupt: advanced && wants_interrupt(memory, queue)?, unfinished })
}

/// Whether the guest asked to hear of what was just added to the used ring.
fn wants_interrupt<M: GuestMemory>(memory: &M, queue: &mut Queue) -> Result<bool, Broken> {
    if queue.event_idx_enabled() {
        return Ok(queue.needs_notification(memory)?);
    }
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    let flags: u16 = memory.read_obj(GuestAddress(queue.avail_ring())).map_err(|_| Broken)?;
    Ok(u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0)
}

impl From<virtio_queue::Error> for Broken {
    fn from(_: virtio_queue::Error) -> Self {
        Self
    }
}

impl Chain {
    fn load<M: GuestMemory>(&mut self, descriptors: DescriptorChain<&M>, queue_size: u16) {
        self.head = descriptors.head_index();
        self.readable.clear();
        self.writable.clear();
        if self.collect(descriptors, queue_size).is_err() {
            self.readable.clear();
            self.writable.clear();
        }
    }

    fn collect<M: GuestMemory>(
        &mut self,
        descriptors: DescriptorChain<&M>,
        queue_size: u16,
    ) -> Result<(), Fault> {
        let mut complete = false;
        for (count, descriptor) in descriptors.enumerate() {
            if count >= usize::from(queue_size) {
                return Err(Fault);
            }
            let segment = Segment { address: descriptor.addr(), length: descriptor.len() };
            if descriptor.is_write_only() {
                self.writable.push(segment);
            } else if self.writable.is_empty() {
                self.readable.push(segment);
            } else {
                return Err(Fault);
            }
            complete = !descriptor.has_next();
        }
        // The iterator ends quietly on a loop, a bad index or a bad table.
        if complete { Ok(()) } else { Err(Fault) }
    }

    /// The part that the guest wrote for us, from its start.
    pub(crate) fn reader(&self) -> Cursor<'_> {
        Cursor::new(&self.readable)
    }

    /// The part that the guest wants filled, from its start.
    pub(crate) fn writer(&self) -> Cursor<'_> {
        Cursor::new(&self.writable)
    }
}

/// A position within one part of a chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor<'a> {
    segments: &'a [Segment],
    // Invariant: no more than the length of the first segment.
    offset: u32,
    remaining: u64,
}

impl<'a> Cursor<'a> {
    fn new(segments: &'a [Segment]) -> Self {
        let remaining = segments.iter().map(|segment| u64::from(segment.length)).sum();
        Self { segments, offset: 0, remaining }
    }

    /// Bytes from here to the end.
    pub(crate) fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Moves on without touching guest memory.
    pub(crate) fn skip(&mut self, bytes: u64) -> Result<(), Fault> {
        self.advance(bytes, |_, _, _| Ok(()))
    }

    /// Fills `buffer` from the guest.
    pub(crate) fn read<M: GuestMemory>(
        &mut self,
        memory: &M,
        buffer: &mut [u8],
    ) -> Result<(), Fault> {
        let total = u64::try_from(buffer.len()).map_err(|_| Fault)?;
        self.advance(total, |address, start, length| {
            let piece = buffer.get_mut(start..start + length).ok_or(Fault)?;
            memory.read_slice(piece, address).map_err(|_| Fault)
        })
    }

    /// Writes `bytes` to the guest.
    pub(crate) fn write<M: GuestMemory>(&mut self, memory: &M, bytes: &[u8]) -> Result<(), Fault> {
        let total = u64::try_from(bytes.len()).map_err(|_| Fault)?;
        self.advance(total, |address, start, length| {
            let piece = bytes.get(start..start + length).ok_or(Fault)?;
            memory.write_slice(piece, address).map_err(|_| Fault)
        })
    }

    /// Walks `total` bytes, calling `visit` with each piece's address, its
    /// place in the whole walk, and its length.
    fn advance(
        &mut self,
        total: u64,
        mut visit: impl FnMut(GuestAddress, usize, usize) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        if total > self.remaining {
            return Err(Fault);
        }
        let mut done = 0u64;
        while done < total {
            let (first, rest) = self.segments.split_first().ok_or(Fault)?;
            let left = u64::from(first.length - self.offset);
            if left == 0 {
                self.segments = rest;
                self.offset = 0;
                continue;
            }
            let piece = u32::try_from(left.min(total - done)).map_err(|_| Fault)?;
            let address = first.address.checked_add(u64::from(self.offset)).ok_or(Fault)?;
            let start = usize::try_from(done).map_err(|_| Fault)?;
            visit(address, start, usize::try_from(piece).map_err(|_| Fault)?)?;
            self.offset += piece;
            self.remaining -= u64::from(piece);
            done += u64::from(piece);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
