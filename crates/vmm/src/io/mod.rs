//! The devices of a machine: the bus that routes accesses, and the host's end of each device.

pub mod bus;
mod client;
pub mod console;
pub mod entropy;
pub mod queues;
pub mod tap;
pub mod vsock;
