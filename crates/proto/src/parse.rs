//! Requests from JSON, with errors that name the member at fault.
//!
//! serde's own errors name a member only when it is missing or unknown.  Clients need to know which
//! of their members has the wrong type, too, so the members are handed to serde one by one and the
//! last one handed over is remembered.

use std::cell::RefCell;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::de::value::MapDeserializer;
use serde_json::{Map, Value};

use crate::error::InvalidRequest;

/// One JSON object, nothing before or after it.
pub(crate) fn object(payload: &[u8]) -> Result<Map<String, Value>, InvalidRequest> {
    match serde_json::from_slice(payload) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(_) => Err(InvalidRequest::whole("the payload is not a JSON object")),
        Err(error) => Err(InvalidRequest::whole(format!("the payload is not JSON: {error}"))),
    }
}

/// Takes the member that says what the object is.
pub(crate) fn take_tag(
    members: &mut Map<String, Value>,
    tag: &str,
) -> Result<String, InvalidRequest> {
    match members.remove(tag) {
        Some(Value::String(value)) => Ok(value),
        Some(_) => Err(InvalidRequest::field(tag, "not a string")),
        None => Err(InvalidRequest::field(tag, "missing")),
    }
}

/// A struct from its members.
pub(crate) fn members<T: DeserializeOwned>(
    members: Map<String, Value>,
) -> Result<T, InvalidRequest> {
    let current = RefCell::new(None);
    let watched = members
        .into_iter()
        .map(Some)
        .chain([None])
        .map_while(|member| {
            *current.borrow_mut() = member.as_ref().map(|(name, _)| name.clone());
            member
        })
        .fuse();
    let parsed = T::deserialize(MapDeserializer::<_, serde_json::Error>::new(watched));
    parsed.map_err(|error| {
        let message = error.to_string();
        let field = current.borrow_mut().take().or_else(|| missing_field(&message));
        InvalidRequest { field, message }
    })
}

/// The member that serde's words "missing field `x`" name.
fn missing_field(message: &str) -> Option<String> {
    Some(message.strip_prefix("missing field `")?.split_once('`')?.0.to_owned())
}

/// Refuses a path that depends on where a process is.
pub(crate) fn check_path(field: &str, path: &Path) -> Result<(), InvalidRequest> {
    if path.is_absolute() {
        Ok(())
    } else {
        Err(InvalidRequest::field(field, "not an absolute path"))
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        count: u32,
        #[serde(default)]
        label: Option<String>,
    }

    fn parse(json: &str) -> Result<Sample, InvalidRequest> {
        members(object(json.as_bytes())?)
    }

    fn field_of(json: &str) -> Option<String> {
        parse(json).unwrap_err().field
    }

    #[test]
    fn a_good_object_is_read() {
        let sample = parse(r#"{"count": 3, "label": "x"}"#).unwrap();
        assert_eq!((sample.count, sample.label.as_deref()), (3, Some("x")));
    }

    #[test]
    fn the_member_of_the_wrong_type_is_named() {
        assert_eq!(field_of(r#"{"count": 3, "label": 4}"#).as_deref(), Some("label"));
        assert_eq!(field_of(r#"{"count": -1, "label": "x"}"#).as_deref(), Some("count"));
    }

    #[test]
    fn the_unknown_and_the_missing_member_are_named() {
        assert_eq!(field_of(r#"{"count": 3, "colour": 4}"#).as_deref(), Some("colour"));
        assert_eq!(field_of(r#"{"label": "x"}"#).as_deref(), Some("count"));
    }

    #[test]
    fn what_is_no_object_names_no_member() {
        for json in ["[]", "3", "{", "", "{} {}"] {
            assert_eq!(field_of(json), None, "{json}");
        }
    }
}
