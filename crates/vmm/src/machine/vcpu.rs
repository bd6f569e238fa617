//! vCPU threads: run the guest, hand its accesses to the bus, stop at a safe point when asked.
//!
//! A thread stops only when `KVM_RUN` returns `EINTR`.  Then the last exit has
//! been completed, which KVM does on re-entry, and the registers may be read.
//!
//! Stopping a thread is a signal.  Its handler sets `immediate_exit` in the
//! vCPU's shared page, so a signal that arrives just before `KVM_RUN` is not lost
//! (`Documentation/virt/kvm/api.rst`, `immediate_exit`).

use std::cell::Cell;
use std::fmt;
use std::os::unix::thread::JoinHandleExt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_run;
use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::error::Error;
use crate::io::bus::{Bus, End};
use crate::jail::filter::{self, Role};
use crate::kvm::cpu::VcpuState;
use crate::kvm::msrs::Defaults;
use crate::sys::mapping;
use crate::sys::urgency::{self, Urgent};

/// Longest wait for vCPUs to stop.  They stop in microseconds; this ends a wait on a broken host.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const NOT_PAUSED: Error = Error::State("the vCPUs are not paused");
/// Stack of a vCPU thread.  The loop needs a few KiB; what is not touched costs nothing.
const STACK_BYTES: usize = 256 << 10;

thread_local! {
    /// The shared page of the vCPU that this thread runs; read by the signal handler.
    static RUN_PAGE: Cell<*mut kvm_run> = const { Cell::new(ptr::null_mut()) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Run,
    Park,
    End,
}

/// What each parked thread is to do with its vCPU.
type Work = Arc<dyn Fn(usize, &VcpuFd) + Send + Sync>;

/// What a thread's work came to.
type Slot<R> = Mutex<Option<Result<R, Error>>>;

struct Inner {
    mode: Mode,
    parked: usize,
    /// A vCPU has run its last: the machine is over.
    over: bool,
    work: Option<Work>,
    /// Whether each thread still has `work` before it, which is begun when all are parked.
    waiting: Vec<bool>,
    /// Whether each may be urgent, and calms itself when it runs.
    urgent: Vec<bool>,
    stopped_at: Option<Instant>,
    running_at: Option<Instant>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("mode", &self.mode).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Longest wait for the threads to stop or to go on.
    timeout: Duration,
}

impl Shared {
    /// Stands between `threads` threads, which are to park, and whoever tells them what to do.
    fn new(threads: usize, timeout: Duration) -> Self {
        let inner = Inner {
            mode: Mode::Park,
            parked: 0,
            over: false,
            work: None,
            waiting: vec![false; threads],
            urgent: vec![false; threads],
            stopped_at: None,
            running_at: None,
        };
        Self { inner: Mutex::new(inner), changed: Condvar::new(), timeout }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes whoever waits, and looks again.
    ///
    /// The lock is let go first: who is woken would only find it taken and sleep once more, and a
    /// guest that is paused pays for each such turn.
    fn tell<'a>(&'a self, inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        drop(inner);
        self.changed.notify_all();
        self.lock()
    }

    /// Lets all threads go on, and returns when they have.
    fn resume(&self) -> Result<(), Error> {
        let mut inner = self.lock();
        inner.mode = Mode::Run;
        inner = self.tell(inner);
        let (_inner, going) = self.wait_while(inner, |inner| inner.parked > 0 && !inner.over);
        if going { Ok(()) } else { Err(Error::State("a vCPU did not go on in time")) }
    }

    /// Has all threads stop, which `kick` gets to look, and then do `work` if there is any.
    /// Returns when the last one has.  If one does not stop in time, all go on.
    fn pause(&self, work: Option<Work>, kick: impl FnOnce()) -> Result<(), Error> {
        let mut inner = self.lock();
        inner.mode = Mode::Park;
        inner.waiting.fill(work.is_some());
        inner.work = work;
        kick();
        let stopped = self.await_all(inner);
        if matches!(stopped, Err(Error::Stuck)) {
            let mut inner = self.lock();
            inner.mode = Mode::Run;
            inner.work = None;
            inner.waiting.fill(false);
            drop(self.tell(inner));
        }
        stopped
    }

    /// Has all threads, which are parked, do `work`.  Returns when the last one has.
    fn perform(&self, work: Work) -> Result<(), Error> {
        let mut inner = self.lock();
        if inner.mode != Mode::Park || inner.over {
            return Err(NOT_PAUSED);
        }
        inner.waiting.fill(true);
        inner.work = Some(work);
        inner = self.tell(inner);
        self.await_all(inner).map_err(|error| match error {
            Error::Stuck => Error::State("a vCPU that is paused cannot be read or written"),
            other => other,
        })
    }

    fn await_all(&self, inner: MutexGuard<'_, Inner>) -> Result<(), Error> {
        let (mut inner, stopped) = self.wait_while(inner, |inner| {
            inner.parked < inner.waiting.len() || inner.waiting.contains(&true) && !inner.over
        });
        if !stopped {
            return Err(Error::Stuck);
        }
        inner.work = None;
        if inner.waiting.contains(&true) { Err(NOT_PAUSED) } else { Ok(()) }
    }

    /// Waits until `condition` is false; returns whether it is.
    fn wait_while<'a>(
        &self,
        inner: MutexGuard<'a, Inner>,
        condition: impl Fn(&Inner) -> bool,
    ) -> (MutexGuard<'a, Inner>, bool) {
        let waited = self.changed.wait_timeout_while(inner, self.timeout, |inner| condition(inner));
        let (inner, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        (inner, !timeout.timed_out())
    }

    /// Waits while the machine is parked, as thread `id`, which has `perform` do what work there
    /// is.  Returns whether to run.
    ///
    /// Whoever waits is woken by the last thread; by one that is alone and has work to do, not
    /// before that is done.
    fn park(&self, id: usize, perform: impl Fn(Work)) -> bool {
        let mut inner = self.lock();
        if inner.mode == Mode::Park {
            if inner.parked == 0 {
                inner.stopped_at = Some(Instant::now());
            }
            inner.parked += 1;
            let threads = inner.waiting.len();
            if inner.parked == threads && !(threads == 1 && inner.waiting[id]) {
                inner = self.tell(inner);
            }
            while inner.mode == Mode::Park {
                let begun = inner.waiting[id] && inner.parked == threads;
                if let Some(work) = inner.work.clone().filter(|_| begun) {
                    drop(inner);
                    perform(work);
                    inner = self.lock();
                    inner.waiting[id] = false;
                    if !inner.waiting.contains(&true) {
                        inner = self.tell(inner);
                    }
                } else {
                    inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
                }
            }
            inner.parked -= 1;
            if inner.parked == 0 {
                inner.running_at = Some(Instant::now());
            }
        }
        // Before anybody is told, who may then ask for the next stop at once.
        let (run, last) = (inner.mode == Mode::Run, inner.parked == 0);
        let urgent = std::mem::take(&mut inner.urgent[id]);
        drop(inner);
        if last {
            self.changed.notify_all();
        }
        if urgent {
            urgency::calm();
        }
        run
    }

    /// Has all threads, which run, be urgent no longer than until each has stopped and runs again;
    /// and the calling one until what is returned is dropped.
    fn hurry(&self) -> Option<Urgent> {
        self.lock().urgent.fill(true);
        Urgent::here()
    }
}

/// All vCPU threads of a machine.  Dropping it ends them.
#[derive(Debug)]
pub struct Vcpus {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Vcpus {
    /// Starts one thread per vCPU, parked.  `run_bytes` is the size of what each shares with KVM.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a thread or the signal handler cannot be made.
    pub fn start(fds: Vec<VcpuFd>, bus: &Arc<Bus>, run_bytes: usize) -> Result<Self, Error> {
        install_handler()?;
        let shared = Arc::new(Shared::new(fds.len(), STOP_TIMEOUT));
        let mut vcpus = Self { shared, threads: Vec::with_capacity(fds.len()) };
        for (id, mut fd) in fds.into_iter().enumerate() {
            // In a fork it would hold this machine's VM, whatever descriptors are closed there.
            let page = ptr::from_mut(fd.get_kvm_run()).cast();
            mapping::keep_from_forks(page, run_bytes as u64)?;
            let (shared, bus) = (Arc::clone(&vcpus.shared), Arc::clone(bus));
            let thread = std::thread::Builder::new()
                .name(format!("vcpu{id}"))
                .stack_size(STACK_BYTES)
                .spawn(move || run(id, fd, &shared, &bus))
                .map_err(Error::io("start a vCPU thread"))?;
            vcpus.threads.push(thread);
        }
        Ok(vcpus)
    }

    /// Lets the guest run, and returns when all vCPUs do.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if one does not within [`STOP_TIMEOUT`]; the others do.
    pub fn resume(&self) -> Result<(), Error> {
        self.shared.resume()
    }

    /// Has threads that were made urgent for the next stop of the guest, which runs, be so until it
    /// runs again: its own and the calling one.  What is returned is to be kept till then; `None`
    /// if the calling one is not.
    #[must_use]
    pub fn hurry(&self) -> Option<Urgent> {
        self.shared.hurry()
    }

    /// For how long the guest was paused before the last [`Self::resume`]: from the first vCPU
    /// that stopped to the last one that ran again.
    #[must_use]
    pub fn stood_still(&self) -> Duration {
        let inner = self.shared.lock();
        let times = inner.running_at.zip(inner.stopped_at);
        times.map_or(Duration::ZERO, |(running, stopped)| running - stopped)
    }

    /// Stops all vCPUs, and returns when the last one has.
    ///
    /// # Errors
    ///
    /// [`Error::Stuck`] if one does not stop within [`STOP_TIMEOUT`]; all run then.
    pub fn pause(&self) -> Result<(), Error> {
        self.shared.pause(None, || self.kick())
    }

    /// As [`Self::pause`] and then [`Self::save`], with nothing in between.
    ///
    /// # Errors
    ///
    /// [`Error::Stuck`] as [`Self::pause`]; those of [`Self::save`], and all are stopped then.
    pub fn pause_and_save(&self, msr_defaults: &Arc<Defaults>) -> Result<Vec<VcpuState>, Error> {
        gather(self.threads.len(), saving(msr_defaults), |work| {
            self.shared.pause(Some(work), || self.kick())
        })
    }

    /// Reads the state of all vCPUs, which must be paused.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`] if one cannot be read, [`Error::State`] if they are running.
    pub fn save(&self, msr_defaults: &Arc<Defaults>) -> Result<Vec<VcpuState>, Error> {
        self.each(saving(msr_defaults))
    }

    /// Has each vCPU's thread do `work`, all at once; they must be paused.
    ///
    /// When it returns, no thread holds anything of the work, nor a lock of the allocator.
    ///
    /// # Errors
    ///
    /// The first of `work`'s; [`Error::State`] if the vCPUs are running, or one does not answer.
    pub fn each<R: Send + 'static>(
        &self,
        work: impl Fn(usize, &VcpuFd) -> Result<R, Error> + Send + Sync + 'static,
    ) -> Result<Vec<R>, Error> {
        gather(self.threads.len(), work, |work| self.shared.perform(work))
    }

    fn kick(&self) {
        for thread in &self.threads {
            // SAFETY: the thread has not been joined, so its id is valid.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), signal()) };
        }
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        self.shared.lock().mode = Mode::End;
        self.shared.changed.notify_all();
        self.kick();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing more to tell.
            drop(thread.join());
        }
    }
}

fn saving(
    msr_defaults: &Arc<Defaults>,
) -> impl Fn(usize, &VcpuFd) -> Result<VcpuState, Error> + Send + Sync + 'static {
    let msr_defaults = Arc::clone(msr_defaults);
    move |_, fd| VcpuState::save(fd, &msr_defaults)
}

/// Returns what each of `threads` made of `work`, which `perform` has them do.
fn gather<R: Send + 'static>(
    threads: usize,
    work: impl Fn(usize, &VcpuFd) -> Result<R, Error> + Send + Sync + 'static,
    perform: impl FnOnce(Work) -> Result<(), Error>,
) -> Result<Vec<R>, Error> {
    let results: Arc<[Slot<R>]> = (0..threads).map(|_| Mutex::new(None)).collect();
    let sink = Arc::clone(&results);
    perform(Arc::new(move |id, fd| {
        let result = work(id, fd);
        *sink[id].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
    }))?;
    let take = |slot: &Slot<R>| slot.lock().unwrap_or_else(PoisonError::into_inner).take();
    results.iter().filter_map(take).collect()
}

fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn on_signal(_: libc::c_int) {
    RUN_PAGE.with(|page| {
        if let Some(page) = NonNull::new(page.get()) {
            // SAFETY: the page belongs to the vCPU that this very thread runs, and is mapped while
            // the pointer is set; nothing else of this thread holds a reference to the field.
            let flag = unsafe { &raw mut (*page.as_ptr()).immediate_exit };
            // SAFETY: as above; the kernel reads the byte, nothing else writes it concurrently.
            unsafe { flag.write_volatile(1) };
        }
    });
}

fn install_handler() -> Result<(), Error> {
    // SAFETY: all-zero is a valid `sigaction`: no flags (so no SA_RESTART), empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
    // SAFETY: `action` is initialised, and its handler only touches a byte of a mapped page.
    let result = unsafe { libc::sigaction(signal(), &raw const action, ptr::null_mut()) };
    if result < 0 { Err(Error::last_os("sigaction")) } else { Ok(()) }
}

fn run(id: usize, mut fd: VcpuFd, shared: &Shared, bus: &Bus) {
    RUN_PAGE.with(|page| page.set(ptr::from_mut(fd.get_kvm_run())));
    let filtered = filter::put_on(Role::Vcpu).map_err(|error| End::Error(error.to_string()));
    loop {
        fd.set_kvm_immediate_exit(0);
        if !shared.park(id, |work| work(id, &fd)) {
            break;
        }
        let ran = filtered.clone().and_then(|()| run_until_interrupted(&mut fd, bus));
        if let Err(end) = ran {
            bus.end(end);
            // The machine is over for all vCPUs; wait to be told so.
            let mut inner = shared.lock();
            inner.parked += 1;
            inner.over = true;
            shared.changed.notify_all();
            while inner.mode != Mode::End {
                inner = shared.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
            }
            break;
        }
    }
    RUN_PAGE.with(|page| page.set(ptr::null_mut()));
}

fn run_until_interrupted(fd: &mut VcpuFd, bus: &Bus) -> Result<(), End> {
    loop {
        match fd.run() {
            Ok(VcpuExit::MmioWrite(address, data)) => bus.mmio_write(address, data),
            Ok(VcpuExit::MmioRead(address, data)) => bus.mmio_read(address, data),
            Ok(VcpuExit::IoOut(port, data)) => bus.io_out(port, data)?,
            Ok(VcpuExit::IoIn(port, data)) => bus.io_in(port, data),
            Ok(VcpuExit::Intr) => return Ok(()),
            Ok(VcpuExit::Shutdown) => return Err(End::TripleFault),
            Ok(VcpuExit::SystemEvent(..)) => return Err(End::Shutdown),
            Ok(exit) => return Err(End::Error(format!("unexpected exit: {exit:?}"))),
            Err(error) if error.errno() == libc::EINTR => return Ok(()),
            Err(error) if error.errno() == libc::EAGAIN => {}
            Err(error) => return Err(End::Error(format!("KVM_RUN: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::array;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex, mpsc};
    use std::thread::{self, Thread};
    use std::time::Duration;

    use super::{Mode, STOP_TIMEOUT, Shared, Work};
    use crate::error::Error;
    use crate::sys::urgency::{is_urgent, raise, this_thread};

    const THREADS: usize = 4;
    const TURNS: usize = 20_000;

    /// Has `drive` stop and start threads, which are given what to do it with.
    ///
    /// A thread that runs does nothing until it is kicked; work is done while none runs, and is
    /// `at_work`.
    fn with_threads(
        at_work: impl Fn() + Sync,
        drive: impl Fn(&Shared, &dyn Fn()) -> Result<(), Error>,
    ) {
        let shared = &Shared::new(THREADS, STOP_TIMEOUT);
        let (running, at_work) = (&AtomicUsize::new(0), &at_work);
        thread::scope(|scope| {
            let run = move |id| {
                let perform = |_| {
                    assert_eq!(running.load(Ordering::SeqCst), 0);
                    at_work();
                };
                while shared.park(id, perform) {
                    running.fetch_add(1, Ordering::SeqCst);
                    thread::park();
                    running.fetch_sub(1, Ordering::SeqCst);
                }
            };
            let spawn = |id| scope.spawn(move || run(id)).thread().clone();
            let threads: [Thread; THREADS] = array::from_fn(spawn);
            let kick = || threads.iter().for_each(Thread::unpark);
            let _ending = Ending { shared, kick: &kick };
            // They start parked, where no kick reaches them.
            let started = shared.pause(None, || ()).and_then(|()| shared.resume());
            let outcome = started.and_then(|()| (0..TURNS).try_for_each(|_| drive(shared, &kick)));
            outcome.unwrap();
        });
    }

    /// Ends the threads, also if an assertion fails: the scope waits for them.
    struct Ending<'a> {
        shared: &'a Shared,
        kick: &'a dyn Fn(),
    }

    impl Drop for Ending<'_> {
        fn drop(&mut self) {
            self.shared.lock().mode = Mode::End;
            self.shared.changed.notify_all();
            (self.kick)();
        }
    }

    #[test]
    fn threads_that_are_stopped_as_soon_as_they_run_run_again() {
        let nothing = || ();
        with_threads(nothing, |shared, kick| {
            shared.pause(None, kick)?;
            shared.resume()
        });
    }

    #[test]
    fn work_is_begun_when_all_have_stopped_and_done_when_it_is_said_to_be() {
        let held = Arc::new(());
        let nothing = || ();
        with_threads(nothing, |shared, kick| {
            for round in 0..2 {
                let held = Arc::clone(&held);
                let work: Work = Arc::new(move |_, _| drop(Arc::clone(&held)));
                if round == 0 { shared.pause(Some(work), kick) } else { shared.perform(work) }?;
                assert!(!shared.lock().waiting.contains(&true));
            }
            assert_eq!(Arc::strong_count(&held), 1, "a thread holds on to what it was given");
            shared.resume()?;
            assert!(shared.perform(Arc::new(|_, _| ())).is_err(), "work for threads that run");
            Ok(())
        });
    }

    #[test]
    fn threads_of_which_one_does_not_stop_in_time_all_go_on() {
        let shared = &Shared::new(2, Duration::from_millis(1));
        let (say, said) = mpsc::channel();
        let hears = || said.recv_timeout(STOP_TIMEOUT);
        thread::scope(|scope| {
            let also_says = say.clone();
            let stops = scope.spawn(move || {
                while shared.park(0, drop) {
                    say.send(()).unwrap();
                    thread::park();
                }
            });
            let busy = scope.spawn(move || {
                if shared.park(1, drop) {
                    also_says.send(()).unwrap();
                    thread::park();
                }
            });
            let end = || [&stops, &busy].iter().for_each(|thread| thread.thread().unpark());
            let _ending = Ending { shared, kick: &end };
            shared.resume().unwrap();
            hears().and_then(|()| hears()).unwrap();

            let refused = shared.pause(None, || stops.thread().unpark());

            assert!(matches!(refused, Err(Error::Stuck)));
            hears().unwrap();
        });
    }

    #[test]
    fn threads_are_urgent_while_they_stand_still_and_no_longer() {
        let seen = &Mutex::new(Vec::<(bool, libc::pid_t)>::new());
        let look = || seen.lock().unwrap().push((is_urgent(), this_thread()));
        with_threads(look, |shared, kick| {
            let stop = |urgent| {
                let work: Work = Arc::new(|_, _| ());
                shared.pause(Some(work), kick)?;
                let seen = seen.lock().unwrap().split_off(0);
                assert!(seen.len() == THREADS && seen.iter().all(|(was, _)| *was == urgent));
                Ok::<_, Error>(seen.into_iter().map(|(_, thread)| thread).collect::<Vec<_>>())
            };
            let threads = stop(false)?;
            shared.resume()?;
            let may = threads.into_iter().chain([this_thread()]).all(raise);
            let urgent = shared.hurry();
            assert_eq!(urgent.is_some(), may);
            drop(stop(may)?);
            assert_eq!(is_urgent(), may);
            shared.resume()?;
            drop(urgent);
            assert!(!is_urgent());
            drop(stop(false)?);
            shared.resume()
        });
    }
}
