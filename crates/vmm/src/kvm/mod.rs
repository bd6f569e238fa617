//! What KVM holds of a machine: its chips and its vCPUs, to be read and put back.

pub mod cpu;
pub mod cpuid;
pub mod emulator;
pub mod msrs;
pub mod prefault;
pub mod stored;
pub mod tsc;
pub mod vm;
