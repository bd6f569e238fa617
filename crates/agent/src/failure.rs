//! Why an operation failed, as the client is told.

use std::io;
use std::path::Path;

use forkd_proto::guest::{ErrorBody, ErrorCode};
use nix::errno::Errno;

/// Result of whatever an operation needs.
pub type Outcome<T> = Result<T, ErrorBody>;

/// A failure with a code of our own.
pub fn failure(code: ErrorCode, message: impl Into<String>) -> ErrorBody {
    ErrorBody { code, message: message.into(), field: None }
}

/// A complaint about one member of the request that only the guest's state shows to be wrong.
pub fn invalid(field: &str, message: impl Into<String>) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::InvalidRequest,
        message: message.into(),
        field: Some(field.to_owned()),
    }
}

/// The kernel's refusal, with its words.
pub fn refused(what: &str, error: &io::Error) -> ErrorBody {
    failure(code_of(error), format!("{what}: {error}"))
}

/// The kernel's refusal of something with a path.
pub fn refused_path(path: &Path, error: &io::Error) -> ErrorBody {
    refused(&path.display().to_string(), error)
}

/// Adds the code `code` to whatever went wrong.
pub fn recoded(code: ErrorCode) -> impl Fn(ErrorBody) -> ErrorBody {
    move |body| ErrorBody { code, message: body.message, field: None }
}

/// What the kernel says of a shortage that passes: of descriptors, processes or memory.
const SHORTAGES: [Errno; 4] = [Errno::EMFILE, Errno::ENFILE, Errno::EAGAIN, Errno::ENOMEM];

/// The code that the kernel's refusal has.
pub fn code_of(error: &io::Error) -> ErrorCode {
    if error.raw_os_error().is_some_and(|number| SHORTAGES.contains(&Errno::from_raw(number))) {
        return ErrorCode::Busy;
    }
    match error.kind() {
        io::ErrorKind::NotFound => ErrorCode::NotFound,
        io::ErrorKind::PermissionDenied => ErrorCode::PermissionDenied,
        io::ErrorKind::AlreadyExists => ErrorCode::Exists,
        io::ErrorKind::NotADirectory => ErrorCode::NotADirectory,
        io::ErrorKind::IsADirectory => ErrorCode::IsADirectory,
        io::ErrorKind::DirectoryNotEmpty => ErrorCode::NotEmpty,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
        io::ErrorKind::FileTooLarge => ErrorCode::TooLarge,
        _ => ErrorCode::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_refusals_keep_their_meaning_and_words() {
        for (number, code) in [
            (nix::libc::ENOENT, ErrorCode::NotFound),
            (nix::libc::EACCES, ErrorCode::PermissionDenied),
            (nix::libc::EPERM, ErrorCode::PermissionDenied),
            (nix::libc::EEXIST, ErrorCode::Exists),
            (nix::libc::ENOTDIR, ErrorCode::NotADirectory),
            (nix::libc::EISDIR, ErrorCode::IsADirectory),
            (nix::libc::ENOTEMPTY, ErrorCode::NotEmpty),
            (nix::libc::ENOSPC, ErrorCode::NoSpace),
            (nix::libc::EDQUOT, ErrorCode::NoSpace),
            (nix::libc::EROFS, ErrorCode::Io),
            (nix::libc::EMFILE, ErrorCode::Busy),
            (nix::libc::EAGAIN, ErrorCode::Busy),
        ] {
            let body = refused("/a", &io::Error::from_raw_os_error(number));
            assert_eq!(body.code, code, "{number}");
            assert!(body.message.starts_with("/a: "), "{}", body.message);
        }
    }
}
