//! `IA32_ARCH_CAPABILITIES`: which weaknesses an Intel processor does not have.
//!
//! A kernel looks once, when it boots, and leaves out what it does not need to do.  So a guest
//! that has seen that something is no problem must not run where it is.  Two bits are the other
//! way round: they say that a weakness is there.

use forkd_proto::control::Cpu;

use crate::error::Error;

/// The MSR.
pub const MSR: u32 = 0x10a;

/// What bits are called, and those that every server since 2019 has.
const BITS: &[(u8, &str)] = &[
    (0, "rdcl_no"),
    (1, "ibrs_all"),
    (3, "skip_l1dfl_vmentry"),
    (4, "ssb_no"),
    (5, "mds_no"),
    (6, "pschange_mc_no"),
    (7, "tsx_ctrl"),
    (8, "taa_no"),
    (13, "sbdr_ssdp_no"),
    (14, "fbsdp_no"),
    (15, "psdp_no"),
    (17, "fb_clear"),
    (20, "bhi_no"),
    (24, "pbrsb_no"),
    (26, "gds_no"),
    (27, "rfds_no"),
    (28, "rfds_clear"),
    (62, "its_no"),
];
const PORTABLE: u64 = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6;
/// That returns may be predicted by something else: always, or in a restricted mode.
const WEAKNESSES: [(u8, &str); 2] = [(2, "rsba"), (19, "rrsba")];
const WEAK: u64 = 1 << 2 | 1 << 19;

/// What a guest is told where KVM offers `offered`.
#[must_use]
pub fn shown(offered: u64, cpu: Cpu) -> u64 {
    let known = BITS.iter().fold(WEAK, |mask, (bit, _)| mask | 1 << bit);
    match cpu {
        Cpu::Host => offered & known,
        Cpu::Portable => offered & PORTABLE | WEAK,
    }
}

/// What the bits of `value` are called, less those that say of a weakness.
pub fn names(value: u64) -> impl Iterator<Item = &'static str> {
    BITS.iter().filter(move |(bit, _)| value & 1 << bit != 0).map(|(_, name)| *name)
}

/// Whether a guest that has seen `value` has seen no more than a portable one.
#[must_use]
pub fn is_portable(value: u64) -> bool {
    value & !PORTABLE == WEAK
}

/// Refuses to go on if a guest that has `seen` one value would be wrong about a processor of which
/// KVM says `here`.
///
/// # Errors
///
/// [`Error::CpuMismatch`] naming the bits.
pub fn check(seen: u64, here: u64) -> Result<(), Error> {
    let lacking = seen & !here & !WEAK;
    let hidden = here & !seen & WEAK;
    let name = |bit: u8| {
        let known = BITS.iter().chain(&WEAKNESSES).find(|(at, _)| *at == bit);
        known.map_or_else(|| format!("bit {bit}"), |(_, name)| (*name).to_owned())
    };
    let names = |bits: u64| (0..64).filter(move |bit| bits & 1 << bit != 0).map(name);
    let problems: Vec<_> = names(lacking)
        .chain(names(hidden).map(|name| format!("no {name}")))
        .map(|name| format!("{name} (IA32_ARCH_CAPABILITIES)"))
        .collect();
    if problems.is_empty() { Ok(()) } else { Err(Error::CpuMismatch(problems.join(", "))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(seen: u64, here: u64) -> String {
        check(seen, here).map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn a_guest_that_was_told_of_no_weakness_does_not_run_where_there_is_one() {
        assert_eq!(problems(0b1001, 0b1011), "");
        assert!(problems(0b100_1001, 0b1000).ends_with(
            "rdcl_no (IA32_ARCH_CAPABILITIES), pschange_mc_no (IA32_ARCH_CAPABILITIES)"
        ));
        assert!(problems(1 << 40, 0).ends_with("bit 40 (IA32_ARCH_CAPABILITIES)"));
    }

    #[test]
    fn a_guest_that_was_not_told_of_a_weakness_does_not_run_where_it_is() {
        for (bit, name) in WEAKNESSES {
            assert_eq!(problems(1 << bit, 0), "");
            assert_eq!(problems(1 << bit, 1 << bit), "");
            let refused = problems(0, 1 << bit);
            assert!(refused.ends_with(&format!("no {name} (IA32_ARCH_CAPABILITIES)")), "{refused}");
        }
    }

    #[test]
    fn guests_are_told_what_has_a_name_and_portable_ones_what_all_servers_say() {
        assert_eq!(shown(1 << 40 | 1 << 62 | 1, Cpu::Host), 1 << 62 | 1);
        assert_eq!(shown(1 << 62 | 1, Cpu::Portable), WEAK | 1);
        assert_eq!(shown(0, Cpu::Portable), WEAK);
    }
}
