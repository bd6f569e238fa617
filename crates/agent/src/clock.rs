//! The guest's wall clock.

use std::io;

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime, clock_settime};

const NANOSECONDS: i64 = 1_000_000_000;

/// Nanoseconds since the epoch, now.
pub fn realtime_ns() -> i64 {
    clock_gettime(ClockId::CLOCK_REALTIME)
        .map_or(0, |now| now.tv_sec().saturating_mul(NANOSECONDS).saturating_add(now.tv_nsec()))
}

/// Seconds since the guest booted.
pub fn uptime_s() -> f64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map_or(0.0, |now| std::time::Duration::from(now).as_secs_f64())
}

/// Sets the wall clock.
///
/// # Errors
///
/// The kernel refused: this process has not `CAP_SYS_TIME`.
pub fn set_realtime_ns(realtime_ns: i64) -> io::Result<()> {
    let instant =
        TimeSpec::new(realtime_ns.div_euclid(NANOSECONDS), realtime_ns.rem_euclid(NANOSECONDS));
    Ok(clock_settime(ClockId::CLOCK_REALTIME, instant)?)
}
