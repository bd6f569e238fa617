//! Messages and framing of forkd's two protocols, without I/O of their own.
//!
//! `protocol/guest/PROTOCOL.md` describes what a host says to the agent inside a guest ([`guest`]),
//! `protocol/control/PROTOCOL.md` what the daemon says to VMM processes ([`control`]).  Both travel
//! in the same [`frame`]s.  The golden frames in `protocol/*/vectors` are replayed by
//! `tests/vectors.rs` and by the Python side, so neither can drift from the prose.
//!
//! # Trust
//!
//! Everything decoded here comes from somebody else: a client, a guest, a daemon of another
//! version.  Lengths are checked before anything is allocated, kinds and reserved bytes before
//! anything is believed, and unknown members of a request are refused by name, so that a misspelt
//! option never does nothing silently.

#![forbid(unsafe_code)]

pub mod cell;
pub mod compare;
pub mod control;
pub mod error;
pub mod frame;
pub mod guest;
pub mod limits;
mod parse;
pub mod text;

pub use error::{FrameError, InvalidRequest, ReadError};
pub use frame::{Decoder, Frame, Header, Kind, encode, read_frame, read_frame_into, write_frame};
pub use text::Text;
