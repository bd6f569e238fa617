//! The header in front of every packet (virtio 1.2, §5.10.6).

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 44;

/// The one kind of socket we serve.
pub(super) const KIND_STREAM: u16 = 1;

pub(super) const OP_REQUEST: u16 = 1;
pub(super) const OP_RESPONSE: u16 = 2;
pub(super) const OP_RST: u16 = 3;
pub(super) const OP_SHUTDOWN: u16 = 4;
pub(super) const OP_RW: u16 = 5;
pub(super) const OP_CREDIT_UPDATE: u16 = 6;
pub(super) const OP_CREDIT_REQUEST: u16 = 7;

/// In a shutdown: the sender will receive no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// In a shutdown: the sender will send no more.
pub(super) const SHUTDOWN_SEND: u32 = 2;
/// In a shutdown: both.
pub(super) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// A header; the payload of `length` bytes follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) source_cid: u64,
    pub(super) target_cid: u64,
    pub(super) source_port: u32,
    pub(super) target_port: u32,
    pub(super) length: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    pub(super) buffer_bytes: u32,
    pub(super) forwarded: u32,
}

impl Header {
    /// Any 44 bytes are a header; what they say is checked elsewhere.
    pub(super) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let half = |at: usize| u16::from_le_bytes([0, 1].map(|byte| bytes[at + byte]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Self {
            source_cid: long(0),
            target_cid: long(8),
            source_port: word(16),
            target_port: word(20),
            length: word(24),
            kind: half(28),
            op: half(30),
            flags: word(32),
            buffer_bytes: word(36),
            forwarded: word(40),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&self.source_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.target_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.source_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.target_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.length.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buffer_bytes.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.forwarded.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_header_is_kept() {
        let mut next = 0;
        let bytes = [(); HEADER_BYTES].map(|()| {
            next += 1;
            next
        });

        let header = Header::from_bytes(&bytes);

        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(header.source_cid, 0x0807_0605_0403_0201);
        assert_eq!((header.kind, header.op), (0x1e1d, 0x201f));
        assert_eq!(header.forwarded, 0x2c2b_2a29);
    }
}
