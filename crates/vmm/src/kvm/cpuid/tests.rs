//! What guests are shown, and where they can run, on hosts whose CPUID others have recorded.

use super::compare::differences;
use super::table::{Feature, HIDDEN};
use super::*;

/// Hosts, oldest first, and what is in `tests/cpus` of each.
const HOSTS: [(&str, &str); 7] = [
    ("cascade-lake", include_str!("../../../tests/cpus/cascade-lake.txt")),
    ("ice-lake", include_str!("../../../tests/cpus/ice-lake.txt")),
    ("sapphire-rapids", include_str!("../../../tests/cpus/sapphire-rapids.txt")),
    ("granite-rapids", include_str!("../../../tests/cpus/granite-rapids.txt")),
    ("milan", include_str!("../../../tests/cpus/milan.txt")),
    ("genoa", include_str!("../../../tests/cpus/genoa.txt")),
    ("qemu-epyc", include_str!("../../../tests/cpus/qemu-epyc.txt")),
];
const BRAND: [u8; 48] = [b'x'; 48];

/// What KVM supports on a host, and its `IA32_ARCH_CAPABILITIES`.
fn recorded(text: &str) -> (Vec<kvm_cpuid_entry2>, Option<u64>) {
    let mut table = Vec::new();
    let mut capabilities = None;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<_> = line.split(' ').collect();
        if let ["msr", "10a", value] = words[..] {
            capabilities = Some(u64::from_str_radix(value, 16).unwrap());
            continue;
        }
        let [function, index, eax, ebx, ecx, edx]: [u32; 6] =
            std::array::from_fn(|at| u32::from_str_radix(words[at], 16).unwrap());
        let of = kvm_cpuid_entry2 { eax, ebx, ecx, edx, ..indexed(function, index) };
        let plain = kvm_cpuid_entry2 { flags: 0, ..of };
        table.push(if stored::is_plain(&of) { of } else { plain });
    }
    (table, capabilities)
}

fn host(name: &str) -> Vec<kvm_cpuid_entry2> {
    recorded(HOSTS.iter().find(|(each, _)| *each == name).unwrap().1).0
}

fn guest(name: &str, cpu: Cpu, id: u8, vcpus: u8) -> Vec<kvm_cpuid_entry2> {
    shown(&host(name), Wanted { cpu, id, vcpus }, true, BRAND)
}

/// Why a guest of one host cannot run on another.
fn refusal(of: &str, on: &str, cpu: Cpu) -> Vec<String> {
    let capabilities = |name: &str| recorded(HOSTS.iter().find(|it| it.0 == name).unwrap().1).1;
    let mut why = differences(&guest(of, cpu, 0, 2), &guest(on, Cpu::Host, 0, 2));
    if let Some(seen) = capabilities(of) {
        let here = arch_capabilities::shown(capabilities(on).unwrap_or(0), Cpu::Host);
        let checked = arch_capabilities::check(arch_capabilities::shown(seen, cpu), here);
        why.extend(checked.err().map(|error| error.to_string()));
    }
    why
}

fn register(table: &[kvm_cpuid_entry2], function: u32, index: u32) -> [u32; 4] {
    let entry = find(table, function, index).copied().unwrap_or_default();
    [entry.eax, entry.ebx, entry.ecx, entry.edx]
}

#[test]
fn every_bit_that_a_host_offers_is_shown_or_is_hidden_for_a_reason() {
    let mut unknown = Vec::new();
    for (name, text) in HOSTS {
        for entry in recorded(text).0 {
            for register in [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx] {
                let known = match what(entry.function, entry.index, register) {
                    Some(What::Features(features)) => mask(features),
                    Some(_) => !0,
                    None => 0,
                };
                let place = Some((entry.index, register));
                let hidden = HIDDEN
                    .iter()
                    .filter(|row| row.0 == entry.function && (row.1.is_none() || row.1 == place))
                    .fold(0, |mask, row| mask | row.2);
                // States that are not shown have no entries.
                let state = entry.function == 0xd && entry.index > 1;
                let left = value(&entry, register) & !known & !hidden;
                if left != 0 && !state {
                    let (function, index) = (entry.function, entry.index);
                    unknown.push(format!("{name}: {function:#x}.{index} {register:?} {left:#x}"));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
}

#[test]
fn no_bit_is_both_shown_and_hidden() {
    for (function, index, register, what) in ROWS {
        let What::Features(features) = what else { continue };
        let place = Some((index.unwrap_or(0), *register));
        for (_, _, bits, why) in
            HIDDEN.iter().filter(|row| row.0 == *function && (row.1.is_none() || row.1 == place))
        {
            assert_eq!(mask(features) & bits, 0, "{function:#x} {register:?}: {why}");
        }
    }
}

#[test]
fn guests_are_not_shown_what_snapshots_do_not_hold() {
    for (name, _) in HOSTS {
        let table = guest(name, Cpu::Host, 0, 2);
        for (function, place, bits, why) in HIDDEN {
            for entry in table.iter().filter(|entry| entry.function == *function) {
                let shown = match place {
                    Some((index, _)) if *index != entry.index => 0,
                    Some((_, register)) => value(entry, *register),
                    None => !0,
                };
                assert_eq!(shown & bits, 0, "{name}: {why}");
            }
        }
        let functions: Vec<u32> = table.iter().map(|entry| entry.function).collect();
        assert!([0xa, 0x12, 0x14, 0x1d, 0x1e, 0x24].iter().all(|it| !functions.contains(it)));
        assert!(
            table.iter().all(|it| it.function != 0xd || [0, 1, 2, 5, 6, 7, 9].contains(&it.index))
        );
        assert_eq!(register(&table, 0x8000_0008, 0)[0] >> 8, 48, "{name}: linear addresses");
    }
}

#[test]
fn what_xsave_takes_is_what_the_states_that_are_shown_take() {
    let bytes = |name, cpu| register(&guest(name, cpu, 0, 1), 0xd, 0)[2];

    assert_eq!(bytes("sapphire-rapids", Cpu::Host), 0xa88);
    assert_eq!(bytes("milan", Cpu::Host), 0x988);
    for (name, _) in HOSTS {
        assert_eq!(bytes(name, Cpu::Portable), 0x340, "{name}");
        assert_eq!(register(&guest(name, Cpu::Portable, 0, 1), 0xd, 0)[0], 7, "{name}");
    }
}

#[test]
fn a_portable_guest_has_x86_64_v3_and_no_avx_512() {
    let level = [
        "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave", "cx16", "lahf_lm",
        "popcnt", "sse4_1", "sse4_2", "ssse3",
    ];
    for (name, _) in HOSTS {
        let table = guest(name, Cpu::Portable, 0, 1);
        let names = names(&table);
        let lacking: Vec<_> = level.iter().filter(|it| !names.contains(it)).collect();
        assert!(lacking.is_empty(), "{name}: {lacking:?}");
        assert!(names.iter().all(|it| !it.starts_with("avx512")), "{name}");
        assert!(is_portable(&table), "{name}");
        assert!(!is_portable(&guest(name, Cpu::Host, 0, 1)), "{name}");
    }
}

/// `pcid` and `invpcid` came with Zen 3; Linux takes `xsaves` away for erratum 1386.
#[test]
fn a_portable_guest_of_amds_has_nothing_that_zen_2_has_not() {
    for name in ["milan", "genoa"] {
        let table = guest(name, Cpu::Portable, 0, 1);
        let names = names(&table);
        let later = ["erms", "fsrm", "invpcid", "pcid", "pku", "vaes", "vpclmulqdq", "xsaves"];
        let shown: Vec<_> = later.iter().filter(|it| names.contains(it)).collect();
        assert!(shown.is_empty(), "{name}: {shown:?}");
    }
}

#[test]
fn each_vcpu_is_a_core_of_one_package_that_shares_the_last_cache() {
    for (name, _) in HOSTS {
        for (count, shift) in [(1_u8, 0_u32), (2, 1), (3, 2), (8, 3), (32, 5)] {
            for id in 0..count {
                let table = guest(name, Cpu::Host, id, count);
                let (id, count, ids) = (u32::from(id), u32::from(count), 1 << shift);
                let [_, ebx, _, edx] = register(&table, 1, 0);
                assert_eq!((ebx >> 24, ebx >> 16 & 0xff, ebx & 0xff), (id, ids, 0), "{name}");
                assert_eq!(edx >> 28 & 1, u32::from(count > 1), "{name}");
                assert_eq!(register(&table, 0xb, 0), [0, 1, 0x100, id], "{name}");
                assert_eq!(register(&table, 0xb, 1), [shift, count, 0x201, id], "{name}");
                assert_eq!(register(&table, 0xb, 2), [0, 0, 2, id], "{name}");
                let amd = Vendor::of(&table) == Vendor::Amd;
                if amd {
                    assert_eq!(register(&table, 0x8000_0008, 0)[2], shift << 12 | (count - 1));
                }
                let extended = names(&table).contains(&"topoext");
                let own = if extended { [id, id, 0, 0] } else { [0; 4] };
                assert_eq!(register(&table, 0x8000_001e, 0), own, "{name}");
                let caches = if amd { 0x8000_001d } else { 4 };
                for index in 0..if extended || !amd { 4 } else { 0 } {
                    let eax = register(&table, caches, index)[0];
                    let shared = if index == 3 { ids - 1 } else { 0 };
                    assert_eq!(eax >> 14 & 0xfff, shared, "{name}: cache {index}");
                    assert_eq!(eax >> 26, if amd { 0 } else { ids - 1 }, "{name}");
                }
            }
        }
    }
}

#[test]
fn the_ends_of_the_ranges_are_where_the_entries_end() {
    let table = guest("sapphire-rapids", Cpu::Host, 0, 1);
    assert_eq!(register(&table, 0, 0)[0], 0x1f);
    assert_eq!(register(&table, 7, 0)[0], 2);
    assert_eq!(register(&table, 0x4000_0000, 0)[0], 0x4000_0001);
    assert_eq!(register(&table, 0x8000_0000, 0)[0], 0x8000_0008);
    assert_eq!(register(&guest("milan", Cpu::Host, 0, 1), 0, 0)[0], 0xd);
}

#[test]
fn a_guest_is_told_the_hosts_brand_or_that_of_its_kind() {
    assert_eq!(brand(&guest("milan", Cpu::Host, 0, 1)), "x".repeat(48));
    assert_eq!(brand(&guest("milan", Cpu::Portable, 0, 1)), "AMD EPYC Processor");
    assert_eq!(brand(&guest("cascade-lake", Cpu::Portable, 0, 1)), "Intel(R) Xeon(R) Processor");
    let unnamed = shown(&host("milan"), Wanted { cpu: Cpu::Host, id: 0, vcpus: 1 }, true, [0; 48]);
    assert_eq!(brand(&unnamed), "AMD EPYC Processor");
}

/// Of each host, those that take its guests: what the host has, and portable ones.
#[test]
fn each_pair_of_hosts_says_yes_or_no() {
    let all_of = |of: &str, cpu| {
        let takes = |on: &&str| refusal(of, on, cpu).is_empty();
        HOSTS.map(|(name, _)| name).into_iter().filter(|on| takes(on)).collect::<Vec<_>>()
    };
    let intel = ["cascade-lake", "ice-lake", "sapphire-rapids", "granite-rapids"];
    let amd = ["milan", "genoa"];
    let taken = [
        ("cascade-lake", &["cascade-lake", "ice-lake"][..], &intel[..]),
        ("ice-lake", &["ice-lake"], &intel),
        ("sapphire-rapids", &["sapphire-rapids", "granite-rapids"], &intel),
        ("granite-rapids", &["granite-rapids"], &intel),
        ("milan", &amd, &amd),
        ("genoa", &["genoa"], &amd),
        ("qemu-epyc", &["milan", "genoa", "qemu-epyc"], &["milan", "genoa", "qemu-epyc"]),
    ];
    for (of, as_host, portable) in taken {
        for (cpu, expected) in [(Cpu::Host, as_host), (Cpu::Portable, portable)] {
            let why = HOSTS.map(|(on, _)| (on, refusal(of, on, cpu)));
            assert_eq!(all_of(of, cpu), expected, "{of} {cpu:?} {why:#?}");
        }
    }
}

#[test]
fn what_is_missing_is_named() {
    let why = refusal("genoa", "milan", Cpu::Host).join(", ");
    for expected in [
        "avx512f",
        "(CPUID 0x7.0 ebx)",
        "autoibrs",
        "physical addresses of 52 bits; here they have 48",
    ] {
        assert!(why.contains(expected), "{expected}: {why}");
    }
    let why = refusal("milan", "ice-lake", Cpu::Portable).join(", ");
    assert_eq!(why, "the vendor AuthenticAMD; here it is GenuineIntel");
}

#[test]
fn what_a_guest_has_seen_is_the_vendor_and_what_does_not_change_while_it_runs() {
    let mut table = guest("milan", Cpu::Host, 0, 2);
    let offered = seen(&table, None, 0).features;
    for entry in table.iter_mut().filter(|entry| entry.function == 1) {
        entry.ecx |= 1 << 27;
    }

    assert_eq!(seen(&table, None, 0).features, offered);
    assert!(offered.contains(&"AuthenticAMD".to_owned()));
    let intel = seen(&guest("ice-lake", Cpu::Host, 0, 1), None, 0).features;
    assert!(intel.contains(&"GenuineIntel".to_owned()));
}

#[test]
fn a_register_that_is_not_shown_may_hold_nothing_in_a_snapshot() {
    let offered = guest("milan", Cpu::Host, 0, 1);
    let with = |entry| [offered.clone(), vec![entry]].concat();
    let pmu = kvm_cpuid_entry2 { function: 0xa, eax: 2, ..Default::default() };
    assert_eq!(differences(&with(pmu), &offered), ["0x2 in CPUID 0xa.0 eax, which is not shown"]);
    assert!(differences(&offered, &offered).is_empty());
    let mut other = offered.clone();
    for entry in other.iter_mut().filter(|it| it.function == 1) {
        entry.ebx ^= 0x1800;
        entry.ecx |= 1 << 5;
    }
    let why = differences(&other, &offered);
    assert_eq!(why, ["cache lines of 128 bytes; here they have 64", "bit 5 (CPUID 0x1.0 ecx)"]);
}

#[test]
fn what_a_guest_does_itself_is_no_difference() {
    let offered = guest("ice-lake", Cpu::Host, 0, 1);
    let mut used = guest("ice-lake", Cpu::Host, 1, 4);
    for entry in &mut used {
        match entry.function {
            1 => entry.ecx |= 1 << 27,
            7 if entry.index == 0 => entry.ecx |= 1 << 4,
            0xd if entry.index < 2 => entry.ebx = 0xa88,
            _ => {}
        }
    }
    assert!(differences(&used, &offered).is_empty());
}

fn mask(features: &[Feature]) -> u32 {
    features.iter().fold(0, |mask, (bit, ..)| mask | 1 << bit)
}
