//! What can be wrong with bytes from a peer.

use std::fmt;
use std::io;

use crate::limits::FRAME_PAYLOAD_MAX;

/// Why bytes are not a frame.  The peer is answered `protocol`, and the connection closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// The payload would be longer than [`FRAME_PAYLOAD_MAX`].
    TooLong(u32),
    /// No kind of frame has this number.
    UnknownKind(u8),
    /// A reserved byte of the header is not zero.
    Reserved,
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(length) => {
                write!(f, "a payload of {length} bytes exceeds the limit of {FRAME_PAYLOAD_MAX}")
            }
            Self::UnknownKind(kind) => write!(f, "frame kind {kind} is unknown"),
            Self::Reserved => write!(f, "a reserved byte of the frame header is not zero"),
        }
    }
}

impl std::error::Error for FrameError {}

/// Why no frame could be read from a stream.
#[derive(Debug)]
pub enum ReadError {
    /// The stream failed, or ended in the middle of a frame (`UnexpectedEof`).
    Io(io::Error),
    /// The bytes are not a frame.
    Frame(FrameError),
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "cannot read a frame: {error}"),
            Self::Frame(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ReadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::Frame(error) => Some(error),
        }
    }
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<FrameError> for ReadError {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

/// Why a JSON request was refused; travels as code `invalid_request`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidRequest {
    /// The member at fault, where there is one.
    pub field: Option<String>,
    /// What is wrong with it, for a person.
    pub message: String,
}

impl InvalidRequest {
    /// A complaint about one member.
    pub fn field(field: &str, message: impl Into<String>) -> Self {
        Self { field: Some(field.to_owned()), message: message.into() }
    }

    /// A complaint about the request as a whole.
    pub fn whole(message: impl Into<String>) -> Self {
        Self { field: None, message: message.into() }
    }
}

impl fmt::Display for InvalidRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.field {
            Some(field) => write!(f, "{field}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for InvalidRequest {}
