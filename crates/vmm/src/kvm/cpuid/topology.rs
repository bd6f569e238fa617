//! One package, whose cores are the vCPUs: each a thread with caches of its own, and one cache of
//! the last level for all.
//!
//! KVM says nothing of it since Linux 6.2, so the entries are made here.  A guest that found each
//! vCPU in a package of its own would move its threads between them badly, and licences count
//! packages.

use kvm_bindings::kvm_cpuid_entry2;

use super::{Table, Vendor, Wanted, indexed};

const HYPERVISOR: u32 = 1 << 31;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPER_THREADING: u32 = 1 << 28;
const SEVERAL_CORES: u32 = 1 << 1;
const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
/// The level of the cache that all share.
const SHARED_LEVEL: u32 = 3;
/// Kinds of levels in the extended topology.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Writes a vCPU's ids, and who shares what with it.
pub(super) fn shape(table: &mut Table, vendor: Vendor, wanted: Wanted, deadline: bool) {
    let (id, count) = (u32::from(wanted.id), u32::from(wanted.vcpus));
    let ids = count.next_power_of_two();
    for ((function, _), entry) in table.iter_mut() {
        match function {
            1 => {
                entry.ebx = (entry.ebx & 0xff00) | (ids << 16) | (id << 24);
                entry.ecx |= HYPERVISOR | if deadline { TSC_DEADLINE } else { 0 };
                entry.edx &= !HYPER_THREADING;
                entry.edx |= if count > 1 { HYPER_THREADING } else { 0 };
            }
            4 => share(entry, ids, (ids - 1) << 26),
            0x8000_001d => share(entry, ids, 0),
            0x8000_0001 if vendor == Vendor::Amd => {
                entry.ecx &= !SEVERAL_CORES;
                entry.ecx |= if count > 1 { SEVERAL_CORES } else { 0 };
            }
            0x8000_0008 => entry.ecx = (ids.ilog2() << 12) | (count - 1),
            _ => {}
        }
    }
    let extensions = table.get(&(0x8000_0001, 0)).map_or(0, |entry| entry.ecx);
    table.remove(&(0x8000_001e, 0));
    if extensions & TOPOLOGY_EXTENSIONS == 0 {
        table.retain(|(function, _), _| *function != 0x8000_001d);
    } else {
        let own =
            kvm_cpuid_entry2 { function: 0x8000_001e, eax: id, ebx: id, ..Default::default() };
        table.insert((own.function, 0), own);
    }
    // Intel's second one came later, and guests that know it look there first.
    let second = vendor == Vendor::Intel && table.contains_key(&(0x1f, 0));
    table.retain(|(function, _), _| !matches!(function, 0xb | 0x1f));
    for function in if second { &[0xb, 0x1f][..] } else { &[0xb] } {
        for entry in levels(*function, id, count) {
            table.insert((entry.function, entry.index), entry);
        }
    }
}

fn share(cache: &mut kvm_cpuid_entry2, ids: u32, cores: u32) {
    let (kind, level) = (cache.eax & 0x1f, cache.eax >> 5 & 7);
    if kind == 0 {
        cache.eax = 0;
        return;
    }
    let shared = if level >= SHARED_LEVEL { ids - 1 } else { 0 };
    cache.eax = (cache.eax & 0x3fff) | (shared << 14) | cores;
}

fn levels(function: u32, id: u32, count: u32) -> [kvm_cpuid_entry2; 3] {
    let cores = count.next_power_of_two().ilog2();
    [(0, 0, 1, LEVEL_THREAD), (1, cores, count, LEVEL_CORE), (2, 0, 0, 0)].map(
        |(index, eax, ebx, kind)| kvm_cpuid_entry2 {
            eax,
            ebx,
            ecx: index | kind << 8,
            edx: id,
            ..indexed(function, index)
        },
    )
}
