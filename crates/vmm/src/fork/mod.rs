//! Machines of machines: fork points, and what is made of them.

pub mod branch;
pub mod child;
pub mod plan;
pub mod reset;
