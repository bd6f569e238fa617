"""A newcomer's way: a fresh root with Python only, a wheel, `forkd quickstart`, and nothing left.

The root is Debian's, in namespaces.  Where this host's KVM runs no stock guest, which is so in
nearly every such root, the forks are in the helper machine.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.machine.kernel import default_cache
from tests.support import fresh_root
from tests.support.docs import ROOT
from tests.support.ext4 import read
from tests.support.oci import folder, regular, write_layout
from tests.support.wheels import built

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fresh_root import FreshRoot

pytestmark = [
    pytest.mark.needs("root", "binaries", "mmdebstrap", "network"),
    pytest.mark.timeout(1800),
]

ENVIRONMENT = "/opt/forkd"
FORKD = f"{ENVIRONMENT}/bin/forkd"

DOCTOR_NAMES = ("qemu-system-x86", "busybox-static", "kmod", "mmdebstrap")
"""The packages that `forkd doctor` names in a root with Python only."""

CACHE = "/root/.cache/forkd"

BUILD = f"{ENVIRONMENT}/bin/python -m forkd.images build"

WITHOUT_APT = (
    "/usr/bin/apt* /usr/bin/dpkg* /usr/sbin/dpkg* /usr/lib/apt /usr/lib/dpkg /usr/share/dpkg "
    "/etc/apt /etc/dpkg /var/lib/apt /var/lib/dpkg /var/cache/apt"
)
"""What makes a root one of Debian's package manager."""

RECIPE = """\
name = "layout"

[image]
oci = "layout"
"""

OF_TRIXIE = "e2fsprogs"
"""What a root of Debian 13 lacks besides; in one of Debian 12 it is."""

BY_XDG = {"/root/.cache", "/root/.config", "/root/.local", "/root/.local/state"}
"""Folders that programs make for their own below them, and that nobody removes."""

BY_GROUPADD = {"/etc/group-", "/etc/gshadow-", "/etc/.pwd.lock"}
"""What Debian's groupadd and groupdel keep: the files as they were, and their lock."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("platform", tmp_path_factory.mktemp("wheel"))


@contextlib.contextmanager
def fresh(wheel: Path, packages: tuple[str, ...], release: str) -> Iterator[FreshRoot]:
    """Start a root with some packages besides Python, and install the wheel in it by pip."""
    lower = fresh_root.made(release, fresh_root.PYTHON_ONLY, release)
    if packages:
        lower = fresh_root.made(f"{release}-host", packages, release, lower)
    with tempfile.TemporaryDirectory(prefix="fk-root-", dir="/tmp") as folder:
        layer = Path(folder, "layer")
        with fresh_root.fresh_root(lower, layer=layer, shared=(wheel.parent,)) as root:
            root.check(f"python3 -m venv {ENVIRONMENT}")
            root.check(f"{ENVIRONMENT}/bin/pip install -q --no-cache-dir '{wheel}[daemon]'")
            yield root


def bring_cache(root: FreshRoot, by: Path) -> None:
    """Put what was once fetched and built on this host into the root's cache.

    Fetching is tested in test_images_archive, and by the walks of the soak, which begin with
    nothing.

    Args:
        root: Where to.
        by: A folder of this host that the root shares.
    """
    command = [sys.executable, "-m", "forkd.images", "build", str(ROOT / "recipes/python")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)  # noqa: S603 - ours
    assert done.returncode == 0, done.stderr
    image = Path(done.stdout.split()[-1]).parent
    for each in (image, default_cache() / "initramfs", default_cache() / "kernels"):
        to = by / "cache" / each.relative_to(default_cache())
        to.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", "--reflink=auto", "--sparse=always", each, to], check=True)  # noqa: S603, S607 - cp
    root.check(f"mkdir -p ~/.cache/forkd && cp -a --sparse=always {by}/cache/. ~/.cache/forkd")


def walk(root: FreshRoot) -> None:
    """Set up, start, ask ten forks, and take all of it back."""
    set_up = root.run(f"{FORKD} host setup --yes --dir /")  # the kernel's settings are read-only
    assert all("Read-only file system" in line for line in set_up.stderr.splitlines()), set_up
    root.check("getent group forkd && test -f /etc/tmpfiles.d/forkd.conf")

    said = json.loads(root.check(f"{FORKD} quickstart --yes --json"))
    again = json.loads(root.check(f"{FORKD} quickstart --yes --json -n 1"))
    tags = json.loads(root.check(f"{FORKD} snapshot ls --json"))

    assert (said["forks"], said["snapshot"], again["forks"]) == (10, "quickstart", 1)
    assert [each["tag"] for each in tags] == ["quickstart"]
    root.check(f"{FORKD} down --purge --yes")
    root.check(f"{FORKD} host undo --yes --dir /")
    root.check(f"rm -r {ENVIRONMENT}")
    assert root.written() - BY_XDG - BY_GROUPADD == set()


def test_ten_forks_answer_in_a_fresh_debian_12_and_nothing_is_left(wheel: Path) -> None:
    with fresh(wheel, DOCTOR_NAMES, "bookworm") as root:
        bring_cache(root, wheel.parent)
        walk(root)


@pytest.mark.soak(only=True)
@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_ten_forks_answer_where_nothing_was_fetched_before(wheel: Path, release: str) -> None:
    packages = (*DOCTOR_NAMES, OF_TRIXIE) if release == "trixie" else DOCTOR_NAMES
    with fresh(wheel, packages, release) as root:
        walk(root)


@pytest.mark.soak(only=True)
def test_what_is_missing_is_named_with_its_packages_and_nothing_is_changed(wheel: Path) -> None:
    with fresh(wheel, (), "bookworm") as root:
        before = root.written()

        done = root.run(f"{FORKD} quickstart --yes")

        assert done.returncode == 1
        assert "this host lacks something that forkd needs; nothing was changed" in done.stderr
        named = done.stderr.split()
        assert [each for each in DOCTOR_NAMES if each not in named] == []
        assert "Traceback" not in done.stderr
        assert root.written() - before - BY_XDG == set()


@pytest.mark.soak(only=True)
def test_an_oci_layout_is_built_where_there_is_neither_apt_nor_dpkg(wheel: Path) -> None:
    """What doctor names for images of OCI is there, as another distribution would have it."""
    write_layout(
        wheel.parent / "recipe" / "layout",
        [[folder("bin"), regular("bin/hello", b"one")], [regular("bin/hello", b"two", mode=0o755)]],
        {"Env": ["GREETING=hello"]},
    )
    (wheel.parent / "recipe" / "recipe.toml").write_text(RECIPE)
    with fresh(wheel, ("kmod",), "bookworm") as root:
        root.check(f"rm -rf {WITHOUT_APT}")
        assert root.run("apt-get --version").returncode == root.run("dpkg -l").returncode == 127
        checks = json.loads(root.run(f"{FORKD} doctor --json").stdout)
        before, temporary = root.written(), root.check("ls -A /tmp")

        built = root.check(f"{BUILD} {wheel.parent}/recipe --json").splitlines()[-1]

        image = Path(json.loads(built)["rootfs"])
        root.check(f"cp --sparse=always {image} {wheel.parent}/rootfs.ext4")
        left = {each for each in root.written() - before if not f"{each}/".startswith(f"{CACHE}/")}
        cached = root.check(f"ls -A {CACHE}/images {image.parent}").split()
        assert root.check("ls -A /tmp") == temporary
    assert [each["status"] for each in checks if each["name"] == "images from OCI"] == ["PASS"]
    assert read(wheel.parent / "rootfs.ext4", "/bin/hello") == b"two"
    assert left - BY_XDG == set()
    named = sorted(each for each in cached if "/" not in each)
    assert named == sorted([image.parent.name, "image.json", "manifest.json", "rootfs.ext4"])


def test_nobody_to_ask_is_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "forkd"
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}

    for words, option in ((["quickstart"], "--yes"), (["down", "--purge"], "--yes")):
        done = subprocess.run(  # noqa: S603 - ours
            [program, *words],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip

        assert done.returncode == 2
        assert option in done.stderr
    assert list(tmp_path.iterdir()) == []
