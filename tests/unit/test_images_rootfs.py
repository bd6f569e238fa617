"""What we put into a root file system stays in it, whatever links the image has."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from forkd.errors import BuildError
from forkd.images import rootfs
from forkd.images.rootfs import check_ext4, inodes_for, install, install_tree, resolve


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def put(root: Path, target: str, data: bytes = b"x", mode: int = 0o644) -> None:
    install(root, PurePosixPath(target), data, mode)


def test_a_file_is_installed_with_its_mode_and_the_folders_above_it(root: Path) -> None:
    put(root, "/etc/forkd/image.json", b"{}", 0o600)

    file = root / "etc" / "forkd" / "image.json"
    assert (file.read_bytes(), file.stat().st_mode & 0o7777) == (b"{}", 0o600)
    assert file.parent.stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("target", ["/", "..", "../../..", "/../../..", "/nowhere/../.."])
def test_a_link_to_a_folder_outside_leads_to_the_folder_of_that_name_inside(
    root: Path, tmp_path: Path, target: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "etc").symlink_to(f"{target}{outside}")

    put(root, "/etc/passwd")

    assert list(outside.iterdir()) == []
    assert (root / str(outside).lstrip("/") / "passwd").read_bytes() == b"x"


def test_a_link_in_place_of_the_file_is_replaced_not_followed(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (root / "file").symlink_to(victim)

    put(root, "/file")

    assert victim.read_bytes() == b"mine"
    assert not (root / "file").is_symlink()


def test_a_relative_link_is_followed_from_where_it_is(root: Path) -> None:
    (root / "usr" / "lib").mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    (root / "usr" / "up").symlink_to("../lib")

    assert resolve(root, PurePosixPath("/usr/up/x")) == root / "usr" / "lib" / "x"


def chain_of_links(root: Path, count: int) -> None:
    for number in range(count):
        (root / f"l{number}").symlink_to(f"l{number + 1}")
    (root / f"l{count}").mkdir()


def test_as_many_links_as_the_kernel_takes_are_followed_and_no_more(root: Path) -> None:
    chain_of_links(root, rootfs.LINKS_MAX + 1)

    put(root, "/l1/x")
    with pytest.raises(BuildError, match="too many symbolic links"):
        put(root, "/l0/x")


def test_a_circle_of_links_is_refused(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")

    with pytest.raises(BuildError, match="too many symbolic links"):
        put(root, "/a/x")


def test_a_file_where_a_folder_should_be_is_refused(root: Path) -> None:
    put(root, "/etc")

    with pytest.raises(BuildError, match="/etc is not a folder"):
        put(root, "/etc/passwd")


def test_a_folder_where_the_file_should_be_is_refused(root: Path) -> None:
    (root / "etc").mkdir()

    with pytest.raises(BuildError, match="/etc is a folder in the image"):
        put(root, "/etc")


def test_a_tree_is_installed_without_its_links(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "run").write_text("#!")
    (source / "bin" / "run").chmod(0o700)
    (source / "data").write_text("d")
    (source / "secret").symlink_to("/etc/shadow")

    install_tree(root, PurePosixPath("/opt"), source)

    opt = root / "opt"
    assert sorted(each.name for each in opt.rglob("*")) == ["bin", "data", "run"]
    assert (opt / "bin" / "run").stat().st_mode & 0o777 == 0o755
    assert (opt / "data").stat().st_mode & 0o777 == 0o644


def ext4(size_bytes: int = 8192) -> bytes:
    data = bytearray(size_bytes)
    data[1024 + 0x38 : 1024 + 0x3A] = b"\x53\xef"
    return bytes(data)


def test_a_given_file_system_tells_its_size(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(ext4())

    assert check_ext4(tmp_path / "image") == 8192


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "no ext4"), (bytes(8192), "no ext4"), (ext4() + b"x", "no whole number")],
)
def test_a_file_that_is_no_file_system_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "image").write_bytes(data)

    with pytest.raises(BuildError, match=words):
        check_ext4(tmp_path / "image")


def test_a_missing_file_system_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no root file system at"):
        check_ext4(tmp_path / "image")


def test_an_absolute_link_deep_in_the_image_starts_again_at_its_root(root: Path) -> None:
    (root / "usr" / "share").mkdir(parents=True)
    (root / "usr" / "share" / "conf").symlink_to("/etc")

    put(root, "/usr/share/conf/file")

    assert (root / "etc" / "file").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("entries", "disk_mib", "inodes"),
    [
        (20_000, 2_048, 20_000 + 262_144),
        (300_000, 2_048, 524_288),
        (524_288 - 16, 2_048, 524_288),
        (10, 1_024, 10 + 131_072),
        (10, 32, 8_192),
    ],
)
def test_a_sandbox_has_inodes_in_proportion_besides_those_of_its_image(
    entries: int, disk_mib: int, inodes: int
) -> None:
    assert inodes_for(entries, disk_mib) == inodes


def test_an_image_of_more_files_than_there_can_be_inodes_says_so() -> None:
    with pytest.raises(BuildError, match=r"524288 inodes; raise machine\.disk_mib"):
        inodes_for(524_288 - 15, 2_048)
