//! A connection to a program in the guest.

use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

/// `connect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Connect {
    /// The TCP port on which the program listens.
    pub port: NonZeroU16,
}
