//! One line per thing that goes wrong, on the console of the guest.

use std::fs::OpenOptions;
use std::io::Write;

/// Says one line: in the kernel's log, which the host keeps as the console log, or on standard
/// error where there is no such log to write to.
pub fn line(message: &str) {
    let text = format!("forkd-agent: {message}\n");
    let kernel = OpenOptions::new().write(true).open("/dev/kmsg");
    // As an error: what is less may not reach the console.
    let said = kernel.and_then(|mut log| log.write_all(format!("<3>{text}").as_bytes()));
    if said.is_err() {
        eprint!("{text}");
    }
}
