//! What a process that a zygote has forked says to it: one line of JSON in its pipe, once.

use forkd_proto::control::{ErrorBody, ErrorCode, ForkMs};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Longest line, its end included: pipes take this much at once or not at all (`PIPE_BUF`).  Of a
/// longer one the zygote keeps nothing.
pub(super) const REPORT_BYTES_MAX: usize = 4096;

/// What is said.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Report {
    /// A child's agent has answered.
    Ready { ms: ForkMs, ipv6: bool },
    /// A child is about to end.
    Failed { stage: String, code: ErrorCode, message: String, again: bool },
    /// A task is done.
    Done { reply: Value },
    /// A task has failed.
    Refused { error: ErrorBody },
}

impl Report {
    /// The line, with as much of a message as fits.
    pub(super) fn line(&mut self) -> Vec<u8> {
        let mut line = fitting(self, REPORT_BYTES_MAX - 1, Self::message);
        line.push(b'\n');
        line
    }

    fn message(&mut self) -> Option<&mut String> {
        match self {
            Self::Failed { message, .. } => Some(message),
            Self::Refused { error, .. } => Some(&mut error.message),
            Self::Ready { .. } | Self::Done { .. } => None,
        }
    }
}

/// The payload of an ERROR frame, with as much of its message as fits a pipe.
pub(super) fn refusal(mut error: ErrorBody) -> Vec<u8> {
    fitting(&mut error, REPORT_BYTES_MAX, |error| Some(&mut error.message))
}

/// Halves the message of `value` until its JSON has at most `bytes_max` bytes.
///
/// The message's own length says little: JSON has six bytes for some that a guest may have sent.
fn fitting<T: Serialize>(
    value: &mut T,
    bytes_max: usize,
    message: impl Fn(&mut T) -> Option<&mut String>,
) -> Vec<u8> {
    loop {
        let json = serde_json::to_vec(value).unwrap_or_default();
        match message(value) {
            Some(message) if json.len() > bytes_max && !message.is_empty() => {
                message.truncate(message.floor_char_boundary(message.len() / 2));
            }
            _ => return json,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_control_bytes_is_cut_until_its_line_fits_a_pipe() {
        for message in ["\u{1}".repeat(1 << 20), "€".repeat(REPORT_BYTES_MAX), String::new()] {
            let (stage, code) = ("agent".to_owned(), ErrorCode::Guest);
            let error = ErrorBody { code, message: message.clone(), field: None };
            let refused = refusal(error);
            let whole: ErrorBody = serde_json::from_slice(&refused).unwrap();
            let mut report = Report::Failed { stage, code, message, again: false };

            let line = report.line();

            assert!(refused.len() <= REPORT_BYTES_MAX && line.len() <= REPORT_BYTES_MAX);
            let Ok(Report::Failed { message, .. }) = serde_json::from_slice(&line) else {
                panic!("not what was said: {line:?}");
            };
            assert_eq!(message.len(), whole.message.len());
            assert_eq!(message.is_empty(), line.len() < 100, "{}", line.len());
        }
    }
}
