"""What a SIGHUP has read again: settings, log files, certificates, the token."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from forkd.errors import ForkdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.daemon.auditing import Auditor
    from forkd.daemon.settings import Settings

RELOAD = "reload"
"""Action of a SIGHUP in the audit log."""

LIVE = frozenset({"token_file", "tls_cert", "tls_key", "tls_client_ca"})
"""Settings that hold from a SIGHUP on; others hold from the next start."""

log = logging.getLogger(__name__)


class Reloads:
    """What there is to be read again, in the order in which it was added; settings come first.

    Args:
        auditor: Writes down what was.
        settings: What the daemon has started with.

    Attributes:
        settings: Those that hold now.
    """

    def __init__(self, auditor: Auditor, settings: Settings) -> None:
        self.settings = settings
        self._auditor = auditor
        self._parts: dict[str, Callable[[], None]] = {"config": self._reload_settings}

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

    def _reload_settings(self) -> None:
        """Read the settings again; name those that hold from the next start only.

        Raises:
            InvalidRequest: A setting makes no sense, or the file cannot be read.
        """
        found = self.settings.read_again()
        changed = {
            name: new
            for name in type(found).model_fields
            if (new := getattr(found, name)) != getattr(self.settings, name)
        }
        live = {name: new for name, new in changed.items() if self._is_live(name, new)}
        if later := sorted(changed.keys() - live.keys()):
            log.warning(
                "changed settings that hold from the next start",
                extra={"settings": " ".join(later)},
            )
        self.settings = self.settings.model_copy(update=live)

    def _is_live(self, name: str, new: object) -> bool:
        """Whether a change holds at once: TLS is neither begun nor ended while the daemon runs."""
        both = new is not None and getattr(self.settings, name) is not None
        return name in LIVE and (both or name == "token_file")
