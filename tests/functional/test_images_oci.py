"""OCI images become root file systems with their settings kept, and cannot reach the host."""

from __future__ import annotations

import stat
import sys
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError
from forkd.images.builder import build_rootfs
from forkd.images.layout import Cache
from forkd.images.modules import PlannedModule, PlannedModules
from forkd.images.plan import disk_mib_for
from forkd.images.recipe import parse_recipe
from forkd.images.steps import Build
from forkd.limits import BUILD_UIDS
from tests.support.ext4 import Entry, listing, read
from tests.support.hostile_package import cells
from tests.support.oci import (
    folder,
    hardlink,
    regular,
    symlink,
    write_docker_archive,
    write_layout,
    write_oci_archive,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.images.apart import Cells
    from forkd.images.builder import Rootfs

pytestmark = pytest.mark.timeout(120)

CONFIG = {"Env": ["A=image", "B=image"], "WorkingDir": "/srv", "User": "1000:1000"}


WHERE: list[Cells | None] = [None]
"""Where layers are unpacked."""


@pytest.fixture(
    autouse=True,
    params=["here", pytest.param("cell", marks=pytest.mark.needs("root", "binaries"))],
)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test build as an ordinary user does, and as a daemon that is root."""
    monkeypatch.setattr(
        sys.modules[__name__], "WHERE", [None if request.param == "here" else cells()]
    )


def build(
    tmp_path: Path, image: str, modules: PlannedModules | None = None, **more: object
) -> Rootfs:
    table = {"name": "oci", "image": {"oci": image}, "machine": {"disk_mib": 32}, **more}
    recipe = parse_recipe(table, folder=tmp_path)
    return build_rootfs(recipe, Cache.open(tmp_path / "cache"), Build(), WHERE[0], modules)


def hello(tmp_path: Path) -> Path:
    members = [folder("etc"), regular("etc/hello", b"hi", mode=0o640, owner=1000)]
    return write_layout(tmp_path / "layout", [members, [regular("etc/.wh.gone")]], CONFIG)


def test_contents_owners_and_modes_arrive_in_the_file_system(tmp_path: Path) -> None:
    hello(tmp_path)

    root = build(tmp_path, "layout")

    assert read(root.path, "/etc/hello") == b"hi"
    entry = listing(root.path, "/etc")["hello"]
    assert (entry.mode & 0o7777, entry.uid, entry.gid) == (0o640, 1000, 1000)
    assert {"dev", "proc", "run", "sys", "tmp"} <= set(listing(root.path, "/"))


def test_environment_directory_and_user_are_kept_under_those_of_the_recipe(tmp_path: Path) -> None:
    hello(tmp_path)

    root = build(tmp_path, "layout", env={"B": "recipe"}, user="root")

    assert root.config.env == {"A": "image", "B": "recipe"}
    assert (root.config.cwd, root.config.user) == ("/srv", "root")
    assert b'"A": "image"' in read(root.path, "/etc/forkd/image.json")


@pytest.mark.parametrize("write", [write_docker_archive, write_oci_archive])
def test_an_archive_gives_the_same_as_the_layout_it_was_made_from(
    tmp_path: Path, write: Callable[[Path, Path], None]
) -> None:
    write(hello(tmp_path), tmp_path / "image.tar")

    root = build(tmp_path, "image.tar")

    assert read(root.path, "/etc/hello") == b"hi"
    assert root.config.cwd == "/srv"


def test_what_is_below_run_arrives_by_either_name(tmp_path: Path) -> None:
    members = [
        folder("run/app", mode=0o2775, owner=33),
        regular("run/app/keep"),
        symlink("var/run", "/run"),
        folder("var/run/old", mode=0o1777),
    ]
    write_layout(tmp_path / "layout", [members])

    root = build(tmp_path, "layout")

    found = listing(root.path, "/run")
    assert found["app"] == Entry(stat.S_IFDIR | 0o2775, 33, 33)
    assert found["old"] == Entry(stat.S_IFDIR | 0o1777, 0, 0)
    assert "keep" in listing(root.path, "/run/app")


def one_module(tmp_path: Path) -> PlannedModules:
    path = tmp_path / "some.ko"
    path.write_bytes(b"no module, but depmod only warns of that")
    planned = PlannedModule(path=path, name="kernel/lib/some.ko")
    return PlannedModules(release="6.1.0-test", source="test", files=(planned,))


def test_kernel_modules_arrive_with_tables_and_a_modprobe(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    members = [symlink("lib", str(outside)), folder("sbin")]
    write_layout(tmp_path / "layout", [members])

    root = build(tmp_path, "layout", one_module(tmp_path))

    place = f"{outside}/modules/6.1.0-test"
    assert read(root.path, f"{place}/kernel/lib/some.ko").startswith(b"no module")
    assert {"modules.dep", "modules.alias.bin"} <= listing(root.path, place).keys()
    assert stat.S_ISLNK(listing(root.path, "/sbin")["modprobe"].mode)
    assert list(outside.iterdir()) == []
    assert build(tmp_path, "layout").key != root.key


def test_an_image_keeps_its_own_modprobe(tmp_path: Path) -> None:
    members = [folder("usr/sbin"), symlink("sbin", "usr/sbin"), regular("usr/sbin/modprobe", b"x")]
    write_layout(tmp_path / "layout", [members])

    root = build(tmp_path, "layout", one_module(tmp_path))

    assert read(root.path, "/usr/sbin/modprobe") == b"x"


def test_a_hostile_archive_stays_in_its_folder(tmp_path: Path) -> None:
    """Parent paths, absolute and relative links, and a hard link, all aimed at `outside`."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    up = "../" * 40
    members = [
        regular(f"{up}{str(outside)[1:]}/escaped", b"x"),
        regular(f"/{outside}/absolute", b"x"),
        symlink("abs", str(outside)),
        regular("abs/through", b"x"),
        symlink("rel", f"{up}{str(outside)[1:]}"),
        regular("rel/through", b"x"),
        symlink("etc", str(outside)),
        symlink("dev", str(outside)),
        symlink("usr", str(outside)),
    ]
    write_layout(tmp_path / "layout", [members])

    root = build(tmp_path, "layout")

    assert [each.name for each in outside.iterdir()] == ["secret"]
    assert "secret" not in listing(root.path, str(outside))
    assert b'"cwd"' in read(root.path, f"{outside}/forkd/image.json")


def test_a_hard_link_to_the_hosts_files_brings_nothing_in(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    write_layout(tmp_path / "layout", [[hardlink("stolen", f"{'../' * 40}{str(secret)[1:]}")]])

    with pytest.raises(BuildError, match=r"'stolen' is a hard link to .*, which is not there"):
        build(tmp_path, "layout")

    assert secret.stat().st_nlink == 1


@pytest.mark.needs("root", "binaries")
def test_an_owner_that_a_cell_has_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WHERE", [cells()])
    most = BUILD_UIDS - 1
    write_layout(tmp_path / "layout", [[regular("a", owner=most)]])
    write_layout(tmp_path / "other", [[regular("b", owner=most + 1)]])

    assert listing(build(tmp_path, "layout").path, "/")["a"].uid == most
    with pytest.raises(BuildError, match=f"'b' belongs to user {most + 1} and group {most + 1}"):
        build(tmp_path, "other")


def test_a_recipes_file_behind_a_hostile_link_lands_inside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "motd").write_text("hello")
    write_layout(tmp_path / "layout", [[symlink("etc", str(outside))]])

    root = build(tmp_path, "layout", files=[{"source": "motd", "target": "/etc/motd"}])

    assert list(outside.iterdir()) == []
    assert read(root.path, f"{outside}/motd") == b"hello"


def test_a_damaged_blob_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    layout = hello(tmp_path)
    for blob in (layout / "blobs" / "sha256").iterdir():
        blob.write_bytes(blob.read_bytes()[:-1] + b"?")

    with pytest.raises(BuildError, match=r"cannot unpack the image oci:.* was changed: sha256:"):
        build(tmp_path, "layout")

    assert list((tmp_path / "cache" / "images").iterdir()) == []


@pytest.mark.parametrize("length", [1_000, 3_000, -300])
def test_an_archive_that_is_cut_is_one_clear_error_and_nothing_is_left(
    tmp_path: Path, length: int
) -> None:
    write_docker_archive(hello(tmp_path), tmp_path / "image.tar")
    archive = tmp_path / "image.tar"
    archive.write_bytes(archive.read_bytes().rstrip(b"\0")[:length])

    with pytest.raises(BuildError, match=r"image\.tar"):
        build(tmp_path, "image.tar")

    assert list((tmp_path / "cache" / "images").glob("*")) == []


def test_an_unreachable_registry_is_one_clear_error(tmp_path: Path) -> None:
    """Port 9 of this machine is closed, so the answer comes at once and without a network."""
    with pytest.raises(BuildError, match=r"cannot reach 127\.0\.0\.1:9 for 127\.0\.0\.1:9/x"):
        build(tmp_path, "127.0.0.1:9/x")


def test_an_image_larger_than_its_disk_says_so(tmp_path: Path) -> None:
    noise = bytes(range(256)) * 4096 * 40
    write_layout(tmp_path / "layout", [[regular("big", noise)]])

    with pytest.raises(BuildError, match=r"does not fit into 32 MiB; raise machine\.disk_mib"):
        build(tmp_path, "layout")

    assert list((tmp_path / "cache" / "images").iterdir()) == []


def test_a_disk_that_nobody_chose_has_room_for_its_image(tmp_path: Path) -> None:
    small, large = disk_mib_for(0), disk_mib_for(4 << 30)

    assert (small, large) == (2_048, 6_144 + 512)
    hello(tmp_path)
    table = {"name": "oci", "image": {"oci": "layout"}}
    recipe = parse_recipe(table, folder=tmp_path)
    root = build_rootfs(recipe, Cache.open(tmp_path / "cache"), Build(), WHERE[0])
    assert root.disk_bytes >> 20 == small


def test_a_disk_has_an_inode_for_each_8_kib_and_their_tables_are_holes(tmp_path: Path) -> None:
    hello(tmp_path)

    image = build(tmp_path, "layout", machine={"disk_mib": 2_048}).path

    with image.open("rb") as file:
        superblock = file.read(2048)[1024:]
    free = int.from_bytes(superblock[0x10:0x14], "little")
    assert free >= 262_144
    assert image.stat().st_blocks * 512 < 4 << 20


def test_layers_that_say_they_are_terabytes_are_refused_before_they_are_unpacked(
    tmp_path: Path,
) -> None:
    """A sparse member says how large it is in its header, whatever the archive's own size."""
    info, _ = regular("huge")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "huge",
        "GNU.sparse.realsize": str(1 << 40),
    }
    sparse_map = b"1\n0\n0\n".ljust(512, b"\0")
    info.size = len(sparse_map)
    write_layout(tmp_path / "layout", [[(info, sparse_map)]])

    with pytest.raises(BuildError, match="layers hold more than 134217728 bytes"):
        build(tmp_path, "layout")

    assert list((tmp_path / "cache" / "images").iterdir()) == []
