"""`forkd pack`, `unpack`, `push` and `pull`: snapshots between hosts.

The daemon writes and checks packs; signing them, and saying whose signature is believed, is the
user's part, and so are the web and the files on this side.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from forkd.cli import render
from forkd.cli.context import shared
from forkd.cli.keys import DEFAULT, keyring
from forkd.cli.options import Json, Tag
from forkd.cli.units import shown_size
from forkd.errors import Conflict, HostError, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forkd import Client
    from forkd.cli.help_text import Commands
    from forkd.packs.container import Head
    from forkd.wire import v2_packs

READ_BYTES = 1024 * 1024
TOLD_BYTES = 64 * 1024 * 1024
"""How far a pack comes between two lines that say so."""

KeyName = Annotated[
    str | None, typer.Option("--key", metavar="NAME", help="The key to sign the pack with.")
]
Unsigned = Annotated[bool, typer.Option("--unsigned", help="Do not sign the pack.")]
As = Annotated[
    str | None, typer.Option("--as", metavar="TAG", help="Name for the imported snapshot.")
]
AllowUnsigned = Annotated[
    bool,
    typer.Option(
        "--allow-unsigned", help="Accept unsigned packs, and packs signed by untrusted keys."
    ),
]
PlainHttp = Annotated[
    bool,
    typer.Option("--plain-http", help="Ask the registry without TLS, though it is elsewhere."),
]


def register(app: Commands) -> None:
    """Add the commands of this file."""
    for command in (pack, unpack, push, pull):
        app.command()(command)


def pack(  # noqa: PLR0913 - a command has that many options
    tag: Tag,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write (TAG.forkpack unless set)."),
    ] = None,
    *,
    key: KeyName = None,
    unsigned: Unsigned = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json: Json = False,
) -> None:
    """Export a snapshot and its ancestors to one signed file.

    Examples:
      forkd pack numpy
      forkd pack numpy -o /backup/numpy.forkpack --key release
    """
    shared.as_json = json
    path = output or Path(f"{tag}.forkpack")
    if path.exists() and not force:
        raise Conflict(f"{path} exists; --force replaces it")
    signer = _key_name(key, unsigned=unsigned, as_json=json)
    with (
        shared.client(as_json=json) as client,
        render.steps(as_json=json) as steps,
        _packed(client, tag, signer) as (head, pieces),
        _written(path) as file,
    ):
        size = sum(map(file.write, _told(pieces, steps, "pack", f"packing {tag}")))
    said = {"file": str(path), "bytes": size, **_signer(head)}
    _report(f"{path}: {shown_size(size)}", said, as_json=json)


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pack; - reads standard input.")],
    *,
    as_: As = None,
    allow_unsigned: AllowUnsigned = False,
    json: Json = False,
) -> None:
    """Import a pack: all of its snapshots, or none.

    Examples:
      forkd unpack numpy.forkpack
      forkd unpack numpy.forkpack --as numpy-2
    """
    with shared.client(as_json=json) as client, _opened(file) as source:
        pieces = iter(lambda: source.read(READ_BYTES), b"")
        taken = _take(client, pieces, as_, allow_unsigned=allow_unsigned, as_json=json)
    _report_taken(taken, as_json=json)


def push(  # noqa: PLR0913 - as above
    tag: Tag,
    url: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="REGISTRY/NAME:TAG, or URL of a file or folder (ends with /).",
        ),
    ],
    *,
    version: Annotated[
        str | None, typer.Option(help="Version in the folder (the next one unless set).")
    ] = None,
    key: KeyName = None,
    unsigned: Unsigned = False,
    cosign_key: Annotated[
        Path | None,
        typer.Option(help="In a registry: sign as cosign does, with this secret key (PEM)."),
    ] = None,
    plain_http: PlainHttp = False,
    json: Json = False,
) -> None:
    """Pack a snapshot and upload it to a registry or a server.

    A registry is sent only what it lacks, with the credentials of docker or podman. To a server,
    FORKD_PACKS_TOKEN is sent as a bearer token.

    Examples:
      forkd push numpy registry.example.com/team/numpy:1.0
      forkd push numpy https://packs.example.com/team/
    """
    shared.as_json = json
    signer = _key_name(key, unsigned=unsigned, as_json=json)
    with shared.client(as_json=json) as client, render.steps(as_json=json) as steps:
        pushed = client.snapshots.push(
            tag,
            url,
            version=version,
            key=signer,
            cosign_key=cosign_key,
            plain_http=plain_http,
            on_progress=steps,
        )
    shown = {"tag": pushed.tag, "links": pushed.links, "signed_by": pushed.signed_by}
    if pushed.layers is not None:
        said = {
            "reference": pushed.target,
            "digest": pushed.digest,
            "bytes": pushed.bytes,
            "sent_bytes": pushed.sent_bytes,
            "layers": pushed.layers,
            "sent_layers": pushed.sent_layers,
            "cosign": cosign_key is not None,
        }
        sent = shown_size(pushed.sent_bytes or 0)
        text = f"{pushed.target}: {shown_size(pushed.bytes)}, of which {sent} were sent"
    else:
        said = {"url": pushed.target, "bytes": pushed.bytes}
        if pushed.version is not None:
            said |= {"name": tag, "version": pushed.version, "digest": pushed.digest}
        name = tag if pushed.version is None else f"{tag}@{pushed.version}"
        text = f"{name}: {shown_size(pushed.bytes)}"
    _report(text, said | shown, as_json=json)


def pull(  # noqa: PLR0913 - as above
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="REGISTRY/NAME:TAG, a URL, or NAME or NAME@VERSION of a folder."
        ),
    ],
    *,
    folder: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="URL", help="URL of the folder (FORKD_PACKS_URL unless set)."
        ),
    ] = None,
    as_: As = None,
    allow_unsigned: AllowUnsigned = False,
    cosign_key: Annotated[
        Path | None,
        typer.Option(help="Refuse what has no cosign signature by this public key (PEM)."),
    ] = None,
    plain_http: PlainHttp = False,
    json: Json = False,
) -> None:
    """Download a pack from a registry or a server, and import it.

    Examples:
      forkd pull registry.example.com/team/numpy:1.0
      forkd pull numpy@3 --from https://packs.example.com/team/
      forkd pull https://packs.example.com/team/numpy.forkpack
    """
    with shared.client(as_json=json) as client, render.steps(as_json=json) as steps:
        taken = client.snapshots.pull(
            source,
            as_,
            folder=folder,
            allow_unsigned=allow_unsigned,
            cosign_key=cosign_key,
            plain_http=plain_http,
            on_progress=steps,
        )
    _report_taken(taken, as_json=json)


@contextmanager
def _packed(client: Client, tag: str, key: str | None) -> Iterator[tuple[Head, Iterator[bytes]]]:
    """Give a snapshot's pack as it comes, signed on the way."""
    from forkd.packs.container import Pieces, read_head  # noqa: PLC0415 - slow to load

    with client.snapshots.pack(tag) as pieces:
        source = Pieces(pieces)
        head = read_head(source)
        head = head if key is None else head.signed(keyring(as_json=shared.as_json).secret(key))
        yield head, chain([head.encode()], source.rest())


def _take(
    client: Client,
    pieces: Iterable[bytes],
    name: str | None,
    *,
    allow_unsigned: bool,
    as_json: bool,
) -> v2_packs.Unpacked:
    """Send a pack to the daemon, unless nobody who signed it is trusted."""
    from forkd.packs.container import checked  # noqa: PLC0415 - slow to load

    trusted = keyring(as_json=as_json).trusted()
    head, rest = checked(pieces, trusted, allow_unsigned=allow_unsigned)
    tag = name or head.manifest.head.tag
    with render.steps(as_json=as_json) as steps:
        whole = _told(chain([head.encode()], rest), steps, "unpack", f"unpacking {tag}")
        return client.snapshots.unpack(tag, whole, trusted=trusted, allow_unsigned=allow_unsigned)


def _key_name(name: str | None, *, unsigned: bool, as_json: bool) -> str | None:
    """Return the name of the key to sign with, which exists; None for no signature."""
    if unsigned:
        if name is not None:
            raise InvalidRequest("--key and --unsigned exclude each other", field="key")
        return None
    try:
        keyring(as_json=as_json).secret(name or DEFAULT)
    except NotFound as error:
        raise InvalidRequest(f"{error}; --unsigned does without", field="key") from None
    return name or DEFAULT


@dataclass(frozen=True)
class _Step:
    stage: str
    message: str
    fraction: float | None = None


def _told(
    pieces: Iterable[bytes], steps: render.Steps, stage: str, message: str
) -> Iterator[bytes]:
    """Pass pieces on, and say now and then how many there were."""
    steps(_Step(stage, message))
    size = 0
    for piece in pieces:
        if size // TOLD_BYTES != (size + len(piece)) // TOLD_BYTES:
            steps(_Step(stage, f"{message}, {shown_size(size + len(piece))}"))
        size += len(piece)
        yield piece


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}") from error
    with file:
        yield file


@contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    """Give a file that has its name once it is whole, and is gone if that never happens."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror}") from error
    aside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise HostError(f"cannot write {path}: {error.strerror}") from error
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _signer(head: Head) -> dict[str, Any]:
    return {
        "tag": head.manifest.head.tag,
        "links": [link.tag for link in head.manifest.links],
        "signed_by": None if head.key is None else head.key.hex(),
    }


def _report(text: str, said: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        render.document(said)
    else:
        render.note(text)


def _report_taken(taken: v2_packs.Unpacked, *, as_json: bool) -> None:
    if as_json:
        render.document(taken)
        return
    links = ", ".join(f"{each.tag}{' (was here)' * each.reused}" for each in taken.links)
    render.note(f"snapshot {taken.snapshot.tag}: {links}")
    if taken.missing_features:
        missing = ", ".join(taken.missing_features[:10])
        render.note(f"this host's processor lacks what its guest saw, so it may not run: {missing}")
