//! The VM generation id: sixteen bytes that no other machine has.
//!
//! Linux' `vmgenid` driver mixes them into its random number generator whenever
//! it is told that they have changed ("Virtual Machine Generation ID", Microsoft, 2012;
//! Linux `drivers/virt/vmgenid.c`), and tells the module `wireguard`.  The agent has the
//! kernel reseed itself in any case, so it is told only if it has that module (ADR 0036).

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::error::Error;
use crate::layout;
use crate::sys::process;

/// Gives this machine an id of its own.
///
/// # Errors
///
/// [`Error::Io`] if the host has no entropy, [`Error::GuestMemory`] if memory ends below the page.
pub fn renew(memory: &GuestMemoryMmap) -> Result<(), Error> {
    let mut id = [0; 16];
    process::random(&mut id).map_err(Error::io("draw a generation id"))?;
    memory.write_slice(&id, GuestAddress(layout::VMGENID)).map_err(Error::guest_memory)
}
