//! The form in which trees travel: tar, as POSIX has it (pax), with GNU's holes.
//!
//! Pure: bytes to [`Member`] and back.  Written is what `tar`, Python and BSD read; read is what
//! they write, GNU's long names included.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Everything in an archive is a multiple of this.
pub const BLOCK: usize = 512;

/// Longest extended header that is read: names of the longest paths, and a few attributes.
pub const EXTENSION_MAX: u64 = 64 << 10;

/// Greatest number in the eleven octal digits of a size.
const SIZE_MAX: u64 = (1 << 33) - 1;

/// Greatest number in the seven octal digits of a user.
const ID_MAX: u64 = (1 << 21) - 1;

/// Longest name in a header of its own.
const NAME_MAX: usize = 100;

/// What one member of an archive is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// Another name of a member before it.
    HardLink,
    /// A symbolic link.
    Symlink,
    /// A directory.
    Directory,
    /// What is not copied: a device or a pipe.
    Other,
}

/// One member of an archive, without its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Where, below the root of the archive.
    pub path: PathBuf,
    /// What.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change, in seconds since the epoch.
    pub mtime: u64,
    /// Where a link points.
    pub target: PathBuf,
    /// Bytes that follow in the archive.
    pub stored: u64,
    /// Size of the file, if it has holes: a map of what is stored comes before the contents.
    pub sparse: Option<u64>,
    /// Further records, which other programs ignore.
    pub records: Vec<(String, Vec<u8>)>,
}

/// What one header block says.
#[derive(Debug)]
pub enum Block {
    /// The end of the archive.
    End,
    /// A member, if nothing that came before it says otherwise.
    Member(Box<Member>),
    /// So many bytes follow, which belong to the next member.
    Extension(Extension, u64),
}

/// What an extension holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension {
    /// Records of pax.
    Pax,
    /// A long name, as GNU writes it.
    Name,
    /// Where a link points, likewise.
    Target,
    /// What is not for the next member alone.
    Ignored,
}

/// What the extensions before a member have said.
#[derive(Debug, Default)]
pub struct Overrides {
    records: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Member {
    /// The blocks that announce this member.
    pub fn encode(&self) -> Vec<u8> {
        let mut records = Vec::new();
        let mut add = |key: &str, value: &[u8]| records.extend(record(key, value));
        let name = self.path.as_os_str().as_bytes();
        let target = self.target.as_os_str().as_bytes();
        if [name, target].iter().any(|it| it.len() > NAME_MAX && std::str::from_utf8(it).is_err()) {
            add("hdrcharset", b"BINARY");
        }
        if let Some(size) = self.sparse {
            add("GNU.sparse.major", b"1");
            add("GNU.sparse.minor", b"0");
            add("GNU.sparse.name", name);
            add("GNU.sparse.realsize", size.to_string().as_bytes());
        } else if name.len() > NAME_MAX {
            add("path", name);
        }
        if target.len() > NAME_MAX {
            add("linkpath", target);
        }
        for (key, value, most) in [
            ("size", self.stored, SIZE_MAX),
            ("uid", u64::from(self.uid), ID_MAX),
            ("gid", u64::from(self.gid), ID_MAX),
        ] {
            if value > most {
                add(key, value.to_string().as_bytes());
            }
        }
        for (key, value) in &self.records {
            add(key, value);
        }
        let mut blocks = Vec::new();
        if !records.is_empty() {
            let length = u64::try_from(records.len()).unwrap_or_default();
            blocks.extend_from_slice(&header(b"pax", b"", b'x', [0o644, 0, 0, length, 0]));
            blocks.extend_from_slice(&records);
            blocks.resize(blocks.len().next_multiple_of(BLOCK), 0);
        }
        let flag = match self.kind {
            Kind::File => b'0',
            Kind::HardLink => b'1',
            Kind::Symlink => b'2',
            Kind::Directory => b'5',
            Kind::Other => b'6',
        };
        let numbers = [
            u64::from(self.mode),
            u64::from(self.uid).min(ID_MAX),
            u64::from(self.gid).min(ID_MAX),
            self.stored.min(SIZE_MAX),
            self.mtime.min(SIZE_MAX),
        ];
        blocks.extend_from_slice(&header(cut(name), cut(target), flag, numbers));
        blocks
    }
}

impl Block {
    /// Reads one block.
    ///
    /// # Errors
    ///
    /// It is no header of an archive; what is wrong.
    pub fn parse(block: &[u8; BLOCK]) -> Result<Self, &'static str> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(Self::End);
        }
        let number = |from: usize, to: usize| {
            number(block.get(from..to).unwrap_or_default()).ok_or("a number in it is malformed")
        };
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        let own: u64 = block.iter().skip(148).take(8).map(|byte| u64::from(*byte)).sum();
        if number(148, 156)? != sum - own + 8 * u64::from(b' ') {
            return Err("a checksum in it is wrong, or it is no tar archive");
        }
        let text = |from: usize, to: usize| until_zero(block.get(from..to).unwrap_or_default());
        let size = number(124, 136)?;
        let kind = match block.get(156) {
            Some(b'0' | b'7' | 0) => Kind::File,
            Some(b'1') => Kind::HardLink,
            Some(b'2') => Kind::Symlink,
            Some(b'5') => Kind::Directory,
            Some(b'x') => return Ok(Self::Extension(Extension::Pax, size)),
            Some(b'L') => return Ok(Self::Extension(Extension::Name, size)),
            Some(b'K') => return Ok(Self::Extension(Extension::Target, size)),
            Some(b'g') => return Ok(Self::Extension(Extension::Ignored, size)),
            _ => Kind::Other,
        };
        let is_posix = block.get(257..263) == Some(b"ustar\0".as_slice());
        let folder = if is_posix { text(345, 500) } else { b"" };
        let path = path(folder).join(path(text(0, 100)));
        let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        Ok(Self::Member(Box::new(Member {
            path,
            kind,
            mode: small(number(100, 108)?) & 0o7777,
            uid: small(number(108, 116)?),
            gid: small(number(116, 124)?),
            mtime: number(136, 148)?,
            target: self::path(text(157, 257)),
            stored: if kind == Kind::File || kind == Kind::Other { size } else { 0 },
            sparse: None,
            records: Vec::new(),
        })))
    }
}

impl Overrides {
    /// Takes what an extension holds.
    ///
    /// # Errors
    ///
    /// A record of it is malformed.
    pub fn add(&mut self, kind: Extension, mut bytes: &[u8]) -> Result<(), &'static str> {
        match kind {
            Extension::Ignored => {}
            Extension::Name => self.records.push((b"path".into(), until_zero(bytes).into())),
            Extension::Target => self.records.push((b"linkpath".into(), until_zero(bytes).into())),
            Extension::Pax => {
                while !bytes.is_empty() {
                    let (key, value, rest) = take_record(bytes).ok_or("a record is malformed")?;
                    self.records.push((key.into(), value.into()));
                    bytes = rest;
                }
            }
        }
        Ok(())
    }

    /// Has the next member be what they say.
    ///
    /// # Errors
    ///
    /// A number in them is malformed, or the file has holes in a form of before.
    pub fn apply(&mut self, member: &mut Member) -> Result<(), &'static str> {
        const MALFORMED: &str = "a number in a record is malformed";
        for (key, value) in std::mem::take(&mut self.records) {
            let number = || -> Result<u64, &'static str> {
                let whole = value.split(|byte| *byte == b'.').next().unwrap_or_default();
                std::str::from_utf8(whole).ok().and_then(|it| it.parse().ok()).ok_or(MALFORMED)
            };
            let id = || number().and_then(|it| u32::try_from(it).map_err(|_| MALFORMED));
            match key.as_slice() {
                b"path" | b"GNU.sparse.name" => member.path = path(&value),
                b"linkpath" => member.target = path(&value),
                b"size" if member.kind == Kind::File => member.stored = number()?,
                b"uid" => member.uid = id()?,
                b"gid" => member.gid = id()?,
                b"mtime" => member.mtime = number().unwrap_or(0),
                b"GNU.sparse.realsize" => member.sparse = Some(number()?),
                b"GNU.sparse.major" if value != b"1" => {
                    return Err("holes are in a form that is not supported");
                }
                b"GNU.sparse.map" | b"GNU.sparse.numblocks" => {
                    return Err("holes are in a form that is not supported");
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The blocks after the last member.
pub const END: [u8; 2 * BLOCK] = [0; 2 * BLOCK];

/// The map of what is stored of a file with holes: offsets and lengths.
pub fn encode_map(segments: &[(u64, u64)]) -> Vec<u8> {
    let mut map = format!("{}\n", segments.len()).into_bytes();
    for (offset, length) in segments {
        map.extend_from_slice(format!("{offset}\n{length}\n").as_bytes());
    }
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

/// Bytes that fill the last block of so many.
pub fn padding(length: u64) -> usize {
    let block = u64::try_from(BLOCK).unwrap_or(1);
    usize::try_from(length.next_multiple_of(block) - length).unwrap_or_default()
}

fn path(bytes: &[u8]) -> PathBuf {
    Path::new(&OsString::from_vec(bytes.to_vec())).to_owned()
}

fn until_zero(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn cut(name: &[u8]) -> &[u8] {
    name.get(..NAME_MAX).unwrap_or(name)
}

/// A number in octal, or in GNU's binary form.
fn number(field: &[u8]) -> Option<u64> {
    if let [0x80, rest @ ..] = field {
        let (high, low) = rest.split_at_checked(rest.len().checked_sub(8)?)?;
        let low: [u8; 8] = low.try_into().ok()?;
        return high.iter().all(|byte| *byte == 0).then(|| u64::from_be_bytes(low));
    }
    // A time before the epoch.
    if field.first() == Some(&0xff) {
        return Some(0);
    }
    let text = std::str::from_utf8(until_zero(field)).ok()?.trim();
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

fn header(name: &[u8], target: &[u8], flag: u8, numbers: [u64; 5]) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| {
        block.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
    };
    let [mode, uid, gid, size, mtime] = numbers;
    put(0, name);
    put(100, format!("{mode:07o}").as_bytes());
    put(108, format!("{uid:07o}").as_bytes());
    put(116, format!("{gid:07o}").as_bytes());
    put(124, format!("{size:011o}").as_bytes());
    put(136, format!("{mtime:011o}").as_bytes());
    put(148, b"        ");
    put(156, &[flag]);
    put(157, target);
    put(257, b"ustar\x0000");
    let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    let text = format!("{sum:06o}\0 ");
    block.iter_mut().skip(148).zip(text.bytes()).for_each(|(to, from)| *to = from);
    block
}

/// One record: its own length in decimal, key and value.
fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    let mut bytes = format!("{length} {key}=").into_bytes();
    bytes.extend_from_slice(value);
    bytes.push(b'\n');
    bytes
}

type Record<'a> = (&'a [u8], &'a [u8], &'a [u8]);

fn take_record(bytes: &[u8]) -> Option<Record<'_>> {
    let space = bytes.iter().position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(bytes.get(..space)?).ok()?.parse().ok()?;
    let (record, rest) = bytes.split_at_checked(length)?;
    let body = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = body.iter().position(|byte| *byte == b'=')?;
    Some((body.get(..equals)?, body.get(equals + 1..)?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(path: &[u8]) -> Member {
        Member {
            path: super::path(path),
            kind: Kind::File,
            mode: 0o4755,
            uid: 0,
            gid: 4_000_000_000,
            mtime: 1_700_000_000,
            target: PathBuf::new(),
            stored: 9_000_000_000,
            sparse: None,
            records: Vec::new(),
        }
    }

    fn decode(mut bytes: &[u8]) -> Result<Member, &'static str> {
        let mut overrides = Overrides::default();
        loop {
            let (block, rest) = bytes.split_first_chunk::<BLOCK>().ok_or("too short")?;
            bytes = rest;
            match Block::parse(block)? {
                Block::End => return Err("the end"),
                Block::Member(mut member) => {
                    overrides.apply(&mut member)?;
                    return Ok(*member);
                }
                Block::Extension(kind, length) => {
                    let length = usize::try_from(length).unwrap();
                    overrides.add(kind, bytes.get(..length).ok_or("too short")?)?;
                    bytes = bytes.get(length.next_multiple_of(BLOCK)..).ok_or("too short")?;
                }
            }
        }
    }

    #[test]
    fn a_member_comes_back_as_it_was() {
        for path in [b"a".to_vec(), b"\xff\n -".to_vec(), [b'x'; 4_000].into(), [0xe9; 200].into()]
        {
            let mut sent = member(&path);
            assert_eq!(decode(&sent.encode()), Ok(sent.clone()));
            sent.kind = Kind::Symlink;
            sent.stored = 0;
            sent.target = super::path(&path);
            assert_eq!(decode(&sent.encode()), Ok(sent.clone()));
            sent.kind = Kind::File;
            sent.sparse = Some(1 << 40);
            assert_eq!(decode(&sent.encode()), Ok(sent));
        }
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        let good = member(b"a").encode();
        let (start, last) = good.split_at(good.len() - BLOCK);
        for at in [0, 100, 130, 150, 257] {
            let mut bad = last.to_vec();
            bad[at] ^= 1;
            assert!(decode(&[start, &bad].concat()).is_err(), "{at}");
        }
        assert!(decode(&[0; BLOCK]).is_err());
        assert!(Overrides::default().add(Extension::Pax, b"9999 path=x\n").is_err());
        assert!(Overrides::default().add(Extension::Pax, b"x").is_err());
    }

    #[test]
    fn a_record_whose_length_gains_a_digit_by_itself_is_right() {
        for length in 90..110 {
            let record = record("key", &vec![b'v'; length]);
            let (key, value, rest) = take_record(&record).unwrap();
            assert_eq!((key, value.len(), rest.len()), (b"key".as_slice(), length, 0));
        }
    }
}
