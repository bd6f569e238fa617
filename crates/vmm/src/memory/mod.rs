//! Guest memory: the image that forks share, what each has written, and what it will write.

pub mod delta;
pub mod question;
pub mod ram;
pub mod seed_memory;
mod sheet;
pub mod warmth;
