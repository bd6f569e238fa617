"""The one error of this package: what is wrong with a Dockerfile, and where."""

from __future__ import annotations

from forkd.errors import InvalidRequest


def wrong(file: str, line: int, message: str) -> InvalidRequest:
    """Return the error for a line of a Dockerfile."""
    return InvalidRequest(f"{file}:{line}: {message}", field="dockerfile", line=line)
