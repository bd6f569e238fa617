"""An image gets the kernel modules that its recipe wants, with all that these need."""

from __future__ import annotations

import lzma
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError
from forkd.images import modules
from forkd.images.kernel import Kernel

if TYPE_CHECKING:
    from pathlib import Path

RELEASE = "6.1.0-test"

TABLE = {
    "kernel/fs/fuse/fuse.ko": "",
    "kernel/net/bridge/br_netfilter.ko": "kernel/net/bridge/bridge.ko kernel/net/llc/llc.ko",
    "kernel/net/bridge/bridge.ko": "kernel/net/llc/llc.ko",
    "kernel/net/llc/llc.ko": "",
    "kernel/drivers/net/wireguard/wireguard.ko": "",
    "kernel/drivers/gpu/card-driver.ko": "kernel/drivers/gpu/helper.ko.xz",
    "kernel/drivers/gpu/helper.ko.xz": "",
}

DEFAULT = {
    "kernel/fs/fuse/fuse.ko",
    "kernel/net/bridge/br_netfilter.ko",
    "kernel/net/bridge/bridge.ko",
    "kernel/net/llc/llc.ko",
    "kernel/drivers/net/wireguard/wireguard.ko",
}


def content(release: str, name: str = "") -> bytes:
    return b"\x7fELF\0license=GPL\0vermagic=%s SMP mod_unload \0%s" % (
        release.encode(),
        name.encode(),
    )


def kernel(folder: Path, *, version: str = "custom", release: str = RELEASE) -> Kernel:
    lines = [f"{path}: {needs}\n" for path, needs in TABLE.items()]
    (folder / "modules.dep").write_text("".join(lines))
    (folder / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\n")
    for name in TABLE:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content(release, name)
        path.write_bytes(lzma.compress(data) if name.endswith(".xz") else data)
    return Kernel(version, folder / "vmlinuz", folder)


def names(chosen: modules.PlannedModules | None) -> set[str]:
    assert chosen is not None
    return {each.name for each in chosen.files} - {"modules.builtin"}


def test_by_default_there_is_what_needs_no_hardware(tmp_path: Path) -> None:
    chosen = modules.choose(kernel(tmp_path), "default")

    assert names(chosen) == DEFAULT


def test_all_is_all(tmp_path: Path) -> None:
    assert names(modules.choose(kernel(tmp_path), "all")) == set(TABLE)


def test_a_list_brings_what_its_modules_need_and_either_dash_will_do(tmp_path: Path) -> None:
    given = kernel(tmp_path)

    assert names(modules.choose(given, ("br-netfilter",))) == {
        name for name in TABLE if name.startswith(("kernel/net/bridge", "kernel/net/llc"))
    }
    assert names(modules.choose(given, ("card_driver", "ext4"))) == {
        name for name in TABLE if "gpu" in name
    }


def test_there_are_none_if_none_are_wanted_or_the_kernel_has_none(tmp_path: Path) -> None:
    given = kernel(tmp_path)

    assert modules.choose(given, "none") is None
    assert modules.choose(given, ()) is None
    assert modules.choose(given, ("ext4",)) is None
    assert modules.choose(Kernel("custom", tmp_path, None), "default") is None


def test_a_module_that_the_kernel_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no module wireguarf"):
        modules.choose(kernel(tmp_path), ("wireguarf",))


def test_modules_of_a_kernel_that_came_without_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"machine\.modules"):
        modules.choose(Kernel("custom", tmp_path, None), ("fuse",))


def test_the_release_is_what_the_modules_say(tmp_path: Path) -> None:
    chosen = modules.choose(kernel(tmp_path), ("helper",))

    assert chosen is not None
    assert chosen.release == RELEASE


@pytest.mark.parametrize("release", ["", "..", "../../etc", "a/b", "x" * 65])
def test_a_release_that_is_no_name_of_a_folder_is_refused(tmp_path: Path, release: str) -> None:
    with pytest.raises(BuildError, match="does not say which kernel"):
        modules.choose(kernel(tmp_path, release=release), "default")


def test_other_contents_are_another_source_unless_the_version_says_it(tmp_path: Path) -> None:
    given = kernel(tmp_path)
    first = modules.choose(given, ("fuse",))
    (tmp_path / "kernel/fs/fuse/fuse.ko").write_bytes(content(RELEASE, "changed"))
    second = modules.choose(given, ("fuse",))

    assert first is not None
    assert second is not None
    assert first.described() != second.described()
    debian = modules.choose(Kernel("6.1-1", tmp_path, tmp_path), ("fuse",))
    assert debian is not None
    assert debian.source == "6.1-1"


@pytest.mark.parametrize("line", ["../../etc/shadow.ko:", "/etc/shadow.ko:", "a.ko: ../b.ko"])
def test_a_table_that_names_other_files_is_refused(tmp_path: Path, line: str) -> None:
    given = kernel(tmp_path)
    with (tmp_path / "modules.dep").open("a") as table:
        table.write(f"{line}\n")

    with pytest.raises(BuildError, match="outside of its folder"):
        modules.choose(given, "default")
