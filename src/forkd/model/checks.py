"""Range checks shared by the values of this package; each error names its field."""

from __future__ import annotations

from forkd.errors import InvalidRequest


def in_range(field: str, value: float, low: float, high: float) -> None:
    """Return if `low` ≤ `value` ≤ `high`.

    Raises:
        InvalidRequest: It is not; NaN is not.
    """
    if not low <= value <= high:
        raise InvalidRequest(f"{field} must be {low} to {high}, not {value}", field=field)


def guest_path(field: str, path: str, bytes_max: int) -> None:
    """Return if `path` is an absolute path that a guest's kernel would take.

    Raises:
        InvalidRequest: It is relative, too long, or holds a NUL.
    """
    if not path.startswith("/"):
        raise InvalidRequest(f"{field} must be an absolute path, not {path[:80]!r}", field=field)
    if length_of(field, path, field) > bytes_max:
        raise InvalidRequest(f"{field} is longer than {bytes_max} bytes", field=field)
    if "\0" in path:
        raise InvalidRequest(f"{field} holds a NUL", field=field)


def length_of(what: str, text: str, field: str) -> int:
    """Return the length of `text` in bytes, as the guest's kernel has it (PEP 383).

    Raises:
        InvalidRequest: It holds a surrogate that stands for no byte.
    """
    try:
        return len(text.encode(errors="surrogateescape"))
    except UnicodeEncodeError:
        words = f"{what} holds a surrogate that stands for no byte"
        raise InvalidRequest(words, field=field) from None


def unicode_length(field: str, text: str) -> int:
    """Return the length of `text` in UTF-8, in bytes.

    Raises:
        InvalidRequest: It holds a surrogate without its other half.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        words = f"{field} must be Unicode, without lone surrogates"
        raise InvalidRequest(words, field=field) from None
