//! A machine's disk: immutable layers, and one private top.

pub mod compare;
pub mod host_disk;
pub mod layers;
pub mod merge;
pub mod top;
