"""An image is built once, by one builder, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from forkd import programs
from forkd.errors import BuildError, ForkdError, InvalidRequest
from forkd.host.process import Cancel
from forkd.images import kernel
from forkd.images.builder import build, build_rootfs
from forkd.images.keys import image_key
from forkd.images.layout import PARTIAL_PREFIX, Cache
from forkd.images.recipe import load_recipe, parse_recipe
from forkd.images.steps import Build
from forkd.machine.build import Memory, Step, build_image
from tests.support.ext4 import check, listing, read
from tests.support.oci import regular, write_layout

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.images.builder import BuiltImage
    from forkd.model.progress import Progress

pytestmark = pytest.mark.timeout(300)

BZIMAGE = bytes(0x202) + b"HdrS" + b"\x0f\x02" + bytes(64)

DEBIAN = """
name = "small"
env = { GREETING = "hello" }
cwd = "/srv"
user = "daemon"
files = [{ source = "motd", target = "/etc/motd", mode = 0o600 }]
[image]
debian = { packages = ["python3-minimal"] }
[pip]
requirements = ["six"]
[machine]
kernel = "vmlinuz"
disk_mib = 512
[warmup]
post_fork_command = ["/bin/true"]
"""


@pytest.fixture
def recipe_folder(tmp_path: Path) -> Path:
    """A recipe that builds in under a second, and a kernel for it."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    write_layout(folder / "layout", [[regular("bin/true", b"x")]])
    (folder / "vmlinuz").write_bytes(BZIMAGE)
    (folder / "recipe.toml").write_text(
        'name = "tiny"\n[image]\noci = "layout"\n[machine]\nkernel = "vmlinuz"\ndisk_mib = 32\n'
    )
    return folder


def built(folder: Path, cache: Cache, events: list[Progress] | None = None) -> BuiltImage:
    progress = (lambda _: None) if events is None else events.append
    return build(folder, cache=cache, agent=None, progress=progress)


def test_an_unchanged_recipe_is_not_built_again_and_a_changed_one_is(
    recipe_folder: Path, tmp_path: Path
) -> None:
    cache = Cache.open(tmp_path / "cache")
    first = built(recipe_folder, cache)
    before = first.image.rootfs.stat()
    events: list[Progress] = []

    again = built(recipe_folder, cache, events)
    recipe = recipe_folder / "recipe.toml"
    recipe.write_text('cwd = "/srv"\n' + recipe.read_text())
    changed = built(recipe_folder, cache)

    assert again.image == first.image
    assert first.image.rootfs.stat() == before
    assert [event.message.endswith("from the cache") for event in events] == [True]
    assert changed.image.key != first.image.key


def test_the_image_says_what_it_is_and_its_file_system_is_sound(
    recipe_folder: Path, tmp_path: Path
) -> None:
    image = built(recipe_folder, Cache.open(tmp_path / "cache")).image

    manifest = json.loads((image.rootfs.parent / "manifest.json").read_text())
    assert (manifest["key"], manifest["disk_bytes"]) == (image.key, image.disk_bytes)
    assert image.disk_bytes == 32 << 20
    assert check(image.rootfs) == ""
    assert sorted(each.name for each in image.rootfs.parent.iterdir()) == [
        "image.json",
        "manifest.json",
        "rootfs.ext4",
    ]


def test_what_was_built_says_which_kernel_by_its_digest(
    recipe_folder: Path, tmp_path: Path
) -> None:
    built = build(
        recipe_folder, cache=Cache.open(tmp_path / "cache"), agent=None, progress=lambda _: None
    )

    assert built.kernel_version == "custom"
    assert built.kernel_digest == hashlib.sha256(BZIMAGE).hexdigest()


def test_two_builders_of_one_image_build_it_once(recipe_folder: Path, tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    events: list[Progress] = []
    builders = [
        threading.Thread(target=built, args=(recipe_folder, cache, events)) for _ in range(4)
    ]

    for each in builders:
        each.start()
    for each in builders:
        each.join(timeout=60)

    assert sum(event.message == "image unpacked" for event in events) == 1
    assert sum(event.message.endswith("from the cache") for event in events) == 3


def test_a_killed_builder_leaves_only_what_the_next_one_removes(
    recipe_folder: Path, tmp_path: Path
) -> None:
    cache = Cache.open(tmp_path / "cache")
    command = [sys.executable, "-m", "forkd.images", "build", str(recipe_folder), "--json"]
    with subprocess.Popen(  # noqa: S603 - our own arguments
        [*command, "--cache", str(cache.folder)], stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None
        for line in builder.stdout:
            if json.loads(line).get("message") == "unpacking layers":
                builder.kill()
    left = [each.name for each in cache.images.iterdir()]

    image = built(recipe_folder, cache).image

    assert left == [f"{PARTIAL_PREFIX}{image.key}"]
    assert [each.name for each in cache.images.iterdir()] == [image.key]


def test_a_cancelled_build_leaves_nothing(recipe_folder: Path, tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")

    with Cancel() as cancel, pytest.raises(BuildError, match="cancelled"):
        build(
            recipe_folder,
            cache=cache,
            agent=None,
            progress=lambda event: cancel.set() if event.stage == "rootfs" else None,
            cancel=cancel,
        )

    assert list(cache.images.iterdir()) == []


def test_files_that_change_while_they_are_built_in_are_refused(
    recipe_folder: Path, tmp_path: Path
) -> None:
    recipe = recipe_folder / "recipe.toml"
    recipe.write_text('files = [{ source = "motd", target = "/motd" }]\n' + recipe.read_text())
    motd = recipe_folder / "motd"
    motd.write_text("first")
    cache = Cache.open(tmp_path / "cache")

    def change(event: Progress) -> None:
        if event.message == "image unpacked":
            motd.write_text("second")

    with pytest.raises(BuildError, match="changed while its image was built"):
        build(recipe_folder, cache=cache, agent=None, progress=change)

    assert list(cache.images.iterdir()) == []
    assert read(built(recipe_folder, cache).image.rootfs, "/motd") == b"second"
    motd.write_text("first")
    assert read(built(recipe_folder, cache).image.rootfs, "/motd") == b"first"


def test_the_command_line_reports_a_refusal_as_one_event(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('name = "x"\nimge = {}\n')

    done = subprocess.run(  # noqa: S603 - our own arguments
        [sys.executable, "-m", "forkd.images", "build", str(tmp_path), "--json"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 1
    assert json.loads(done.stdout) == {
        "event": "failed",
        "code": "invalid_request",
        "message": "recipe has the unknown key 'imge'; did you mean 'image'?",
        "context": {"field": "imge"},
    }


def test_a_kernel_that_is_no_kernel_stops_the_build_before_anything_else(
    recipe_folder: Path, tmp_path: Path
) -> None:
    (recipe_folder / "vmlinuz").write_text("no kernel")
    cache = Cache.open(tmp_path / "cache")

    with pytest.raises(BuildError, match="is no kernel"):
        built(recipe_folder, cache)

    assert list(cache.images.iterdir()) == []


def test_a_finished_file_system_is_taken_as_it_is(recipe_folder: Path, tmp_path: Path) -> None:
    image = recipe_folder / "disk.ext4"
    subprocess.run(  # noqa: S603 - our own arguments
        ["/sbin/mke2fs", "-q", "-t", "ext4", str(image), "24M"], check=True, timeout=60
    )
    table: dict[str, Any] = {"name": "given", "image": {"rootfs": "disk.ext4"}}

    root = build_rootfs(
        parse_recipe(table, folder=recipe_folder), Cache.open(tmp_path / "cache"), Build()
    )

    assert root.disk_bytes == 24 << 20
    assert root.path.read_bytes() == image.read_bytes()


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> BuiltImage:
    """A real Debian with a file, a Python package and settings of its own."""
    folder = tmp_path_factory.mktemp("debian")
    (folder / "recipe.toml").write_text(DEBIAN)
    (folder / "motd").write_text("welcome")
    (folder / "vmlinuz").write_bytes(BZIMAGE)
    return built(folder, Cache.open(folder / "cache"))


@pytest.mark.soak(only=True)
@pytest.mark.needs("mmdebstrap", "network")
def test_debian_packages_files_and_requirements_are_all_there(debian: BuiltImage) -> None:
    image = debian.image.rootfs

    packages = listing(image, "/usr/local/lib/python3.11/dist-packages")
    assert read(image, "/etc/motd") == b"welcome"
    assert listing(image, "/etc")["motd"].mode & 0o7777 == 0o600
    assert "six.py" in packages
    assert "python3.11" in listing(image, "/usr/bin")
    assert json.loads(read(image, "/etc/forkd/image.json")) == {
        "env": {"GREETING": "hello"},
        "cwd": "/srv",
        "user": "daemon",
        "post_fork_command": ["/bin/true"],
    }


@pytest.mark.soak(only=True)
@pytest.mark.needs("mmdebstrap", "network")
def test_python_is_compiled_before_any_child_is_born(debian: BuiltImage) -> None:
    cached = listing(debian.image.rootfs, "/usr/lib/python3.11/__pycache__")

    assert any(name.startswith("os.cpython-311") for name in cached)


@pytest.mark.soak(only=True)
@pytest.mark.needs("mmdebstrap", "network")
def test_nothing_of_the_host_is_in_the_image(debian: BuiltImage) -> None:
    image = debian.image.rootfs

    for path in ("/etc/hostname", "/etc/resolv.conf", "/etc/machine-id"):
        assert read(image, path) == b""
    assert set(listing(image, "/dev")) == {".", ".."}
    assert set(listing(image, "/root")) == {".", "..", ".bashrc", ".profile"}


@pytest.mark.soak(only=True)
@pytest.mark.needs("mmdebstrap", "network")
def test_apt_works_in_the_image_and_keeps_leaving_documentation_out(debian: BuiltImage) -> None:
    image = debian.image.rootfs

    assert "apt-get" in listing(image, "/usr/bin")
    assert b"bookworm-security" in read(image, "/etc/apt/sources.list")
    assert b"path-exclude=/usr/share/man/*" in read(image, "/etc/dpkg/dpkg.cfg.d/99mmdebstrap")
    # Packages make links in this folder: without it, Java's do not install.
    assert set(listing(image, "/usr/share/man/man1")) == {".", ".."}
    assert check(image) == ""


@pytest.mark.soak(only=True)
@pytest.mark.needs("mmdebstrap", "network")
def test_the_manifest_names_the_packages_that_were_installed(debian: BuiltImage) -> None:
    manifest = json.loads((debian.image.rootfs.parent / "manifest.json").read_text())

    assert manifest["packages"]["python3-minimal"].startswith("3.11")


@pytest.mark.soak(only=True)
@pytest.mark.needs("mmdebstrap", "network")
def test_a_package_that_does_not_exist_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    table = {"name": "x", "image": {"debian": {"packages": ["forkd-no-such-package"]}}}

    with pytest.raises(ForkdError, match="forkd-no-such-package"):
        build_rootfs(parse_recipe(table, folder=tmp_path), cache, Build())

    assert list(cache.images.iterdir()) == []


@pytest.mark.soak(only=True)
@pytest.mark.needs("network")
def test_debians_kernel_is_fetched_once_and_is_a_kernel_with_modules(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")

    fetched = kernel.debian_kernel(cache, Build())
    again = kernel.debian_kernel(cache, Build())

    assert fetched == again
    assert fetched.modules is not None
    assert kernel.given_kernel(fetched.vmlinuz, fetched.modules).vmlinuz == fetched.vmlinuz
    assert sorted(each.name for each in fetched.vmlinuz.parent.iterdir()) == [
        "kernel.json",
        "modules",
        "vmlinuz",
    ]


@pytest.mark.needs("network")
def test_a_series_that_debian_has_not_is_named_with_those_it_has(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)

    with pytest.raises(BuildError, match=r"Debian has no kernel 6\.3; it has .*6\.12\."):
        kernel.debian_kernel(cache, Build(), "6.3")

    assert list(cache.kernels.iterdir()) == []


def test_waiting_for_another_builder_can_be_cancelled(recipe_folder: Path, tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    key = image_key(load_recipe(recipe_folder))

    with cache.lock(f"image-{key}"), Cancel() as cancel, pytest.raises(BuildError, match="cancel"):
        build(
            recipe_folder,
            cache=cache,
            agent=None,
            progress=lambda event: cancel.set() if "waiting for" in event.message else None,
            cancel=cancel,
        )


SMALL = """
name = "small"
image.debian.packages = []
machine.memory_mib = 4096
"""


@pytest.mark.parametrize(
    ("asked_mib", "wants_mib", "source"),
    [(None, 4096, "machine.memory_mib"), (5000, 5000, "--memory")],
)
def test_a_machine_that_does_not_fit_the_helper_machine_is_refused_before_its_image_is_built(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked_mib: int | None,
    wants_mib: int,
    source: str,
) -> None:
    (tmp_path / "recipe.toml").write_text(SMALL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(programs, "find", lambda _: tmp_path / "agent")
    steps: list[Step] = []

    with pytest.raises(InvalidRequest) as caught:
        build_image(tmp_path, steps.append, Memory(lambda: 4095, asked_mib))

    assert str(caught.value) == (
        f"the recipe small asks for {wants_mib} MiB of memory ({source}), but the helper machine "
        f"has 4095 MiB; lower {source}, or run `forkd down`, set FORKD_MACHINE_MEMORY_MIB, and run "
        "`forkd up`"
    )
    assert caught.value.context == {"field": "machine.memory_mib"}
    assert steps == []


@pytest.mark.parametrize("memory", [Memory(lambda: 4096), Memory(lambda: 128, asked_mib=128), None])
def test_a_machine_that_fits_goes_on_to_its_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Memory | None
) -> None:
    (tmp_path / "recipe.toml").write_text(f'{SMALL}machine.kernel = "{tmp_path}/no-kernel"\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(programs, "find", lambda _: tmp_path / "agent")

    with pytest.raises(BuildError, match="no-kernel"):
        build_image(tmp_path, lambda _: None, memory)
