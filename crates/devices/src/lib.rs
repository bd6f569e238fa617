//! The devices a guest sees: state machines over hostile input.
//!
//! Nothing here knows KVM, threads, files or sockets.  The VMM's bus calls in
//! with loads, stores and "the guest rang"; the devices call out through four
//! small traits that the VMM implements: [`disk::Blocks`] and [`disk::Top`]
//! (a disk's layers), [`virtio::rng::Entropy`] and [`virtio::net::Frames`].
//! [`virtio::vsock::Vsock`] calls nobody: it is driven from both sides.
//!
//! | Module            | Device                                             |
//! |-------------------|----------------------------------------------------|
//! | [`virtio::mmio`]  | the transport: registers, queues, interrupt status |
//! | [`virtio::block`] | the disk's front, over any [`virtio::block::Disk`] |
//! | [`disk`]          | the disk's back: immutable layers, private top     |
//! | [`virtio::net`]   | Ethernet frames, no offloads                       |
//! | [`virtio::rng`]   | entropy                                            |
//! | [`virtio::vsock`] | stream connections, connection table and credit    |
//!
//! # Trust
//!
//! Guest memory, register stores and everything read from a snapshot are
//! hostile.  They reach no panic, no log line and no allocation beyond a named
//! limit; what breaks the rules is dropped or answered with an error, and
//! counted in `rejected()`.

#![forbid(unsafe_code)]

pub mod disk;
pub mod virtio;
