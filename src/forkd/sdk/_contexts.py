"""Daemons that have a name, and which of them is used: `forkd context` writes them.

They are in `forkd/contexts.json` in `XDG_CONFIG_HOME` (else `~/.config`), which its owner alone can
read because it holds tokens:

    {"version": 1, "current": "ci",
     "contexts": {"ci": {"url": "https://ci.example.com:8889", "token": "…"}}}

The name `local` always exists: the daemon that `forkd up` started on this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forkd.errors import Conflict, HostError, InvalidRequest, NotFound

LOCAL = "local"
"""The context that is no entry: what is found without contexts."""

CONTEXTS_MAX = 100
"""Most contexts of one user."""

CONTEXTS_BYTES_MAX = 1024 * 1024
"""Longest file of contexts that is read."""

CONTEXTS_VERSION = 1
"""Latest version of the file that is read, and the one that is written."""

CONTEXT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class Context:
    """A daemon that has a name.

    Attributes:
        url: Its address.
        token: The bearer token; None if none is needed.
        ca_file: As of `forkd.sdk.Endpoint`.
        client_cert: As of `forkd.sdk.Endpoint`.
        client_key: As of `forkd.sdk.Endpoint`.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None


@dataclass
class Contexts:
    """All contexts of a user.

    Attributes:
        current: The one that is used; None for `local`.
        by_name: The contexts.
    """

    current: str | None = None
    by_name: dict[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """Return a context.

        Raises:
            NotFound: There is none of that name; the message names those that there are.
        """
        found = self.by_name.get(name)
        if found is None:
            known = ", ".join([LOCAL, *sorted(self.by_name)])
            raise NotFound(
                f"there is no context {name!r}; there are: {known}; `forkd context use NAME` "
                "chooses one",
                context=name,
            )
        return found

    def add(self, name: str, context: Context) -> None:
        """Add a context.

        Raises:
            InvalidRequest: It cannot have that name, or there are too many.
            Conflict: The name is taken.
        """
        if CONTEXT_NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"{name!r} is not the name of a context: 1 to 63 letters, digits, '.', '_' and '-'",
                field="name",
            )
        if name == LOCAL or name in self.by_name:
            raise Conflict(f"there is a context {name!r} already", context=name)
        if len(self.by_name) >= CONTEXTS_MAX:
            raise InvalidRequest(f"there are {CONTEXTS_MAX} contexts, which is the limit")
        self.by_name[name] = context

    def use(self, name: str) -> None:
        """Make a context the one that is used.

        Raises:
            NotFound: There is none of that name.
        """
        if name != LOCAL:
            self.get(name)
        self.current = None if name == LOCAL else name

    def remove(self, name: str) -> None:
        """Remove a context; if it was used, `local` is from now on.

        Raises:
            NotFound: There is none of that name.
            InvalidRequest: It is `local`.
        """
        if name == LOCAL:
            raise InvalidRequest(f"the context {LOCAL!r} always exists", field="name")
        self.get(name)
        del self.by_name[name]
        if self.current == name:
            self.current = None

    def save(self) -> None:
        """Write the file, whole, for its owner alone.

        Raises:
            HostError: It cannot be written.
        """
        path = contexts_file()
        members = {
            "version": CONTEXTS_VERSION,
            "current": self.current,
            "contexts": {
                name: {key: value for key, value in asdict(each).items() if value is not None}
                for name, each in self.by_name.items()
            },
        }
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, aside = tempfile.mkstemp(prefix=".contexts.", dir=path.parent)  # mode 0600
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(json.dumps(members, indent=2) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                Path(aside).replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(aside).unlink()
                raise
        except OSError as error:
            raise HostError(f"cannot write {path}: {error.strerror}") from error


def contexts_file() -> Path:
    """Return where contexts are kept."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "forkd" / "contexts.json"


def load() -> Contexts:
    """Return the user's contexts.

    Raises:
        InvalidRequest: The file is damaged, or of a later version.
    """
    path = contexts_file()
    try:
        with path.open(encoding="utf-8") as file:
            said = json.loads(file.read(CONTEXTS_BYTES_MAX))
        _check_version(path, said.get("version", CONTEXTS_VERSION))
        known = {str(name): Context(**each) for name, each in said["contexts"].items()}
        current = said.get("current")
        return Contexts(None if current is None else str(current), known)
    except FileNotFoundError:
        return Contexts()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidRequest(
            f"{path} does not hold contexts ({error}); remove it and add them anew"
        ) from error


def _check_version(path: Path, version: object) -> None:
    if not isinstance(version, int):
        raise TypeError("its version is no number")
    if version > CONTEXTS_VERSION:
        raise InvalidRequest(
            f"{path} has version {version}, and this forkd reads {CONTEXTS_VERSION}: use a later "
            "forkd, or name the daemon by FORKD_URL and FORKD_TOKEN"
        )


def chosen(name: str | None = None) -> Context | None:
    """Return the context that is used, or the one of a name; None for `local`.

    Raises:
        NotFound: There is no such context, or no longer.
        InvalidRequest: The file of contexts is damaged.
    """
    name = name or os.environ.get("FORKD_CONTEXT") or None
    if name == LOCAL:
        return None
    known = load()
    name = name or known.current
    return None if name is None else known.get(name)
