//! The 8-byte header that both protocols put before every payload.
//!
//! | offset | bytes | field                                        |
//! |--------|-------|----------------------------------------------|
//! | 0      | 4     | length of the payload, little-endian         |
//! | 4      | 1     | kind                                         |
//! | 5      | 3     | reserved, zero                               |
//!
//! [`Decoder`] is for callers who own their I/O (a poll loop); [`read_frame`] and [`write_frame`]
//! are for those who may block.  Nothing is allocated for a length until the header has been
//! checked.

use std::io::{self, Read, Write};

use crate::error::{FrameError, ReadError};
use crate::limits::{FRAME_HEADER_BYTES, FRAME_PAYLOAD_MAX};

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// JSON `{"op": …}`, client to server.
    Request = 1,
    /// JSON; the operation succeeded and is over.
    Reply = 2,
    /// JSON `{"code","message","field"?}`; the operation failed and is over.
    Error = 3,
    /// JSON `{"event": …}`, in the course of an operation.
    Event = 4,
    /// JSON, client to agent, in the course of `exec`.
    Control = 5,
    /// Bytes for the process's standard input.
    Stdin = 16,
    /// The end of the process's standard input.
    StdinEof = 17,
    /// Bytes of the process's standard output.
    Stdout = 18,
    /// Bytes of the process's standard error.
    Stderr = 19,
    /// Bytes of a file.
    Data = 32,
    /// The end of a file.
    DataEof = 33,
}

impl Kind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 11] = [
        Self::Request,
        Self::Reply,
        Self::Error,
        Self::Event,
        Self::Control,
        Self::Stdin,
        Self::StdinEof,
        Self::Stdout,
        Self::Stderr,
        Self::Data,
        Self::DataEof,
    ];

    /// Whether the payload is one JSON object.
    #[must_use]
    pub fn is_json(self) -> bool {
        matches!(self, Self::Request | Self::Reply | Self::Error | Self::Event | Self::Control)
    }
}

impl TryFrom<u8> for Kind {
    type Error = FrameError;

    fn try_from(number: u8) -> Result<Self, FrameError> {
        Self::ALL
            .into_iter()
            .find(|kind| *kind as u8 == number)
            .ok_or(FrameError::UnknownKind(number))
    }
}

/// A header that has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the payload is.
    pub kind: Kind,
    /// Length of the payload in bytes, at most [`FRAME_PAYLOAD_MAX`].
    pub length: u32,
}

impl Header {
    /// The header for `length` bytes of payload.
    ///
    /// # Errors
    ///
    /// [`FrameError::TooLong`] past [`FRAME_PAYLOAD_MAX`].
    pub fn new(kind: Kind, length: usize) -> Result<Self, FrameError> {
        let length = u32::try_from(length).map_err(|_| FrameError::TooLong(u32::MAX))?;
        if length > FRAME_PAYLOAD_MAX {
            return Err(FrameError::TooLong(length));
        }
        Ok(Self { kind, length })
    }

    /// The header's bytes.
    #[must_use]
    pub fn encode(self) -> [u8; FRAME_HEADER_BYTES] {
        let [a, b, c, d] = self.length.to_le_bytes();
        [a, b, c, d, self.kind as u8, 0, 0, 0]
    }

    /// Reads and checks a header.
    ///
    /// # Errors
    ///
    /// [`FrameError`] for a length past the limit, an unknown kind or a reserved byte that is not
    /// zero.
    pub fn decode(bytes: [u8; FRAME_HEADER_BYTES]) -> Result<Self, FrameError> {
        let [a, b, c, d, kind, reserved @ ..] = bytes;
        let length = u32::from_le_bytes([a, b, c, d]);
        if length > FRAME_PAYLOAD_MAX {
            return Err(FrameError::TooLong(length));
        }
        let kind = Kind::try_from(kind)?;
        if reserved != [0; 3] {
            return Err(FrameError::Reserved);
        }
        Ok(Self { kind, length })
    }

    /// The payload's length as a size in memory.
    #[must_use]
    pub fn payload_bytes(self) -> usize {
        // `length` is at most 2^20, and no target of ours has a smaller usize.
        usize::try_from(self.length).unwrap_or(usize::MAX)
    }
}

/// One frame with its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What the payload is.
    pub kind: Kind,
    /// At most [`FRAME_PAYLOAD_MAX`] bytes.
    pub payload: Vec<u8>,
}

/// Appends one whole frame to `out`.
///
/// # Errors
///
/// [`FrameError::TooLong`]; `out` is unchanged then.
pub fn encode(kind: Kind, payload: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
    let header = Header::new(kind, payload.len())?;
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(payload);
    Ok(())
}

/// Cuts a stream of bytes into frames, as the bytes come.
///
/// Holds at most one frame plus whatever one [`push`](Self::push) added: a caller who takes all
/// frames after each push is bounded by [`FRAME_PAYLOAD_MAX`] and the size of its own reads.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    // Bytes of `buffer` that were handed out already.
    taken: usize,
}

impl Decoder {
    /// A decoder that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes as they were read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.buffer.drain(..self.taken);
            self.taken = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame as a borrow, or `None` until more bytes come.
    ///
    /// # Errors
    ///
    /// [`FrameError`] as soon as a header is wrong, before its payload has arrived.  The stream is
    /// beyond repair then: every later call fails alike.
    pub fn next_frame(&mut self) -> Result<Option<(Kind, &[u8])>, FrameError> {
        let rest = self.buffer.get(self.taken..).unwrap_or_default();
        let Some((header, rest)) = rest.split_first_chunk::<FRAME_HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::decode(*header)?;
        let Some(payload) = rest.get(..header.payload_bytes()) else {
            return Ok(None);
        };
        self.taken += FRAME_HEADER_BYTES + header.payload_bytes();
        Ok(Some((header.kind, payload)))
    }

    /// Bytes that belong to no whole frame yet; non-zero at the end of a stream means it was cut.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.buffer.len() - self.taken
    }

    /// Gives back memory that a large frame made this decoder hold.
    pub fn shrink(&mut self) {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        self.buffer.shrink_to_fit();
    }
}

/// Reads one frame, or `None` at a clean end of the stream.
///
/// # Errors
///
/// [`ReadError::Io`] (of kind `UnexpectedEof` if the stream ends inside a frame), or
/// [`ReadError::Frame`].
pub fn read_frame(reader: &mut impl Read) -> Result<Option<Frame>, ReadError> {
    let mut payload = Vec::new();
    Ok(read_frame_into(reader, &mut payload)?.map(|kind| Frame { kind, payload }))
}

/// Like [`read_frame`], into a buffer that the caller uses again and again.
///
/// # Errors
///
/// As [`read_frame`]; `payload` is unspecified then.
pub fn read_frame_into(
    reader: &mut impl Read,
    payload: &mut Vec<u8>,
) -> Result<Option<Kind>, ReadError> {
    let mut header = [0; FRAME_HEADER_BYTES];
    if !fill_or_end(reader, &mut header)? {
        return Ok(None);
    }
    let header = Header::decode(header)?;
    payload.clear();
    payload.resize(header.payload_bytes(), 0);
    reader.read_exact(payload)?;
    Ok(Some(header.kind))
}

/// Writes one frame and flushes nothing.  A small frame is one `write`.
///
/// # Errors
///
/// Whatever `writer` fails with; `InvalidInput` for a payload past [`FRAME_PAYLOAD_MAX`].
pub fn write_frame(writer: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(FRAME_HEADER_BYTES + payload.len());
    encode(kind, payload, &mut bytes)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    writer.write_all(&bytes)
}

/// Fills `buffer`; false if the stream ends before its first byte.
fn fill_or_end(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buffer.len() {
        let free = buffer.get_mut(filled..).unwrap_or_default();
        match reader.read(free) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn max() -> usize {
        usize::try_from(FRAME_PAYLOAD_MAX).unwrap()
    }

    #[test]
    fn every_kind_survives_a_round_trip() {
        for kind in Kind::ALL {
            let mut bytes = Vec::new();
            encode(kind, b"payload", &mut bytes).unwrap();
            let frame = read_frame(&mut bytes.as_slice()).unwrap().unwrap();
            assert_eq!(frame, Frame { kind, payload: b"payload".to_vec() });
        }
    }

    #[test]
    fn a_payload_at_the_limit_is_sent_and_one_past_it_refused() {
        assert!(Header::new(Kind::Data, max()).is_ok());
        assert_eq!(Header::new(Kind::Data, max() + 1), Err(FrameError::TooLong(1_048_577)));
    }

    #[test]
    fn a_length_past_the_limit_is_refused_before_its_payload_arrives() {
        let mut decoder = Decoder::new();
        decoder.push(&[1, 0, 16, 0, 32, 0, 0, 0]);
        assert_eq!(decoder.next_frame(), Err(FrameError::TooLong(1_048_577)));
    }

    #[test]
    fn frames_come_out_whole_however_the_bytes_arrive() {
        let mut bytes = Vec::new();
        encode(Kind::Stdout, b"one", &mut bytes).unwrap();
        encode(Kind::DataEof, b"", &mut bytes).unwrap();
        let mut decoder = Decoder::new();
        let mut seen = Vec::new();
        for byte in bytes {
            decoder.push(&[byte]);
            while let Some((kind, payload)) = decoder.next_frame().unwrap() {
                seen.push((kind, payload.to_vec()));
            }
        }
        assert_eq!(seen, [(Kind::Stdout, b"one".to_vec()), (Kind::DataEof, Vec::new())]);
        assert_eq!(decoder.pending(), 0);
    }

    #[test]
    fn a_stream_cut_inside_a_frame_is_not_a_clean_end() {
        let mut bytes = Vec::new();
        encode(Kind::Stdout, b"one", &mut bytes).unwrap();
        for cut in 1..bytes.len() {
            let error = read_frame(&mut &bytes[..cut]).unwrap_err();
            assert!(
                matches!(error, ReadError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof),
                "cut at {cut}"
            );
        }
        assert!(read_frame(&mut [].as_slice()).unwrap().is_none());
    }
}
