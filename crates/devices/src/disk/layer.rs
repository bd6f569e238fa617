//! One immutable layer of a disk.

use std::fmt;
use std::io;

use super::presence::Presence;
use super::{BLOCK_BYTES, Blocks};

/// Consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Run {
    /// The first of them.
    pub first: u64,
    /// How many.
    pub blocks: u64,
}

/// Why layers do not make a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerError {
    /// A disk's size is not a whole number of blocks, or none.
    DiskSize(u64),
    /// There are more layers than [`super::LAYERS_MAX`].
    TooMany(usize),
    /// Layer `index` is larger than the disk it is to be part of.
    TooLarge {
        /// Its place, lowest first.
        index: usize,
        /// Its size.
        size_bytes: u64,
    },
    /// A run is empty, beyond the layer's size, or not after the one before it.
    Run(usize),
}

impl fmt::Display for LayerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DiskSize(bytes) => {
                write!(f, "a disk of {bytes} bytes is not a whole number of {BLOCK_BYTES}")
            }
            Self::TooMany(count) => write!(f, "{count} layers are too many"),
            Self::TooLarge { index, size_bytes } => {
                write!(f, "layer {index} of {size_bytes} bytes is larger than the disk")
            }
            Self::Run(index) => write!(f, "run {index} of the layer is out of order or range"),
        }
    }
}

impl std::error::Error for LayerError {}

/// A layer that nobody writes to any more; shared freely.
pub struct Layer {
    blocks: Box<dyn Blocks>,
    map: Map,
    // Blocks that layers below may hold, and that were discarded before this one was frozen.
    discarded: Presence,
    size_bytes: u64,
}

/// Which blocks a layer holds, and where.
#[derive(Debug)]
enum Map {
    /// Every one, at its own offset, to the end of the layer.
    Whole,
    /// Those of a table, one after the other.
    Runs(Box<[Entry]>),
    /// Those of a set, each at its own offset.
    Sparse(Presence),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    run: Run,
    // Where the run's first block is in the backing.
    offset: u64,
}

/// For how many blocks one answer holds, and where they are, if anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) offset: Option<u64>,
    pub(super) blocks: u64,
}

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer")
            .field("map", &self.map)
            .field("size_bytes", &self.size_bytes)
            .finish_non_exhaustive()
    }
}

impl Layer {
    /// A raw image of `size_bytes`: every block at its own offset.  The last
    /// one may be short, and reads as if zeros followed.
    pub fn raw(blocks: impl Blocks + 'static, size_bytes: u64) -> Self {
        Self {
            blocks: Box::new(blocks),
            map: Map::Whole,
            discarded: Presence::default(),
            size_bytes,
        }
    }

    /// A layer of a disk of `size_bytes` that holds `runs`, whose blocks lie one
    /// after the other from `data_offset` of `blocks`.
    ///
    /// # Errors
    ///
    /// [`LayerError`] if the runs are not ascending, disjoint and within
    /// the disk.  They come from a file, which is input like any other.
    pub fn from_runs(
        blocks: impl Blocks + 'static,
        size_bytes: u64,
        data_offset: u64,
        runs: &[Run],
    ) -> Result<Self, LayerError> {
        let mut offset = data_offset;
        let mut end = 0;
        let mut entries = Vec::with_capacity(runs.len());
        for (index, &run) in runs.iter().enumerate() {
            let bad = LayerError::Run(index);
            let run_end = run.first.checked_add(run.blocks).ok_or(bad)?;
            let in_order = run.blocks > 0 && (run.first > end || index == 0);
            if !in_order || run_end > size_bytes / BLOCK_BYTES {
                return Err(bad);
            }
            entries.push(Entry { run, offset });
            offset = offset.checked_add(run.blocks * BLOCK_BYTES).ok_or(bad)?;
            end = run_end;
        }
        let map = Map::Runs(entries.into_boxed_slice());
        let discarded = Presence::default();
        Ok(Self { blocks: Box::new(blocks), map, discarded, size_bytes })
    }

    /// The same layer, above which a disk has discarded these blocks of layers
    /// below, which it lacks itself.
    #[must_use]
    pub fn with_discarded(mut self, blocks: impl IntoIterator<Item = u64>) -> Self {
        blocks.into_iter().for_each(|block| self.discarded.insert(block));
        self
    }

    /// What used to be the top of a disk.
    pub(super) fn frozen(
        blocks: impl Blocks + 'static,
        size_bytes: u64,
        presence: Presence,
        discarded: Presence,
    ) -> Self {
        Self { blocks: Box::new(blocks), map: Map::Sparse(presence), discarded, size_bytes }
    }

    /// Blocks of layers below it that were discarded before it was frozen.
    pub(super) fn discarded(&self) -> &Presence {
        &self.discarded
    }

    /// The same: ascending, disjoint, not adjacent.
    #[must_use]
    pub fn discarded_runs(&self) -> Vec<Run> {
        self.discarded.runs().collect()
    }

    /// Its size: that of the image, or of the disk it was made for.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The blocks it holds: ascending, disjoint, not adjacent.
    #[must_use]
    pub fn runs(&self) -> Vec<Run> {
        match &self.map {
            Map::Whole => {
                let blocks = self.size_bytes.div_ceil(BLOCK_BYTES);
                (blocks > 0).then_some(Run { first: 0, blocks }).into_iter().collect()
            }
            Map::Runs(entries) => entries.iter().map(|entry| entry.run).collect(),
            Map::Sparse(presence) => presence.runs().collect(),
        }
    }

    /// How many blocks it holds.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        match &self.map {
            Map::Whole => self.size_bytes.div_ceil(BLOCK_BYTES),
            Map::Runs(entries) => entries.iter().map(|entry| entry.run.blocks).sum(),
            Map::Sparse(presence) => presence.blocks(),
        }
    }

    /// Fills `buffer`, whole blocks, from a run that [`Layer::runs`] listed.
    ///
    /// # Errors
    ///
    /// If it is not within one, or the backing cannot be read.
    pub fn read_blocks(&self, first: u64, buffer: &mut [u8]) -> io::Result<()> {
        let blocks = (buffer.len() as u64).div_ceil(BLOCK_BYTES);
        let extent = self.extent(first, blocks);
        match extent.offset {
            Some(offset) if extent.blocks == blocks => self.read_at(offset, buffer),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Where `block` is, and up to `max` blocks after it in the same way.
    pub(super) fn extent(&self, block: u64, max: u64) -> Extent {
        match &self.map {
            Map::Whole => {
                let end = self.size_bytes.div_ceil(BLOCK_BYTES);
                if block < end {
                    Extent { offset: Some(block * BLOCK_BYTES), blocks: max.min(end - block) }
                } else {
                    Extent { offset: None, blocks: max }
                }
            }
            Map::Runs(entries) => extent_in(entries, block, max),
            Map::Sparse(presence) => {
                let (present, blocks) = presence.span(block, max);
                Extent { offset: present.then_some(block * BLOCK_BYTES), blocks }
            }
        }
    }

    /// Reads from the backing; zeros past the end of a raw image.
    pub(super) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let stored = match self.map {
            Map::Whole => self.size_bytes.saturating_sub(offset),
            Map::Runs(_) | Map::Sparse(_) => u64::MAX,
        };
        let stored = usize::try_from(stored).unwrap_or(usize::MAX).min(buffer.len());
        let (head, tail) = buffer.split_at_mut(stored);
        tail.fill(0);
        if head.is_empty() { Ok(()) } else { self.blocks.read_at(offset, head) }
    }
}

fn extent_in(entries: &[Entry], block: u64, max: u64) -> Extent {
    let after = entries.partition_point(|entry| entry.run.first <= block);
    if let Some(Entry { run, offset }) = after.checked_sub(1).and_then(|at| entries.get(at)) {
        let into = block - run.first;
        if into < run.blocks {
            let blocks = max.min(run.blocks - into);
            return Extent { offset: Some(offset + into * BLOCK_BYTES), blocks };
        }
    }
    let gap = entries.get(after).map_or(max, |entry| entry.run.first - block);
    Extent { offset: None, blocks: max.min(gap) }
}
