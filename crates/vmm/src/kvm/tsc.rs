//! The time stamp counters of a machine's vCPUs: how fast they run, and putting all of them back
//! to one instant, as often as is asked.
//!
//! A guest's counter is the host's, scaled, plus an *offset*.  A write of the counter
//! (`IA32_TSC`) does not say what the offset becomes: KVM takes a value within a second
//! of the one that it expects for an attempt to have vCPUs agree, and keeps the offset.  A guest
//! that is reset twice within a second would keep its time, and vCPUs that are written more than a
//! second apart would differ.  So the offsets themselves are set (`KVM_VCPU_TSC_OFFSET`, since
//! Linux 5.16), all of them for the same reading of the host's counter.
//!
//! Older kernels get a value far off first, which KVM cannot take for such an attempt, and then
//! the right one.  The other vCPUs follow one by one, so that KVM does have them agree.

use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, Msrs, kvm_device_attr, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use crate::error::Error;
use crate::kvm::cpu::VcpuState;
use crate::kvm::msrs::IA32_TSC;

/// Largest difference of frequencies that KVM leaves unscaled, in parts per million: its own
/// `tsc_tolerance_ppm`, and about what a guest's time service can make up for.
pub const TOLERANCE_PPM: u32 = 250;

/// No two counters of one machine differ by so much: twelve years at 3 GHz.
const FAR_OFF: u64 = 1 << 60;

const SET_DEVICE_ATTR: libc::Ioctl = 0x4018_aee1;
const GET_DEVICE_ATTR: libc::Ioctl = 0x4018_aee2;

/// Where the counters of a machine's vCPUs were at one instant, to be put back there.
#[derive(Debug)]
pub struct Counters {
    values: Vec<u64>,
    khz: u32,
    begun: Mutex<Option<Begun>>,
}

/// How the first vCPU was put back, which the others follow.
#[derive(Clone, Copy, Debug)]
enum Begun {
    /// By its offset: when the host's counter, scaled, was this.
    Offset { host: u64 },
    /// By a value, then.
    Value { at: Instant },
}

impl Counters {
    /// Those of `vcpus`, for one time that they are put back.
    #[must_use]
    pub fn new(vcpus: &[VcpuState]) -> Self {
        let values: Vec<_> = vcpus.iter().map(|vcpu| (vcpu.tsc(), vcpu.tsc_offset)).collect();
        let khz = vcpus.first().map_or(0, |vcpu| vcpu.tsc_khz);
        Self { values: at_one_instant(&values, khz), khz, begun: Mutex::new(None) }
    }

    /// Puts back vCPU `id`; threads may do so at once, each with its own.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`] or [`Error::Io`] naming what KVM refused.
    pub fn put_back(&self, id: usize, vcpu: &impl Counter) -> Result<(), Error> {
        let offset = vcpu.offset()?;
        let value = self.values.get(id).copied().unwrap_or(0);
        // Held meanwhile: a kernel that only takes values is told of them one by one.
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        match (*begun, offset) {
            (None, Some(offset)) => {
                let host = vcpu.read()?.wrapping_sub(offset);
                vcpu.set_offset(value.wrapping_sub(host))?;
                *begun = Some(Begun::Offset { host });
            }
            (None, None) => {
                vcpu.write(value.wrapping_add(FAR_OFF))?;
                vcpu.write(value)?;
                *begun = Some(Begun::Value { at: Instant::now() });
            }
            (Some(Begun::Offset { host }), _) => vcpu.set_offset(value.wrapping_sub(host))?,
            (Some(Begun::Value { at }), _) => {
                vcpu.write(value.wrapping_add(cycles(at.elapsed(), self.khz)))?;
            }
        }
        Ok(())
    }
}

/// What counters were when the first of them was read, of which each was read at its own time and
/// with the offset that it had, if the kernel said so.
///
/// Without offsets, counters that are less than a second apart are taken to have agreed, as KVM
/// takes them.
fn at_one_instant(read: &[(u64, Option<u64>)], khz: u32) -> Vec<u64> {
    let Some(&(first, first_offset)) = read.first() else { return Vec::new() };
    let second = u64::from(khz) * 1000;
    read.iter()
        .map(|&(value, offset)| match (offset, first_offset) {
            (Some(offset), Some(base)) => first.wrapping_add(offset.wrapping_sub(base)),
            _ if value.abs_diff(first) < second => first,
            _ => value,
        })
        .collect()
}

/// The frequency to ask for in place of `here`, for guests that have `saved`; 0 is not known.
/// `scales` says whether this host has hardware for another than its own.
///
/// It is asked for also if it need not be scaled: a snapshot of a fork then says what the first
/// guest saw, and tolerances do not add up.
///
/// # Errors
///
/// [`Error::CpuMismatch`] if the counter would run at another rate than the guest knows.
pub fn frequency(saved: u32, here: u32, scales: bool) -> Result<Option<u32>, Error> {
    if saved == 0 || here == 0 {
        return Ok(None);
    }
    let differs = u64::from(saved.abs_diff(here)) * 1_000_000;
    if scales || differs <= u64::from(here) * u64::from(TOLERANCE_PPM) {
        return Ok(Some(saved));
    }
    Err(cannot_scale(saved, here))
}

/// That the counter runs at `here` kHz, and not at the `saved` ones.
#[must_use]
pub fn cannot_scale(saved: u32, here: u32) -> Error {
    Error::CpuMismatch(format!(
        "a TSC of {saved} kHz; this one runs at {here} kHz and cannot be scaled"
    ))
}

fn cycles(passed: Duration, khz: u32) -> u64 {
    let cycles = passed.as_nanos() * u128::from(khz) / 1_000_000;
    u64::try_from(cycles).unwrap_or(u64::MAX)
}

/// One vCPU's counter, as KVM gives it.
pub trait Counter {
    /// What it has more than the host's, scaled; `None` if this kernel does not tell.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if KVM refuses for another reason.
    fn offset(&self) -> Result<Option<u64>, Error>;

    /// Sets the offset.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    fn set_offset(&self, offset: u64) -> Result<(), Error>;

    /// Its value.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`].
    fn read(&self) -> Result<u64, Error>;

    /// Writes a value, of which KVM makes an offset.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`].
    fn write(&self, value: u64) -> Result<(), Error>;
}

impl Counter for VcpuFd {
    fn offset(&self) -> Result<Option<u64>, Error> {
        let mut offset = 0_u64;
        let attribute = attribute(&raw mut offset);
        // SAFETY: KVM reads the structure, and writes the eight bytes at its address, which is
        // that of `offset`; both outlive the call.
        let done = unsafe { libc::ioctl(self.as_raw_fd(), GET_DEVICE_ATTR, &raw const attribute) };
        if done == 0 {
            return Ok(Some(offset));
        }
        match std::io::Error::last_os_error().raw_os_error() {
            // Before 5.16 vCPUs have no attributes.
            Some(libc::EINVAL | libc::ENXIO | libc::ENOTTY) => Ok(None),
            _ => Err(Error::last_os("KVM_GET_DEVICE_ATTR")),
        }
    }

    fn set_offset(&self, mut offset: u64) -> Result<(), Error> {
        let attribute = attribute(&raw mut offset);
        // SAFETY: KVM reads the structure, and the eight bytes at its address, which is that of
        // `offset`; both outlive the call.
        let done = unsafe { libc::ioctl(self.as_raw_fd(), SET_DEVICE_ATTR, &raw const attribute) };
        if done == 0 { Ok(()) } else { Err(Error::last_os("KVM_SET_DEVICE_ATTR")) }
    }

    fn read(&self) -> Result<u64, Error> {
        let mut msrs = one_msr(0)?;
        match self.get_msrs(&mut msrs).map_err(Error::kvm("KVM_GET_MSRS"))? {
            1 => Ok(msrs.as_slice()[0].data),
            _ => Err(Error::State("KVM does not let a vCPU's TSC be read")),
        }
    }

    fn write(&self, value: u64) -> Result<(), Error> {
        match self.set_msrs(&one_msr(value)?).map_err(Error::kvm("KVM_SET_MSRS"))? {
            1 => Ok(()),
            _ => Err(Error::State("KVM does not let a vCPU's TSC be written")),
        }
    }
}

fn attribute(offset: *mut u64) -> kvm_device_attr {
    kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: offset as u64,
    }
}

fn one_msr(data: u64) -> Result<Msrs, Error> {
    Msrs::from_entries(&[kvm_msr_entry { index: IA32_TSC, data, ..Default::default() }])
        .map_err(|_| Error::State("there is no memory for one MSR"))
}

/// Tells the guest that it was paused and that its clocks went on, so that its watchdogs do not
/// take the gap for a hang.  A guest that does not use `kvm-clock` is not told.
///
/// # Errors
///
/// [`Error::Kvm`].
pub fn tell_of_a_gap(vcpu: &VcpuFd) -> Result<(), Error> {
    match vcpu.kvmclock_ctrl() {
        Err(error) if error.errno() != libc::EINVAL => {
            Err(Error::Kvm { what: "KVM_KVMCLOCK_CTRL", source: error })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::vm;
    use std::cell::Cell;

    const KHZ: u32 = 2_000_000;

    fn counters(values: &[u64]) -> Counters {
        Counters { values: values.to_vec(), khz: KHZ, begun: Mutex::new(None) }
    }

    /// A machine of a KVM that takes a value close to what it expects for an attempt to have vCPUs
    /// agree, as `kvm_synchronize_tsc` does.
    #[derive(Default)]
    struct Machine {
        host: Cell<u64>,
        offset: Cell<u64>,
        written: Cell<(u64, u64)>,
    }

    struct Vcpu<'a> {
        of: &'a Machine,
        tells: bool,
        own: Cell<u64>,
    }

    impl Counter for Vcpu<'_> {
        fn offset(&self) -> Result<Option<u64>, Error> {
            Ok(self.tells.then(|| self.own.get()))
        }

        fn set_offset(&self, offset: u64) -> Result<(), Error> {
            self.own.set(offset);
            Ok(())
        }

        fn read(&self) -> Result<u64, Error> {
            // Time passes.
            self.of.host.set(self.of.host.get() + 1_000);
            Ok(self.of.host.get().wrapping_add(self.own.get()))
        }

        fn write(&self, value: u64) -> Result<(), Error> {
            let Machine { host, offset, written } = self.of;
            let (last, at) = written.replace((value, host.get()));
            let expected = last.wrapping_add(host.get() - at);
            if value.abs_diff(expected) >= SECOND {
                offset.set(value.wrapping_sub(host.get()));
            }
            self.own.set(offset.get());
            Ok(())
        }
    }

    const SECOND: u64 = KHZ as u64 * 1_000;

    #[test]
    fn counters_go_back_however_soon_they_are_put_back_again() {
        for tells in [true, false] {
            let machine = Machine { host: Cell::new(99 * SECOND), ..Machine::default() };
            let vcpus = [0, 1, 2].map(|_| Vcpu { of: &machine, tells, own: Cell::new(0) });
            for _ in 0..30 {
                machine.host.set(machine.host.get() + SECOND / 2);
                let counters = counters(&[7 * SECOND; 3]);
                let before = machine.host.get();
                for (id, vcpu) in vcpus.iter().enumerate().rev() {
                    counters.put_back(id, vcpu).unwrap();
                }

                let at = vcpus.each_ref().map(|vcpu| (7 * SECOND).wrapping_sub(vcpu.own.get()));
                assert!(before <= at[0] && at[0] <= machine.host.get(), "{before} {at:?}");
                assert_eq!(at, [at[0]; 3], "tells: {tells}");
            }
        }
    }

    #[test]
    fn a_counter_that_its_guest_set_otherwise_stays_as_far_from_the_others() {
        let machine = Machine::default();
        let vcpus = [0, 1].map(|_| Vcpu { of: &machine, tells: true, own: Cell::new(0) });
        let counters = counters(&[7 * SECOND, 9]);

        for (id, vcpu) in vcpus.iter().enumerate() {
            counters.put_back(id, vcpu).unwrap();
        }

        let offsets = vcpus.each_ref().map(|vcpu| vcpu.own.get());
        assert_eq!(offsets[0].wrapping_sub(offsets[1]), 7 * SECOND - 9);
    }

    #[test]
    fn a_guest_without_kvm_clock_is_told_of_no_gap() {
        // Where KVM opens; the vCPU is never run.
        let Ok(kvm) = vm::open() else { return };
        let vm = kvm.create_vm().unwrap();
        vm.create_irq_chip().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();

        assert!(vcpu.kvmclock_ctrl().is_err());
        tell_of_a_gap(&vcpu).unwrap();
    }

    #[test]
    fn counters_that_were_read_one_after_the_other_are_those_of_one_instant() {
        type Read = (u64, Option<u64>);
        let cases: [(&[Read], &[u64]); 5] = [
            (&[(100, Some(10)), (250, Some(10))], &[100, 100]),
            (&[(100, Some(10)), (250, Some(u64::MAX))], &[100, 89]),
            (&[(100, None), (250, None)], &[100, 100]),
            (&[(100, Some(10)), (7_000_000_000, None)], &[100, 7_000_000_000]),
            (&[], &[]),
        ];
        for (read, expected) in cases {
            assert_eq!(at_one_instant(read, KHZ), expected);
        }
    }

    #[test]
    fn a_frequency_that_differs_by_more_than_kvm_tolerates_needs_hardware() {
        let saved = |khz, scales| frequency(khz, KHZ, scales).map_err(|error| error.to_string());
        for khz in [KHZ, KHZ - 500, KHZ + 500] {
            assert_eq!(saved(khz, false), Ok(Some(khz)));
        }
        for khz in [KHZ - 501, KHZ + 501, 1_000_000] {
            let why = saved(khz, false).unwrap_err();
            let expected =
                format!("a TSC of {khz} kHz; this one runs at 2000000 kHz and cannot be scaled");
            assert!(why.ends_with(&expected), "{why}");
            assert_eq!(saved(khz, true), Ok(Some(khz)));
        }
        assert_eq!((saved(0, false), frequency(1, 0, false).ok()), (Ok(None), Some(None)));
    }

    #[test]
    fn cycles_are_those_of_the_time_that_passed() {
        assert_eq!(cycles(Duration::from_micros(3), KHZ), 6_000);
    }
}
