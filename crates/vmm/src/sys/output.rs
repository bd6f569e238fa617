//! Lines on standard output and standard error, which may be files on a full disk.
//!
//! `println!` and `eprintln!` end the process if they cannot write.

use std::fmt::Display;
use std::io::{self, Write};

/// Writes a line to standard error, for a person; if nobody can read it, nothing is lost but that.
pub fn log(line: impl Display) {
    drop(writeln!(io::stderr(), "{line}"));
}

/// Writes a line to standard output, for whoever started this process.
///
/// # Errors
///
/// The kernel's; then nobody has heard of it.
pub fn say(line: impl Display) -> io::Result<()> {
    let mut output = io::stdout();
    writeln!(output, "{line}").and_then(|()| output.flush())
}
