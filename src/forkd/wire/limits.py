"""Limits of the REST API, each with a name and a reason.

Clients may rely on them and the daemon refuses what exceeds them, so they belong to the
contract.  They are checked by the types in `wire.v1`; a body or a WebSocket message is measured
by the daemon before anything parses it.
"""

FORK_COUNT_MAX = 10_000
"""Sandboxes made by one request; the VMM's own limit for one fork."""

TAG_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
"""Names of snapshots.  A tag is a folder's name in the store; `..` is refused besides."""

TRUSTED_CHARS_MAX = 64 * 65
"""The keys that one request to unpack trusts: 64 of them, each 64 hex digits and a comma."""

ID_CHARS_MAX = 64
"""Longest id of a sandbox that a client must be ready for."""

FORK_DEADLINE_SECS_DEFAULT = 60.0
"""Time a child has, from its clone until its agent has answered, when the caller names none."""

FORK_DEADLINE_SECS_MAX = 3_600.0
"""Longest such time that may be asked for."""

TTL_SECS_MIN = 0.1
"""Shortest life that a sandbox may be given."""

TTL_SECS_MAX = 365 * 24 * 3_600.0
"""Longest life that a sandbox may be given, a year; without one it has no end."""

LINK_EXEC_CHARS_MAX = 128 * 1024
"""Command between two links of a chain; one argument of a program is no longer."""

LINK_EXEC_TIMEOUT_SECS_DEFAULT = 600.0
"""Time that command has when the caller names none."""

BODY_BYTES_MAX = 2 * 1024 * 1024
"""Body of a request, file contents aside: the guest's frame of 1 MiB, escaped as JSON."""

CODE_CHARS_MAX = 512 * 1024
"""Code of one eval: it must fit one frame of the guest protocol, whatever JSON makes of it."""

ARGS_MAX = 4096
"""Arguments of one exec."""

ARG_CHARS_MAX = 128 * 1024
"""One argument or value of the environment; Linux allows no longer one (MAX_ARG_STRLEN)."""

ENV_MAX = 1024
"""Variables of the environment that one exec may add."""

PATH_CHARS_MAX = 4096
"""A path, on the host or in a guest; Linux allows no longer one (PATH_MAX)."""

USER_CHARS_MAX = 64
"""A user's name or `uid:gid`."""

STDIN_CHARS_MAX = 512 * 1024
"""Input given in the body of a buffered exec; more than that is streamed."""

TIMEOUT_SECS_DEFAULT = 30.0
"""Time an exec or an eval has when the caller names none."""

TIMEOUT_SECS_MAX = 7 * 24 * 3600.0
"""Longest time an exec or an eval may ask for."""

OUTPUT_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of each output kept by a buffered exec; the rest is drained, dropped and said to be."""

MEMORY_LIMIT_MIB_MIN = 32
"""Smallest memory limit of a sandbox: its VMM needs some itself."""

MEMORY_LIMIT_MIB_MAX = 1 << 20
"""Largest memory limit of a sandbox: the largest guest that boots, 1 TiB."""

DISK_LIMIT_MIB_MAX = 1 << 24
"""Largest private disk layer of a sandbox: the largest ext4 with 4 KiB blocks, 16 TiB."""

CPU_LIMIT_MAX = 1_024.0
"""Largest CPU limit of a sandbox, in cores."""

TTY_SIDE_MAX = 4096
"""Rows or columns of a terminal."""

MESSAGE_BYTES_MAX = 1024 * 1024 + 1
"""One WebSocket message: a kind and the payload of one frame of the guest protocol."""
