"""What agents and VMM processes answer, as types: the only place that reads their JSON.

An agent's answers are a guest's, and a guest may be hostile.  So each member has a type and a
bound here, and an answer that breaks one is an `EngineError` that names the member, whichever
operation asked.  Members that a type does not have are ignored: contracts only grow.

Contracts: protocol/guest/PROTOCOL.md and protocol/control/PROTOCOL.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forkd.errors import EngineError
from forkd.limits import EVAL_FORMS_MAX, EVAL_RESULTS_MAX
from forkd.model.files import EntryKind
from forkd.model.guest import RuntimeStatus

if TYPE_CHECKING:
    from forkd.model.json import JsonObject

WORD_CHARS_MAX = 256
"""Longest name or version that is read."""

MESSAGE_CHARS_MAX = 64 * 1024
"""Longest message that is read."""

SECONDS_MAX = 10 * 365 * 24 * 3_600.0
"""Longest duration that is believed: ten years."""

ENTRIES_MAX = 10_000
"""Most entries of one folder, by contract."""

COUNT_MAX = (1 << 63) - 1
"""Greatest number that is believed: what SQLite, and JSON readers elsewhere, can hold."""

PID_MAX = 1 << 22
"""Greatest process id of Linux on a 64-bit host (PID_MAX_LIMIT)."""

SIGNAL_MAX = 64
"""Greatest signal of Linux."""

CPU_FEATURES_MAX = 1_024
"""Most features of a processor that are read; there are some two hundred with a name."""

MODE_BITS_MAX = 0o177777
"""Greatest `st_mode`, type bits included."""

ID_MAX = (1 << 32) - 1
"""Greatest uid and gid of Linux."""

Word = Annotated[str, Field(max_length=WORD_CHARS_MAX)]
Message = Annotated[str, Field(max_length=MESSAGE_CHARS_MAX)]
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Instant = Annotated[int, Field(ge=-COUNT_MAX, le=COUNT_MAX)]
Pid = Annotated[int, Field(ge=1, le=PID_MAX)]
Seconds = Annotated[float, Field(ge=0, le=SECONDS_MAX)]
Milliseconds = Annotated[float, Field(ge=0, le=SECONDS_MAX * 1_000)]
Base64 = Annotated[str, Field(max_length=8 * 1024, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Mime = Annotated[str, Field(pattern=r"^[!-~ ]{1,128}$")]
FileName = Annotated[str, Field(pattern=r"^[a-z][a-z.]{0,31}$")]


class Reply(BaseModel):
    """One answer."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def read(cls, members: JsonObject, asked: str) -> Self:
        """Return `members` as this reply.

        Args:
            members: From a frame, or a line.
            asked: The operation, for the message.

        Raises:
            EngineError: A member is missing, of another type, or out of its bound.
        """
        try:
            return cls.model_validate(members)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise EngineError(
                f"the answer to {asked} is invalid: {where}: {first['msg']}"
            ) from None


class Empty(Reply):
    """An answer that only says that the operation is over."""


# Agents


class AgentError(Reply):
    """An ERROR frame of an agent."""

    code: Word
    message: Message = ""
    field: Word | None = None


class Pong(Reply):
    """To `ping`."""

    version: Word
    pid: Pid
    uptime_s: Seconds
    runtime: Annotated[RuntimeStatus, Field(strict=False)]


class GuestTime(Reply):
    """To `set_time` and `adjust_time`."""

    realtime_ns: Instant


class Echo(Reply):
    """To `echo`."""

    data: str


class EvalException(Reply):
    """An exception that escaped evaluated code."""

    type: str
    message: str
    traceback: str


class EvalForms(Reply):
    """One result of evaluated code, by MIME type."""

    is_main: bool = False
    data: Annotated[dict[Mime, str], Field(max_length=EVAL_FORMS_MAX)]
    omitted: Annotated[dict[Mime, Count], Field(max_length=EVAL_FORMS_MAX)] = {}


class Evaluated(Reply):
    """To `eval`."""

    has_value: bool
    repr: str | None = None
    value: Any = None  # JSON, which was parsed already
    value_is_json: bool = False
    error: EvalException | None = None
    timed_out: bool = False
    results: Annotated[list[EvalForms], Field(max_length=EVAL_RESULTS_MAX)] = []
    more_results: Count = 0


class Warmed(Reply):
    """To `warm`."""

    duration_s: Seconds


class Connected(Reply):
    """The first EVENT of `connect`."""

    event: Literal["connected"]


class ExecStarted(Reply):
    """The first EVENT of `exec`."""

    event: Literal["started"]
    pid: Pid


class ExecEnded(Reply):
    """To `exec`."""

    exit_code: Annotated[int, Field(ge=0, le=255)] | None
    signal: Annotated[int, Field(ge=1, le=SIGNAL_MAX)] | None
    timed_out: bool
    duration_s: Seconds
    truncated: bool = False


class FileOpened(Reply):
    """The first EVENT of `read_file`."""

    size_bytes: Count
    mode: Annotated[int, Field(ge=0, le=MODE_BITS_MAX)]


class ArchiveOpened(Reply):
    """The first EVENT of `read_archive`; an archive has neither size nor mode."""

    event: Literal["archive"]
    size_bytes: Literal[0] = 0
    mode: Literal[0] = 0


class SkippedEntry(Reply):
    """What an archive, or the tree that was made of it, has not."""

    path: Message
    reason: Message


class ArchiveWritten(Reply):
    """To `write_archive`."""

    entries: Count
    bytes: Count
    skipped: Annotated[list[SkippedEntry], Field(max_length=ENTRIES_MAX)]
    more_skipped: Count = 0


class FileWritten(Reply):
    """To `write_file`."""

    bytes: Count


class Entry(Reply):
    """To `stat`."""

    name: str
    kind: Annotated[EntryKind, Field(strict=False)]
    size_bytes: Count
    mode: Annotated[int, Field(ge=0, le=MODE_BITS_MAX)]
    uid: Annotated[int, Field(ge=0, le=ID_MAX)]
    gid: Annotated[int, Field(ge=0, le=ID_MAX)]
    modified_at_ns: Instant
    target: str | None = None
    name_b64: Base64 | None = None
    target_b64: Base64 | None = None


class Entries(Reply):
    """To `list_dir`."""

    entries: Annotated[list[Entry], Field(max_length=ENTRIES_MAX)]


class Watched(Reply):
    """To `watched`."""

    longest_s: Seconds


class Booted(Reply):
    """The EVENT by which an agent announces itself."""

    event: Literal["booted"]
    version: Word


# VMM processes


class ControlError(Reply):
    """An ERROR frame of a VMM process, and the line of one that could not begin."""

    code: Word
    message: Message = ""


class SavedFile(Reply):
    """One file of a snapshot.

    Attributes:
        name: Of the file.
        bytes: Length of the whole file.
        digest: BLAKE3 of its body, lower-case hex.
    """

    name: FileName
    bytes: Count
    digest: Digest


class CpuSeen(Reply):
    """What a guest has seen of a processor, or would be shown of one.

    Attributes:
        model: What it calls itself.
        features: Each of which another host must have.
        portable: Whether that is no more than `cpu = "portable"` has.
        physical_bits: Of an address.
        tsc_khz: Frequency of its time stamp counter; 0 if that is not known.
    """

    model: Word
    features: Annotated[tuple[Word, ...], Field(max_length=CPU_FEATURES_MAX, strict=False)]
    portable: bool
    physical_bits: Annotated[int, Field(ge=0, le=64)]
    tsc_khz: Count


class Saved(Reply):
    """To `save`.

    Attributes:
        files: What was written.
        cpu: What the guest has seen of the processor; None of a disk alone.
    """

    files: Annotated[list[SavedFile], Field(min_length=1, max_length=3)]
    cpu: CpuSeen | None = None


class Branched(Reply):
    """To `branch`: a seed that listens.

    Attributes:
        pid: The seed's process.
        pause_ms: From the first vCPU that stopped to the last that ran again; 0 for a machine
            that was paused already.
        users: Whether the seed can have its children be others, in a user namespace.
    """

    pid: Pid
    pause_ms: Milliseconds
    users: bool = False


class Derived(Reply):
    """To `derive`."""

    pid: Pid


class Retired(Reply):
    """To `retire`: with how many children the zygote ends, 0 if it ends at once."""

    children: Count


class Timed(Reply):
    """To `reset` and `identify`."""

    ms: Milliseconds


class SpawnStages(Reply):
    """How long the stages of a spawn took."""

    clone: Milliseconds
    build: Milliseconds
    resume: Milliseconds
    agent: Milliseconds
    total: Milliseconds


class MachineStatus(Reply):
    """To a machine's `status`."""

    state: Literal["running", "paused"]
    pid: Pid


class DiskMetrics(Reply):
    """The disk's part of `Metrics`.

    Attributes:
        top_bytes: What the machine has of its own, in the private layer and those frozen.
        reads: Requests of the guest.
        writes: As `reads`.
        flushes: As `reads`.
    """

    top_bytes: Count
    reads: Count
    writes: Count
    flushes: Count


class Metrics(Reply):
    """To `metrics`.

    Attributes:
        exits: VM exits handled in user space.
        rejected: Accesses that devices refused, by device.
        disk: None without a disk.
    """

    exits: Count
    rejected: Annotated[dict[Word, Count], Field(max_length=64)]
    disk: DiskMetrics | None = None


class ChildReady(Reply):
    """An EVENT of `fork`: a child whose agent has answered.

    Attributes:
        ipv6: Whether its guest has the IPv6 address that it was given, or will.
    """

    event: Literal["ready"]
    id: Word
    pid: Pid
    ms: SpawnStages
    attempts: Annotated[int, Field(ge=1, le=64)] = 1
    ipv6: bool = False


class ChildFailed(Reply):
    """An EVENT of `fork`: a child of which nothing remains."""

    event: Literal["failed"]
    id: Word
    stage: Word
    code: Word
    message: Message
    attempts: Annotated[int, Field(ge=1, le=64)] = 1


class MachineExited(Reply):
    """The last EVENT of a machine."""

    event: Literal["exited"]
    reason: Word
    message: Message | None = None


class FileDifference(Reply):
    """One file that differs between two disks."""

    path: str
    change: Literal["added", "changed", "removed"]
    kind: Annotated[str, Field(max_length=1)]
    size_bytes: Count


class Compared(Reply):
    """The line that a comparison prints."""

    changes: list[FileDifference]
    more: Count
