use std::sync::Mutex;

use super::*;

const SIZE: u64 = 64 * BLOCK_BYTES;

/// Bytes in memory, that count how often they are asked.
#[derive(Debug, Default)]
struct Store {
    bytes: Mutex<Vec<u8>>,
    reads: Mutex<Vec<(u64, usize)>>,
    synced: Mutex<u32>,
    admitted: Mutex<Vec<u64>>,
    room: Mutex<Option<u64>>,
}

type Shared = Arc<Store>;

fn store(bytes: Vec<u8>) -> Shared {
    Arc::new(Store { bytes: Mutex::new(bytes), ..Store::default() })
}

/// A top whose unwritten bytes are not zeros, so that reading them shows.
fn top() -> Shared {
    store(vec![0xee; usize::try_from(SIZE).unwrap()])
}

impl Blocks for Shared {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap();
        let bytes = self.bytes.lock().unwrap();
        let piece = bytes.get(start..start + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(piece);
        self.reads.lock().unwrap().push((offset, buffer.len()));
        Ok(())
    }
}

impl Top for Shared {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap();
        self.bytes.lock().unwrap()[start..start + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn admit(&self, bytes: u64) -> io::Result<()> {
        self.admitted.lock().unwrap().push(bytes);
        let room = self.room.lock().unwrap().unwrap_or(u64::MAX);
        if bytes > room { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn sync(&self) -> io::Result<()> {
        *self.synced.lock().unwrap() += 1;
        Ok(())
    }
}

fn image(fill: u8) -> Arc<Layer> {
    let bytes = vec![fill; usize::try_from(SIZE).unwrap()];
    Arc::new(Layer::raw(store(bytes), SIZE))
}

fn disk(layers: Vec<Arc<Layer>>) -> LayeredDisk<Shared> {
    LayeredDisk::new(SIZE, layers, top(), SIZE).unwrap()
}

fn read(disk: &mut LayeredDisk<Shared>, offset: u64, length: usize) -> Vec<u8> {
    let mut buffer = vec![0xdd; length];
    disk.read_at(offset, &mut buffer).unwrap();
    buffer
}

fn freeze(disk: &mut LayeredDisk<Shared>) -> Arc<Layer> {
    let frozen = Arc::clone(disk.top());
    disk.freeze(top(), frozen)
}

fn run(first: u64, blocks: u64) -> Run {
    Run { first, blocks }
}

#[test]
fn a_write_shows_in_its_disk_and_not_in_the_sibling_over_the_same_layers() {
    let base = image(1);
    let mut one = disk(vec![Arc::clone(&base)]);
    let mut other = disk(vec![base]);

    one.write_at(BLOCK_BYTES, &[7; 4096]).unwrap();

    assert_eq!(read(&mut one, BLOCK_BYTES - 1, 3), [1, 7, 7]);
    assert_eq!(read(&mut other, BLOCK_BYTES - 1, 3), [1, 1, 1]);
    assert_eq!((one.top_bytes(), other.top_bytes()), (BLOCK_BYTES, 0));
}

#[test]
fn a_top_is_asked_for_room_for_blocks_that_it_lacks_and_a_refusal_changes_nothing() {
    let mut disk = disk(vec![image(1)]);

    disk.write_at(0, &[7; 4096]).unwrap();
    disk.write_at(100, &[8; 5000]).unwrap();
    disk.write_at(0, &[9; 8192]).unwrap();
    assert_eq!(*disk.top().admitted.lock().unwrap(), [BLOCK_BYTES; 2]);
    freeze(&mut disk);
    disk.write_at(0, &[9; 4096]).unwrap();
    assert_eq!(*disk.top().admitted.lock().unwrap(), [BLOCK_BYTES], "a new top has nothing");

    *disk.top().room.lock().unwrap() = Some(BLOCK_BYTES);
    let refused = disk.write_at(0, &[5; 3 * 4096]).unwrap_err();

    assert_eq!((refused.kind(), disk.stats().refused), (io::ErrorKind::StorageFull, 1));
    assert_eq!(read(&mut disk, 0, 1), [9]);
    disk.write_at(0, &[5; 2 * 4096]).unwrap();
}

#[test]
fn a_write_of_part_of_a_block_keeps_the_rest_of_it() {
    let mut disk = disk(vec![image(1)]);

    disk.write_at(512, &[7; 512]).unwrap();
    disk.write_at(2048, &[8; 4096]).unwrap();

    let found = read(&mut disk, 0, 8192);
    let parts = [(1, 512), (7, 512), (1, 1024), (8, 4096), (1, 2048)];
    let expected: Vec<u8> =
        parts.iter().flat_map(|&(fill, length)| std::iter::repeat_n(fill, length)).collect();
    assert!(found == expected);
    assert_eq!(disk.top_runs().collect::<Vec<_>>(), [run(0, 2)]);
}

#[test]
fn what_nobody_holds_is_zeros() {
    let mut disk = disk(Vec::new());
    disk.write_at(512, &[7; 512]).unwrap();

    assert_eq!(read(&mut disk, 0, 512), [0; 512]);
    assert_eq!(read(&mut disk, 512, 512), [7; 512]);
    assert_eq!(read(&mut disk, 1024, 8192), [0; 8192]);
}

#[test]
fn an_image_shorter_than_its_disk_ends_in_zeros() {
    let short = Layer::raw(store(vec![5; 5000]), 5000);
    let mut disk = disk(vec![Arc::new(short)]);

    assert_eq!(read(&mut disk, 4998, 4), [5, 5, 0, 0]);
    assert_eq!(read(&mut disk, 8190, 4), [0; 4]);
}

#[test]
fn a_layer_file_covers_its_runs_and_nothing_else() {
    let mut bytes = vec![0xff; 100];
    for fill in [10, 11, 12] {
        bytes.extend([fill; 4096]);
    }
    let layer = Layer::from_runs(store(bytes), SIZE, 100, &[run(2, 1), run(5, 2)]).unwrap();
    let mut disk = disk(vec![image(1), Arc::new(layer)]);

    let found = read(&mut disk, 0, 8 * 4096);

    let each: Vec<u8> = found.chunks(4096).map(|block| block[0]).collect();
    assert_eq!(each, [1, 1, 10, 1, 1, 11, 12, 1]);
    assert!(found.chunks(4096).all(|block| block.iter().all(|&byte| byte == block[0])));
}

#[test]
fn blocks_that_lie_together_are_read_together() {
    let backing = store(vec![3; usize::try_from(SIZE).unwrap()]);
    let layer = Arc::new(Layer::raw(Arc::clone(&backing), SIZE));
    let mut disk = disk(vec![layer]);
    disk.write_at(4 * BLOCK_BYTES, &[7; 4096]).unwrap();

    read(&mut disk, 512, 8 * 4096);

    let first = (512, 4 * 4096 - 512);
    let second = (5 * BLOCK_BYTES, 3 * 4096 + 512);
    assert_eq!(*backing.reads.lock().unwrap(), [first, second]);
}

#[test]
fn the_top_takes_its_limit_and_not_a_block_more() {
    let mut disk = LayeredDisk::new(SIZE, vec![image(1)], top(), 2 * BLOCK_BYTES).unwrap();
    disk.write_at(0, &[7; 8192]).unwrap();

    let refused = disk.write_at(2 * BLOCK_BYTES, &[7; 512]).unwrap_err();
    let half_refused = disk.write_at(BLOCK_BYTES, &[9; 8192]).unwrap_err();
    disk.write_at(512, &[8; 4096]).unwrap();

    assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
    assert_eq!(half_refused.kind(), io::ErrorKind::StorageFull);
    assert_eq!(disk.stats().refused, 2);
    assert_eq!(read(&mut disk, 8190, 4), [7, 7, 1, 1]);
}

#[test]
fn a_write_is_counted_whole_against_the_limit() {
    let mut disk = LayeredDisk::new(SIZE, vec![image(1)], top(), 2 * BLOCK_BYTES).unwrap();
    disk.write_at(0, &[7; 4096]).unwrap();

    let refused = disk.write_at(BLOCK_BYTES, &[7; 8192]).unwrap_err();

    assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
    assert_eq!(disk.top_bytes(), BLOCK_BYTES);
}

#[test]
fn what_was_frozen_counts_against_the_limit_and_each_block_once() {
    let mut disk = LayeredDisk::new(SIZE, vec![image(1)], top(), 3 * BLOCK_BYTES).unwrap();
    disk.write_at(0, &[7; 8192]).unwrap();
    freeze(&mut disk);

    disk.write_at(BLOCK_BYTES, &[8; 8192]).unwrap();
    let refused = disk.write_at(3 * BLOCK_BYTES, &[9; 512]).unwrap_err();
    disk.discard(2 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    disk.write_at(3 * BLOCK_BYTES, &[9; 512]).unwrap();
    freeze(&mut disk);
    let again = disk.write_at(4 * BLOCK_BYTES, &[9; 512]).unwrap_err();
    disk.write_at(0, &[6; 512]).unwrap();

    assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
    assert_eq!(again.kind(), io::ErrorKind::StorageFull);
    assert_eq!(disk.stats().refused, 2);
}

#[test]
fn a_block_that_is_discarded_after_it_was_frozen_counts_no_more_until_it_is_written_again() {
    let mut disk = LayeredDisk::new(SIZE, vec![image(1)], top(), 2 * BLOCK_BYTES).unwrap();
    disk.write_at(0, &[7; 8192]).unwrap();
    freeze(&mut disk);

    disk.discard(0, BLOCK_BYTES).unwrap();
    disk.discard(0, BLOCK_BYTES).unwrap();
    assert_eq!(disk.own_bytes(), BLOCK_BYTES);
    let layer = freeze(&mut disk);
    assert_eq!(layer.discarded_runs(), [run(0, 1)]);
    disk.discard(0, BLOCK_BYTES).unwrap();
    assert_eq!(disk.own_bytes(), BLOCK_BYTES, "it was discarded two layers above");

    disk.write_at(2 * BLOCK_BYTES, &[8; 4096]).unwrap();
    let refused = disk.write_at(0, &[9; 4096]).unwrap_err();
    disk.discard(2 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    disk.write_at(0, &[9; 4096]).unwrap();
    assert_eq!((disk.own_bytes(), read(&mut disk, 4095, 2)), (2 * BLOCK_BYTES, vec![9, 7]));
    disk.discard(0, BLOCK_BYTES).unwrap();
    disk.write_at(3 * BLOCK_BYTES, &[8; 512]).unwrap();

    assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
    assert_eq!(disk.own_bytes(), 2 * BLOCK_BYTES);
}

#[test]
fn what_is_stored_is_limited_however_often_the_same_blocks_are_frozen() {
    let limit = 2 * BLOCK_BYTES;
    let mut disk = LayeredDisk::new(SIZE, vec![image(1)], top(), limit).unwrap();
    for _ in 1..STORED_PER_LIMIT_MAX {
        disk.write_at(0, &[7; 8192]).unwrap();
        freeze(&mut disk);
    }
    disk.write_at(0, &[8; 4096]).unwrap();

    let refused = disk.write_at(0, &[9; 3 * 4096]).unwrap_err();
    disk.write_at(0, &[9; 8192]).unwrap();
    freeze(&mut disk);
    let again = disk.write_at(0, &[10; 512]).unwrap_err();

    assert_eq!([refused.kind(), again.kind()], [io::ErrorKind::StorageFull; 2]);
    assert_eq!(disk.stored_bytes(), STORED_PER_LIMIT_MAX * limit);
    assert_eq!((read(&mut disk, 0, 1), disk.stats().refused), (vec![9], 2));

    let all = Layer::from_runs(store(vec![9; 8192]), SIZE, 0, &[run(0, 2)]).unwrap();
    disk.restack(vec![Arc::clone(&disk.layers()[0]), Arc::new(all)], 1);

    assert_eq!(disk.stored_bytes(), limit);
    disk.write_at(0, &[10; 512]).unwrap();
}

#[test]
fn two_frozen_tops_as_one_count_as_they_did() {
    let mut disk = LayeredDisk::new(SIZE, vec![image(1)], top(), 2 * BLOCK_BYTES).unwrap();
    disk.write_at(0, &[7; 4096]).unwrap();
    freeze(&mut disk);
    disk.write_at(BLOCK_BYTES, &[8; 4096]).unwrap();
    freeze(&mut disk);
    let both = Layer::from_runs(store(vec![7; 8192]), SIZE, 0, &[run(0, 2)]).unwrap();
    let image = Arc::clone(&disk.layers()[0]);

    disk.restack(vec![image, Arc::new(both)], 1);

    disk.write_at(0, &[9; 8192]).unwrap();
    assert!(disk.write_at(2 * BLOCK_BYTES, &[9; 512]).is_err());
}

#[test]
fn part_of_a_block_that_the_top_has_is_written_without_reading() {
    let shared = top();
    let mut disk = LayeredDisk::new(SIZE, vec![image(1)], Arc::clone(&shared), SIZE).unwrap();
    disk.write_at(0, &[7; 4096]).unwrap();

    disk.write_at(512, &[8; 512]).unwrap();

    assert_eq!(*shared.reads.lock().unwrap(), []);
    assert_eq!(read(&mut disk, 511, 2), [7, 8]);
    assert_eq!(read(&mut disk, 1023, 2), [8, 7]);
}

#[test]
fn a_frozen_top_is_seen_by_both_sides_and_changed_by_neither() {
    let mut one = disk(vec![image(1)]);
    one.write_at(0, &[7; 4096]).unwrap();
    one.write_at(9 * BLOCK_BYTES, &[8; 4096]).unwrap();

    let frozen = freeze(&mut one);
    let mut other = disk(one.layers().to_vec());
    one.write_at(512, &[9; 512]).unwrap();
    other.write_at(9 * BLOCK_BYTES, &[6; 4096]).unwrap();

    assert_eq!(read(&mut one, 510, 4), [7, 7, 9, 9]);
    assert_eq!(read(&mut other, 510, 4), [7, 7, 7, 7]);
    assert_eq!(read(&mut one, 9 * BLOCK_BYTES, 1), [8]);
    assert_eq!(read(&mut other, 9 * BLOCK_BYTES, 1), [6]);
    assert_eq!(frozen.runs(), [run(0, 1), run(9, 1)]);
    assert_eq!(one.top_bytes(), BLOCK_BYTES);
}

#[test]
fn a_frozen_layer_gives_its_blocks_and_no_others() {
    let mut disk = disk(Vec::new());
    disk.write_at(BLOCK_BYTES, &[7; 8192]).unwrap();
    let frozen = freeze(&mut disk);
    let mut buffer = vec![0; 8192];

    frozen.read_blocks(1, &mut buffer).unwrap();

    assert!(buffer == [7; 8192]);
    assert!(frozen.read_blocks(2, &mut buffer).is_err());
    assert!(frozen.read_blocks(0, &mut buffer[..4096]).is_err());
}

#[test]
fn a_discard_gives_back_whole_blocks_of_the_top_and_touches_no_others() {
    let mut disk = disk(vec![image(1)]);
    disk.write_at(0, &[7; 3 * 4096]).unwrap();

    disk.discard(512, 2 * BLOCK_BYTES).unwrap();

    assert_eq!(disk.top_runs().collect::<Vec<_>>(), [run(0, 1), run(2, 1)]);
    assert_eq!(read(&mut disk, 4095, 2), [7, 1]);
    assert_eq!(read(&mut disk, 8191, 2), [1, 7]);
}

#[test]
fn zeroing_reads_as_zeros_and_stores_only_what_lies_over_something() {
    let layer = Layer::from_runs(store(vec![4; 4096]), SIZE, 0, &[run(2, 1)]).unwrap();
    let mut disk = disk(vec![Arc::new(layer)]);
    disk.write_at(0, &vec![7; 5 * 4096]).unwrap();

    disk.write_zeroes(512, 4 * BLOCK_BYTES).unwrap();

    assert_eq!(read(&mut disk, 511, 2), [7, 0]);
    assert_eq!(read(&mut disk, 512, 4 * 4096), [0; 4 * 4096]);
    assert_eq!(read(&mut disk, 4 * BLOCK_BYTES + 511, 2), [0, 7]);
    assert_eq!(disk.top_runs().collect::<Vec<_>>(), [run(0, 1), run(2, 1), run(4, 1)]);
}

#[test]
fn zeroing_within_one_block_keeps_its_ends() {
    let mut disk = disk(vec![image(1)]);

    disk.write_zeroes(512, 512).unwrap();

    assert_eq!(read(&mut disk, 511, 2), [1, 0]);
    assert_eq!(read(&mut disk, 1023, 2), [0, 1]);
}

#[test]
fn a_range_past_the_end_is_refused_whole() {
    let mut disk = disk(Vec::new());

    assert!(disk.write_at(SIZE - 512, &[1; 1024]).is_err());
    assert!(disk.read_at(u64::MAX, &mut [0; 2]).is_err());
    assert!(disk.discard(SIZE, 1).is_err());
    assert!(disk.write_zeroes(u64::MAX, u64::MAX).is_err());
    assert_eq!(disk.top_bytes(), 0);
}

#[test]
fn a_flush_reaches_the_top() {
    let shared = top();
    let mut disk = LayeredDisk::new(SIZE, Vec::new(), Arc::clone(&shared), SIZE).unwrap();

    disk.flush().unwrap();

    assert_eq!(*shared.synced.lock().unwrap(), 1);
}

#[test]
fn layers_that_do_not_make_a_disk_are_refused() {
    let too_large = Arc::new(Layer::raw(top(), SIZE + 1));
    let size_bytes = SIZE + 1;
    let many = vec![image(1); LAYERS_MAX + 1];
    let refuse = |size, layers| LayeredDisk::new(size, layers, top(), SIZE).unwrap_err();

    assert_eq!(
        refuse(SIZE, vec![image(1), too_large]),
        LayerError::TooLarge { index: 1, size_bytes }
    );
    assert_eq!(refuse(SIZE, many), LayerError::TooMany(LAYERS_MAX + 1));
    assert_eq!(refuse(0, Vec::new()), LayerError::DiskSize(0));
    assert_eq!(refuse(4097, Vec::new()), LayerError::DiskSize(4097));
}

#[test]
fn runs_out_of_order_or_range_are_refused() {
    let end = SIZE / BLOCK_BYTES;
    for (runs, bad) in [
        (vec![run(0, 0)], 0),
        (vec![run(3, 2), run(4, 1)], 1),
        (vec![run(3, 2), run(5, 1)], 1),
        (vec![run(3, 2), run(1, 1)], 1),
        (vec![run(end - 1, 2)], 0),
        (vec![run(0, 1), run(u64::MAX, 2)], 1),
        (vec![run(end, u64::MAX)], 0),
    ] {
        let error = Layer::from_runs(top(), SIZE, 0, &runs).unwrap_err();
        assert_eq!(error, LayerError::Run(bad), "{runs:?}");
    }
    assert!(Layer::from_runs(top(), SIZE, 0, &[run(0, 1), run(2, end - 2)]).is_ok());
}
