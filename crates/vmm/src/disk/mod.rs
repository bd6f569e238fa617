//! A machine's disk: immutable layers, and one private top.

pub mod compare;
pub mod layers;
