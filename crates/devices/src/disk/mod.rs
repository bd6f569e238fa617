//! A disk made of layers: immutable ones below, one private top.
//!
//! ```text
//!   guest write ──► top        private to one machine, sparse, limited
//!                   layer n    frozen tops and layer files: some blocks each
//!                   …
//!   guest read  ◄── layer 0    the image: every block
//! ```
//!
//! A block is read from the highest layer that holds it; one that none holds
//! is zeros.  A write goes to the top, copying the rest of its block up first
//! if it covers only part.  [`LayeredDisk::freeze`] turns the top into a layer
//! and goes on with a new one, at a cost that does not depend on its size:
//! that is how siblings share a past without sharing a future.
//!
//! A discarded block leaves the top, and its space is given back.  A frozen top
//! cannot give it back, as siblings may read it: the top notes instead that the
//! block is discarded.  Such a block does not count as this disk's own, and is
//! left out when layers are merged or saved.  What a discarded block reads as is
//! undefined, so reads need not look at these notes.
//!
//! # Trust
//!
//! Ranges come from a guest by way of [`crate::virtio::block`], and are checked
//! here again.  What a guest can make the host store is bounded by a limit on the
//! blocks that it has of its own, in the top or in tops that were frozen, where each
//! counts once, and by [`STORED_PER_LIMIT_MAX`], where each counts as often as it is
//! there.  What it can make the host remember is bounded by the size of its disk: one
//! bit per block, in leaves that exist only where something was written.
//!
//! # Host side
//!
//! Layers are read through [`Blocks`], the top is written through [`Top`].
//! Lower layers are behind [`Arc`], so that a forked process uses those of its
//! parent without opening or parsing anything.

mod layer;
mod presence;

use std::io;
use std::sync::Arc;

pub use layer::{Layer, LayerError, Run};
use presence::Presence;

use crate::virtio::block::Disk;

/// The unit in which layers hold data.
pub const BLOCK_BYTES: u64 = 4096;

/// Most layers below a top.
pub const LAYERS_MAX: usize = 256;

/// How many times its limit a disk may store at most: a block that is written again after the top
/// was frozen is stored again, until layers are merged.
pub const STORED_PER_LIMIT_MAX: u64 = 4;

const BLOCK_LENGTH: usize = 4096;

/// Zeros written at a time.
static ZEROS: [u8; 16 * BLOCK_LENGTH] = [0; 16 * BLOCK_LENGTH];

/// Something that holds a layer's bytes.
pub trait Blocks: Send + Sync {
    /// Fills `buffer` from `offset`.  What was never written reads as anything;
    /// it is not asked for.
    ///
    /// # Errors
    ///
    /// If all of it cannot be had.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

/// Something that holds the bytes of a top: every block at its own offset.
pub trait Top: Blocks {
    /// Stores `data` at `offset`, all of it.
    ///
    /// # Errors
    ///
    /// If it cannot.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Refuses `bytes` more than it has: called before blocks that it lacks are
    /// stored.
    ///
    /// # Errors
    ///
    /// If there is no room; the default refuses nothing.
    fn admit(&self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// Returns when everything stored is durable.
    ///
    /// # Errors
    ///
    /// If it cannot be made so.
    fn sync(&self) -> io::Result<()>;

    /// The range will not be read again before it is written; its space may be
    /// given back.
    ///
    /// # Errors
    ///
    /// If the attempt failed; the default makes none.
    fn punch(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }
}

/// What a disk was asked so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Reads.
    pub reads: u64,
    /// Writes, zeroing included.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Writes refused because the disk was at its limit, or its top had no room.
    pub refused: u64,
}

/// The disk.
#[derive(Debug)]
pub struct LayeredDisk<T> {
    size_bytes: u64,
    layers: Vec<Arc<Layer>>,
    top: T,
    // Invariant: exactly the blocks that `top` has been given.
    present: Presence,
    // Invariant: none of those; blocks that a frozen top has, discarded since.
    discarded: Presence,
    /// How many of the highest layers were tops of this disk.
    frozen: usize,
    // Invariant: the number of blocks that `top` or one of those has, and that were not discarded
    // since.
    own_blocks: u64,
    // Invariant: what those have, each block as often as one has it.
    frozen_blocks: u64,
    own_limit_bytes: u64,
    stats: DiskStats,
}

/// Who has a block.
#[derive(Clone, Copy, Debug)]
enum Source {
    Top,
    Layer { index: usize, offset: u64 },
    Nobody,
}

impl<T: Top + 'static> LayeredDisk<T> {
    /// A disk of `size_bytes` over `layers`, lowest first, with an empty `top`.
    ///
    /// It may have up to `own_limit_bytes` in blocks of its own: in that top, and in
    /// those that are frozen and followed by others.  A block counts once; counted
    /// as often as they are there, they may be [`STORED_PER_LIMIT_MAX`] times as many.
    ///
    /// # Errors
    ///
    /// [`LayerError`] if the layers do not fit the disk.
    pub fn new(
        size_bytes: u64,
        layers: Vec<Arc<Layer>>,
        top: T,
        own_limit_bytes: u64,
    ) -> Result<Self, LayerError> {
        if size_bytes == 0 || !size_bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(LayerError::DiskSize(size_bytes));
        }
        if layers.len() > LAYERS_MAX {
            return Err(LayerError::TooMany(layers.len()));
        }
        if let Some(index) = layers.iter().position(|layer| layer.size_bytes() > size_bytes) {
            return Err(LayerError::TooLarge { index, size_bytes: layers[index].size_bytes() });
        }
        Ok(Self {
            size_bytes,
            layers,
            top,
            present: Presence::default(),
            discarded: Presence::default(),
            frozen: 0,
            own_blocks: 0,
            frozen_blocks: 0,
            own_limit_bytes,
            stats: DiskStats::default(),
        })
    }

    /// The layers below the top, lowest first.
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// The top.  Of its bytes, only those of [`LayeredDisk::top_runs`] mean
    /// anything, each block at its own offset.
    pub fn top(&self) -> &T {
        &self.top
    }

    /// The blocks that the top holds: ascending, disjoint, not adjacent.
    pub fn top_runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.present.runs()
    }

    /// Bytes that the top holds.
    pub fn top_bytes(&self) -> u64 {
        self.present.blocks() * BLOCK_BYTES
    }

    /// Bytes in layers that were tops of this disk.
    pub fn frozen_bytes(&self) -> u64 {
        self.frozen_blocks * BLOCK_BYTES
    }

    /// Bytes in blocks of its own: each counts once, unless it was discarded.
    pub fn own_bytes(&self) -> u64 {
        self.own_blocks * BLOCK_BYTES
    }

    /// Bytes that this disk has made the host store: those of frozen tops, and the top's.
    pub fn stored_bytes(&self) -> u64 {
        self.frozen_bytes() + self.top_bytes()
    }

    /// What was asked so far.
    pub fn stats(&self) -> DiskStats {
        self.stats
    }

    /// Makes what the top holds the highest immutable layer, which is read from
    /// `frozen`, the same bytes; goes on with the empty `top`, drops the old one,
    /// and returns that layer.  Costs the same whatever the top holds.
    pub fn freeze(&mut self, top: T, frozen: impl Blocks + 'static) -> Arc<Layer> {
        self.top = top;
        let present = std::mem::take(&mut self.present);
        let discarded = std::mem::take(&mut self.discarded);
        let layer = Arc::new(Layer::frozen(frozen, self.size_bytes, present, discarded));
        self.layers.push(Arc::clone(&layer));
        self.frozen += 1;
        self.frozen_blocks += layer.blocks();
        layer
    }

    /// Goes on over `layers`, which must hold what the present ones do, seen
    /// from above: two of them as one, for example.  The highest `frozen` must
    /// hold what the tops of this disk did.
    pub fn restack(&mut self, layers: Vec<Arc<Layer>>, frozen: usize) {
        self.layers = layers;
        self.frozen = frozen;
        self.frozen_blocks = self.layers.iter().rev().take(frozen).map(|own| own.blocks()).sum();
    }

    fn check(&self, offset: u64, length: u64) -> io::Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size_bytes => Ok(()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Who has `block`, and for how many blocks up to `max` in one piece.
    fn source(&self, block: u64, max: u64) -> (Source, u64) {
        match self.present.span(block, max) {
            (true, blocks) => (Source::Top, blocks),
            (false, blocks) => self.source_below(block, blocks),
        }
    }

    fn source_below(&self, block: u64, mut max: u64) -> (Source, u64) {
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let extent = layer.extent(block, max);
            max = extent.blocks;
            if let Some(offset) = extent.offset {
                return (Source::Layer { index, offset }, max);
            }
        }
        (Source::Nobody, max)
    }

    /// Whether a top of this disk, frozen or not, has `block` and it was not
    /// discarded since; for how many blocks from it, up to `max`, the answer is
    /// the same.
    fn is_own(&self, block: u64, max: u64) -> (bool, u64) {
        let (present, blocks) = self.present.span(block, max);
        if present {
            return (true, blocks);
        }
        let (discarded, mut blocks) = self.discarded.span(block, blocks);
        if discarded {
            return (false, blocks);
        }
        for layer in self.layers.iter().rev().take(self.frozen) {
            let extent = layer.extent(block, blocks);
            if extent.offset.is_some() {
                return (true, extent.blocks);
            }
            let (discarded, same) = layer.discarded().span(block, extent.blocks);
            blocks = same;
            if discarded {
                return (false, blocks);
            }
        }
        (false, blocks)
    }

    /// How many blocks from `first` to `end` are not this disk's own.
    fn others(&self, first: u64, end: u64) -> u64 {
        let (mut block, mut others) = (first, 0);
        while block < end {
            let (own, blocks) = self.is_own(block, end - block);
            others += if own { 0 } else { blocks };
            block += blocks;
        }
        others
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut rest = buffer;
        let mut at = offset;
        while !rest.is_empty() {
            let within = at % BLOCK_BYTES;
            let wanted = (within + rest.len() as u64).div_ceil(BLOCK_BYTES);
            let (source, blocks) = self.source(at / BLOCK_BYTES, wanted);
            let length = shorter(rest.len(), blocks * BLOCK_BYTES - within);
            let (piece, tail) = rest.split_at_mut(length);
            match source {
                Source::Top => self.top.read_at(at, piece)?,
                Source::Layer { index, offset } => {
                    self.layers[index].read_at(offset + within, piece)?;
                }
                Source::Nobody => piece.fill(0),
            }
            rest = tail;
            at += length as u64;
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.admit(offset, data.len() as u64)?;
        let mut rest = data;
        let mut at = offset;
        while !rest.is_empty() {
            let within = at % BLOCK_BYTES;
            let whole = rest.len() - rest.len() % BLOCK_LENGTH;
            let length = if within == 0 && whole > 0 {
                whole
            } else {
                shorter(rest.len(), BLOCK_BYTES - within)
            };
            let (piece, tail) = rest.split_at(length);
            let block = at / BLOCK_BYTES;
            if length.is_multiple_of(BLOCK_LENGTH) || self.present.contains(block) {
                self.top.write_at(at, piece)?;
            } else {
                self.copy_up(block, within, piece)?;
            }
            let end = block + (within + length as u64).div_ceil(BLOCK_BYTES);
            self.own_blocks += self.others(block, end);
            for block in block..end {
                self.present.insert(block);
                self.discarded.remove(block);
            }
            rest = tail;
            at += length as u64;
        }
        Ok(())
    }

    /// Refuses a write that would put the disk past its limit, or for which its
    /// top has no room.
    fn admit(&mut self, offset: u64, length: u64) -> io::Result<()> {
        let (first, end) = (offset / BLOCK_BYTES, (offset + length).div_ceil(BLOCK_BYTES));
        let added = self.others(first, end);
        let over = added > 0 && (self.own_blocks + added) * BLOCK_BYTES > self.own_limit_bytes;
        let stored_max = self.own_limit_bytes.saturating_mul(STORED_PER_LIMIT_MAX);
        let admitted = match self.absent(first, end) * BLOCK_BYTES {
            _ if over => Err(io::ErrorKind::StorageFull.into()),
            0 => Ok(()),
            more if self.stored_bytes() + more > stored_max => {
                Err(io::ErrorKind::StorageFull.into())
            }
            more => self.top.admit(more),
        };
        self.stats.refused += u64::from(admitted.is_err());
        admitted
    }

    /// How many blocks from `first` to `end` the top lacks.
    fn absent(&self, first: u64, end: u64) -> u64 {
        let (mut block, mut absent) = (first, 0);
        while block < end {
            let (present, blocks) = self.present.span(block, end - block);
            absent += if present { 0 } else { blocks };
            block += blocks;
        }
        absent
    }

    /// Writes a block that the top lacks, of which `piece` is only a part.
    fn copy_up(&self, block: u64, within: u64, piece: &[u8]) -> io::Result<()> {
        let mut whole = [0; BLOCK_LENGTH];
        self.read(block * BLOCK_BYTES, &mut whole)?;
        let start = usize::try_from(within).map_err(|_| io::ErrorKind::InvalidInput)?;
        whole[start..start + piece.len()].copy_from_slice(piece);
        self.top.write_at(block * BLOCK_BYTES, &whole)
    }

    /// Takes blocks from `first` to `end` out of the top, so that they read as
    /// the layers below.
    fn drop_from_top(&mut self, first: u64, end: u64) -> io::Result<()> {
        let mut block = first;
        while block < end {
            let (present, blocks) = self.present.span(block, end - block);
            if present {
                (block..block + blocks).for_each(|block| self.present.remove(block));
                self.own_blocks -= self.others(block, block + blocks);
                self.top.punch(block * BLOCK_BYTES, blocks * BLOCK_BYTES)?;
            }
            block += blocks;
        }
        Ok(())
    }

    /// Notes that blocks from `first` to `end`, which the top lacks, are discarded
    /// in frozen tops: they count no more, and merging leaves them out.
    fn hide_in_frozen(&mut self, first: u64, end: u64) {
        let mut block = first;
        while block < end {
            let (own, blocks) = self.is_own(block, end - block);
            if own {
                (block..block + blocks).for_each(|block| self.discarded.insert(block));
                self.own_blocks -= blocks;
            }
            block += blocks;
        }
    }

    /// Zeros whole blocks: where nothing lies below, forgetting them is enough.
    fn zero_blocks(&mut self, first: u64, end: u64) -> io::Result<()> {
        let mut block = first;
        while block < end {
            let (source, blocks) = self.source_below(block, end - block);
            if matches!(source, Source::Nobody) {
                self.drop_from_top(block, block + blocks)?;
            } else {
                self.write_zeros(block * BLOCK_BYTES, blocks * BLOCK_BYTES)?;
            }
            block += blocks;
        }
        Ok(())
    }

    fn write_zeros(&mut self, offset: u64, length: u64) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let piece = &ZEROS[..shorter(ZEROS.len(), length - done)];
            self.write(offset + done, piece)?;
            done += piece.len() as u64;
        }
        Ok(())
    }
}

fn shorter(length: usize, limit: u64) -> usize {
    usize::try_from(limit).map_or(length, |limit| length.min(limit))
}

impl<T: Top + 'static> Disk for LayeredDisk<T> {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.check(offset, buffer.len() as u64)?;
        self.stats.reads += 1;
        self.read(offset, buffer)
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len() as u64)?;
        self.stats.writes += 1;
        self.write(offset, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stats.flushes += 1;
        self.top.sync()
    }

    /// Whole blocks leave the top, and count no more as this disk's own; they read
    /// as the layers below from then on.  Parts of blocks at either end stay as they
    /// are.
    fn discard(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length)?;
        let (first, end) = (offset.div_ceil(BLOCK_BYTES), (offset + length) / BLOCK_BYTES);
        self.drop_from_top(first, end)?;
        self.hide_in_frozen(first, end);
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length)?;
        self.stats.writes += 1;
        let end = offset + length;
        let (first, last) = (offset.div_ceil(BLOCK_BYTES), end / BLOCK_BYTES);
        if first > last {
            return self.write_zeros(offset, length);
        }
        self.write_zeros(offset, first * BLOCK_BYTES - offset)?;
        self.zero_blocks(first, last)?;
        self.write_zeros(last * BLOCK_BYTES, end - last * BLOCK_BYTES)
    }
}

#[cfg(test)]
mod tests;
