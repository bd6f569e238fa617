//! Which registers of CPUID a guest is shown, and what another host must have of each.
//!
//! This is an allow-list.  A bit, a register or a function that is not here is shown as zero: a
//! later kernel or processor adds nothing to guests before somebody has looked whether its state
//! is part of a snapshot.  [`HIDDEN`] gives the reason for what is left out on purpose.
//!
//! Names are those of Linux's `/proc/cpuinfo`, where it has one.

/// One of the four registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

use Register::{Eax, Ebx, Ecx, Edx};

/// Which guests are shown a feature that the host has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// All.
    Always,
    /// Those that want what the host has.
    Host,
    /// On Intel's processors all, on others those that want what the host has.
    HostOrIntel,
    /// On AMD's processors all, on others those that want what the host has.
    HostOrAmd,
    /// All, on Intel's processors only.
    OnIntel,
}

use Shown::{Always, Host, HostOrAmd, HostOrIntel, OnIntel};

/// A bit of a register, what it is called, and who is shown it.
pub type Feature = (u8, &'static str, Shown);

/// What a register is.
#[derive(Clone, Copy, Debug)]
pub enum What {
    /// Features, each of which another host must have; all other bits are shown as zero.
    Features(&'static [Feature]),
    /// What must be the same on another host.
    Same,
    /// What describes the host, and is no promise; shown as it is, and compared with nothing.
    Describes,
    /// Made in this crate, for each vCPU and each machine.
    Made,
    /// Bits 7-0 are those of a physical address, of which another host must have as many.
    Addresses,
}

use What::{Addresses, Describes, Features, Made, Same};

/// A register: its function, its index if it is of that index only, and what it is.
pub type Row = (u32, Option<u32>, Register, What);

/// The allow-list.
pub const ROWS: &[Row] = &[
    (0x0, None, Eax, Made),
    (0x0, None, Ebx, Same),
    (0x0, None, Ecx, Same),
    (0x0, None, Edx, Same),
    // Family, model and stepping.
    (0x1, None, Eax, Describes),
    (0x1, None, Ebx, Made),
    (0x1, None, Ecx, Features(BASIC_ECX)),
    (0x1, None, Edx, Features(BASIC_EDX)),
    // Caches and TLBs, as Intel's older processors have them.
    (0x2, None, Eax, Describes),
    (0x2, None, Ebx, Describes),
    (0x2, None, Ecx, Describes),
    (0x2, None, Edx, Describes),
    // Caches: their sizes, and in EAX who shares them.
    (0x4, None, Eax, Made),
    (0x4, None, Ebx, Describes),
    (0x4, None, Ecx, Describes),
    (0x4, None, Edx, Describes),
    (0x6, None, Eax, Features(&[(2, "arat", Always)])),
    (0x7, Some(0), Eax, Made),
    (0x7, Some(0), Ebx, Features(EXTENDED_EBX)),
    (0x7, Some(0), Ecx, Features(EXTENDED_ECX)),
    (0x7, Some(0), Edx, Features(EXTENDED_EDX)),
    (0x7, Some(1), Eax, Features(EXTENDED_1_EAX)),
    (0x7, Some(1), Edx, Features(EXTENDED_1_EDX)),
    (0x7, Some(2), Edx, Features(EXTENDED_2_EDX)),
    (0xb, None, Eax, Made),
    (0xb, None, Ebx, Made),
    (0xb, None, Ecx, Made),
    (0xb, None, Edx, Made),
    (0xd, Some(0), Eax, Features(STATES)),
    (0xd, Some(0), Ebx, Made),
    (0xd, Some(0), Ecx, Made),
    (0xd, Some(1), Eax, Features(XSAVE)),
    (0xd, Some(1), Ebx, Made),
    // Of each state: its bytes, where it is in the area that is saved, and how it is aligned.
    (0xd, None, Eax, Same),
    (0xd, None, Ebx, Same),
    (0xd, None, Ecx, Same),
    (0x1f, None, Eax, Made),
    (0x1f, None, Ebx, Made),
    (0x1f, None, Ecx, Made),
    (0x1f, None, Edx, Made),
    (0x4000_0000, None, Eax, Made),
    (0x4000_0000, None, Ebx, Same),
    (0x4000_0000, None, Ecx, Same),
    (0x4000_0000, None, Edx, Same),
    (0x4000_0001, None, Eax, Features(KVM)),
    (0x8000_0000, None, Eax, Made),
    (0x8000_0000, None, Ebx, Describes),
    (0x8000_0000, None, Ecx, Describes),
    (0x8000_0000, None, Edx, Describes),
    (0x8000_0001, None, Eax, Describes),
    (0x8000_0001, None, Ebx, Describes),
    (0x8000_0001, None, Ecx, Features(AMD_ECX)),
    (0x8000_0001, None, Edx, Features(AMD_EDX)),
    // The brand.
    (0x8000_0002, None, Eax, Made),
    (0x8000_0002, None, Ebx, Made),
    (0x8000_0002, None, Ecx, Made),
    (0x8000_0002, None, Edx, Made),
    (0x8000_0003, None, Eax, Made),
    (0x8000_0003, None, Ebx, Made),
    (0x8000_0003, None, Ecx, Made),
    (0x8000_0003, None, Edx, Made),
    (0x8000_0004, None, Eax, Made),
    (0x8000_0004, None, Ebx, Made),
    (0x8000_0004, None, Ecx, Made),
    (0x8000_0004, None, Edx, Made),
    // Caches and TLBs, as AMD's older processors have them.
    (0x8000_0005, None, Eax, Describes),
    (0x8000_0005, None, Ebx, Describes),
    (0x8000_0005, None, Ecx, Describes),
    (0x8000_0005, None, Edx, Describes),
    (0x8000_0006, None, Eax, Describes),
    (0x8000_0006, None, Ebx, Describes),
    (0x8000_0006, None, Ecx, Describes),
    (0x8000_0006, None, Edx, Describes),
    (0x8000_0007, None, Edx, Features(&[(8, "nonstop_tsc", Always)])),
    (0x8000_0008, None, Eax, Addresses),
    (0x8000_0008, None, Ebx, Features(AMD_8_EBX)),
    (0x8000_0008, None, Ecx, Made),
    (0x8000_0019, None, Eax, Describes),
    (0x8000_0019, None, Ebx, Describes),
    // How wide its units are.
    (0x8000_001a, None, Eax, Describes),
    (0x8000_001d, None, Eax, Made),
    (0x8000_001d, None, Ebx, Describes),
    (0x8000_001d, None, Ecx, Describes),
    (0x8000_001d, None, Edx, Describes),
    (0x8000_001e, None, Eax, Made),
    (0x8000_001e, None, Ebx, Made),
    (0x8000_001e, None, Ecx, Made),
    (0x8000_0021, None, Eax, Features(AMD_21_EAX)),
    (0x8000_0021, None, Ecx, Features(AMD_21_ECX)),
];

/// What guests are not shown: the function, its index and register if it is not all of it, the
/// bits, and why.
pub type Hidden = (u32, Option<(u32, Register)>, u32, &'static str);

/// What KVM may offer and guests are not shown.
pub const HIDDEN: &[Hidden] = &[
    (0x1, Some((0, Ecx)), 0x0004_cdfc, "debug store, VMX, SMX, MONITOR, PMU: not in a snapshot"),
    (0x1, Some((0, Edx)), 1 << 21, "the debug store is not in a snapshot"),
    (0x3, None, !0, "serial numbers"),
    (0x5, None, !0, "MONITOR and MWAIT"),
    (0x6, Some((0, Ecx)), !0, "a counter of the host's frequency"),
    (0x7, Some((0, Ebx)), 0x0240_d004, "SGX, MPX, monitoring, PCOMMIT, traces: not in a snapshot"),
    (0x7, Some((0, Ecx)), 0xe5bf_a0a0, "WAITPKG stops cores; CET, LA57, keys, bus locks, SGX"),
    (0x7, Some((0, Edx)), 0x437e_b2e3, "AMX, CET, LBR, UINTR, hybrid parts: not in a snapshot"),
    (0x7, Some((1, Eax)), 0xc86e_0048, "FRED, AMX, HRESET and others: not in a snapshot"),
    (0x7, Some((1, Ebx)), !0, "PPIN and others: the host's"),
    (0x7, Some((1, Ecx)), !0, "immediate forms of MSR instructions"),
    (0x7, Some((1, Edx)), 0x00ae_8100, "AMX, AVX10, user MSRs, CET, APX: not in a snapshot"),
    (0x7, Some((2, Edx)), 1 << 6, "locks of the host's"),
    (0xa, None, !0, "the PMU is not in a snapshot, and shows what others do"),
    (0xd, Some((0, Eax)), 0x000e_7d18, "MPX, AMX, APX: not in a snapshot"),
    (0xd, Some((0, Edx)), !0, "states that nobody knows yet"),
    (0xd, Some((1, Eax)), 1 << 4, "XFD belongs to AMX"),
    (0xd, Some((1, Ecx)), !0, "supervisor states (CET, traces): not in a snapshot"),
    (0xd, Some((1, Edx)), !0, "as ECX"),
    (0xf, None, !0, "monitoring of caches"),
    (0x10, None, !0, "allocation of caches"),
    (0x12, None, !0, "SGX"),
    (0x14, None, !0, "processor traces"),
    (0x15, None, !0, "frequencies of the host's, which may be scaled"),
    (0x16, None, !0, "as 0x15"),
    (0x17, None, !0, "the vendor of a system on a chip"),
    (0x18, None, !0, "TLBs, which the guest shares"),
    (0x19, None, !0, "key locker is not in a snapshot"),
    (0x1a, None, !0, "kinds of cores"),
    (0x1c, None, !0, "the LBR is not in a snapshot"),
    (0x1d, None, !0, "AMX"),
    (0x1e, None, !0, "AMX"),
    (0x24, None, !0, "AVX10: what it enumerates has bits of its own"),
    (0x4000_0001, Some((0, Eax)), 0x0003_8404, "what a VMM has to take part in, or to nest"),
    (0x4000_0001, Some((0, Edx)), !0, "hints that this VMM does not give"),
    (0x8000_0001, Some((0, Ecx)), 0x7d8a_b404, "SVM, traces, PMUs, breakpoints, MWAITX"),
    (0x8000_0007, Some((0, Ebx)), !0, "what a host does of failing memory"),
    (0x8000_0007, Some((0, Edx)), !0x100, "power states of the host's"),
    (0x8000_0008, Some((0, Ebx)), 0x88fd_255a, "counters, RDPRU, MCOMMIT: not in a snapshot"),
    (0x8000_0008, Some((0, Edx)), !0, "RDPRU"),
    (0x8000_000a, None, !0, "SVM"),
    (0x8000_001b, None, !0, "traces of instructions"),
    (0x8000_001c, None, !0, "lightweight profiling"),
    (0x8000_001f, None, !0, "encrypted memory"),
    (0x8000_0020, None, !0, "allocation of bandwidth"),
    (0x8000_0021, Some((0, Eax)), 0x87ef_f09a, "what has to do with SMM, nesting and prefetchers"),
    (0x8000_0021, Some((0, Ebx)), !0, "sizes of microcode"),
    (0x8000_0022, None, !0, "the PMU is not in a snapshot"),
    (0x8000_0023, None, !0, "encrypted memory"),
    (0x8000_0026, None, !0, "the host's topology"),
];

/// `xsave` and what needs it are shown where KVM has them; `osxsave` is the guest's own doing.
const BASIC_ECX: &[Feature] = &[
    (0, "pni", Always),
    (1, "pclmulqdq", Always),
    (9, "ssse3", Always),
    (12, "fma", Always),
    (13, "cx16", Always),
    (17, "pcid", HostOrIntel),
    (19, "sse4_1", Always),
    (20, "sse4_2", Always),
    (21, "x2apic", Always),
    (22, "movbe", Always),
    (23, "popcnt", Always),
    (24, "tsc_deadline_timer", Always),
    (25, "aes", Always),
    (26, "xsave", Always),
    (27, "osxsave", Always),
    (28, "avx", Always),
    (29, "f16c", Always),
    (30, "rdrand", Always),
    (31, "hypervisor", Always),
];

const BASIC_EDX: &[Feature] = &[
    (0, "fpu", Always),
    (1, "vme", Always),
    (2, "de", Always),
    (3, "pse", Always),
    (4, "tsc", Always),
    (5, "msr", Always),
    (6, "pae", Always),
    (7, "mce", Always),
    (8, "cx8", Always),
    (9, "apic", Always),
    (11, "sep", Always),
    (12, "mtrr", Always),
    (13, "pge", Always),
    (14, "mca", Always),
    (15, "cmov", Always),
    (16, "pat", Always),
    (17, "pse36", Always),
    (19, "clflush", Always),
    (23, "mmx", Always),
    (24, "fxsr", Always),
    (25, "sse", Always),
    (26, "sse2", Always),
    (27, "ss", HostOrIntel),
    (28, "ht", Always),
];

const EXTENDED_EBX: &[Feature] = &[
    (0, "fsgsbase", Always),
    (1, "tsc_adjust", Always),
    (3, "bmi1", Always),
    (4, "hle", Host),
    (5, "avx2", Always),
    (6, "fdp_excptn_only", HostOrIntel),
    (7, "smep", Always),
    (8, "bmi2", Always),
    (9, "erms", HostOrIntel),
    (10, "invpcid", HostOrIntel),
    (11, "rtm", Host),
    (13, "zero_fcs_fds", HostOrIntel),
    (16, "avx512f", Host),
    (17, "avx512dq", Host),
    (18, "rdseed", Always),
    (19, "adx", Always),
    (20, "smap", Always),
    (21, "avx512ifma", Host),
    (23, "clflushopt", Always),
    (24, "clwb", Always),
    (26, "avx512pf", Host),
    (27, "avx512er", Host),
    (28, "avx512cd", Host),
    (29, "sha_ni", HostOrAmd),
    (30, "avx512bw", Host),
    (31, "avx512vl", Host),
];

/// `ospke` is the guest's own doing.
const EXTENDED_ECX: &[Feature] = &[
    (0, "prefetchwt1", Host),
    (1, "avx512vbmi", Host),
    (2, "umip", Always),
    (3, "pku", Host),
    (4, "ospke", Host),
    (6, "avx512_vbmi2", Host),
    (8, "gfni", Host),
    (9, "vaes", Host),
    (10, "vpclmulqdq", Host),
    (11, "avx512_vnni", Host),
    (12, "avx512_bitalg", Host),
    (14, "avx512_vpopcntdq", Host),
    (22, "rdpid", HostOrAmd),
    (25, "cldemote", Host),
    (27, "movdiri", Host),
    (28, "movdir64b", Host),
];

const EXTENDED_EDX: &[Feature] = &[
    (2, "avx512_4vnniw", Host),
    (3, "avx512_4fmaps", Host),
    (4, "fsrm", Host),
    (8, "avx512_vp2intersect", Host),
    (10, "md_clear", HostOrIntel),
    (11, "rtm_always_abort", Host),
    (14, "serialize", Host),
    (16, "tsxldtrk", Host),
    (23, "avx512_fp16", Host),
    // AMD has a bit of its own for it, and shows this one in some generations only.
    (26, "spec_ctrl", HostOrIntel),
    (27, "intel_stibp", Always),
    (28, "flush_l1d", HostOrIntel),
    (29, "arch_capabilities", OnIntel),
    (31, "spec_ctrl_ssbd", Always),
];

const EXTENDED_1_EAX: &[Feature] = &[
    (0, "sha512", Host),
    (1, "sm3", Host),
    (2, "sm4", Host),
    (4, "avx_vnni", Host),
    (5, "avx512_bf16", Host),
    (7, "cmpccxadd", Host),
    (10, "fzrm", Host),
    (11, "fsrs", Host),
    (12, "fsrc", Host),
    (23, "avx_ifma", Host),
    (26, "lam", Host),
];

const EXTENDED_1_EDX: &[Feature] = &[
    (4, "avx_vnni_int8", Host),
    (5, "avx_ne_convert", Host),
    (10, "avx_vnni_int16", Host),
    (14, "prefetchiti", Host),
];

const EXTENDED_2_EDX: &[Feature] = &[
    (0, "intel_psfd", Host),
    (1, "ipred_ctrl", Host),
    (2, "rrsba_ctrl", Host),
    (3, "ddpd_u", Host),
    (4, "bhi_ctrl", Host),
    (5, "mcdt_no", Host),
];

/// States of registers that XSAVE knows, and that snapshots hold.
const STATES: &[Feature] = &[
    (0, "xsave_x87", Always),
    (1, "xsave_sse", Always),
    (2, "xsave_avx", Always),
    (5, "xsave_avx512_masks", Host),
    (6, "xsave_avx512_upper", Host),
    (7, "xsave_avx512_high", Host),
    (9, "xsave_pkru", Host),
];

/// Linux hides `xsaves` on AMD's Zen 1 and 2 if their microcode has erratum 1386.
const XSAVE: &[Feature] = &[
    (0, "xsaveopt", Always),
    (1, "xsavec", Always),
    (2, "xgetbv1", Always),
    (3, "xsaves", HostOrIntel),
];

const KVM: &[Feature] = &[
    (0, "kvm_clock", Always),
    (1, "kvm_nop_io_delay", Always),
    (3, "kvm_clock2", Always),
    (4, "kvm_async_pf", Always),
    (5, "kvm_steal_time", Always),
    (6, "kvm_pv_eoi", Always),
    (7, "kvm_pv_unhalt", Always),
    (9, "kvm_pv_tlb_flush", Always),
    (11, "kvm_pv_send_ipi", Always),
    (12, "kvm_poll_control", Always),
    (13, "kvm_pv_sched_yield", Always),
    (14, "kvm_async_pf_int", Always),
    (24, "kvm_clock_stable", Always),
];

const AMD_ECX: &[Feature] = &[
    (0, "lahf_lm", Always),
    (1, "cmp_legacy", Always),
    (3, "extapic", Always),
    (4, "cr8_legacy", Always),
    (5, "abm", Always),
    (6, "sse4a", Always),
    (7, "misalignsse", Always),
    (8, "3dnowprefetch", Always),
    (9, "osvw", Always),
    (11, "xop", Host),
    (16, "fma4", Host),
    (21, "tbm", Host),
    (22, "topoext", Always),
];

const AMD_EDX: &[Feature] = &[
    (0, "fpu", Always),
    (1, "vme", Always),
    (2, "de", Always),
    (3, "pse", Always),
    (4, "tsc", Always),
    (5, "msr", Always),
    (6, "pae", Always),
    (7, "mce", Always),
    (8, "cx8", Always),
    (9, "apic", Always),
    (11, "syscall", Always),
    (12, "mtrr", Always),
    (13, "pge", Always),
    (14, "mca", Always),
    (15, "cmov", Always),
    (16, "pat", Always),
    (17, "pse36", Always),
    (20, "nx", Always),
    (22, "mmxext", Always),
    (23, "mmx", Always),
    (24, "fxsr", Always),
    (25, "fxsr_opt", Always),
    (26, "pdpe1gb", Always),
    (27, "rdtscp", Always),
    (29, "lm", Always),
    (30, "3dnowext", Host),
    (31, "3dnow", Host),
];

const AMD_8_EBX: &[Feature] = &[
    (0, "clzero", Always),
    (2, "xsaveerptr", Always),
    (9, "wbnoinvd", HostOrAmd),
    (12, "ibpb", Always),
    (14, "ibrs", Always),
    (15, "stibp", Always),
    (17, "stibp_always_on", Host),
    (24, "ssbd", Always),
    (25, "virt_ssbd", Host),
    (26, "ssb_no", Host),
    (28, "psfd", Host),
    (29, "btc_no", Host),
    (30, "ibpb_ret", Host),
];

const AMD_21_EAX: &[Feature] = &[
    (0, "no_nested_data_bp", Host),
    (2, "lfence_rdtsc", Always),
    (5, "verw_clear", Host),
    (6, "null_seg_clear_base", Host),
    (8, "autoibrs", Host),
    (9, "no_smm_ctl_msr", Always),
    (10, "fast_rep_stosb", Host),
    (11, "fast_rep_cmpsb", Host),
    (20, "prefetchi", Host),
    (27, "sbpb", Host),
    (28, "ibpb_brtype", Host),
    (29, "srso_no", Host),
    (30, "srso_user_kernel_no", Host),
];

const AMD_21_ECX: &[Feature] = &[(1, "tsa_sq_no", Host), (2, "tsa_l1_no", Host)];
