//! The virtual machine monitor of forkd.  `ARCHITECTURE.md` has the map.

pub mod acpi;
pub mod boot;
pub mod bus;
pub mod console;
pub mod control;
pub mod cpu;
pub mod disk;
pub mod entropy;
pub mod error;
pub mod generation;
pub mod handshake;
pub mod layout;
pub mod machine;
pub mod mapping;
pub mod memory;
pub mod pagemap;
pub mod probe;
pub mod process;
pub mod serve;
pub mod snapshot;
pub mod tap;
pub mod vcpu;
pub mod vm;
pub mod vsock_host;
pub mod warmth;
pub mod zygote;
