//! The 64-byte header that every stored file begins with.
//!
//! Fixed in size and self-describing, so that "not ours", "too new" and
//! "damaged" are three answers that need no decoding of the body.  Layout:
//! `protocol/store/FORMAT.md`.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::error::Error;
use crate::sys::handed;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 64;
/// Bytes that are read and hashed at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Which of the three files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Registers and devices.
    State,
    /// Pages of guest memory.
    Memory,
    /// Blocks of a disk.
    Layer,
}

impl Kind {
    fn magic(self) -> [u8; 8] {
        match self {
            Self::State => *b"FKDSTATE",
            Self::Memory => *b"FKDMEMRY",
            Self::Layer => *b"FKDLAYER",
        }
    }

    /// The version that is written, and the only one that is read.
    fn version(self) -> u32 {
        match self {
            Self::State => 2,
            Self::Memory | Self::Layer => 1,
        }
    }
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the body; the file ends after them.
    pub body_bytes: u64,
    /// BLAKE3 of the body.
    pub digest: [u8; 32],
}

impl Header {
    /// The header's 64 bytes.
    #[must_use]
    pub fn encode(&self, kind: Kind) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&kind.magic());
        bytes[8..12].copy_from_slice(&kind.version().to_le_bytes());
        bytes[16..24].copy_from_slice(&self.body_bytes.to_le_bytes());
        bytes[24..56].copy_from_slice(&self.digest);
        let check = blake3::hash(&bytes[..56]);
        bytes[56..].copy_from_slice(&check.as_bytes()[..8]);
        bytes
    }

    /// Decodes a header; `name` is the file's, for the message.
    ///
    /// # Errors
    ///
    /// [`Error::NotOurs`] for another magic, [`Error::TooNew`] for a later version (whatever the
    /// rest says), [`Error::TooOld`] for an earlier one that is no longer read, [`Error::Damaged`]
    /// if the header's own check does not hold.
    pub fn decode(bytes: &[u8; HEADER_BYTES], kind: Kind, name: &str) -> Result<Self, Error> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        if bytes[..8] != kind.magic() {
            return Err(Error::NotOurs(name.into()));
        }
        let (version, known) = (word(8) & 0xffff_ffff, u64::from(kind.version()));
        if version > known {
            return Err(Error::TooNew(name.into()));
        }
        let check = blake3::hash(&bytes[..56]);
        if check.as_bytes()[..8] != bytes[56..] || version == 0 || word(8) != version {
            return Err(Error::Damaged(format!("{name}: the header is damaged")));
        }
        if version < known {
            return Err(Error::TooOld(name.into()));
        }
        let digest = std::array::from_fn(|byte| bytes[24 + byte]);
        Ok(Self { body_bytes: word(16), digest })
    }
}

/// A stored file, opened and its header checked; hashes the body as it is read.
#[derive(Debug)]
pub struct BodyReader {
    file: BufReader<File>,
    name: String,
    header: Header,
    hasher: blake3::Hasher,
    left: u64,
}

impl BodyReader {
    /// Opens `path`, which must be of `kind` and as long as its header says.
    ///
    /// # Errors
    ///
    /// Those of [`Header::decode`]; [`Error::Damaged`] if the file is shorter or longer than it
    /// should be; [`Error::Io`] if it cannot be read.
    pub fn open(path: &Path, kind: Kind) -> Result<Self, Error> {
        let name = path.display().to_string();
        let mut file = handed::open(path).map_err(Error::io(format!("open {name}")))?;
        let bytes = file.metadata().map_err(Error::io(format!("read {name}")))?.len();
        let mut header = [0; HEADER_BYTES];
        file.read_exact(&mut header).map_err(|_| {
            Error::NotOurs(format!("{name}, of {bytes} bytes and so without a header,"))
        })?;
        let header = Header::decode(&header, kind, &name)?;
        if header.body_bytes.checked_add(HEADER_BYTES as u64) != Some(bytes) {
            return Err(Error::Damaged(format!(
                "{name}: {bytes} bytes long, where the header says {}",
                header.body_bytes.saturating_add(HEADER_BYTES as u64)
            )));
        }
        let left = header.body_bytes;
        let file = BufReader::with_capacity(CHUNK_BYTES, file);
        Ok(Self { file, name, header, hasher: blake3::Hasher::new(), left })
    }

    /// The file's name, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// BLAKE3 of the body, as the header has it.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.header.digest
    }

    /// The file, for reads that are not verified.
    #[must_use]
    pub fn into_file(self) -> File {
        self.file.into_inner()
    }

    /// Bytes of the body that have not been read.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Fills `buffer` from the body.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the body ends before, [`Error::Io`] if it cannot be read.
    pub fn fill(&mut self, buffer: &mut [u8]) -> Result<(), Error> {
        let length = buffer.len() as u64;
        self.left = self
            .left
            .checked_sub(length)
            .ok_or_else(|| Error::Damaged(format!("{}: the body ends too soon", self.name)))?;
        self.file.read_exact(buffer).map_err(Error::io(format!("read {}", self.name)))?;
        self.hasher.update(buffer);
        Ok(())
    }

    /// Reads a little-endian 64-bit integer.
    ///
    /// # Errors
    ///
    /// As [`Self::fill`].
    pub fn word(&mut self) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads what is left of the body only for its digest.
    ///
    /// # Errors
    ///
    /// As [`Self::fill`].
    pub fn skip_rest(&mut self) -> Result<(), Error> {
        let mut buffer = vec![0; CHUNK_BYTES];
        while self.left > 0 {
            let length = usize::try_from(self.left).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            self.fill(&mut buffer[..length])?;
        }
        Ok(())
    }

    /// Checks the digest of the body, all of which must have been read, and hands out the file.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the digest is not the header's.
    pub fn finish(self) -> Result<File, Error> {
        if self.left != 0 {
            return Err(Error::Damaged(format!("{}: {} bytes too long", self.name, self.left)));
        }
        if *self.hasher.finalize().as_bytes() != self.header.digest {
            return Err(Error::Damaged(format!(
                "{}: its digest is not the one it was written with",
                self.name
            )));
        }
        Ok(self.file.into_inner())
    }
}

/// A file being written: body first, header last, then visible under its name whole.
#[derive(Debug)]
pub struct BodyWriter {
    file: File,
    kind: Kind,
    hasher: blake3::Hasher,
    body_bytes: u64,
    aside: std::path::PathBuf,
    target: std::path::PathBuf,
}

/// What was written, for the manifest.
#[derive(Clone, Debug)]
pub struct Written {
    /// Bytes of the whole file.
    pub bytes: u64,
    /// BLAKE3 of the body, in hex.
    pub digest: String,
}

impl BodyWriter {
    /// Starts to write what will be `target`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be made.
    pub fn create(target: &Path, kind: Kind) -> Result<Self, Error> {
        let aside = target.with_extension("partial");
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&aside)
            .map_err(Error::io(format!("create {}", aside.display())))?;
        file.write_all(&[0; HEADER_BYTES])
            .map_err(Error::io(format!("write {}", aside.display())))?;
        let target = target.to_path_buf();
        Ok(Self { file, kind, hasher: blake3::Hasher::new(), body_bytes: 0, aside, target })
    }

    /// Writes the header, makes all of it durable, and gives the file its name.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if any of it fails; the partial file is removed.
    pub fn commit(mut self) -> Result<Written, Error> {
        let header =
            Header { body_bytes: self.body_bytes, digest: *self.hasher.finalize().as_bytes() };
        let finished = self
            .file
            .seek(SeekFrom::Start(0))
            .and_then(|_| self.file.write_all(&header.encode(self.kind)))
            .and_then(|()| self.file.sync_all())
            .and_then(|()| std::fs::rename(&self.aside, &self.target));
        finished.map_err(Error::io(format!("write {}", self.target.display())))?;
        Ok(Written {
            bytes: self.body_bytes + HEADER_BYTES as u64,
            digest: blake3::Hash::from(header.digest).to_hex().to_string(),
        })
    }
}

impl Write for BodyWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all(bytes)?;
        self.hasher.update(bytes);
        self.body_bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for BodyWriter {
    fn drop(&mut self) {
        // After `commit` the name is gone already, and that is fine.
        drop(std::fs::remove_file(&self.aside));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_proto::control::ErrorCode;

    fn header() -> Header {
        Header { body_bytes: 5, digest: [7; 32] }
    }

    #[test]
    fn a_header_decodes_to_what_was_encoded() {
        let bytes = header().encode(Kind::State);

        assert_eq!(Header::decode(&bytes, Kind::State, "x").unwrap(), header());
    }

    #[test]
    fn another_magic_another_version_and_a_flipped_bit_are_four_errors() {
        let other = Header::decode(&header().encode(Kind::Memory), Kind::State, "x").unwrap_err();
        let mut newer = header().encode(Kind::State);
        newer[8] = 3;
        let newer = Header::decode(&newer, Kind::State, "x").unwrap_err();
        let mut older = header().encode(Kind::State);
        older[8] = 1;
        let check = blake3::hash(&older[..56]);
        older[56..].copy_from_slice(&check.as_bytes()[..8]);
        let older = Header::decode(&older, Kind::State, "x").unwrap_err();
        let mut flipped = header().encode(Kind::State);
        flipped[30] ^= 4;
        let flipped = Header::decode(&flipped, Kind::State, "x").unwrap_err();

        assert_eq!(
            [other, newer, older, flipped].map(|error| error.code()),
            [ErrorCode::NotOurs, ErrorCode::TooNew, ErrorCode::TooOld, ErrorCode::Damaged]
        );
    }
}
