//! Harnesses: one function per thing that reads hostile input.
//!
//! Each takes raw bytes, turns them into a sequence of sensible and senseless
//! steps, and asserts what must hold whatever they are.  `fuzz_targets/` feeds
//! them from libFuzzer, `tests/short.rs` from a seeded generator.

mod disk;
mod frame;
mod guest;
mod mmio;
mod states;
mod vsock;

use arbitrary::Unstructured;

/// A harness.
pub type Harness = fn(&[u8]);

/// Every harness by the name of its target.
pub const HARNESSES: [(&str, Harness); 7] = [
    ("mmio_block", mmio_block),
    ("mmio_net", mmio_net),
    ("mmio_rng", mmio_rng),
    ("vsock", vsock),
    ("layered_disk", layered_disk),
    ("device_states", device_states),
    ("frame", frame),
];

/// Most steps taken for one input.
const STEPS_MAX: usize = 64;

/// A guest over the transport and the block device, on a layered disk.
pub fn mmio_block(data: &[u8]) {
    mmio::block(&mut Unstructured::new(data));
}

/// A guest over the transport and the network device.
pub fn mmio_net(data: &[u8]) {
    mmio::net(&mut Unstructured::new(data));
}

/// A guest over the transport and the entropy device.
pub fn mmio_rng(data: &[u8]) {
    mmio::rng(&mut Unstructured::new(data));
}

/// A guest and a host over the vsock device.
pub fn vsock(data: &[u8]) {
    vsock::run(&mut Unstructured::new(data));
}

/// Reads, writes, freezes of a layered disk, compared with a flat one.
pub fn layered_disk(data: &[u8]) {
    disk::run(&mut Unstructured::new(data));
}

/// Devices brought back from states that nobody saved.
pub fn device_states(data: &[u8]) {
    states::run(data);
}

/// Frames of both protocols, in whole and in pieces.
pub fn frame(data: &[u8]) {
    frame::run(data);
}
