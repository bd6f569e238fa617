"""Who a user is to a registry: the files and helpers that docker and podman use.

The first file that knows the registry is believed: `REGISTRY_AUTH_FILE` alone if it is set, else
podman's `containers/auth.json` and then docker's `config.json`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.errors import InvalidRequest
from forkd.registry.limits import AUTH_FILE_BYTES_MAX, CREDENTIAL_HELPER_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from forkd.registry.names import InRegistry

_HELPER = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DOCKER_HUB = "https://index.docker.io/v1/"
_IDENTITY = "<token>"
_NOT_FOUND = "credentials not found"


@dataclass(frozen=True, slots=True)
class Login:
    """What proves who asks.

    Attributes:
        user: The user's name; empty with an identity token.
        secret: The password.
        identity: A token that is exchanged for others; empty if there is a password.
        source: Where this was found, for messages.
    """

    user: str
    secret: str
    identity: str
    source: str


def login_for(reference: InRegistry, environment: Mapping[str, str]) -> Login | None:
    """Return the user's login to the registry of an image or a pack; None if there is none.

    Raises:
        InvalidRequest: A file with credentials is damaged, or a credential helper is missing or
            failed.
    """
    for path in _files(environment):
        said = _read(path)
        if said is not None and (login := _login_in(said, path, reference)) is not None:
            return login
    return None


def _files(environment: Mapping[str, str]) -> Iterator[Path]:
    if named := environment.get("REGISTRY_AUTH_FILE"):
        if not Path(named).exists():
            raise InvalidRequest(f"REGISTRY_AUTH_FILE names {named}, which does not exist")
        yield Path(named)
        return
    home = Path(environment.get("HOME") or Path.home())
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers/auth.json"
    yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "containers/auth.json"
    yield Path(environment.get("DOCKER_CONFIG") or home / ".docker") / "config.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            raw = file.read(AUTH_FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > AUTH_FILE_BYTES_MAX:
        raise InvalidRequest(f"{path} is longer than {AUTH_FILE_BYTES_MAX} bytes")
    try:
        said = json.loads(raw)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise InvalidRequest(f"{path} is no JSON object with credentials of registries")
    return said


def _login_in(said: dict[str, Any], path: Path, reference: InRegistry) -> Login | None:
    helpers = said.get("credHelpers")
    registry = reference.registry
    server = _DOCKER_HUB if registry == "docker.io" else registry
    if isinstance(helpers, dict) and isinstance(named := helpers.get(registry), str):
        return _asked(named, server, path)
    auths = said.get("auths")
    entries = {_plain(key): each for key, each in auths.items()} if isinstance(auths, dict) else {}
    for key in _keys(reference):
        entry = entries.get(key)
        if isinstance(entry, dict) and (login := _entry(entry, path)) is not None:
            return login
    if isinstance(store := said.get("credsStore"), str) and store:
        return _asked(store, server, path)
    return None


def _plain(key: str) -> str:
    """Return what a key of `auths` means, which was a URL once."""
    host = re.sub(r"^https?://", "", key).rstrip("/")
    host = re.sub(r"/v[12]$", "", host)
    return "docker.io" if host == "index.docker.io" else host


def _keys(reference: InRegistry) -> Iterator[str]:
    """Yield the keys that hold for a repository, the narrowest first."""
    parts = [reference.registry, *reference.repository.split("/")]
    for count in range(len(parts), 0, -1):
        yield "/".join(parts[:count])


def _entry(entry: dict[str, Any], path: Path) -> Login | None:
    if isinstance(identity := entry.get("identitytoken"), str) and identity:
        return Login("", "", identity, str(path))
    encoded = entry.get("auth")
    if not isinstance(encoded, str) or not encoded:
        return None
    try:
        user, colon, secret = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise InvalidRequest(f"{path} has a damaged `auth` of a registry: log in again")
    return Login(user, secret, "", str(path))


def _asked(helper: str, server: str, path: Path) -> Login | None:
    """Return what a credential helper says of a server."""
    if _HELPER.fullmatch(helper) is None:
        raise InvalidRequest(f"{path} names a credential helper {helper[:80]!r}, which is no name")
    program = f"docker-credential-{helper}"
    try:
        ended = subprocess.run(  # noqa: S603 - the user's own configuration names it
            [program, "get"],
            input=server.encode(),
            capture_output=True,
            timeout=CREDENTIAL_HELPER_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise InvalidRequest(f"{path} names {program}: cannot run it: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise InvalidRequest(
            f"{program} did not answer within {CREDENTIAL_HELPER_TIMEOUT_S:g} s"
        ) from None
    if ended.returncode:
        text = (ended.stdout + ended.stderr).decode(errors="replace").strip()[:200]
        if _NOT_FOUND in text.lower():
            return None
        raise InvalidRequest(f"{program} failed for {server}: {text or ended.returncode}")
    return _answered(ended.stdout, program, server)


def _answered(raw: bytes, program: str, server: str) -> Login:
    try:
        said = json.loads(raw)
        user, secret = said["Username"], said["Secret"]
    except (ValueError, KeyError, TypeError):
        user = secret = None
    if not isinstance(user, str) or not isinstance(secret, str):
        raise InvalidRequest(f"{program} answered for {server} with what is no credentials")
    if user == _IDENTITY:
        return Login("", "", secret, program)
    return Login(user, secret, "", program)
