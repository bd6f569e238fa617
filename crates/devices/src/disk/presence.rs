//! Which blocks a sparse layer holds, in memory that grows with their number.
//!
//! A bitmap in leaves of [`LEAF_BLOCKS`] blocks (16 MiB of disk, 512 bytes of
//! memory each); a leaf exists while it has a bit set.  A fresh child that has
//! written nothing therefore costs nothing, whatever the size of its disk.

use std::collections::BTreeMap;

use super::Run;

const WORD_BLOCKS: u64 = 64;
const LEAF_WORDS: usize = 64;

/// Blocks covered by one leaf.
pub(super) const LEAF_BLOCKS: u64 = WORD_BLOCKS * LEAF_WORDS as u64;

type Leaf = [u64; LEAF_WORDS];

/// A set of blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Presence {
    // Invariant: no leaf is all zero.
    leaves: BTreeMap<u64, Box<Leaf>>,
    // Invariant: the number of bits set.
    blocks: u64,
}

/// Where a block's bit is: leaf, word, mask.
fn place(block: u64) -> (u64, usize, u64) {
    let word = usize::try_from(block % LEAF_BLOCKS / WORD_BLOCKS).unwrap_or(0);
    (block / LEAF_BLOCKS, word, 1 << (block % WORD_BLOCKS))
}

impl Presence {
    /// How many blocks are in it.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(super) fn contains(&self, block: u64) -> bool {
        let (leaf, word, mask) = place(block);
        self.leaves.get(&leaf).is_some_and(|leaf| leaf[word] & mask != 0)
    }

    pub(super) fn insert(&mut self, block: u64) {
        let (leaf, word, mask) = place(block);
        let leaf = self.leaves.entry(leaf).or_insert_with(|| Box::new([0; LEAF_WORDS]));
        self.blocks += u64::from(leaf[word] & mask == 0);
        leaf[word] |= mask;
    }

    pub(super) fn remove(&mut self, block: u64) {
        let (key, word, mask) = place(block);
        let Some(leaf) = self.leaves.get_mut(&key) else {
            return;
        };
        self.blocks -= u64::from(leaf[word] & mask != 0);
        leaf[word] &= !mask;
        if leaf.iter().all(|&word| word == 0) {
            self.leaves.remove(&key);
        }
    }

    /// Whether `block` is in the set, and for how many blocks from it, up to
    /// `max`, the answer is the same.
    pub(super) fn span(&self, block: u64, max: u64) -> (bool, u64) {
        let present = self.contains(block);
        let mut length = 0;
        while length < max {
            let step = self.step(block + length, present);
            if step == 0 {
                break;
            }
            length += step;
        }
        (present, length.min(max))
    }

    /// Blocks from `block` to the end of its word, or of a gap between leaves,
    /// that are all `present`; 0 if `block` itself is not.
    fn step(&self, block: u64, present: bool) -> u64 {
        let (key, word, _) = place(block);
        let Some(leaf) = self.leaves.get(&key) else {
            let next = self.leaves.range(key..).next();
            let end = next.map_or(u64::MAX, |(&key, _)| key * LEAF_BLOCKS);
            return if present { 0 } else { end - block };
        };
        let same = if present { leaf[word] } else { !leaf[word] };
        let shifted = same >> (block % WORD_BLOCKS);
        u64::from(shifted.trailing_ones())
    }

    /// The set as runs: ascending, disjoint, not adjacent.
    pub(super) fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            loop {
                let (&leaf, _) = self.leaves.range(next / LEAF_BLOCKS..).next()?;
                let block = next.max(leaf * LEAF_BLOCKS);
                let rest_of_leaf = (leaf + 1) * LEAF_BLOCKS - block;
                let (present, length) = self.span(block, rest_of_leaf);
                if present {
                    let (_, blocks) = self.span(block, u64::MAX - block);
                    next = block + blocks;
                    return Some(Run { first: block, blocks });
                }
                next = block + length;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(blocks: &[u64]) -> Presence {
        let mut presence = Presence::default();
        for &block in blocks {
            presence.insert(block);
        }
        presence
    }

    #[test]
    fn runs_merge_across_words_and_leaves() {
        let edge = LEAF_BLOCKS;
        let presence = set(&[0, 1, 62, 63, 64, edge - 1, edge, edge + 1, 9 * edge]);

        let runs: Vec<_> = presence.runs().map(|run| (run.first, run.blocks)).collect();

        assert_eq!(runs, [(0, 2), (62, 3), (edge - 1, 3), (9 * edge, 1)]);
        assert_eq!(presence.blocks(), 9);
    }

    #[test]
    fn a_span_ends_at_the_first_change_or_at_its_limit() {
        let presence = set(&[5, 6, LEAF_BLOCKS * 3]);

        assert_eq!(presence.span(0, 100), (false, 5));
        assert_eq!(presence.span(5, 100), (true, 2));
        assert_eq!(presence.span(5, 1), (true, 1));
        assert_eq!(presence.span(7, u64::MAX - 7), (false, LEAF_BLOCKS * 3 - 7));
        assert_eq!(presence.span(LEAF_BLOCKS * 4, 10), (false, 10));
    }

    #[test]
    fn memory_is_given_back_with_the_last_block_of_a_leaf() {
        let mut presence = set(&[3, 3, LEAF_BLOCKS]);
        presence.remove(3);
        presence.remove(3);
        presence.remove(77 * LEAF_BLOCKS);

        assert_eq!((presence.leaves.len(), presence.blocks()), (1, 1));
        assert_eq!(presence, set(&[LEAF_BLOCKS]));
    }
}
