//! How much memory the host has.

use std::io::Read;
use std::path::Path;

use crate::error::Error;
use crate::sys::handed;

/// Where the kernel says.
pub const FILE: &str = "/proc/meminfo";

/// Bytes that can be taken without others having to give any up, by the kernel's own estimate.
///
/// # Errors
///
/// [`Error::Io`] if the kernel does not say.
pub fn available_bytes() -> Result<u64, Error> {
    let mut text = String::new();
    handed::open(Path::new(FILE))
        .and_then(|mut file| file.read_to_string(&mut text))
        .map_err(Error::io(format!("read {FILE}")))?;
    available_in(&text).ok_or_else(|| Error::Damaged(format!("{FILE} has no MemAvailable")))
}

fn available_in(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_estimate_is_in_kibibytes() {
        let text = "MemTotal:  24000 kB\nMemFree: 1 kB\nMemAvailable:   12345 kB\n";

        assert_eq!(available_in(text), Some(12345 << 10));
        assert_eq!(available_in("MemTotal: 24000 kB\n"), None);
        assert!(available_bytes().unwrap() > 0);
    }
}
