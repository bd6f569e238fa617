//! Guest memory: the image that forks share, what each has written, and what it will write.

pub mod delta;
pub mod held;
pub mod question;
pub mod ram;
mod sheet;
pub mod warmth;
