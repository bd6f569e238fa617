//! Stores of every format that is still read are read by this build, and written back to the same
//! bytes; others are refused by what they are.

use std::path::PathBuf;

use forkd_proto::control::ErrorCode;
use forkd_vmm::disk::layers::Lower;
use forkd_vmm::memory::ram::Ram;
use forkd_vmm::snapshot::state::{MSRS_MAX, MachineState};
use kvm_bindings::kvm_cpuid_entry2;
use vm_memory::{Bytes, GuestAddress};

/// The stores whose memory and layers are read.
const RELEASES: [&str; 1] = ["0.1.0"];
/// Those whose states are.
const STATES: [&str; 1] = ["state-2"];

fn golden(release: &str, name: &str) -> PathBuf {
    let store = concat!(env!("CARGO_MANIFEST_DIR"), "/../../protocol/store/golden");
    PathBuf::from(store).join(release).join(name)
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("forkd-golden-{}-{name}", std::process::id()))
}

#[test]
fn states_are_read_and_written_back_to_the_same_bytes() {
    for release in STATES {
        let path = golden(release, "state");
        let state = MachineState::read(&path).unwrap();
        let target = scratch("state");

        state.write(&target).unwrap();

        let same = std::fs::read(&path).unwrap() == std::fs::read(&target).unwrap();
        std::fs::remove_file(target).unwrap();
        assert!(same, "{release}");
    }
}

#[test]
fn states_of_a_version_that_cannot_be_compared_with_a_host_are_too_old() {
    let refused = MachineState::read(&golden("0.1.0", "state")).unwrap_err();

    assert_eq!(refused.code(), ErrorCode::TooOld);
    assert!(refused.to_string().contains("0.1.0/state was written by an earlier"), "{refused}");
}

#[test]
fn memory_files_are_loaded_to_where_their_runs_say() {
    for release in RELEASES {
        let memory = Ram::load(128 << 20, &[golden(release, "memory")]).unwrap();

        let byte =
            |page: u64| memory.view().read_obj::<u8>(GuestAddress(page * 4096 + 4095)).unwrap();

        assert_eq!([byte(0), byte(1), byte(2), byte(32767)], [0, 1, 2, 3], "{release}");
    }
}

#[test]
fn layers_are_opened() {
    for release in RELEASES {
        let image = scratch("image");
        std::fs::write(&image, [0; 4096]).unwrap();

        let opened = Lower::open(&[image.clone(), golden(release, "disk.layer")], 2 << 30, None);

        std::fs::remove_file(image).unwrap();
        assert_eq!(opened.unwrap().size_bytes(), 2 << 30, "{release}");
    }
}

#[test]
fn a_state_is_refused_when_any_one_of_its_bytes_is_flipped() {
    let bytes = std::fs::read(golden(STATES[0], "state")).unwrap();
    let target = scratch("flipped");
    for at in (0..bytes.len()).step_by(97) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 0x10;
        std::fs::write(&target, flipped).unwrap();

        let code = MachineState::read(&target).unwrap_err().code();

        let codes = [ErrorCode::Damaged, ErrorCode::NotOurs, ErrorCode::TooNew];
        let refused = codes.contains(&code);
        assert!(refused, "byte {at}: {code:?}");
    }
    std::fs::remove_file(target).unwrap();
}

#[test]
fn a_state_with_a_decoy_of_a_cpuid_entry_is_damage() {
    let path = scratch("decoy");
    let golden = || MachineState::read(&golden(STATES[0], "state")).unwrap();
    let features = golden().vcpus[0].cpuid.iter().position(|entry| entry.function == 1).unwrap();
    for (index, flags) in [(0, 0), (1, 0), (1, 1)] {
        let mut state = golden();
        let decoy = state.vcpus[0].cpuid[features];
        // Nested virtualisation: KVM would show the first that matches, and we looked at index 0.
        let decoy = kvm_cpuid_entry2 { index, flags, ecx: decoy.ecx | 1 << 5, ..decoy };
        // In the place of one of those that are empty, of which this kernel saved many.
        state.vcpus[0].cpuid.pop();
        state.vcpus[0].cpuid.insert(features, decoy);

        state.write(&path).unwrap();
        let refused = MachineState::read(&path).unwrap_err();

        assert_eq!(refused.code(), ErrorCode::Damaged);
        assert!(refused.to_string().contains("CPUID 0x1."), "{refused}");
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_state_with_one_msr_more_than_a_vcpu_can_have_is_damage() {
    let path = scratch("msrs");
    let mut state = MachineState::read(&golden(STATES[0], "state")).unwrap();
    let one = state.vcpus[0].msrs[0];

    for (count, allowed) in [(MSRS_MAX, true), (MSRS_MAX + 1, false)] {
        state.vcpus[0].msrs.resize(count, one);
        state.write(&path).unwrap();
        assert_eq!(MachineState::read(&path).is_ok(), allowed);
    }
    std::fs::remove_file(path).unwrap();
}
