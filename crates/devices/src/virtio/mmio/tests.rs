use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::*;
use crate::virtio::rng::{Entropy, Rng};
use crate::virtio::testing::{
    DATA, Driver, MEMORY_BYTES, QUEUE_SIZE, agree as negotiate, avail_ring, load, store,
};

/// Gives sevens.
#[derive(Debug)]
struct Sevens;

impl Entropy for Sevens {
    fn fill(&mut self, buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.fill(7);
        Ok(())
    }
}

type Device = Mmio<Rng<Sevens>>;

const FEATURES: u64 = super::super::TRANSPORT_FEATURES;

fn device() -> Device {
    Mmio::new(Rng::new(Sevens))
}

fn serves(device: &mut Device, driver: &mut Driver) -> bool {
    driver.push(0, &[(DATA, 4, true)]);
    device.process(&driver.memory, 0) && driver.used(0).is_some_and(|(_, bytes)| bytes == 4)
}

#[test]
fn a_driver_finds_the_device_by_its_registers() {
    let mut device = device();

    assert_eq!(load(&mut device, 0x00), u32::from_le_bytes(*b"virt"));
    assert_eq!(load(&mut device, 0x04), 2);
    assert_eq!(load(&mut device, 0x08), VIRTIO_ID_RNG);
    assert_eq!(load(&mut device, 0x0c), VENDOR);
    assert_eq!(load(&mut device, 0x34), 256);
    assert_eq!(load(&mut device, 0x70), 0);
    assert_eq!(load(&mut device, 0xb0), u32::MAX);
    assert_eq!(load(&mut device, 0xbc), u32::MAX);
    assert_eq!(device.rejected(), 0);
}

#[test]
fn features_are_read_in_halves() {
    let mut device = device();
    let mut halves = Vec::new();
    for select in [0, 1, 2] {
        store(&mut device, 0x14, select);
        halves.push(load(&mut device, 0x10));
    }

    assert_eq!(halves, [1 << 29, 1, 0]);
}

#[test]
fn a_queue_that_does_not_exist_has_size_zero_and_cannot_be_set_up() {
    let mut device = device();
    negotiate(&mut device, FEATURES);
    store(&mut device, 0x30, 1);

    assert_eq!(load(&mut device, 0x34), 0);
    assert_eq!(load(&mut device, 0x44), 0);
    for offset in [0x38, 0x44, 0x80, 0x90, 0xa0] {
        store(&mut device, offset, 1);
    }
    assert_eq!(device.rejected(), 5);
}

#[test]
fn accesses_outside_the_table_read_as_zero_and_are_counted() {
    let mut device = device();
    let mut eight = [0xaa; 8];
    device.read(0, &mut eight);
    let mut one = [0xaa];
    device.read(0x70, &mut one);
    device.read(0x01, &mut []);

    assert_eq!((eight, one), ([0; 8], [0]));
    assert_eq!(load(&mut device, 0x02), 0);
    assert_eq!(load(&mut device, 0xb1), 0);
    assert_eq!(load(&mut device, 0x38), 0);
    assert_eq!(device.write(0x70, &[0, 0]), Effect::None);
    assert_eq!(device.write(0x00, &[0; 4]), Effect::None);
    assert_eq!(device.rejected(), 8);
}

#[test]
fn status_bits_are_taken_one_at_a_time_and_in_order() {
    let mut device = device();
    for refused in [2, 3, 4, 8, 16, 64] {
        store(&mut device, 0x70, refused);
        assert_eq!(load(&mut device, 0x70), 0, "{refused}");
    }
    store(&mut device, 0x70, 1);
    store(&mut device, 0x70, 2);
    assert_eq!(load(&mut device, 0x70), 1, "a bit cannot be taken back");
    store(&mut device, 0x70, 3);
    store(&mut device, 0x70, 7);
    assert_eq!(load(&mut device, 0x70), 3, "the features come first");
    store(&mut device, 0x70, 128 | 3);
    assert_eq!(load(&mut device, 0x70), 128 | 3, "a driver may always give up");
}

#[test]
fn features_that_were_not_offered_are_not_agreed_to() {
    for features in [FEATURES | 1 << 5, FEATURES & !(1 << 32), 1 << 63 | 1 << 32] {
        let mut device = device();
        negotiate(&mut device, features);
        assert_eq!(load(&mut device, 0x70), 3, "{features:#x}");
    }
}

#[test]
fn features_cannot_be_changed_once_agreed() {
    let mut device = device();
    negotiate(&mut device, 1 << 32);
    store(&mut device, 0x24, 0);
    store(&mut device, 0x20, 1 << 29);

    assert_eq!(device.save().registers.driver_features, 1 << 32);
}

#[test]
fn a_ready_driver_is_served_and_acknowledges_its_interrupt() {
    let mut device = device();
    let mut driver = Driver::started(&mut device);

    assert!(serves(&mut device, &mut driver));

    assert_eq!(load(&mut device, 0x60), 1);
    assert!(device.interrupt_pending());
    store(&mut device, 0x64, 1);
    assert_eq!(load(&mut device, 0x60), 0);
}

#[test]
fn a_notification_counts_only_for_a_queue_of_a_ready_driver() {
    let mut device = device();
    assert_eq!(store(&mut device, 0x50, 0), Effect::None);
    let _driver = Driver::started(&mut device);

    assert_eq!(store(&mut device, 0x50, 0), Effect::Notify(0));
    assert_eq!(store(&mut device, 0x50, 1), Effect::None);
    assert_eq!(store(&mut device, 0x50, u32::MAX), Effect::None);
    assert_eq!(device.rejected(), 3);
}

#[test]
fn nothing_is_served_before_the_driver_is_ready_or_after_it_failed() {
    let mut device = device();
    let driver = Driver::new();
    assert!(!device.process(&driver.memory, 0));

    let mut driver = Driver::started(&mut device);
    store(&mut device, 0x70, 128 | 15);

    assert!(!serves(&mut device, &mut driver));
    assert!(!device.process(&driver.memory, 7));
}

#[test]
fn a_reset_forgets_everything_and_the_device_starts_again() {
    let mut device = device();
    let mut driver = Driver::started(&mut device);
    assert!(serves(&mut device, &mut driver));
    device.config_changed();

    assert_eq!(store(&mut device, 0x70, 0), Effect::Reset);

    let mut fresh = self::device().save();
    fresh.registers.config_generation = 1;
    assert_eq!(device.save(), fresh);
    let mut driver = Driver::started(&mut device);
    assert!(serves(&mut device, &mut driver));
}

#[test]
fn a_queue_can_be_set_up_only_between_features_and_readiness() {
    let mut device = device();
    store(&mut device, 0x38, 8);
    negotiate(&mut device, FEATURES);
    for refused in [0, 3, 512, 65_536 + 8] {
        store(&mut device, 0x38, refused);
    }
    store(&mut device, 0x80, 8);
    store(&mut device, 0x90, 1);
    store(&mut device, 0xa0, 2);
    store(&mut device, 0x44, 2);
    assert_eq!(device.rejected(), 9);
    store(&mut device, 0x84, 5);
    store(&mut device, 0x80, 0x10);
    store(&mut device, 0x44, 1);
    store(&mut device, 0x80, 0x20);

    let queue = device.save().queues[0];
    assert_eq!((queue.size, queue.descriptors, queue.ready), (256, 0x5_0000_0010, true));
    assert_eq!(device.rejected(), 10);
}

#[test]
fn rings_outside_memory_break_the_device_until_it_is_reset() {
    let mut device = device();
    let driver = Driver::new();
    negotiate(&mut device, FEATURES);
    let beyond = u32::try_from(MEMORY_BYTES).unwrap() - 16;
    for offset in [0x80, 0x90, 0xa0] {
        store(&mut device, offset, beyond);
    }
    store(&mut device, 0x44, 1);
    store(&mut device, 0x70, 15);

    assert!(device.process(&driver.memory, 0));
    assert_eq!((load(&mut device, 0x70), load(&mut device, 0x60)), (79, 2));
    assert!(!device.process(&driver.memory, 0));
    store(&mut device, 0x70, 0);
    let mut driver = Driver::started(&mut device);
    assert!(serves(&mut device, &mut driver));
}

#[test]
fn a_saved_device_goes_on_where_it_was_with_its_interrupt_pending() {
    let mut device = device();
    let mut driver = Driver::started(&mut device);
    assert!(serves(&mut device, &mut driver));
    let state = device.save();

    let mut restored = Device::restore(&state, Rng::new(Sevens)).unwrap();

    assert_eq!(restored.save(), state);
    assert!(restored.interrupt_pending());
    assert!(serves(&mut restored, &mut driver), "served although one is pending");
    store(&mut restored, 0x64, 1);
    assert!(serves(&mut restored, &mut driver));
}

#[test]
fn a_restored_device_still_spares_the_guest_interrupts_it_did_not_ask_for() {
    let mut device = device();
    let mut driver = Driver::started(&mut device);
    let state = device.save();
    let mut restored = Device::restore(&state, Rng::new(Sevens)).unwrap();
    driver.put(avail_ring(0) + 4 + 2 * u64::from(QUEUE_SIZE), &9u16.to_le_bytes());
    driver.push(0, &[(DATA, 4, true)]);

    assert!(!restored.process(&driver.memory, 0));
    assert_eq!(driver.used(0), Some((0, 4)));
}

#[test]
fn states_that_could_not_have_been_saved_are_refused() {
    let mut device = device();
    let _driver = Driver::started(&mut device);
    let good = device.save();
    let refuse = |change: &dyn Fn(&mut MmioState)| {
        let mut state = good.clone();
        change(&mut state);
        Device::restore(&state, Rng::new(Sevens)).unwrap_err()
    };

    assert_eq!(refuse(&|state| state.device_type = 2), RestoreError::DeviceType(2));
    assert_eq!(refuse(&|state| state.queues.clear()), RestoreError::QueueCount(0));
    let extra = |state: &mut MmioState| state.queues.push(state.queues[0]);
    assert_eq!(refuse(&extra), RestoreError::QueueCount(2));
    for size in [0, 3, 512] {
        assert_eq!(refuse(&|state| state.queues[0].size = size), RestoreError::Queue(0));
    }
    assert_eq!(refuse(&|state| state.queues[0].descriptors |= 8), RestoreError::Queue(0));
    assert_eq!(refuse(&|state| state.queues[0].driver_ring |= 1), RestoreError::Queue(0));
    assert_eq!(refuse(&|state| state.queues[0].device_ring |= 2), RestoreError::Queue(0));
    assert_eq!(refuse(&|state| state.registers.status = 3), RestoreError::Queue(0));
    for status in [2, 4, 7, 16, 31, 1 << 31] {
        let error = refuse(&|state| state.registers.status = status);
        assert_eq!(error, RestoreError::Status(status));
    }
    let error = refuse(&|state| state.registers.interrupt_status = 4);
    assert_eq!(error, RestoreError::InterruptStatus(4));
    let error = refuse(&|state| state.registers.driver_features |= 1);
    assert_eq!(error, RestoreError::Features(FEATURES | 1));
    let error = refuse(&|state| state.registers.driver_features = 0);
    assert_eq!(error, RestoreError::Features(0));
}

#[test]
fn no_flipped_bit_of_a_state_reaches_a_panic() {
    let mut device = device();
    let mut driver = Driver::started(&mut device);
    assert!(serves(&mut device, &mut driver));
    let good = device.save();
    for bit in 0..64 {
        let flip = |change: &dyn Fn(&mut MmioState, u64)| {
            let mut state = good.clone();
            change(&mut state, 1 << bit);
            if let Ok(mut restored) = Device::restore(&state, Rng::new(Sevens)) {
                assert_eq!(restored.save(), state);
                restored.process(&driver.memory, 0);
            }
        };
        flip(&|state, mask| state.queues[0].descriptors ^= mask);
        flip(&|state, mask| state.queues[0].driver_ring ^= mask);
        flip(&|state, mask| state.queues[0].device_ring ^= mask);
        flip(&|state, mask| state.registers.driver_features ^= mask);
        let half = |mask: u64| u16::try_from(mask & 0xffff).unwrap();
        flip(&|state, mask| state.queues[0].size ^= half(mask));
        flip(&|state, mask| state.queues[0].next_avail ^= half(mask));
        flip(&|state, mask| state.queues[0].next_used ^= half(mask));
        let word = |mask: u64| u32::try_from(mask & 0xffff_ffff).unwrap();
        flip(&|state, mask| state.registers.status ^= word(mask));
        flip(&|state, mask| state.registers.queue_select ^= word(mask));
    }
}

#[test]
fn a_changed_configuration_shows_in_generation_and_interrupt() {
    let mut device = device();
    device.config_changed();

    assert_eq!((load(&mut device, 0xfc), load(&mut device, 0x60)), (1, 2));
    store(&mut device, 0x64, 1);
    assert_eq!(load(&mut device, 0x60), 2, "only what is named is acknowledged");
}
