//! What a page holds: a function of who writes it, where it is, and the number of the write.

/// Words of a page.
pub const WORDS: usize = 512;
/// Bytes of a page, and of a block of a file.
pub const BYTES: usize = 8 * WORDS;

/// One page.
pub type Page = [u64; WORDS];

/// Whose page it is, and which of theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The worker.
    pub owner: u64,
    /// The page's number among the worker's.
    pub index: u64,
}

/// Mixes two numbers well enough that no wrong page looks right (splitmix64).
pub fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The words of the page at `place` after write `seq`.
fn words(place: Place, seq: u64) -> impl Iterator<Item = u64> {
    let first = mix(mix(place.owner, place.index), seq);
    let step = first | 1;
    let rest = (1..WORDS as u64).map(move |n| first.wrapping_add(n.wrapping_mul(step)));
    std::iter::once(seq).chain(rest)
}

/// Writes number `seq` into the page at `place`.
pub fn fill(page: &mut Page, place: Place, seq: u64) {
    for (word, value) in page.iter_mut().zip(words(place, seq)) {
        *word = value;
    }
}

/// Checks that the page at `place` holds write `seq`, all of it and nothing else.
pub fn check(page: &Page, place: Place, seq: u64) -> Result<(), String> {
    let wrong = page.iter().zip(words(place, seq)).position(|(word, value)| *word != value);
    wrong.map_or(Ok(()), |at| {
        let Place { owner, index } = place;
        let found = page[0];
        Err(format!(
            "worker {owner}, page {index}: word {at} is not of write {seq}; the page says {found}"
        ))
    })
}

/// The number of the last write to page `index` of `count`, when `seq` writes went round them.
pub fn last_write(index: u64, count: u64, seq: u64) -> u64 {
    seq - (seq - index) % count
}

/// The bytes of a page, as they are in a file.
pub fn to_bytes(page: &Page, bytes: &mut [u8]) {
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(page) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
}

/// The page that `bytes` are.
pub fn from_bytes(bytes: &[u8]) -> Page {
    let mut page = [0; WORDS];
    for (word, chunk) in page.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = chunk.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { owner: 3, index: 7 };

    #[test]
    fn a_page_is_right_for_one_write_in_one_place_only() {
        let mut page = [0; WORDS];
        fill(&mut page, PLACE, 40);

        check(&page, PLACE, 40).unwrap();
        assert!(check(&page, PLACE, 39).is_err());
        assert!(check(&page, Place { index: 8, ..PLACE }, 40).is_err());
        page[WORDS - 1] ^= 1;
        assert!(check(&page, PLACE, 40).unwrap_err().contains("word 511 is not of write 40"));
    }

    #[test]
    fn a_page_comes_back_from_its_bytes() {
        let (mut page, mut bytes) = ([0; WORDS], [0; BYTES]);
        fill(&mut page, PLACE, u64::MAX);
        to_bytes(&page, &mut bytes);
        assert_eq!(from_bytes(&bytes), page);
    }

    #[test]
    fn writes_go_round() {
        let last = |seq| [0, 1, 2].map(|index| last_write(index, 3, seq));
        assert_eq!(last(2), [0, 1, 2]);
        assert_eq!(last(3), [3, 1, 2]);
        assert_eq!(last(7), [6, 7, 5]);
    }
}
