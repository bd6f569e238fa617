"""Layers are laid over each other as OCI says, and no path of theirs leads out of the root."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError
from forkd.host.trees import Attributes
from forkd.images.members import Kind, Member
from forkd.images.rootfs import LINKS_MAX
from forkd.images.tree import NAME_BYTES_MAX, Tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd.host.trees import Entry


def folder(name: str, mode: int = 0o755) -> Member:
    return Member(name, Kind.FOLDER, Attributes(mode))


def file(name: str) -> Member:
    return Member(name, Kind.FILE, Attributes(0o644, mtime_ns=7))


def symlink(name: str, target: str) -> Member:
    return Member(name, Kind.SYMLINK, Attributes(0o777), link=target)


def hardlink(name: str, target: str) -> Member:
    return Member(name, Kind.HARDLINK, Attributes(0), link=target)


def laid(*layers: Sequence[Member], entries_max: int = 1_000) -> dict[str, Entry]:
    """Return what layers make, by path; files are numbered as they come."""
    tree, number = Tree(entries_max), 0
    for layer in layers:
        tree.next_layer()
        for member in layer:
            tree.add(member, number if member.kind is Kind.FILE else None)
            number += member.kind is Kind.FILE
    found = {entry.path: entry for entry in tree.entries()}
    for path in found:
        assert not path or path.rpartition("/")[0] in found  # folders come before what is in them
        assert not {"..", ".", ""} & set(path.split("/")) or not path
    return found


def test_later_files_replace_earlier_ones_and_folders_are_merged() -> None:
    found = laid([folder("d"), file("d/a"), file("d/b")], [folder("d", 0o700), file("d/a")])

    assert {path: entry.number for path, entry in found.items()} == {
        "": None, "d": None, "d/a": 2, "d/b": 1,
    }  # fmt: skip
    assert found["d"].attributes == Attributes(0o700)


def test_a_file_replaces_a_folder_and_a_folder_a_file() -> None:
    first = laid([file("d/a"), file("d")])
    second = laid([file("d/a"), file("d"), folder("d"), file("d/b")])

    assert first.keys() == {"", "d"}
    assert second.keys() == {"", "d", "d/b"}


def test_a_folder_replaces_a_link_to_one() -> None:
    found = laid([folder("a"), file("a/x"), symlink("b", "a"), folder("b"), file("b/y")])

    assert found.keys() == {"", "a", "a/x", "b", "b/y"}


def test_a_whiteout_removes_what_lower_layers_have() -> None:
    found = laid(
        [file("a"), file("d/x"), file("d/y/z"), file("keep")],
        [file(".wh.a"), file(".wh.d"), file("e/.wh.none"), file(".wh.none")],
    )

    assert found.keys() == {"", "keep"}


def test_a_whiteout_spares_what_its_own_layer_adds_before_or_after_it() -> None:
    found = laid(
        [file("a"), file("b"), file("d/x"), file("d/y")],
        [file("a"), file(".wh.a"), file(".wh.b"), file("b"), file("d/y"), file(".wh.d")],
    )

    assert {path: entry.number for path, entry in found.items() if entry.number is not None} == {
        "a": 4, "b": 7, "d/y": 8,
    }  # fmt: skip


def test_an_opaque_folder_keeps_only_what_its_own_layer_adds() -> None:
    found = laid(
        [folder("d", 0o700), file("d/a"), file("d/sub/b"), file("d/sub/c"), file("e")],
        [file("d/new"), file("d/sub/c"), file("d/.wh..wh..opq"), file("d/late")],
    )

    assert found.keys() == {"", "d", "d/new", "d/sub", "d/sub/c", "d/late", "e"}
    assert found["d"].attributes == Attributes(0o700)


def test_whiteouts_follow_links_within_the_root() -> None:
    found = laid(
        [file("real/a"), file("real/b"), symlink("link", "../../real")],
        [file("link/.wh.a")],
        [file("link/.wh..wh..opq"), file("link/c")],
    )

    assert found.keys() == {"", "real", "real/c", "link"}


def test_names_of_whiteouts_without_a_meaning_are_left_out() -> None:
    assert laid([file(".wh..wh.plnk"), file("a")]).keys() == {"", "a"}


@pytest.mark.parametrize("name", [".wh.", ".wh..", "d/.wh..."])
def test_a_whiteout_of_what_has_no_name_is_refused(name: str) -> None:
    with pytest.raises(BuildError, match="removes nothing that has a name"):
        laid([file("d/a")], [file(name)])


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("../../a", "a"),
        ("/a", "a"),
        ("./d/../a", "a"),
        ("d//./a", "d/a"),
        ("abs/a", "etc/a"),
        ("rel/a", "a"),
        ("dangling/a", "none/here/a"),
        ("back/a", "none/a"),
        ("chain/a", "etc/a"),
    ],
)
def test_paths_stay_in_the_root(name: str, path: str) -> None:
    found = laid([
        folder("etc"), symlink("abs", "/etc"), symlink("rel", "../../.."),
        symlink("dangling", "/../none/here"), symlink("back", "none/here/.."),
        symlink("chain", "x/../abs"), file(name),
    ])  # fmt: skip

    assert found[path].number == 0


def test_folders_that_a_path_implies_are_roots_and_as_old_as_what_is_in_them() -> None:
    assert laid([file("a/b/c")])["a/b"].attributes == Attributes(0o755, mtime_ns=7)


def test_the_root_has_attributes_and_is_a_folder() -> None:
    assert laid([folder("./", 0o700)])[""].attributes == Attributes(0o700)
    with pytest.raises(BuildError, match="root of the image is no folder"):
        laid([symlink("/", "etc")])


def test_hard_links_are_one_file_whatever_becomes_of_the_first_name() -> None:
    found = laid(
        [file("a"), hardlink("b", "/a"), symlink("s", "a"), hardlink("t", "s")],
        [file("a"), hardlink("c", "d/../b"), file(".wh.b")],
    )

    assert (found["a"].number, found["c"].number) == (1, 0)
    assert "b" not in found
    assert (found["s"].target, found["t"].same_as) == ("a", "s")


def test_hard_links_follow_links_on_their_way_but_not_at_its_end() -> None:
    found = laid([file("real/a"), symlink("way", "/real"), hardlink("b", "way/a")])

    assert found["b"].same_as == "real/a"


@pytest.mark.parametrize("target", ["none", "../../none", "d/none", "", "/", "a/b"])
def test_a_hard_link_to_what_is_not_there_is_refused(target: str) -> None:
    with pytest.raises(BuildError, match=r"'l' is a hard link to .*, which is not there"):
        laid([folder("d"), file("a"), hardlink("l", target)])


def test_a_hard_link_to_what_it_replaces_is_refused() -> None:
    for target in ("a", "a/b"):
        with pytest.raises(
            BuildError, match=f"'a' is a hard link to '{target}', which is not there"
        ):
            laid([file(target), hardlink("a", target)])


def test_a_hard_link_to_a_folder_is_refused() -> None:
    with pytest.raises(BuildError, match="'l' is a hard link to 'd', which is a folder"):
        laid([folder("d"), hardlink("l", "d")])


def test_a_name_below_a_file_is_refused_and_a_whiteout_there_is_nothing() -> None:
    assert laid([file("a")], [file("a/b/.wh.c"), file("a/.wh..wh..opq")]).keys() == {"", "a"}
    with pytest.raises(BuildError, match="'a' is no folder, but the image has names in it"):
        laid([file("a"), file("a/b/c")])


def test_so_many_links_are_followed_and_no_more() -> None:
    def chain(count: int) -> list[Member]:
        links = [symlink(f"l{each}", f"l{each + 1}") for each in range(count)]
        return [*links, folder(f"l{count}"), file("l0/a")]

    assert f"l{LINKS_MAX}/a" in laid(chain(LINKS_MAX))
    with pytest.raises(BuildError, match="too many symbolic links on the way to 'l0'"):
        laid(chain(LINKS_MAX + 1))
    with pytest.raises(BuildError, match="too many symbolic links"):
        laid([symlink("loop", "loop"), file("loop/a")])


def test_so_many_names_are_taken_and_no_more() -> None:
    assert len(laid([file("a/b/c"), file(".wh.x")], entries_max=4)) == 4
    with pytest.raises(BuildError, match="layers hold more than 3 names"):
        laid([file("a/b/c"), file(".wh.x")], entries_max=3)


def test_a_name_may_be_so_long() -> None:
    assert "ä" * (NAME_BYTES_MAX // 2) in laid([file("ä" * (NAME_BYTES_MAX // 2))])
    for name in ("ä" * (NAME_BYTES_MAX // 2 + 1), "a" * (NAME_BYTES_MAX + 1) + "/b"):
        with pytest.raises(BuildError, match=f"longer than {NAME_BYTES_MAX} bytes"):
            laid([file(name)])


def test_a_tree_may_be_deep() -> None:
    deep = "/".join("d" * 2_000)

    assert deep in laid([folder(deep)], [file("x")], entries_max=10_000)
    assert laid([folder(deep)], [file(".wh.d")], entries_max=10_000).keys() == {""}


def test_devices_have_their_kinds_and_numbers() -> None:
    device = Member("null", Kind.CHARACTER_DEVICE, Attributes(0o666), device=(1, 3))

    assert laid([device])["null"].node == (stat.S_IFCHR, 1, 3)
