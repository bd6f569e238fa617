//! Who speaks with a machine from outside: clients at its control socket, and its guest's agent.

pub mod handshake;
pub mod introduction;
pub mod server;
pub mod socket;
