//! What a guest finds when it starts: tables, a kernel, its own id.

pub mod acpi;
pub mod generation;
pub mod kernel;
pub mod probe;
