"""Which packs a folder of the web has: `index.json`, as protocol/packs/FORMAT.md says.

An index is not signed and need not be believed.  It says where a pack is and how long; what the
pack is, the pack says itself.  A file name in it is a name, never a path or another address.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from forkd.errors import Conflict, InvalidRequest, NotFound, PackError
from forkd.packs import limits
from forkd.packs.manifest import Digest, Tag, complaint

INDEX_FILE = "index.json"
SUFFIX = ".forkpack"

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def _version(text: str) -> str:
    if _VERSION.fullmatch(text) is None or ".." in text:
        raise ValueError("is no version")
    return text


Version = Annotated[str, AfterValidator(_version)]
FileName = Annotated[str, Field(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}\z")]


INDEX_VERSION = 1
"""The only version of an index that is read and written."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Published(_Part):
    """One version of a pack.

    Attributes:
        version: What it is called.
        file: Its file, beside the index.
        bytes: How long that is.
        digest: BLAKE3 of all of it.
        created_at: When it was pushed, UTC.
        signed_by: Public key that signed it, as hex; None if nobody did.
    """

    version: Version
    file: FileName
    bytes: Annotated[int, Field(ge=1, le=limits.PACK_FILE_BYTES_MAX)]
    digest: Digest
    created_at: datetime
    signed_by: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")] | None = None


Versions = Annotated[tuple[Published, ...], Field(max_length=limits.INDEX_VERSIONS_MAX)]


class Index(_Part):
    """The packs of one folder, by name; the last version of each is the newest."""

    version: Literal[1] = 1
    packs: dict[Tag, Versions] = Field(default_factory=dict)

    def find(self, name: str, version: str | None = None) -> Published:
        """Return one version of a pack, the newest if none is named.

        Raises:
            NotFound: There is none.
        """
        versions = self.packs.get(name, ())
        for each in reversed(versions):
            if version in {None, each.version}:
                return each
        known = ", ".join(each.version for each in versions[-5:]) or "nothing"
        wanted = name if version is None else f"{name}@{version}"
        raise NotFound(f"the index has no {wanted[:200]}; of that name it has {known}")

    def next_version(self, name: str) -> str:
        """Return a version that a pack does not have yet: the number after the greatest."""
        numbers = [int(each.version) for each in self.packs.get(name, ()) if each.version.isdigit()]
        return str(max(numbers, default=0) + 1)

    def with_version(self, name: str, published: Published) -> Index:
        """Return the index with one version more.

        Raises:
            Conflict: There is such a version, or there are too many.
        """
        versions = self.packs.get(name, ())
        if published.version in {each.version for each in versions}:
            raise Conflict(f"there is a {name}@{published.version} already")
        if len(versions) >= limits.INDEX_VERSIONS_MAX:
            raise Conflict(f"there are {limits.INDEX_VERSIONS_MAX} versions of {name} already")
        packs = dict(self.packs) | {name: (*versions, published)}
        return Index(packs=dict(sorted(packs.items())))


def encode(index: Index) -> bytes:
    """Return the index's file."""
    return index.model_dump_json(indent=1).encode() + b"\n"


def parse(raw: bytes) -> Index:
    """Read an index from anywhere.

    Raises:
        PackError: It is of a later version, malformed, too long, or names what it must not.
    """
    if len(raw) > limits.INDEX_BYTES_MAX:
        raise PackError(f"the index is longer than {limits.INDEX_BYTES_MAX} bytes", reason="limit")
    try:
        said = json.loads(raw)
        version = said.get("version") if isinstance(said, dict) else None
        if isinstance(version, int) and version > INDEX_VERSION:
            raise PackError(
                f"the index has version {version}, and this forkd reads {INDEX_VERSION}: use a "
                "later forkd",
                reason="too_new",
                version=version,
            )
        return Index.model_validate_json(raw)
    except ValidationError as error:
        raise PackError(f"the index is refused: {complaint(error)}", reason="index") from None
    except (ValueError, RecursionError):
        raise PackError("the index is refused: it is no JSON", reason="index") from None


def file_name(name: str, digest: str) -> str:
    """Return what a pack's file is called: after its content, so that pushes never collide."""
    return f"{name}-{digest[:16]}{SUFFIX}"


def parse_name(text: str) -> tuple[str, str | None]:
    """Return the name and the version in `NAME` or `NAME@VERSION`.

    Raises:
        InvalidRequest: One of them is none.
    """
    name, at, version = text.partition("@")
    return name, check_version(version) if at else None


def check_version(text: str) -> str:
    """Return `text` if it is a version.

    Raises:
        InvalidRequest: It is none.
    """
    try:
        return _version(text)
    except ValueError:
        raise InvalidRequest(
            f"a version is a letter or digit, then up to 63 of these, '.', '_', '+' and '-': "
            f"{text[:80]!r}",
            field="version",
        ) from None
