//! Text that a guest's kernel takes: any bytes without a zero, mostly UTF-8.
//!
//! JSON has no bytes.  What is UTF-8 is a string; anything else is an object `{"b64": "…"}`.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::ops::Deref;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use base64::engine::{GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine, alphabet};
use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const MEMBER: &str = "b64";
/// As Python decodes it: what the last digit says beyond the last byte is passed over.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);

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
                let bytes = BASE64.decode(digits);
                bytes
                    .map(|bytes| Text(OsString::from_vec(bytes)))
                    .map_err(|_| de::Error::custom("b64 is not base64 with padding"))
            }
            _ => Err(de::Error::custom("not a string, nor an object with the one member b64")),
        }
    }
}

/// Bytes as base64, with padding.
#[must_use]
pub fn to_base64(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
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
