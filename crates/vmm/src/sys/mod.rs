//! System calls that neither `std` nor the rust-vmm crates wrap.

pub mod clock;
pub mod descriptors;
pub mod files;
pub mod handed;
pub mod listener;
pub mod mapping;
pub mod meminfo;
pub mod output;
pub mod pagemap;
pub mod process;
pub mod sharing;
pub mod urgency;
