//! The host's end of the network device: a tap, or nothing.

use std::fs::File;
use std::io::{self, Read, Write};

use forkd_devices::virtio::net::Frames;

/// A tap device, or a network that is not connected.
#[derive(Debug)]
pub struct Tap {
    file: Option<File>,
}

impl Tap {
    /// Frames go to and come from this tap; without one they are dropped.
    #[must_use]
    pub fn new(file: Option<File>) -> Self {
        Self { file }
    }

    /// The tap, to be watched for frames.
    #[must_use]
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }
}

impl Frames for Tap {
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        // A tap takes a frame whole or not at all.
        self.file.as_mut().map_or(Ok(()), |file| file.write(frame).map(|_| ()))
    }

    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(file) = &mut self.file else { return Ok(None) };
        match file.read(buffer) {
            Ok(length) => Ok(Some(length)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}
