use super::*;
use crate::virtio::mmio::Mmio;
use crate::virtio::testing::{DATA, Driver};

/// Counts up, so that every byte shows where it came from.
#[derive(Debug, Default)]
struct Counting {
    next: u8,
    broken: bool,
}

impl Entropy for Counting {
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        if self.broken {
            return Err(io::ErrorKind::Other.into());
        }
        for byte in buffer {
            *byte = self.next;
            self.next = self.next.wrapping_add(1);
        }
        Ok(())
    }
}

#[test]
fn a_buffer_in_pieces_is_filled_in_order() {
    let mut rng = Mmio::new(Rng::new(Counting::default()));
    let mut driver = Driver::started(&mut rng);
    driver.push(0, &[(DATA, 3, true), (DATA + 100, 0, true), (DATA + 200, 5, true)]);

    assert!(rng.process(&driver.memory, 0));

    assert_eq!(driver.used(0), Some((0, 8)));
    assert_eq!(driver.get(DATA, 4), [0, 1, 2, 0]);
    assert_eq!(driver.get(DATA + 200, 6), [3, 4, 5, 6, 7, 0]);
}

#[test]
fn a_request_gets_the_limit_and_not_a_byte_more() {
    let mut rng = Mmio::new(Rng::new(Counting { next: 1, broken: false }));
    let mut driver = Driver::started(&mut rng);
    let limit = u32::try_from(REQUEST_BYTES_MAX).unwrap();
    driver.push(0, &[(DATA, limit + 1, true)]);

    rng.process(&driver.memory, 0);

    assert_eq!(driver.used(0), Some((0, limit)));
    assert_eq!(driver.get(DATA + u64::from(limit), 1), [0]);
    assert_eq!(rng.rejected(), 0);
}

#[test]
fn a_host_without_entropy_gives_an_empty_answer_and_counts_it() {
    let mut rng = Mmio::new(Rng::new(Counting { next: 0, broken: true }));
    let mut driver = Driver::started(&mut rng);
    driver.push(0, &[(DATA, 16, true)]);

    rng.process(&driver.memory, 0);

    assert_eq!(driver.used(0), Some((0, 0)));
    assert_eq!(rng.rejected(), 1);
}

#[test]
fn a_buffer_outside_memory_is_returned_empty_and_counted() {
    let mut rng = Mmio::new(Rng::new(Counting::default()));
    let mut driver = Driver::started(&mut rng);
    for address in [1 << 40, u64::MAX - 3] {
        driver.push(0, &[(address, 64, true)]);
    }
    driver.push(0, &[(DATA, 16, false)]);

    rng.process(&driver.memory, 0);

    assert_eq!(driver.used(0), Some((0, 0)));
    assert_eq!(driver.used(0), Some((1, 0)));
    assert_eq!(driver.used(0), Some((2, 0)));
    assert_eq!(rng.rejected(), 3);
}
