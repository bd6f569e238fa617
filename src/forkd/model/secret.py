"""A secret: a value that the host puts into requests of sandboxes, and that no sandbox has.

A guest writes the placeholder where the value belongs; the egress proxy puts the value in its
place, in one header, on the way to the hosts that the secret is for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.model.checks import in_range
from forkd.model.network import parse_name_rule
from forkd.model.tenant import parse_name

if TYPE_CHECKING:
    from datetime import datetime

    from forkd.model.caller import Tenant
    from forkd.model.network import NameRule

PLACEHOLDER_PREFIX = "forkd-secret-"
"""What placeholders begin with; the secret's name follows."""

HEADER_DEFAULT = "Authorization"

PORT_DEFAULT = 443
"""The port of a host that is named without one."""

REFUSED_HEADERS = frozenset(
    {
        "connection", "content-encoding", "content-length", "expect", "host", "keep-alive",
        "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers that say where a request goes and where it ends; a secret is in none of them."""

_HEADER = re.compile(rf"[A-Za-z0-9!#$%&'*+.^_`|~-]{{1,{limits.SECRET_HEADER_CHARS_MAX}}}")
_ENV = re.compile(limits.SECRET_ENV_PATTERN.strip("^$"))
_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")


class SecretValue:
    """A secret's value, which shows itself to nobody by accident."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the value."""
        return self._text

    def __repr__(self) -> str:
        return "SecretValue(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretValue) and self._text == other._text

    __hash__ = None  # type: ignore[assignment]  # nobody looks values up


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, without its value.

    Attributes:
        name: What it is called, unique within its tenant.
        tenant: Whose sandboxes may use it.
        hosts: What it is for: names, each with its ports.
        header: In which header of a request its value may stand.
        env: The variable that has its placeholder in guests; None for none.
        created_at: When its value was set.
    """

    name: str
    tenant: Tenant
    hosts: tuple[NameRule, ...]
    header: str
    env: str | None
    created_at: datetime

    @property
    def placeholder(self) -> str:
        """What stands for the value in guests."""
        return PLACEHOLDER_PREFIX + self.name

    @property
    def ports(self) -> frozenset[int]:
        """The ports of its hosts."""
        return frozenset(each.first for host in self.hosts for each in host.ports)

    def is_for(self, name: str, port: int) -> bool:
        """Whether it is for a host: a name in lower case, without the dot at its end."""
        return any(
            host.matches(name) and any(port == each.first for each in host.ports)
            for host in self.hosts
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """A secret with its value."""

    secret: Secret
    value: SecretValue


@dataclass(frozen=True, slots=True)
class SecretUse:
    """Which secrets a sandbox uses; what they are is looked up when it is needed.

    Attributes:
        tenant: Whose they are.
        root: The tree of the sandbox, whose CA signs what its connections are shown.
        names: Which.
    """

    tenant: Tenant
    root: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SecretRequest:
    """A secret to be set; members as of `Secret`.

    Attributes:
        value: Its value.

    Raises:
        InvalidRequest: A member is malformed or out of range, and is named; the message never
            has the value.
    """

    name: str
    value: SecretValue
    hosts: tuple[NameRule, ...]
    header: str = HEADER_DEFAULT
    env: str | None = None

    def __post_init__(self) -> None:
        parse_name(self.name, field="name")
        in_range("hosts", len(self.hosts), 1, limits.SECRET_HOSTS_MAX)
        if _HEADER.fullmatch(self.header) is None:
            raise InvalidRequest(f"{self.header[:80]!r} is no name of a header", field="header")
        if self.header.lower() in REFUSED_HEADERS:
            raise InvalidRequest(f"a secret cannot be in the header {self.header}", field="header")
        if self.env is not None and _ENV.fullmatch(self.env) is None:
            raise InvalidRequest(f"{self.env[:80]!r} is no name of a variable", field="env")
        _check_value(self.value.reveal())


def parse_hosts(texts: list[str] | tuple[str, ...]) -> tuple[NameRule, ...]:
    """Return names with their ports, such as `api.example.com`, `*.example.com:8443`.

    Raises:
        InvalidRequest: One is no name; the field is `hosts`.
    """
    return tuple(dict.fromkeys(parse_name_rule(text, PORT_DEFAULT, "hosts") for text in texts))


def check_names(names: tuple[str, ...]) -> None:
    """Return if a sandbox may use so many secrets, each named once.

    Raises:
        InvalidRequest: It may not; the field is `secrets`.
    """
    in_range("secrets", len(names), 0, limits.SECRETS_PER_SANDBOX_MAX)
    for name in names:
        parse_name(name, field="secrets")
    if len(set(names)) != len(names):
        raise InvalidRequest("secrets are named twice", field="secrets")


def _check_value(text: str) -> None:
    low, high = limits.SECRET_VALUE_BYTES_MIN, limits.SECRET_VALUE_BYTES_MAX
    length = len(text.encode(errors="surrogatepass"))
    if not low <= length <= high:
        raise InvalidRequest(f"value must be {low} to {high} bytes, not {length}", field="value")
    if _VALUE.fullmatch(text) is None:
        raise InvalidRequest(
            "value must be printable ASCII without line breaks, and begin and end with no space: "
            "it becomes part of a header",
            field="value",
        )
