//! The host's wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// The host's wall clock, in nanoseconds since the epoch.
#[must_use]
pub fn realtime_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
