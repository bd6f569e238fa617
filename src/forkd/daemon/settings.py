"""What an operator can set: by flags of `forkd-daemon`, else by the environment, else by a file.

Each setting is declared once, as a field of `Settings`.  Its type checks it, its description is
the help of its flag and its row in docs/reference/configuration.md, its name is the key in the
file, the flag's and, behind `FORKD_`, the variable's.  `forkd.daemon.config_file` reads the file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from forkd import limits, programs
from forkd.daemon import setting_values as values
from forkd.errors import InvalidRequest
from forkd.host import proc, users
from forkd.model.network import NetworkPolicy
from forkd.network.upstream import Via
from forkd.service.jail import UidRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PREFIX = "FORKD_"

CONFIG_VARIABLE = "FORKD_CONFIG"
"""The variable that names the configuration file; a file cannot."""

CLIENTS_VARIABLES = frozenset(
    {
        "FORKD_CA_FILE", "FORKD_CLIENT_CERT", "FORKD_CLIENT_KEY", "FORKD_DEBIAN_MIRROR",
        "FORKD_DEBIAN_SECURITY_MIRROR", "FORKD_HOME", "FORKD_KEYS",
        "FORKD_KERNEL", "FORKD_MACHINE_KERNEL", "FORKD_MACHINE_MEMORY_MIB", "FORKD_MACHINE_QEMU",
        "FORKD_PACKS_TOKEN", "FORKD_PACKS_URL", "FORKD_TAG", "FORKD_TARGET", "FORKD_TOKEN",
        "FORKD_URL",
    }
)  # fmt: skip
"""Variables of the same prefix that are for clients; the daemon has nothing to say of them."""

PORT_MAX = 65_535

SOCKET_MODE_DEFAULT = 0o660
"""The owner and its group may talk to the daemon, and so are root on this host."""

VALUE_CHARS_MAX = 200
"""Most of a wrong value that an error repeats."""

ALIKE_MIN = 0.7
"""How alike two names are, of 1, of which one may be the other misspelt."""

USER = re.compile(r"//.*@")
"""Who logs in, and with which password, in a URL; no error repeats it."""

SHOWN = "default_shown"

Kind = Literal["a string", "an integer", "a number", "an array of strings"]
"""How a setting is written in a file of TOML."""


@dataclass(frozen=True, slots=True)
class FileValues:
    """What a configuration file says.

    Attributes:
        values: Settings by name, as TOML has them.
        places: Where each of them is: the file and the line.
        path: The file; None if there is none.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Who has set a setting, a flag, a variable or a line of a file; and to what."""

    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Bind:
    """Where to listen on TCP; port 0 lets the kernel choose."""

    host: str
    port: int


def _bind(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value:
        return None
    host, _, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ValueError("must be host:port, such as 127.0.0.1:8889")
    return Bind(host, int(port))


_Path = Annotated[Path | None, BeforeValidator(values.path)]
_Folder = Annotated[Path, BeforeValidator(values.folder)]
_Count = Annotated[int, Field(ge=1)]


def _setting(default: object, meaning: str, shown: str | None = None) -> Any:  # noqa: ANN401 - as pydantic's own `Field`
    """Declare a setting; `shown` stands for a default that is no value."""
    return Field(default, description=meaning, json_schema_extra={SHOWN: shown})


class Settings(BaseSettings):
    """The daemon's settings: arguments go before the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    _again: Callable[[], Settings] | None = PrivateAttr(None)

    socket: Annotated[Path | None, BeforeValidator(values.socket)] = _setting(
        Path("/run/forkd/forkd.sock"),
        f"Path of the Unix socket, at most {values.SOCKET_PATH_BYTES_MAX} bytes. Empty: none.",
    )
    socket_mode: Annotated[int, BeforeValidator(values.mode)] = _setting(
        SOCKET_MODE_DEFAULT,
        "Mode of the Unix socket, in octal. Users who may open it control the daemon.",
        f"0{SOCKET_MODE_DEFAULT:o}",
    )
    socket_group: Annotated[int | None, BeforeValidator(values.group)] = _setting(
        None,
        "Group of the Unix socket, by name or number. Its users control the daemon, too.",
        f"`{values.SOCKET_GROUP}` if the daemon is root and this host has that group; else the "
        "daemon's",
    )
    bind: Annotated[Bind | None, NoDecode, BeforeValidator(_bind)] = _setting(
        None, "`HOST:PORT` to serve on TCP too. Clients there need the token.", "none"
    )
    hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(values.hosts)] = _setting(
        (),
        "Further names and addresses under which clients reach the TCP address, separated by "
        "commas. Loopback names and the address itself are always served, other names are refused.",
        "none",
    )
    token_file: _Path = _setting(
        None,
        "File with the bearer token of TCP: at least 16 characters, readable by its owner only.",
        "`token` in `state_dir`, made if it is missing",
    )
    tls_cert: _Path = _setting(
        None,
        "File with the certificate of TCP, in PEM: the server's own first, then those of its CAs. "
        "Clients use `https://` then, and TLS 1.2 or later.",
        "no TLS",
    )
    tls_key: _Path = _setting(
        None,
        "File with the private key of `tls_cert`, in PEM, without a password, readable by its "
        "owner only.",
        "no TLS",
    )
    tls_client_ca: _Path = _setting(
        None,
        "File with the certificates of CAs, in PEM: clients of TCP need a certificate that one of "
        "them has signed, besides a token.",
        "clients need no certificate",
    )
    state_dir: _Folder = _setting(
        Path("/var/lib/forkd"), "Folder of snapshots and the database; must survive a restart."
    )
    run_dir: _Folder = _setting(
        Path("/run/forkd"),
        "Folder of the sockets and console logs of live sandboxes; a short path.",
    )
    cache_dir: _Path = _setting(
        None, "Folder of kernels and images; may be deleted at any time.", "`cache` in `state_dir`"
    )
    disk_dir: _Path = _setting(
        None,
        "Folder of the private disks of live sandboxes: what guests write, in files without names.",
        "`tops` in `state_dir`",
    )
    sandbox_ttl_s: Annotated[
        float, Field(ge=limits.TTL_S_MIN, le=limits.TTL_S_MAX, allow_inf_nan=False)
    ] = _setting(
        limits.SANDBOX_TTL_S_DEFAULT,
        "How long a sandbox lives, in seconds, if its fork leaves the time to the daemon "
        "(`ttl_secs` is `default`). A sandbox that is forked without any `ttl_secs` has no end.",
    )
    disk_limit_mib: Annotated[int, Field(ge=1, le=limits.DISK_LIMIT_MIB_MAX)] = _setting(
        limits.DISK_LIMIT_MIB_DEFAULT,
        "Disk blocks that a sandbox may have of its own if its fork says no limit, in MiB.",
    )
    disk_reserve_mib: Annotated[int, Field(ge=0, le=limits.DISK_LIMIT_MIB_MAX)] = _setting(
        limits.DISK_RESERVE_MIB_DEFAULT,
        "What guests' writes leave free on the file system of `disk_dir`, in MiB; a write that "
        "would not fails in its guest.",
    )
    memory_reserve_mib: Annotated[int, Field(ge=0)] = _setting(
        limits.MEMORY_RESERVE_MIB_DEFAULT,
        "Memory that the host must have available, in MiB, before forks, branches and bakes are "
        "accepted.",
    )
    memory_overcommit: Annotated[
        float | None, Field(gt=0, le=limits.MEMORY_OVERCOMMIT_MAX, allow_inf_nan=False)
    ] = _setting(
        None,
        "Most memory that guests may be promised together, as a multiple of the host's. They share "
        "most of it, and never touch much of the rest. With a value above 1 one guest alone may "
        "have more than the host.",
        "no limit",
    )
    memory_pressure_max: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = _setting(
        limits.MEMORY_PRESSURE_MAX_DEFAULT,
        "Forks, branches and bakes are refused while the host's memory pressure is above this: "
        "PSI's `full avg10`, in percent.",
    )
    io_pressure_max: Annotated[float | None, Field(ge=0, le=100, allow_inf_nan=False)] = _setting(
        None,
        "Forks, branches and bakes are refused while the host's I/O pressure is above this: PSI's "
        "`full avg10`, in percent. A busy disk is normal.",
        "no limit",
    )
    cpu_pressure_max: Annotated[float | None, Field(ge=0, le=100, allow_inf_nan=False)] = _setting(
        None,
        "Forks, branches and bakes are refused while the host's CPU pressure is above this: PSI's "
        "`some avg10`, in percent. Busy processors are normal.",
        "no limit",
    )
    cgroups: Literal["on", "off"] | None = _setting(
        None,
        "`on`: every sandbox has a cgroup, whose limits follow from its snapshot where its fork "
        "says none; without cgroup v2 the daemon does not start. `off`: only sandboxes that are "
        "forked with a limit have one.",
        "`on` for root, and for others in a cgroup that is delegated to them; otherwise `off`",
    )
    recipe_dirs: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(values.folders)] = _setting(
        (programs.RECIPES, Path("/etc/forkd/recipes")),
        "Folders of recipes, separated by colons. A request may name a recipe in one of them, by "
        "the name of its folder or by its path; any other recipe is uploaded. What these recipes "
        "name of this host's files may be read into a guest.",
        "the recipes that come with forkd, then `/etc/forkd/recipes`",
    )
    vmm: _Path = _setting(
        None,
        "The program `forkd-vmm`.",
        "beside `forkd-daemon`, in a checkout's `target`, or on `PATH`",
    )
    agent: _Path = _setting(
        None,
        "The guest agent `forkd-agent`, statically linked.",
        "as `vmm`",
    )
    zygotes: Annotated[int, Field(ge=limits.ZYGOTES_MIN)] = _setting(
        limits.ZYGOTES_DEFAULT,
        "Most zygotes at once, each with the memory of a snapshot that was forked in the last ten "
        "minutes. For one more, that which was not forked from for longest ends.",
    )
    tree_live: _Count = _setting(
        limits.TREE_LIVE_DEFAULT,
        "Most live descendants of one sandbox, at any depth.",
    )
    tree_depth: _Count = _setting(
        limits.TREE_DEPTH_DEFAULT, "Most branches between a sandbox and its oldest ancestor."
    )
    tree_private_mib: _Count = _setting(
        limits.TREE_PRIVATE_MIB_DEFAULT,
        "Most private memory of a sandbox and all its descendants together, in MiB.",
    )
    jail: Literal["on", "off"] | None = _setting(
        None,
        "`on` or `off`: whether machines are jailed, without rights, files or network of the host; "
        "each as a user of its own if the daemon is root, otherwise all as the daemon's. `off` is "
        "for hosts that cannot: a captured machine then is the daemon's user, and may make every "
        "system call.",
        "`on`",
    )
    core_scheduling: Literal["sandbox", "off"] = _setting(
        "sandbox",
        "`sandbox`: where two threads of a processor share a core (SMT), no other process runs on "
        "the core of a machine while it does. Needs Linux 5.14 with `CONFIG_SCHED_CORE`; without, "
        "and with `off`, machines share cores.",
    )
    uid_range: Annotated[UidRange, NoDecode, BeforeValidator(values.uids)] = _setting(
        limits.UIDS_DEFAULT,
        "`FIRST:COUNT`, users and groups of jailed machines, by number: nobody's on this host, and "
        "in no range of `/etc/subuid` or `/etc/subgid`.",
        limits.UIDS_DEFAULT,
    )
    build_uid_range: Annotated[UidRange, NoDecode, BeforeValidator(values.uids)] = _setting(
        limits.BUILD_UIDS_DEFAULT,
        "`FIRST:COUNT`, users and groups of builds of images, likewise: 65536 for each of 4 "
        "builds, and one for each of 4 packs that are read or written. With `FORKD_JAIL=off` these "
        "run as the daemon's user.",
        limits.BUILD_UIDS_DEFAULT,
    )
    build_network: Annotated[
        NetworkPolicy | None, NoDecode, BeforeValidator(values.build_network)
    ] = _setting(
        "internet",
        "What builds of images may download from: rules as of `forkd fork --network`, with "
        "spaces between and names in full, or `any`. Name servers and proxies of this host are "
        "always reached. With `FORKD_JAIL=off` it is `any`.",
        "internet",
    )
    image_cache_mib: Annotated[int, Field(ge=0, le=limits.IMAGE_CACHE_MIB_MAX)] = _setting(
        limits.IMAGE_CACHE_MIB_DEFAULT,
        "What the image cache may take, in MiB: images that no named snapshot needs, and the "
        "snapshots that `forkd run --image` makes. Beyond it, what was used longest ago is "
        "removed, but nothing that was used within ten minutes, or that sandboxes use.",
    )
    registries_insecure: Annotated[
        tuple[str, ...], NoDecode, BeforeValidator(values.registries)
    ] = _setting(
        (),
        "Registries that need no TLS: `HOST` or `HOST:PORT`, separated by commas. Registries "
        "on loopback addresses need no entry.",
        "none",
    )
    registry_auth_file: _Path = _setting(
        None,
        "File with credentials for registries, as `docker login` and `podman login` write it. "
        "Every tenant that may make snapshots can fetch what they give access to.",
        "none",
    )
    dns: Annotated[tuple[tuple[str, int], ...], NoDecode, BeforeValidator(values.servers)] = (
        _setting(
            (),
            "Name servers that are asked for the names that sandboxes may resolve: IPv4 addresses, "
            "each with `:PORT` if that is not 53, with commas between.",
            "those of `/etc/resolv.conf`",
        )
    )
    egress_proxy: Annotated[Via | None, NoDecode, BeforeValidator(values.via)] = _setting(
        None,
        "Proxy by which sandboxes reach ports 80 and 443 of what they may reach: "
        "`http://[USER:PASSWORD@]HOST:PORT`, which is asked to `CONNECT` to addresses. What "
        "`NO_PROXY` names is reached straight. Empty: none.",
        "`HTTPS_PROXY`, or else `HTTP_PROXY`",
    )
    egress_ca: _Path = _setting(
        None,
        "File with CA certificates, in PEM, that servers which get secrets are verified with, "
        "besides those of this host.",
        "none",
    )
    network_slots: Annotated[int, Field(ge=0, le=limits.NETWORK_SLOTS_MAX)] = _setting(
        limits.NETWORK_SLOTS_DEFAULT,
        "Taps with addresses that are kept ready for sandboxes with a network, from the first fork "
        "of one until the daemon stops: a fork of so many does not wait for them. 0: none.",
    )
    pack_keys: _Path = _setting(
        None,
        "Folder of keys, as `forkd key` keeps them: only packs signed by a key trusted there are "
        "accepted.",
        "each request names the keys that it trusts",
    )
    pack_unsigned: Literal["allow", "refuse"] = _setting(
        "refuse",
        "`allow` or `refuse`: whether a request may accept a pack that is unsigned, or signed by "
        "an untrusted key.",
    )
    otlp_endpoint: Annotated[str | None, BeforeValidator(values.endpoint)] = _setting(
        None,
        "Where traces are exported to, by OTLP over HTTP: `http://HOST:PORT` of a collector. Needs "
        "`forkd-vm[tracing]`; the variables of OpenTelemetry's SDK, such as `OTEL_TRACES_SAMPLER`, "
        "hold as well.",
        "none",
    )

    audit_log: _Path = _setting(
        Path("audit.log"),
        "File of the audit log: a line of JSON for each request. Empty: none.",
        "`audit.log` in `state_dir`",
    )
    audit_full: Literal["continue", "refuse"] = _setting(
        "continue",
        "What happens while the audit log cannot be written. `continue`: requests are served, and "
        "lines that find no room are counted. `refuse`: only reads are served.",
    )

    def group_of_socket(self) -> int | None:
        """Return whose the Unix socket is besides its user's; None for the group of the daemon."""
        if self.socket_group is not None or users.user_id() != 0:
            return self.socket_group
        return users.group_id(values.SOCKET_GROUP)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Where `read` found the settings that are not as by default."""
        return self._origins

    def read_again(self) -> Settings:
        """Return what flags, environment and file say now; the same if `read` has not made it.

        Raises:
            InvalidRequest: As `read`.
        """
        return self if self._again is None else self._again()

    @property
    def audit_path(self) -> Path | None:
        """Where the audit log is; None for nowhere."""
        return None if self.audit_log is None else self.state_dir / self.audit_log

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.socket is None and self.bind is None:
            raise ValueError("nothing to listen on: set socket, or bind, or both")
        return self


def read(
    flags: Mapping[str, str], load: Callable[[], FileValues] = FileValues, *, overrides: bool = True
) -> Settings:
    """Return the settings: those in `flags`, by name, else those of the environment, else a file's.

    A value that another goes before is not looked at.

    Args:
        flags: Settings by name, as text.
        load: Reads the configuration file.
        overrides: Whether the environment goes before the file.

    Raises:
        InvalidRequest: A value makes no sense; it says which, why, and what to do.
    """
    file = load()
    origins = _origins(flags, file, overrides=overrides)
    chosen: dict[str, Any] = dict(flags)  # text, which the types of the fields parse
    for name, place in file.places.items():
        if origins[name].where == place:
            chosen[name] = file.values[name]
    try:
        found = Settings(**chosen)
    except ValidationError as error:
        raise _refusal(error, origins) from error
    found._origins.update(origins)  # noqa: SLF001 - this makes it
    found._again = partial(read, flags, load, overrides=overrides)  # noqa: SLF001 - likewise
    return found


def replaced(settings: Settings, changed: Mapping[str, Any]) -> Settings:
    """Return settings with other values, which they keep when they are read again."""
    found = settings.model_copy(update=dict(changed))
    found._again = lambda: replaced(settings.read_again(), changed)  # noqa: SLF001 - as in `read`
    return found


def _origins(flags: Mapping[str, str], file: FileValues, *, overrides: bool) -> dict[str, Origin]:
    """Return who has set each setting that is set."""
    environment = {name.upper(): value for name, value in proc.environment().items()}
    found = {}
    for name in Settings.model_fields:
        if name in flags:
            found[name] = Origin(flag(name), flags[name])
        elif variable(name) in environment and (overrides or name not in file.values):
            found[name] = Origin(variable(name), environment[variable(name)])
        elif name in file.values:
            value = file.values[name]
            text = ", ".join(value) if isinstance(value, list) else str(value)
            found[name] = Origin(file.places[name], text)
    return found


def kind(name: str) -> Kind:
    """Return how a setting is written in a file of TOML."""
    declared = Settings.model_fields[name]
    if get_origin(declared.annotation) is tuple:
        return "an array of strings"
    if any(isinstance(each, BeforeValidator) for each in declared.metadata):
        return "a string"
    types = {declared.annotation, *get_args(declared.annotation)}
    if float in types:
        return "a number"
    return "an integer" if int in types else "a string"


def misspelt(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each variable that no setting has and that may be a misspelt one, with that one."""
    known = {variable(each).removeprefix(PREFIX): variable(each) for each in Settings.model_fields}
    for name in sorted(set(names) - {*known.values(), *CLIENTS_VARIABLES, CONFIG_VARIABLE}):
        if name.startswith(PREFIX):
            close = difflib.get_close_matches(
                name.removeprefix(PREFIX), known, n=1, cutoff=ALIKE_MIN
            )
            yield from ((name, known[each]) for each in close)


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    """Return the variable of a setting."""
    return f"{PREFIX}{name.upper()}"


def meaning(name: str) -> str:
    """Return what a setting means, in a sentence or two."""
    return Settings.model_fields[name].description or ""


def default(name: str) -> str:
    """Return the default of a setting, as a person reads it."""
    field = Settings.model_fields[name]
    extra = field.json_schema_extra
    shown = extra.get(SHOWN) if isinstance(extra, dict) else None
    return str(field.default if shown is None else shown)


def nearest(name: str) -> str | None:
    """Return the setting that a name may be misspelt of, or is written otherwise; None for none."""
    plain = name.lower().replace("-", "_").removeprefix(PREFIX.lower())
    close = difflib.get_close_matches(plain, Settings.model_fields, n=1, cutoff=ALIKE_MIN)
    return close[0] if close else None


def shown(text: str) -> str:
    """Return a value without the user and the password that it may have."""
    return USER.sub("//...@", text[:VALUE_CHARS_MAX])


def _refusal(error: ValidationError, origins: Mapping[str, Origin]) -> InvalidRequest:
    first = error.errors()[0]
    problem = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return InvalidRequest(problem, field="socket")
    name = str(first["loc"][0])
    if name not in Settings.model_fields:
        return InvalidRequest(f"there is no setting {name}", field=name)
    said = origins[name].where if name in origins else variable(name)
    where = said if said in {flag(name), variable(name)} else f"{said}: {name}"
    return InvalidRequest(
        f"{where} is {shown(repr(first['input']))}: {problem[:1].lower()}{problem[1:]}; "
        f"without it: {default(name)}",
        field=name if where != said else said,
    )
