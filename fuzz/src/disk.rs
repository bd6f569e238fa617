//! The layered disk against a flat one.

use std::io;
use std::sync::{Arc, Mutex};

use arbitrary::{Arbitrary, Unstructured};
use forkd_devices::disk::{BLOCK_BYTES, Blocks, Layer, LayeredDisk, Run, STORED_PER_LIMIT_MAX, Top};
use forkd_devices::virtio::block::Disk;

use crate::guest::steps;

const BLOCKS: u64 = 8;
const SIZE: u64 = BLOCKS * BLOCK_BYTES;
const LIMIT: u64 = 5 * BLOCK_BYTES;
const SECTOR: u64 = 512;

/// Bytes in memory; what was never written is not zero, so that reading it shows.
#[derive(Clone, Debug)]
pub(crate) struct Store(Arc<Mutex<Vec<u8>>>);

impl Store {
    pub(crate) fn new(size: u64) -> Self {
        Self(Arc::new(Mutex::new(vec![0xee; size as usize])))
    }
}

impl Blocks for Store {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let start = offset as usize;
        buffer.copy_from_slice(&self.0.lock().expect("one thread")[start..start + buffer.len()]);
        Ok(())
    }
}

impl Top for Store {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let start = offset as usize;
        self.0.lock().expect("one thread")[start..start + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.write_at(offset, &vec![0xdd; length as usize])
    }
}

#[derive(Arbitrary, Debug)]
enum Op {
    Write { sector: u8, sectors: u8, fill: u8 },
    Read { sector: u8, sectors: u8 },
    Zero { sector: u8, sectors: u8 },
    Discard { sector: u8, sectors: u8 },
    Freeze,
    Stacked { runs: Vec<(u8, u8)> },
}

struct Pair {
    disk: LayeredDisk<Store>,
    /// What the guest sees.
    flat: Vec<u8>,
    /// What it would see without the top.
    below: Vec<u8>,
}

pub(crate) fn run(input: &mut Unstructured<'_>) {
    let image = vec![1; (SIZE - 700) as usize];
    let layer = Layer::raw(Store(Arc::new(Mutex::new(image))), SIZE - 700);
    let mut flat = vec![1; SIZE as usize];
    flat[(SIZE - 700) as usize..].fill(0);
    let disk = LayeredDisk::new(SIZE, vec![Arc::new(layer)], Store::new(SIZE), LIMIT);
    let mut pair = Pair { disk: disk.expect("a sound disk"), below: flat.clone(), flat };
    steps(input, |op: Op| {
        pair.step(op);
        Ok(())
    });
    let mut all = vec![0xcc; SIZE as usize];
    pair.disk.read_at(0, &mut all).expect("all of the disk can be read");
    assert!(all == pair.flat, "the disk differs from a flat one");
    check_runs(&pair.disk.top_runs().collect::<Vec<_>>());
}

/// A range in bytes that may reach past the end of the disk.
fn range(sector: u8, sectors: u8) -> (u64, u64) {
    let end = SIZE / SECTOR + 4;
    (u64::from(sector) % end * SECTOR, u64::from(sectors) % end * SECTOR)
}

impl Pair {
    fn step(&mut self, op: Op) {
        match op {
            Op::Write { sector, sectors, fill } => {
                let (offset, length) = range(sector, sectors);
                let data = vec![fill; length as usize];
                let outcome = self.disk.write_at(offset, &data);
                self.expect(offset, length, outcome, fill);
            }
            Op::Read { sector, sectors } => {
                let (offset, length) = range(sector, sectors);
                let mut buffer = vec![0xcc; length as usize];
                let outcome = self.disk.read_at(offset, &mut buffer);
                assert_eq!(outcome.is_ok(), offset + length <= SIZE);
                if outcome.is_ok() {
                    assert!(buffer == self.flat[offset as usize..][..length as usize]);
                }
            }
            Op::Zero { sector, sectors } => {
                let (offset, length) = range(sector, sectors);
                match self.disk.write_zeroes(offset, length) {
                    Ok(()) => self.flat[offset as usize..][..length as usize].fill(0),
                    // Part of it may be zeros, the rest as it was.
                    Err(_) => self.resynchronise(offset, length),
                }
            }
            Op::Discard { sector, sectors } => self.discard(range(sector, sectors)),
            Op::Freeze => {
                let frozen = self.disk.freeze(Store::new(SIZE), self.disk.top().clone());
                check_runs(&frozen.runs());
                self.below.copy_from_slice(&self.flat);
            }
            Op::Stacked { runs } => self.restack(&runs),
        }
        assert!(self.disk.top_bytes() <= LIMIT);
        assert!(self.disk.stored_bytes() <= LIMIT * STORED_PER_LIMIT_MAX);
        let blocks: u64 = self.disk.top_runs().map(|run| run.blocks).sum();
        assert_eq!(blocks * BLOCK_BYTES, self.disk.top_bytes());
    }

    fn expect(&mut self, offset: u64, length: u64, outcome: io::Result<()>, fill: u8) {
        match outcome {
            Ok(()) => {
                assert!(offset + length <= SIZE);
                self.flat[offset as usize..][..length as usize].fill(fill);
            }
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {}
            Err(_) => assert!(offset + length > SIZE),
        }
    }

    fn discard(&mut self, (offset, length): (u64, u64)) {
        let outcome = self.disk.discard(offset, length);
        assert_eq!(outcome.is_ok(), offset + length <= SIZE);
        if outcome.is_ok() {
            let first = offset.div_ceil(BLOCK_BYTES) * BLOCK_BYTES;
            let end = (offset + length) / BLOCK_BYTES * BLOCK_BYTES;
            if first < end {
                let range = first as usize..end as usize;
                self.flat[range.clone()].copy_from_slice(&self.below[range]);
            }
        }
    }

    /// After a refusal half-way each byte is either as before or zero.
    fn resynchronise(&mut self, offset: u64, length: u64) {
        if offset + length > SIZE {
            return;
        }
        let mut now = vec![0; length as usize];
        self.disk.read_at(offset, &mut now).expect("a range on the disk");
        let flat = &mut self.flat[offset as usize..][..length as usize];
        for (new, old) in now.iter().zip(flat) {
            assert!(*new == *old || *new == 0);
            *old = *new;
        }
    }

    /// Another disk over the same layers and a layer file with these runs.
    fn restack(&mut self, wanted: &[(u8, u8)]) {
        let runs: Vec<Run> = wanted
            .iter()
            .map(|&(first, blocks)| Run { first: first.into(), blocks: blocks.into() })
            .collect();
        // Runs that are sound hold no more than the disk does.
        let blocks = runs.iter().map(|run| run.blocks).sum::<u64>().min(BLOCKS);
        let backing = Store(Arc::new(Mutex::new(vec![9; (blocks * BLOCK_BYTES) as usize])));
        let layer = Layer::from_runs(backing, SIZE, 0, &runs);
        let sound = runs.iter().all(|run| run.blocks > 0 && run.first + run.blocks <= BLOCKS)
            && runs.windows(2).all(|pair| pair[0].first + pair[0].blocks < pair[1].first);
        assert_eq!(layer.is_ok(), sound);
        let Ok(layer) = layer else {
            return;
        };
        assert_eq!(layer.runs(), runs);
        let mut layers = self.disk.layers().to_vec();
        layers.push(Arc::new(layer));
        self.disk = LayeredDisk::new(SIZE, layers, Store::new(SIZE), LIMIT).expect("sound");
        self.flat.copy_from_slice(&self.below);
        for run in &runs {
            let start = (run.first * BLOCK_BYTES) as usize;
            self.flat[start..][..(run.blocks * BLOCK_BYTES) as usize].fill(9);
        }
        self.below.copy_from_slice(&self.flat);
    }
}

fn check_runs(runs: &[Run]) {
    assert!(runs.iter().all(|run| run.blocks > 0));
    assert!(runs.windows(2).all(|pair| pair[0].first + pair[0].blocks < pair[1].first));
}
