"""Layers become the files that umoci makes of them, whatever is in them, and nothing beside."""

from __future__ import annotations

import gzip
import json
import os
import random
import stat
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest
import zstandard

from forkd.errors import BuildError, HostError
from forkd.images import unpacking
from forkd.images.stored import LAYOUT, Source
from forkd.images.unpacking import LayerLimits, unpack
from tests.support import oci
from tests.support.oci import folder, hardlink, regular, symlink, write_layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.oci import Member

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(120)]

SEEDS = 60

NAMES = "abcd"

Found = dict[str, tuple[int, int, int, bytes | str | None, tuple[tuple[str, bytes], ...], int]]


def silent(_: float) -> None:
    """Tell nobody."""


def unpacked(layout: Path, to: Path, limits: LayerLimits | None = None) -> Path:
    unpack(Source(LAYOUT, layout), to, limits or LayerLimits(1 << 20), silent)
    return to / unpacking.ROOTFS_NAME


def by_umoci(layout: Path, to: Path) -> Path:
    """Have umoci unpack the only image of a layout, which it must be told the name of."""
    index = json.loads((layout / "index.json").read_text())
    index["manifests"][0]["annotations"] = {"org.opencontainers.image.ref.name": "x"}
    (layout / "index.json").write_text(json.dumps(index))
    command = ["umoci", "unpack", "--image", f"{layout}:x", str(to)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)  # noqa: S603 - ours
    return to / "rootfs"


def seen(root: Path) -> tuple[Found, dict[str, int], list[list[str]]]:
    """Return what is in a folder by path, the times of it, and which names are one file."""
    found: Found = {}
    times: dict[str, int] = {}
    same: dict[int, list[str]] = {}
    for path in sorted(root.rglob("*")):
        status, name = path.lstat(), str(path.relative_to(root))
        content: bytes | str | None = None
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        names = os.listxattr(path, follow_symlinks=False)
        xattrs = tuple((each, os.getxattr(path, each, follow_symlinks=False)) for each in names)
        owner = status.st_uid, status.st_gid
        found[name] = status.st_mode, *owner, content, tuple(sorted(xattrs)), status.st_rdev
        times[name] = status.st_mtime_ns
        if not stat.S_ISDIR(status.st_mode):
            same.setdefault(status.st_ino, []).append(name)
    return found, times, sorted(each for each in same.values() if len(each) > 1)


def path(source: random.Random) -> str:
    return "/".join(source.choice(NAMES) for _ in range(source.randint(1, 4)))


def member(source: random.Random, known: list[str]) -> Member:
    """Return anything that may be in a layer, honest or not."""
    name = path(source)
    up = source.choice(["", "/", "../", "../../../", "./", "../a/../"])
    match source.choice("ddddffffsshhwwwo"):
        case "d":
            made = folder(
                name, mode=source.choice([0o755, 0o700, 0o1777]), owner=source.choice([0, 5])
            )
        case "f":
            mode = source.choice([0o644, 0o4755, 0o600])
            data = source.randbytes(source.randint(0, 9))
            made = regular(up + name, data, mode=mode, owner=source.choice([0, 7]))
        case "s":
            made = symlink(name, up + path(source))
        case "h":
            made = hardlink(name, up + source.choice(known or [name]))
        case "w":
            above, _, last = name.rpartition("/")
            made = regular(f"{above}/.wh.{last}")
        case _:
            made = regular(f"{name}/.wh..wh..opq")
    known.append(name)
    made[0].mtime = source.randint(1, 10**9)
    return made


@pytest.mark.needs("umoci")
@pytest.mark.timeout(300)
def test_any_layers_become_what_umoci_makes_of_them(tmp_path: Path) -> None:
    both_made = 0
    for seed in range(SEEDS):
        source, known = random.Random(seed), list[str]()  # noqa: S311 - repeatable
        layers = [
            [member(source, known) for _ in range(source.randint(1, 8))]
            for _ in range(source.randint(1, 3))
        ]
        layout = write_layout(tmp_path / f"{seed}", layers)
        try:
            theirs = by_umoci(layout, tmp_path / f"{seed}-umoci")
        except subprocess.CalledProcessError:
            with pytest.raises((BuildError, HostError)):
                unpacked(layout, tmp_path / f"{seed}-ours")
            continue
        ours = unpacked(layout, tmp_path / f"{seed}-ours")
        assert seen(ours)[::2] == seen(theirs)[::2], f"seed {seed}: {layers}"
        both_made += 1
    assert both_made > SEEDS / 3


def special(name: str, kind: bytes, *device: int) -> Member:
    info, data = regular(name, mode=0o620, owner=3)
    info.type = kind
    info.devmajor, info.devminor = device or (0, 0)
    return info, data


@pytest.mark.needs("umoci")
def test_attributes_are_those_that_umoci_gives(tmp_path: Path) -> None:
    capability, _ = regular("ping", b"program", mode=0o755, owner=1)
    capability.pax_headers = {
        "SCHILY.xattr.user.note": "a note",
        "SCHILY.xattr.security.capability": "\x01\0\0\x02\0\x20" + "\0" * 14,
    }
    members = [
        folder("setgid", mode=0o2775, owner=33),
        regular("setuid", b"x", mode=0o4755, owner=12),
        symlink("link", "/nowhere"),
        (capability, b"program"),
        special("null", tarfile.CHRTYPE, 1, 3),
        special("disk", tarfile.BLKTYPE, 8, 1),
        special("pipe", tarfile.FIFOTYPE),
        hardlink("again", "setuid"),
        regular("ä" * 100 + "/" + "b" * 200, b"y"),
        regular("large", owner=2_000_000, data=bytes(200_000)),
    ]
    for number, (info, _) in enumerate(members, start=1):
        info.mtime = number * 10_000_000
    layout = write_layout(tmp_path / "layout", [members])

    ours, theirs = unpacked(layout, tmp_path / "ours"), by_umoci(layout, tmp_path / "theirs")

    (found, times, same), (wanted, wanted_times, wanted_same) = seen(ours), seen(theirs)
    assert found == wanted
    assert dict(found["ping"][4]).keys() == {"user.note", "security.capability"}
    assert same == wanted_same == [["again", "setuid"]]
    implied = "ä" * 100
    assert times | {implied: 0} == wanted_times | {implied: 0}


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_packed_layers_are_unpacked(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    layout = write_layout(tmp_path / "layout", [[regular("a", bytes(100_000))]])
    oci.pack_layers(layout, pack)

    assert seen(unpacked(layout, tmp_path / "ours"))[0]["a"][3] == bytes(100_000)


def test_a_layer_that_is_not_what_the_configuration_says_is_refused(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [[regular("a", b"honest")]])
    oci.pack_layers(layout, lambda data: gzip.compress(data.replace(b"honest", b"hacked")))

    with pytest.raises(BuildError, match="a layer is not what the configuration says"):
        unpacked(layout, tmp_path / "ours")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: gzip.compress(data)[:-9], "what gzip has packed is cut short"),
        (lambda data: data[:700], "cut short, in 'a'"),
        (lambda data: b"x" + data, "no tar archive"),
        (lambda data: b"BZh" + data, "packed with bzip2"),
    ],
)
def test_a_layer_that_is_damaged_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], said: str
) -> None:
    layout = write_layout(tmp_path / "layout", [[regular("a", bytes(1_000))]])
    oci.pack_layers(layout, change)

    with pytest.raises(BuildError, match=f"a layer of the image cannot be read: .*{said}"):
        unpacked(layout, tmp_path / "ours")


def test_a_blob_that_was_changed_is_refused(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [[regular("a", b"1")]])
    blob = oci.blob_at(layout, oci.manifest_of(layout)["layers"][0]["digest"])
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")

    with pytest.raises(BuildError, match=r"the image was changed: sha256:.* another digest"):
        unpacked(layout, tmp_path / "ours")


def test_one_name_or_byte_past_the_limit_is_refused(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [[regular("a", b"12")], [regular("b", b"3")]])

    assert unpack(Source(LAYOUT, layout), tmp_path / "exact", LayerLimits(3, 2), silent) == 3
    with pytest.raises(BuildError, match="layers hold more than 2 bytes"):
        unpacked(layout, tmp_path / "bytes", LayerLimits(2, 2))
    with pytest.raises(BuildError, match="layers hold more than 1 names"):
        unpacked(layout, tmp_path / "names", LayerLimits(3, 1))


def test_so_much_may_be_behind_the_end_of_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = write_layout(tmp_path / "layout", [[regular("a")]])
    behind = 10_240 - 512 - 512  # what tarfile writes: its member, and the block that ends it

    monkeypatch.setattr(unpacking, "TRAILER_BYTES_MAX", behind)
    unpacked(layout, tmp_path / "exact")
    monkeypatch.setattr(unpacking, "TRAILER_BYTES_MAX", behind - 1)
    with pytest.raises(BuildError, match=f"more than {behind - 1} bytes are behind the end"):
        unpacked(layout, tmp_path / "more")


def test_a_sparse_file_keeps_its_holes(tmp_path: Path) -> None:
    info, _ = regular("holes")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "holes",
        "GNU.sparse.realsize": str(64 << 20),
    }
    data = b"2\n0\n3\n1048576\n3\n".ljust(512, b"\0") + b"abcdef"
    info.size = len(data)
    layout = write_layout(tmp_path / "layout", [[(info, data), regular("next", b"x")]])

    root = unpacked(layout, tmp_path / "ours", LayerLimits(1 << 30))

    status = (root / "holes").stat()
    assert (status.st_size, status.st_blocks < 1_000) == (64 << 20, True)
    with (root / "holes").open("rb") as file:
        assert file.read(4) == b"abc\0"
        file.seek(1 << 20)
        assert file.read(4) == b"def\0"
    assert (root / "next").read_bytes() == b"x"


def test_nothing_but_the_root_and_the_configuration_stays(tmp_path: Path) -> None:
    members = [folder("a"), regular("a/b", b"1"), regular("a/b", b"2")]
    layout = write_layout(tmp_path / "layout", [members, [regular(".wh.a")]])

    unpacked(layout, tmp_path / "ours")

    assert sorted(each.name for each in (tmp_path / "ours").iterdir()) == ["config.json", "rootfs"]
