//! The three files that make a snapshot; `protocol/store/FORMAT.md` is their specification.

pub mod header;
pub mod pages;
pub mod runs;
pub mod state;
