//! Watching for times at which the guest is paused.
//!
//! The poll loop looks at the clock each millisecond while a connection asks for it, and keeps the
//! longest time between two looks.  So a pause of the machine is in it, and whatever it costs the
//! guest afterwards; and so is the millisecond, without any stall at all.

use std::time::{Duration, Instant};

use forkd_proto::guest::{WatchedReply, timeout};

/// Between two looks.
pub const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A watch, from its first look on.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    began: Instant,
    last: Instant,
    longest: Duration,
    until: Instant,
}

impl Watch {
    /// Begins, for at most so many seconds.
    #[must_use]
    pub fn new(now: Instant, for_s: f64) -> Self {
        Self { began: now, last: now, longest: Duration::ZERO, until: now + timeout(for_s) }
    }

    /// Looks at the clock, unless the watch is over.  The look that finds it over counts.
    pub fn look(&mut self, now: Instant) {
        if self.last < self.until {
            self.longest = self.longest.max(now.saturating_duration_since(self.last));
            self.last = now;
        }
    }

    /// When to look again; `None` when it is over.
    #[must_use]
    pub fn wake_at(&self) -> Option<Instant> {
        (self.last < self.until).then(|| self.last + LOOK_EVERY)
    }

    /// When it has lasted so many seconds, or is over by itself.
    #[must_use]
    pub fn lasted_at(&self, at_least_s: f64) -> Instant {
        self.until.min(self.began + timeout(at_least_s))
    }

    /// What it saw.
    #[must_use]
    pub fn reply(&self) -> WatchedReply {
        let watched = self.last.saturating_duration_since(self.began);
        WatchedReply { longest_s: self.longest.as_secs_f64(), watched_s: watched.as_secs_f64() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_time_between_two_looks_is_kept_and_none_after_the_end() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut watch = Watch::new(began, 0.03);
        assert_eq!(watch.wake_at(), Some(at(1)));

        for ms in [1, 2, 27, 28, 31] {
            watch.look(at(ms));
        }

        assert_eq!(watch.wake_at(), None);
        watch.look(at(500));
        assert_eq!(watch.reply(), WatchedReply { longest_s: 0.025, watched_s: 0.031 });
        assert_eq!(watch.lasted_at(0.02), at(20));
        assert_eq!(watch.lasted_at(0.04), at(30));
    }
}
