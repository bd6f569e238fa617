//! The program says what is wrong, or ends in order if it cannot even do that.

use std::fs::File;
use std::process::Command;

#[test]
fn a_program_that_nobody_can_hear_ends_with_a_status_and_not_with_a_signal() {
    for (arguments, status) in [(&["zygote", "--config", "/nonexistent"][..], 1), (&["help"], 2)] {
        let full = || File::options().write(true).open("/dev/full").unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_forkd-vmm"));
        program.args(arguments).stdout(full()).stderr(full());

        assert_eq!(program.status().unwrap().code(), Some(status), "{arguments:?}");
    }
}
