//! Text that a guest's kernel takes: any bytes without a zero, mostly UTF-8.
//!
//! JSON has no bytes.  What is UTF-8 is a string; anything else is an object `{"b64": "…"}`.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::ops::Deref;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const MEMBER: &str = "b64";
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// A name, a path or an argument.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Text(pub OsString);

impl Text {
    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl Deref for Text {
    type Target = OsStr;

    fn deref(&self) -> &OsStr {
        &self.0
    }
}

impl AsRef<OsStr> for Text {
    fn as_ref(&self) -> &OsStr {
        &self.0
    }
}

impl AsRef<Path> for Text {
    fn as_ref(&self) -> &Path {
        Path::new(&self.0)
    }
}

impl<T: Into<OsString>> From<T> for Text {
    fn from(text: T) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_string_lossy())
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Some(text) = self.0.to_str() {
            return serializer.serialize_str(text);
        }
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry(MEMBER, &to_base64(self.as_bytes()))?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, or an object with the member b64")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Text, E> {
        Ok(text.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Text, A::Error> {
        let entry: Option<(String, String)> = map.next_entry()?;
        let more: Option<String> = map.next_key()?;
        match (entry, more) {
            (Some((member, digits)), None) if member == MEMBER => {
                let bytes = from_base64(&digits);
                bytes
                    .map(|bytes| Text(OsString::from_vec(bytes)))
                    .ok_or_else(|| de::Error::custom("b64 is not base64 with padding"))
            }
            _ => Err(de::Error::custom("not a string, nor an object with the one member b64")),
        }
    }
}

/// Bytes as base64, with padding.
#[must_use]
pub fn to_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or_default());
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at > chunk.len() { '=' } else { char::from(digit) });
        }
    }
    text
}

/// The bytes that base64 with padding stands for.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_suffix("==").or_else(|| text.strip_suffix('=')).unwrap_or(text);
    if !text.len().is_multiple_of(4) || digits.len() % 4 == 1 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut held) = (0_u32, 0);
    for digit in digits.bytes() {
        let value = DIGITS.iter().position(|each| *each == digit)?;
        bits = bits << 6 | u32::try_from(value).ok()?;
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held & 0xff) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_any_bytes_travels_both_ways() {
        for (bytes, json) in [
            (b"plain".as_slice(), r#""plain""#),
            (b"", r#""""#),
            ("grüß".as_bytes(), r#""grüß""#),
            (b"\xff", r#"{"b64":"/w=="}"#),
            (b"caf\xe9", r#"{"b64":"Y2Fm6Q=="}"#),
            (b"\xff\xfe\x00", r#"{"b64":"//4A"}"#),
            (b"\xffxxxx", r#"{"b64":"/3h4eHg="}"#),
        ] {
            let text = Text(OsString::from_vec(bytes.to_vec()));
            assert_eq!(serde_json::to_string(&text).unwrap(), json);
            assert_eq!(serde_json::from_str::<Text>(json).unwrap(), text);
        }
    }

    #[test]
    fn what_is_neither_text_nor_base64_is_refused() {
        for json in [
            r#"{"b64":"/w="}"#,
            r#"{"b64":"/"}"#,
            r#"{"b64":"/w==/w=="}"#,
            r#"{"b64":"\n"}"#,
            r#"{"b64":7}"#,
            r#"{"b65":"/w=="}"#,
            r#"{"b64":"/w==","more":1}"#,
            "{}",
            "7",
            "[]",
            "null",
        ] {
            assert!(serde_json::from_str::<Text>(json).is_err(), "{json}");
        }
    }
}
