//! Where workers stop between two steps, so that somebody can look at all of them at once.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
struct Inner {
    closed: bool,
    stopped: usize,
    /// Somebody waits for workers to come by.
    watched: bool,
    /// How often each worker has come by.
    passed: Vec<u64>,
}

/// The gate.
#[derive(Debug)]
pub struct Gate {
    inner: Mutex<Inner>,
    /// For workers: the gate has closed or opened.
    turned: Condvar,
    /// For who watches: a worker has come by, or has stopped, or has left.
    came: Condvar,
}

/// While it lives, every worker stands at the gate.
#[derive(Debug)]
pub struct Stopped<'a>(&'a Gate);

impl Gate {
    /// Makes an open gate for `workers`.
    pub fn new(workers: usize) -> Self {
        let inner = Inner { closed: false, stopped: 0, watched: false, passed: vec![0; workers] };
        Self { inner: Mutex::new(inner), turned: Condvar::new(), came: Condvar::new() }
    }

    /// Worker `who` comes by, rests for `pause`, and stays for as long as the gate is closed.
    pub fn pass(&self, who: usize, pause: Duration) {
        let mut inner = self.lock();
        inner.passed[who] += 1;
        if inner.watched {
            self.came.notify_all();
        }
        let rested = Instant::now() + pause;
        while !inner.closed {
            let left = rested.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            inner = wait(&self.turned, inner, left);
        }
        inner.stopped += 1;
        self.came.notify_all();
        while inner.closed {
            inner = self.turned.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.stopped -= 1;
        self.came.notify_all();
    }

    /// Closes the gate, and returns when all workers stand there.
    pub fn stop(&self) -> Stopped<'_> {
        let mut inner = self.lock();
        // Those of the last time first have to be gone.
        while inner.stopped > 0 {
            inner = self.came.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.closed = true;
        self.turned.notify_all();
        while inner.stopped < inner.passed.len() {
            inner = self.came.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        Stopped(self)
    }

    /// Waits until each worker has come by once more.  Returns those that have not by then.
    pub fn wait_for_all(&self, deadline: Duration) -> Vec<usize> {
        let mut inner = self.lock();
        inner.watched = true;
        let (before, deadline) = (inner.passed.clone(), Instant::now() + deadline);
        loop {
            let late = |who: &usize| inner.passed[*who] == before[*who];
            let missing: Vec<usize> = (0..before.len()).filter(late).collect();
            let left = deadline.saturating_duration_since(Instant::now());
            if missing.is_empty() || left.is_zero() {
                inner.watched = false;
                return missing;
            }
            inner = wait(&self.came, inner, left);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.lock().closed = false;
        self.0.turned.notify_all();
    }
}

fn wait<'a>(what: &Condvar, inner: MutexGuard<'a, Inner>, most: Duration) -> MutexGuard<'a, Inner> {
    what.wait_timeout(inner, most).unwrap_or_else(PoisonError::into_inner).0
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
    use std::thread;

    use super::*;

    const DEADLINE: Duration = Duration::from_mins(1);

    #[test]
    fn all_workers_stand_while_the_gate_is_closed_and_go_on_afterwards() {
        let gate = Arc::new(Gate::new(3));
        let (steps, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let workers: Vec<_> = (0..3)
            .map(|who| {
                let (gate, steps, over) = (gate.clone(), steps.clone(), over.clone());
                thread::spawn(move || {
                    while !over.load(SeqCst) {
                        steps.fetch_add(1, SeqCst);
                        gate.pass(who, Duration::from_millis(who as u64));
                    }
                })
            })
            .collect();
        for _ in 0..20 {
            let stopped = gate.stop();
            let before = steps.load(SeqCst);
            thread::yield_now();
            assert_eq!(steps.load(SeqCst), before);
            drop(stopped);
            assert_eq!(gate.wait_for_all(DEADLINE), Vec::<usize>::new());
            assert!(steps.load(SeqCst) >= before + 3);
        }
        over.store(true, SeqCst);
        for worker in workers {
            worker.join().unwrap();
        }
    }

    #[test]
    fn who_does_not_come_by_is_named() {
        assert_eq!(Gate::new(2).wait_for_all(Duration::ZERO), [0, 1]);
    }
}
