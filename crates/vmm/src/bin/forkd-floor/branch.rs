//! What branching a machine costs that goes on writing to its memory.
//!
//! One round, as `stages` and `pause_ms` count it:
//!
//! ```text
//!   main    ask ─┐            ┌─ save registers ─ fork(2) ─ let go ─┐
//!   vCPU         └─ kick ─ stopped ═══════════ pause ═══════════ running
//! ```
//!
//! `pause_ms` is the vCPU thread's own: from the return of `KVM_RUN` until just before the next.
//! `asked_ms` is what whoever asks sees: from the request until the vCPU runs.  The child must find
//! the counters of one instant in its memory, which do not move, and run a machine over it.
//! The vCPU is paused between rounds, and sweeps all pages before each and, while the child
//! still has them, after it: so every page is a small one that was copied, as it is where siblings
//! live on.

use std::io::{self, BufRead, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forkd_vmm::sys::mapping;
use kvm_bindings::{CpuId, kvm_regs, kvm_sregs};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use serde_json::{Value, json};

use crate::guest::{self, Failure, PAGE_BYTES};
use crate::words::{milliseconds, number};

/// Guest memory: that of a machine with 2 GiB.
const MEMORY_BYTES: u64 = 2 << 30;
/// Where a huge page may begin: our machines' memory is aligned to them as well.
const ALIGN_BYTES: u64 = 2 << 20;
/// Where the guest's stores begin: behind the image, in memory that no file is behind.
const DIRTY_FROM: u64 = 256 << 20;
/// Most that is dirtied: up to the end.
const DIRTY_MIB_MAX: u32 = 1_792;

/// How often somebody who waits for the other thread looks again.
const LOOK_AGAIN: Duration = Duration::from_micros(20);
/// How often somebody looks who waits for the guest.
const LOOK_AT_GUEST: Duration = Duration::from_millis(1);
/// Longest wait for the guest to write to each page: an emulated processor needs 15 s for a GiB.
const SWEEP_TIMEOUT: Duration = Duration::from_mins(5);

/// `mov r8,rsi; mov r9d,ecx; 0: mov rsi,r8; mov ecx,r9d; 1: inc dword [rsi]; add rsi,4096;
/// dec ecx; jnz 1b; out 0x80,al; jmp 0b`
const PROGRAM: [u8; 27] = [
    0x49, 0x89, 0xf0, 0x41, 0x89, 0xc9, 0x4c, 0x89, 0xc6, 0x44, 0x89, 0xc9, 0xff, 0x06, 0x48, 0x81,
    0xc6, 0, 0x10, 0, 0, 0xff, 0xc9, 0x75, 0xf3, 0xe6, 0x80,
];
/// `jmp` back to `0`, behind the program.
const AGAIN: [u8; 2] = [0xeb, 0xe9];

/// Branches a machine once for each line of standard input.
pub fn run(words: impl Iterator<Item = String>) -> Result<(), Failure> {
    let pages = parse(words)? << 8;
    let memory = Memory::new(pages)?;
    let source = Source::start(memory)?;
    for line in io::stdin().lock().lines() {
        line?;
        println!("{}", source.round()?);
    }
    Ok(())
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<u32, Failure> {
    match words.next().as_deref() {
        Some(option @ "--dirty-mib") => number(option, words.next(), 1..=DIRTY_MIB_MAX),
        _ => Err("--dirty-mib is needed".into()),
    }
}

/// Guest memory as our machines have theirs: zeros, with a private view of a file where the image
/// has anything.
#[derive(Clone, Copy)]
struct Memory {
    start: *mut u8,
    pages: u32,
}

// SAFETY: a mapping that is never unmapped; what the guest writes is read with volatile loads.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(pages: u32) -> Result<Self, Failure> {
        let program = [PROGRAM.as_slice(), &AGAIN].concat();
        let image = guest::image(MEMORY_BYTES, &program)?;
        let start = mapping::map_zeros(MEMORY_BYTES, ALIGN_BYTES)?;
        mapping::cover(start, guest::RESIDENT_BYTES.into(), &image, 0)?;
        Ok(Self { start, pages })
    }

    /// How often the guest has written to a page.
    fn count(self, page: u32) -> u32 {
        // SAFETY: the page is in the mapping, aligned, and every value is a `u32`.
        unsafe { self.counter(page).read_volatile() }
    }

    fn counter(self, page: u32) -> *mut u32 {
        let offset = DIRTY_FROM + u64::from(page) * u64::from(PAGE_BYTES);
        self.start.wrapping_add(usize::try_from(offset).unwrap_or(0)).cast()
    }

    /// How often it has written to all.
    fn sweeps(self) -> u32 {
        self.count(self.pages - 1)
    }

    /// Whether the counters are of one instant: none is ahead of one before it, and the first is at
    /// most one ahead of the last.
    fn consistent(self) -> bool {
        let first = self.count(0);
        (1..self.pages)
            .try_fold(first, |before, page| {
                let count = self.count(page);
                (count <= before && first - count <= 1).then_some(count)
            })
            .is_some()
    }

    fn machine(self, kvm: &Kvm) -> Result<(VmFd, VcpuFd), Failure> {
        let vm = kvm.create_vm()?;
        guest::add_chips(&vm)?;
        let bytes = usize::try_from(MEMORY_BYTES)?;
        // SAFETY: the mapping is as long and lives as long as this process.
        unsafe { guest::give(&vm, 0, 0, self.start, bytes) }?;
        let vcpu = vm.create_vcpu(0)?;
        Ok((vm, vcpu))
    }
}

/// What both threads know.
#[derive(Debug)]
struct Shared {
    /// The vCPU shall pause.
    hold: AtomicBool,
    /// It does.
    still: AtomicBool,
    /// When it last stopped and when it ran again, in nanoseconds since `began`.
    stopped_ns: AtomicU64,
    running_ns: AtomicU64,
    began: Instant,
    /// Its registers when it stopped.
    registers: Mutex<Registers>,
}

type Registers = (kvm_regs, kvm_sregs);

impl Shared {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The machine that is branched.
struct Source {
    kvm: Kvm,
    cpuid: CpuId,
    memory: Memory,
    shared: Arc<Shared>,
    /// Descriptors that a child closes.
    theirs: [i32; 2],
    thread: JoinHandle<()>,
    _vm: VmFd,
}

impl Source {
    fn start(memory: Memory) -> Result<Self, Failure> {
        ignore_kicks()?;
        let kvm = Kvm::new()?;
        let cpuid = guest::cpuid(&kvm)?;
        let (vm, vcpu) = memory.machine(&kvm)?;
        guest::set_state(&vcpu, &cpuid, DIRTY_FROM, memory.pages.into())?;
        let shared = Arc::new(Shared {
            hold: AtomicBool::new(false),
            still: AtomicBool::new(false),
            stopped_ns: AtomicU64::new(0),
            running_ns: AtomicU64::new(0),
            began: Instant::now(),
            registers: Mutex::default(),
        });
        let (theirs, ours) = ([vcpu.as_raw_fd(), vm.as_raw_fd()], Arc::clone(&shared));
        let thread = std::thread::Builder::new().spawn(move || {
            if let Err(error) = execute(vcpu, &ours) {
                eprintln!("the guest: {error}");
                std::process::exit(1);
            }
        })?;
        let source = Self { kvm, cpuid, memory, shared, theirs, thread, _vm: vm };
        source.sweep()?;
        source.stop();
        Ok(source)
    }

    /// Lets the machine run, branches it, and lets it run again until all is dirty once more.
    fn round(&self) -> Result<Value, Failure> {
        self.go();
        self.sweep()?;
        let (mut answer, theirs) = io::pipe()?;
        let (waits, release) = io::pipe()?;
        let asked = Instant::now();
        self.stop();
        let (stopped, forking) = (asked.elapsed(), Instant::now());
        // SAFETY: the vCPU's thread is paused, and holds no lock while it does.
        match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error().into()),
            0 => {
                drop(release);
                self.live(theirs, waits);
            }
            _ => {}
        }
        let (forked, resuming) = (forking.elapsed(), Instant::now());
        self.go();
        let (running, all) = (resuming.elapsed(), asked.elapsed());
        drop(theirs);
        let mut sound = [0];
        answer.read_exact(&mut sound).map_err(|_| "the child ended")?;
        self.sweep()?;
        drop(release);
        // SAFETY: waits for the only child there is; no status is asked for.
        unsafe { libc::wait(ptr::null_mut()) };
        let span = |shared: &Shared| {
            let running = shared.running_ns.load(Ordering::Acquire);
            running.saturating_sub(shared.stopped_ns.load(Ordering::Acquire))
        };
        let pause = Duration::from_nanos(span(&self.shared));
        self.stop();
        Ok(json!({
            "pause_ms": milliseconds(pause),
            "asked_ms": milliseconds(all),
            "stages_ms": {
                "stop": milliseconds(stopped),
                "fork": milliseconds(forked),
                "resume": milliseconds(running),
            },
        }))
    }

    /// Stops the vCPU, whose thread then saves its registers.
    fn stop(&self) {
        self.shared.hold.store(true, Ordering::Release);
        while !self.shared.still.load(Ordering::Acquire) {
            // SAFETY: the thread was not joined, so its id is valid.
            unsafe { libc::pthread_kill(self.thread.as_pthread_t(), libc::SIGUSR1) };
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn go(&self) {
        self.shared.hold.store(false, Ordering::Release);
        self.thread.thread().unpark();
        while self.shared.still.load(Ordering::Acquire) {
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Waits until the guest has written to every page from the first to the last.
    fn sweep(&self) -> Result<(), Failure> {
        let (before, began) = (self.memory.sweeps(), Instant::now());
        while self.memory.sweeps().wrapping_sub(before) < 2 {
            if began.elapsed() > SWEEP_TIMEOUT {
                return Err("the guest does not come round".into());
            }
            std::thread::sleep(LOOK_AT_GUEST);
        }
        Ok(())
    }

    /// In the child: what it sees must be of one instant and not move, and bear a machine.
    fn live(&self, mut answer: PipeWriter, mut waits: PipeReader) -> ! {
        for descriptor in self.theirs {
            // SAFETY: closes this process's copies of the source's vCPU and VM; nothing uses them.
            unsafe { libc::close(descriptor) };
        }
        let first = self.memory.count(0);
        let sound = self.memory.consistent() && self.machine().is_ok() && {
            self.memory.consistent() && self.memory.count(0) == first
        };
        // Its end lets the source go on, whether it was let go or nobody waits.
        if sound && answer.write_all(&[1]).is_ok() {
            drop(waits.read(&mut [0]));
        }
        // SAFETY: ends this process without running what its parent registered to run at exit.
        unsafe { libc::_exit(0) }
    }

    fn machine(&self) -> Result<(), Failure> {
        let (vm, vcpu) = self.memory.machine(&self.kvm)?;
        let (general, system) = *self.shared.registers();
        vcpu.set_cpuid2(&self.cpuid)?;
        vcpu.set_sregs(&system)?;
        vcpu.set_regs(&general)?;
        drop((vcpu, vm));
        Ok(())
    }
}

/// The vCPU's thread.
fn execute(mut vcpu: VcpuFd, shared: &Shared) -> Result<(), Failure> {
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(port, _)) if port == guest::PORT => {}
            Ok(VcpuExit::Intr) => {}
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => {}
            other => return Err(format!("it left with {other:?}").into()),
        }
        if !shared.hold.load(Ordering::Acquire) {
            continue;
        }
        shared.stopped_ns.store(shared.now_ns(), Ordering::Release);
        *shared.registers() = (vcpu.get_regs()?, vcpu.get_sregs()?);
        shared.still.store(true, Ordering::Release);
        // Without looking again: between rounds the processor is that of what it is compared with.
        while shared.hold.load(Ordering::Acquire) {
            std::thread::park();
        }
        shared.running_ns.store(shared.now_ns(), Ordering::Release);
        shared.still.store(false, Ordering::Release);
    }
}

/// Has the signal that stops the vCPU do nothing but that.
fn ignore_kicks() -> Result<(), Failure> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as libc::sighandler_t;
    // SAFETY: `action` is initialised, and its handler does nothing.
    if unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut()) } < 0 {
        return Err(io::Error::last_os_error().into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> impl Iterator<Item = String> {
        line.split_whitespace().map(str::to_owned)
    }

    #[test]
    fn an_amount_one_past_its_limit_is_refused() {
        assert_eq!(parse(words("--dirty-mib 1792")).unwrap(), 1792);
        for line in ["--dirty-mib 0", "--dirty-mib 1793", "--dirty-mib", "--n 1", ""] {
            assert!(parse(words(line)).is_err(), "{line}");
        }
    }

    #[test]
    fn counters_of_two_instants_are_told_from_those_of_one() {
        let memory = Memory::new(4).unwrap();
        let set = |counts: [u32; 4]| {
            for (page, count) in (0..).zip(counts) {
                // SAFETY: the page is in the mapping, aligned, and no other writes to it.
                unsafe { memory.counter(page).write_volatile(count) };
            }
            memory.consistent()
        };
        assert!(set([2, 2, 2, 2]) && set([3, 3, 2, 2]));
        assert!(!set([3, 2, 3, 2]) && !set([4, 3, 3, 2]) && !set([2, 2, 2, 3]));
    }
}
