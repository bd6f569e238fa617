//! System calls that neither `std` nor the rust-vmm crates wrap.

pub mod mapping;
pub mod pagemap;
pub mod process;
pub mod urgency;
