"""What a SIGHUP has read again: log files, certificates, the token."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from forkd.errors import ForkdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.daemon.auditing import Auditor

RELOAD = "reload"
"""Action of a SIGHUP in the audit log."""

log = logging.getLogger(__name__)


class Reloads:
    """What there is to be read again, in the order in which it was added.

    Args:
        auditor: Writes down what was.
    """

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self._parts: dict[str, Callable[[], None]] = {}

    def add(self, name: str, reload: Callable[[], None]) -> None:
        """Have `reload` called on each SIGHUP; a `ForkdError` of it means that nothing changed."""
        self._parts[name] = reload

    def run(self) -> None:
        """Read everything again; what cannot be used leaves what was there before."""
        done = []
        for name, reload in self._parts.items():
            try:
                reload()
            except ForkdError as error:
                fields = {"what": name, "error": str(error)}
                log.error("not reloaded: what was there before stays", extra=fields)  # noqa: TRY400 - the message is the news
                self._auditor.event(RELOAD, error.code, name)
            else:
                done.append(name)
        log.info("reloaded", extra={"what": " ".join(done)})
        self._auditor.event(RELOAD, None, *done)
