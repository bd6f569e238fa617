//! What CPUID shows to a guest, and whether another host can show the same.
//!
//! ```text
//!   what KVM supports ─ the allow-list ([`table`]) ─ ids and caches ([`topology`]) ─► a vCPU
//!   what a guest has seen ──────── [`compare`] ──────── what a vCPU would be shown here
//! ```
//!
//! Everything here but [`for_vcpu`] is a function of tables, and is tested with those of real
//! hosts (`crates/vmm/tests/cpus`).

pub mod arch_capabilities;
pub mod compare;
pub mod table;
pub mod topology;

use std::arch::x86_64::__cpuid;
use std::collections::BTreeMap;

use forkd_proto::control::{Cpu, CpuSeen};
use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2,
};
use kvm_ioctls::{Cap, Kvm};

use crate::error::Error;
use crate::kvm::{msrs, stored, vm};
use table::{ROWS, Register, Shown, What};

/// Bytes of XSAVE's area that hold x87 and SSE, and its header.
const LEGACY_AREA_BYTES: u32 = 576;
/// Bits of a physical address of a processor that does not say (Intel SDM, volume 3, 4.1.4).
const UNSAID_PHYSICAL_BITS: u32 = 36;
/// Bits of a linear address with four levels of page tables.
const LINEAR_BITS: u32 = 48;

/// Who made the processor, as far as guests are shown other things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// AMD, and Hygon.
    Amd,
    /// Intel, and whoever else does as Intel.
    Intel,
}

impl Vendor {
    /// Whose `table` is.
    #[must_use]
    pub fn of(table: &[kvm_cpuid_entry2]) -> Self {
        match find(table, 0, 0).map(|entry| entry.ecx.to_le_bytes()) {
            Some([b'c', b'A', b'M', b'D'] | [b'u', b'i', b'n', b'e']) => Self::Amd,
            _ => Self::Intel,
        }
    }

    /// The bits of a physical address that all servers have.
    fn portable_bits(self) -> u32 {
        match self {
            Self::Amd => 48,
            Self::Intel => 46,
        }
    }

    fn brand(self) -> &'static str {
        match self {
            Self::Amd => "AMD EPYC Processor",
            Self::Intel => "Intel(R) Xeon(R) Processor",
        }
    }
}

/// What a vCPU is to be shown.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// All that the host has, or what many have.
    pub cpu: Cpu,
    /// The vCPU's number.
    pub id: u8,
    /// How many there are.
    pub vcpus: u8,
}

/// What vCPU `id` of `vcpus` is shown here.
///
/// # Errors
///
/// [`Error::Kvm`] if KVM does not tell what it supports.
pub fn for_vcpu(kvm: &Kvm, wanted: Wanted) -> Result<CpuId, Error> {
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::kvm("KVM_GET_SUPPORTED_CPUID"))?;
    let deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    let shown = shown(supported.as_slice(), wanted, deadline, host_brand());
    CpuId::from_entries(&shown)
        .map_err(|_| Error::Damaged("there are more CPUID entries than KVM takes".into()))
}

/// What a vCPU is shown where KVM has `supported`, and emulates a `deadline` timer.
#[must_use]
pub fn shown(
    supported: &[kvm_cpuid_entry2],
    wanted: Wanted,
    deadline: bool,
    host_brand: [u8; 48],
) -> Vec<kvm_cpuid_entry2> {
    let vendor = Vendor::of(supported);
    let mut table: Table = supported
        .iter()
        .filter(|entry| stored::is_plain(entry))
        .filter_map(|entry| allowed(entry, vendor, wanted.cpu))
        .map(|entry| ((entry.function, entry.index), entry))
        .collect();
    keep_states(&mut table);
    topology::shape(&mut table, vendor, wanted, deadline);
    let brand = match wanted.cpu {
        Cpu::Host if host_brand.iter().any(|byte| *byte != 0) => host_brand,
        _ => padded(vendor.brand()),
    };
    name(&mut table, &brand);
    end(&mut table);
    table.into_values().collect()
}

/// Entries by function and index.
type Table = BTreeMap<(u32, u32), kvm_cpuid_entry2>;

/// An entry with what the allow-list has of it; nothing if that has none of its function.
fn allowed(entry: &kvm_cpuid_entry2, vendor: Vendor, cpu: Cpu) -> Option<kvm_cpuid_entry2> {
    if !ROWS.iter().any(|row| row.0 == entry.function) {
        return None;
    }
    let mut kept = *entry;
    for register in [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx] {
        let value = value_mut(&mut kept, register);
        *value &= match what(entry.function, entry.index, register) {
            None => 0,
            Some(What::Features(features)) => features
                .iter()
                .filter(|(.., shown)| is_shown(*shown, vendor, cpu))
                .fold(0, |mask, (bit, ..)| mask | 1 << bit),
            Some(What::Addresses) => {
                let most = if cpu == Cpu::Portable { vendor.portable_bits() } else { 0xff };
                *value = (*value & 0xff).min(most) | LINEAR_BITS << 8;
                !0
            }
            Some(_) => !0,
        };
    }
    Some(kept)
}

fn is_shown(shown: Shown, vendor: Vendor, cpu: Cpu) -> bool {
    match shown {
        Shown::Always => true,
        Shown::OnIntel => vendor == Vendor::Intel,
        Shown::Host => cpu == Cpu::Host,
        Shown::HostOrIntel => cpu == Cpu::Host || vendor == Vendor::Intel,
        Shown::HostOrAmd => cpu == Cpu::Host || vendor == Vendor::Amd,
    }
}

/// What the allow-list says of a register.
#[must_use]
pub fn what(function: u32, index: u32, register: Register) -> Option<What> {
    let of = |row: &&table::Row| row.0 == function && row.2 == register;
    let exact = ROWS.iter().filter(of).find(|row| row.1 == Some(index));
    let any = || ROWS.iter().filter(of).find(|row| row.1.is_none());
    // The first two entries of XSAVE's are no states.
    let state = function != 0xd || index > 1;
    exact.or_else(|| any().filter(|_| state)).map(|row| row.3)
}

/// Leaves the entries of those states of registers that are shown, and says what room they take.
fn keep_states(table: &mut Table) {
    let Some(states) = table.get(&(0xd, 0)).map(|entry| entry.eax) else { return };
    table.retain(|(function, index), _| {
        *function != 0xd || *index < 2 || *index < 32 && states & 1 << index != 0
    });
    let ends = table.range((0xd, 2)..(0xe, 0)).map(|(_, state)| state.ebx + state.eax);
    let bytes = ends.max().unwrap_or(0).max(LEGACY_AREA_BYTES);
    if let Some(entry) = table.get_mut(&(0xd, 0)) {
        entry.ecx = bytes;
        // What is enabled at reset; KVM keeps it up to date.
        entry.ebx = LEGACY_AREA_BYTES;
    }
}

fn name(table: &mut Table, brand: &[u8; 48]) {
    let (words, _) = brand.as_chunks::<4>();
    for (function, words) in (0x8000_0002..).zip(words.chunks_exact(4)) {
        let [eax, ebx, ecx, edx] = std::array::from_fn(|at| u32::from_le_bytes(words[at]));
        let entry = kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() };
        table.insert((function, 0), entry);
    }
}

/// Has each range of functions say where it ends, and the seventh how many entries it has.
fn end(table: &mut Table) {
    for (first, end) in [(0, 0x4000_0000), (0x4000_0000, 0x4000_0100), (0x8000_0000, !0)] {
        let last =
            table.range((first, 0)..(end, 0)).next_back().map(|((function, _), _)| *function);
        if let (Some(last), Some(entry)) = (last, table.get_mut(&(first, 0))) {
            entry.eax = last;
        }
    }
    let extended = table.range((7, 0)..(8, 0)).next_back().map(|((_, index), _)| *index);
    if let (Some(index), Some(entry)) = (extended, table.get_mut(&(7, 0))) {
        entry.eax = index;
    }
}

/// What a guest with `table` and these `capabilities` has seen.
#[must_use]
pub fn seen(table: &[kvm_cpuid_entry2], capabilities: Option<u64>, tsc_khz: u32) -> CpuSeen {
    let weaknesses = capabilities.map(arch_capabilities::names).into_iter().flatten();
    let mut features: Vec<_> =
        names(table).into_iter().chain(weaknesses).map(str::to_owned).collect();
    features.push(vendor_id(table));
    features.sort_unstable();
    CpuSeen {
        model: brand(table),
        features,
        portable: is_portable(table) && capabilities.is_none_or(arch_capabilities::is_portable),
        physical_bits: physical_bits(table),
        tsc_khz,
    }
}

/// What a guest with one vCPU would be shown here of all that the host has.
///
/// # Errors
///
/// [`Error::Io`] if KVM does not open, [`Error::Kvm`] if it does not tell.
pub fn offered() -> Result<CpuSeen, Error> {
    let kvm = vm::open()?;
    let shown = for_vcpu(&kvm, Wanted { cpu: Cpu::Host, id: 0, vcpus: 1 })?;
    let vm = kvm.create_vm().map_err(Error::kvm("KVM_CREATE_VM"))?;
    let vcpu = vm.create_vcpu(0).map_err(Error::kvm("KVM_CREATE_VCPU"))?;
    vcpu.set_cpuid2(&shown).map_err(Error::kvm("KVM_SET_CPUID2"))?;
    let capabilities = match Vendor::of(shown.as_slice()) {
        Vendor::Amd => None,
        Vendor::Intel => msrs::read(&vcpu, [arch_capabilities::MSR])?.first().map(|msr| msr.data),
    };
    let capabilities = capabilities.map(|value| arch_capabilities::shown(value, Cpu::Host));
    Ok(seen(shown.as_slice(), capabilities, vcpu.get_tsc_khz().unwrap_or(0)))
}

/// What the vendor calls itself: `GenuineIntel`, `AuthenticAMD` or another.
#[must_use]
pub fn vendor_id(table: &[kvm_cpuid_entry2]) -> String {
    let words = find(table, 0, 0).map_or([0; 3], |entry| [entry.ebx, entry.edx, entry.ecx]);
    String::from_utf8_lossy(words.map(u32::to_le_bytes).as_flattened()).into_owned()
}

/// The names of all features that `table` shows and that stay as they are.
#[must_use]
pub fn names(table: &[kvm_cpuid_entry2]) -> Vec<&'static str> {
    let mut names: Vec<_> = ROWS
        .iter()
        .filter_map(|(function, index, register, what)| match what {
            What::Features(features) => {
                let value = value_of(table, *function, index.unwrap_or(0), *register);
                let stays = value & !compare::moving(*function, *register);
                Some(features.iter().filter(move |(bit, ..)| stays & 1 << bit != 0))
            }
            _ => None,
        })
        .flatten()
        .map(|(_, name, _)| *name)
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Whether `table` shows nothing that [`Cpu::Portable`] does not.
#[must_use]
pub fn is_portable(table: &[kvm_cpuid_entry2]) -> bool {
    let vendor = Vendor::of(table);
    ROWS.iter().all(|(function, index, register, what)| match what {
        What::Features(features) => {
            let value = value_of(table, *function, index.unwrap_or(0), *register);
            features
                .iter()
                .filter(|(bit, ..)| value & 1 << bit != 0)
                .all(|(.., shown)| is_shown(*shown, vendor, Cpu::Portable))
        }
        _ => true,
    })
}

/// Bits of a physical address.
#[must_use]
pub fn physical_bits(table: &[kvm_cpuid_entry2]) -> u32 {
    match value_of(table, 0x8000_0008, 0, Register::Eax) & 0xff {
        0 => UNSAID_PHYSICAL_BITS,
        said => said,
    }
}

/// What a processor calls itself.
#[must_use]
pub fn brand(table: &[kvm_cpuid_entry2]) -> String {
    let bytes: Vec<u8> = (0x8000_0002..=0x8000_0004)
        .filter_map(|function| find(table, function, 0))
        .flat_map(|entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
        .flat_map(u32::to_le_bytes)
        .collect();
    String::from_utf8_lossy(&bytes).trim_matches(['\0', ' ']).to_owned()
}

fn host_brand() -> [u8; 48] {
    let mut brand = [0; 48];
    if __cpuid(0x8000_0000).eax >= 0x8000_0004 {
        let words = (0x8000_0002..=0x8000_0004).map(__cpuid);
        let words = words.flat_map(|leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]);
        for (bytes, word) in brand.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }
    brand
}

fn padded(text: &str) -> [u8; 48] {
    let mut padded = [0; 48];
    for (byte, of) in padded.iter_mut().zip(text.bytes()) {
        *byte = of;
    }
    padded
}

fn find(table: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
    table.iter().find(|entry| entry.function == function && entry.index == index)
}

fn value_of(table: &[kvm_cpuid_entry2], function: u32, index: u32, register: Register) -> u32 {
    find(table, function, index).map_or(0, |entry| value(entry, register))
}

fn value(entry: &kvm_cpuid_entry2, register: Register) -> u32 {
    let mut entry = *entry;
    *value_mut(&mut entry, register)
}

fn value_mut(entry: &mut kvm_cpuid_entry2, register: Register) -> &mut u32 {
    match register {
        Register::Eax => &mut entry.eax,
        Register::Ebx => &mut entry.ebx,
        Register::Ecx => &mut entry.ecx,
        Register::Edx => &mut entry.edx,
    }
}

fn indexed(function: u32, index: u32) -> kvm_cpuid_entry2 {
    let flags = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
    kvm_cpuid_entry2 { function, index, flags, ..Default::default() }
}

#[cfg(test)]
mod tests;
