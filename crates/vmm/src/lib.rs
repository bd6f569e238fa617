//! The virtual machine monitor of forkd.  `ARCHITECTURE.md` has the map.

pub mod boot;
pub mod control;
pub mod disk;
pub mod error;
pub mod fork;
pub mod io;
pub mod jail;
pub mod kvm;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod snapshot;
pub mod sys;
pub mod zygote;
