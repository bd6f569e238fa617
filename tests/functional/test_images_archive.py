"""Kernels come from a mirror of Debian's, and nothing is used that Debian has not signed."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError, CapacityError, HostError
from forkd.images import debian_archive, kernel
from forkd.images.debian import build_debian
from forkd.images.debian_archive import (
    LIST_BYTES_MAX,
    PACKAGE_BYTES_MAX,
    Archive,
    Package,
    is_exempt,
    read_keyring,
    verify_release,
)
from forkd.images.layout import PARTIAL_PREFIX, Cache
from forkd.images.mirrors import KEYRING, Mirrors
from forkd.images.recipe import DebianSource
from forkd.images.steps import Build
from forkd.machine.kernel import find_kernel
from tests.support.debian_mirror import KERNEL, NOW, RELEASE, VERSION, DebianMirror, deb, new_key
from tests.support.web import web  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forkd.images.kernel import Kernel
    from tests.support.web import Web

pytestmark = pytest.mark.timeout(60)

SECURITY = "/debian-security/dists/bookworm-security/InRelease"


@pytest.fixture
def mirror(web: Web, monkeypatch: pytest.MonkeyPatch) -> DebianMirror:  # noqa: F811 - the fixture
    """A mirror whose keys are taken for Debian's."""
    made = DebianMirror(web)
    monkeypatch.setattr(kernel, "find_mirrors", lambda: made.mirrors)
    monkeypatch.setattr(kernel, "release_of_host", lambda: "bookworm")
    monkeypatch.setattr(debian_archive, "read_keyring", lambda: [made.key.extract_certificate()])
    monkeypatch.setattr(debian_archive, "utc_now", lambda: NOW)
    made.publish()
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    """A cache in which nothing may be left half done."""
    made = Cache.open(tmp_path / "cache")
    yield made
    assert list((tmp_path / "cache").rglob(f"{PARTIAL_PREFIX}*")) == []


def fetched(cache: Cache, series: str | None = None) -> Kernel:
    return kernel.debian_kernel(cache, Build(), series)


def refused(cache: Cache, series: str | None = None) -> str:
    """Return why no kernel could be had; nothing is in the cache then."""
    with pytest.raises(BuildError) as caught:
        fetched(cache, series)
    assert kernel.newest_cached(cache, series) is None
    return str(caught.value)


def test_the_newest_kernel_is_fetched_and_unpacked(mirror: DebianMirror, cache: Cache) -> None:
    found = fetched(cache)

    assert found.version == f"{RELEASE}_{VERSION}"
    assert found.vmlinuz.read_bytes() == b"kernel"
    assert found.modules is not None
    assert (found.modules / "kernel/a.ko").read_bytes() == KERNEL[
        f"lib/modules/{RELEASE}/kernel/a.ko"
    ]
    asked = len(mirror.web.seen)
    assert fetched(cache) == found
    assert len(mirror.web.seen) == asked


def test_a_series_that_is_nowhere_is_refused_with_what_there_is(
    mirror: DebianMirror, cache: Cache
) -> None:
    for suite in ("trixie", "trixie-backports"):
        mirror.put_suite("/debian", suite, "")
    mirror.put_suite("/debian-security", "trixie-security", "")

    assert refused(cache, "7") == f"Debian has no kernel 7; it has {RELEASE}"


@pytest.mark.usefixtures("mirror")
def test_a_mirror_that_others_have_signed_is_refused(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    debian = new_key()
    monkeypatch.setattr(debian_archive, "read_keyring", lambda: [debian.extract_certificate()])

    assert "InRelease is not signed by Debian" in refused(cache)


def test_a_release_that_was_changed_is_refused(mirror: DebianMirror, cache: Cache) -> None:
    whole = mirror.web.files[SECURITY]
    mirror.web.files[SECURITY] = whole.replace(b"Valid-Until: Fri", b"Valid-Until: Sat")
    assert mirror.web.files[SECURITY] != whole

    assert "is not signed by Debian" in refused(cache)


def test_an_unsigned_release_is_refused(mirror: DebianMirror, cache: Cache) -> None:
    mirror.web.files[SECURITY] = b"Codename: bookworm-security\n"

    said = refused(cache)

    assert "is not signed by Debian" in said
    assert "FORKD_DEBIAN_SECURITY_MIRROR names another mirror" in said


def test_an_expired_release_is_refused(mirror: DebianMirror, cache: Cache) -> None:
    mirror.valid_until = NOW - dt.timedelta(seconds=1)
    mirror.publish()

    assert "InRelease expired on 2026-11-28: the mirror has not been updated" in refused(cache)


def test_a_release_that_does_not_expire_is_used(mirror: DebianMirror, cache: Cache) -> None:
    mirror.valid_until = None
    mirror.publish()

    assert fetched(cache).vmlinuz.read_bytes() == b"kernel"


def test_a_release_of_the_future_is_refused(mirror: DebianMirror, cache: Cache) -> None:
    mirror.date = NOW + dt.timedelta(days=1, seconds=1)
    mirror.publish()

    assert "is in the future: this host's clock is wrong" in refused(cache)


def test_a_release_of_another_suite_is_refused(mirror: DebianMirror, cache: Cache) -> None:
    mirror.put_suite("/debian", "bookworm", "", codename="buster")

    assert "InRelease is of buster, not of bookworm" in refused(cache)


def test_packages_that_were_changed_are_refused(mirror: DebianMirror, cache: Cache) -> None:
    path = next(each for each in mirror.web.files if each.endswith(".deb"))
    mirror.web.files[path] = mirror.web.files[path][:-1] + b"?"

    said = refused(cache)

    assert "is not what Debian signed (SHA-256 " in said
    assert "try again later" in said


def test_a_list_that_was_changed_is_refused(mirror: DebianMirror, cache: Cache) -> None:
    path = next(
        each for each in mirror.web.files if "/debian-security/dists" in each and "by-hash" in each
    )
    mirror.web.files[path] = bytes(len(mirror.web.files[path]))

    assert "is not what Debian signed" in refused(cache)


def test_a_package_that_is_longer_than_said_is_not_read_on(
    mirror: DebianMirror, cache: Cache
) -> None:
    path = next(each for each in mirror.web.files if each.endswith(".deb"))
    length = len(mirror.web.files[path])
    mirror.web.files[path] += b"?"

    assert f"has more than {length} bytes" in refused(cache)


def test_an_answer_that_breaks_off_is_one_error(mirror: DebianMirror, cache: Cache) -> None:
    mirror.web.cut = 5

    assert "cannot reach http://127.0.0.1" in refused(cache)


def test_what_a_mirror_lacks_is_named(mirror: DebianMirror, cache: Cache) -> None:
    del mirror.web.files[SECURITY]

    assert refused(cache) == (
        f"there is no {mirror.web.url(SECURITY)}; FORKD_DEBIAN_SECURITY_MIRROR names another mirror"
    )


def test_a_package_that_is_damaged_is_named(mirror: DebianMirror, cache: Cache) -> None:
    mirror.publish(deb(KERNEL)[:-200])

    assert f"the package linux-image-{RELEASE}_{VERSION}_amd64.deb is damaged" in refused(cache)


@pytest.mark.parametrize(
    ("length", "most"),
    [(PACKAGE_BYTES_MAX + 1, PACKAGE_BYTES_MAX)],
)
def test_a_package_over_the_limit_is_not_asked_for(
    mirror: DebianMirror, tmp_path: Path, length: int, most: int
) -> None:
    package = Package("x", "1", "", mirror.mirrors.releases, "pool/x.deb", "0" * 64, length)
    asked = len(mirror.web.seen)

    with (
        pytest.raises(BuildError, match=f"has {length} bytes; at most {most} are fetched"),
        Archive(mirror.mirrors, Build()) as archive,
    ):
        archive.download(package, tmp_path)

    assert len(mirror.web.seen) == asked


def test_a_list_over_the_limit_is_not_asked_for(mirror: DebianMirror, cache: Cache) -> None:
    text = (
        "Codename: bookworm\nDate: Fri, 27 Nov 2026 12:00:00 GMT\nSHA256:\n"
        f" {'0' * 64} {LIST_BYTES_MAX + 1} main/binary-amd64/Packages.xz\n"
    )
    mirror.web.files["/debian/dists/bookworm/InRelease"] = mirror.signed(text.encode())

    assert f"has {LIST_BYTES_MAX + 1} bytes; at most {LIST_BYTES_MAX} are fetched" in refused(cache)


def test_without_a_network_the_error_names_mirror_and_proxy_settings(
    monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    nobody = "http://127.0.0.1:1/debian"
    monkeypatch.setattr(kernel, "find_mirrors", lambda: Mirrors(nobody, nobody))

    assert refused(cache) == (
        f"cannot reach {nobody}/dists/bookworm/InRelease: [Errno 111] Connection refused; "
        "FORKD_DEBIAN_MIRROR names another mirror, and http_proxy or https_proxy a proxy"
    )


@pytest.mark.usefixtures("mirror")
def test_a_proxy_that_is_down_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:1")

    said = refused(cache)

    assert "/InRelease by the proxy http://127.0.0.1:1: [Errno 111] Connection refused" in said
    assert "secret" not in said


def test_a_proxy_is_asked_and_hosts_of_no_proxy_are_not(
    mirror: DebianMirror, monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    """The server takes whole URLs for paths, so as a proxy it has nothing."""
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", mirror.web.url("/"))
    nowhere = Mirrors("http://mirror.test/debian", "http://mirror.test/debian-security")
    monkeypatch.setattr(kernel, "find_mirrors", lambda: nowhere)
    refused(cache)
    assert mirror.web.seen[-1][1] == "http://mirror.test/debian/dists/bookworm/InRelease"

    monkeypatch.setenv("no_proxy", "elsewhere.test, 127.0.0.1")
    monkeypatch.setattr(kernel, "find_mirrors", lambda: mirror.mirrors)
    assert fetched(cache).vmlinuz.read_bytes() == b"kernel"


@pytest.mark.parametrize(
    ("exempt", "is_one"),
    [
        ("mirror.test", True),
        (".test", True),
        ("*", True),
        ("other.test,", False),
        ("r.test", False),
    ],
)
def test_which_hosts_need_no_proxy(exempt: str, is_one: bool) -> None:  # noqa: FBT001 - a table
    assert is_exempt("mirror.test", exempt) is is_one


@pytest.mark.needs("root")
def test_base_packages_that_debian_has_not_signed_are_refused(
    mirror: DebianMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the host's apt believes other keys; mmdebstrap says it in apt's words."""
    monkeypatch.setenv("FORKD_DEBIAN_MIRROR", mirror.mirrors.releases)

    with pytest.raises(BuildError, match=r"/debian bookworm InRelease' is not signed"):
        build_debian(DebianSource(), tmp_path / "root", Build())


@pytest.mark.needs("root")
def test_a_full_disk_is_one_error_and_leaves_nothing(mirror: DebianMirror, tmp_path: Path) -> None:
    mirror.publish(deb(KERNEL | {f"lib/modules/{RELEASE}/big.ko": os.urandom(3 << 20)}))
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)  # noqa: S603, S607
    try:
        with pytest.raises(CapacityError, match="No space left on device"):
            fetched(Cache.open(small / "cache"))
        assert list(small.rglob(f"{PARTIAL_PREFIX}*")) == []
    finally:
        subprocess.run(["umount", small], check=True)  # noqa: S603, S607


def test_the_keys_that_come_along_verify_releases_of_debian_12_and_13() -> None:
    names = {str(user) for key in read_keyring() for user in key.user_ids}

    for release in ("11/bullseye", "12/bookworm", "13/trixie"):
        assert any(f"Archive Automatic Signing Key ({release})" in name for name in names)


@pytest.mark.needs("network")
@pytest.mark.parametrize("suite", ["bookworm", "bookworm-security", "trixie"])
def test_debian_s_own_release_is_verified_and_a_changed_one_is_not(suite: str) -> None:
    with Archive(Mirrors(), Build()) as archive:
        kinds = archive.packages(suite, lambda name: name == "base-files")
    assert suite.endswith("-security") or [each.name for each in kinds] == ["base-files"]


def test_keys_that_are_missing_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="has no keys of Debian's"):
        read_keyring(tmp_path / "none.gpg")


def test_what_is_signed_by_one_of_several_keys_is_believed(mirror: DebianMirror) -> None:
    keys = [new_key().extract_certificate(), mirror.key.extract_certificate()]

    release = verify_release(mirror.web.files[SECURITY], "bookworm-security", "here", keys, NOW)

    assert list(release.digests) == ["main/binary-amd64/Packages.xz"]


def test_the_program_that_fetches_kernels_ends_with_one_line(
    mirror: DebianMirror, tmp_path: Path
) -> None:
    """The real keys do not verify what the test has signed."""
    environment = os.environ | {"FORKD_DEBIAN_MIRROR": mirror.mirrors.releases}
    command = [sys.executable, "-m", "forkd.images", "kernel", "--cache", str(tmp_path), "debian"]
    done = subprocess.run(  # noqa: S603 - ours
        command, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "is not signed by Debian" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert KEYRING.is_file()


def test_the_helper_machine_without_a_kernel_says_why_in_one_line(
    mirror: DebianMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_DEBIAN_MIRROR", mirror.mirrors.releases)
    monkeypatch.delenv("FORKD_MACHINE_KERNEL", raising=False)
    told: list[str] = []

    with pytest.raises(HostError, match=r"the helper machine has no kernel: .* not signed by Debi"):
        find_kernel(tmp_path, progress=told.append)

    host = mirror.mirrors.releases.removeprefix("http://").removesuffix("/debian")
    assert told == [f"fetching InRelease of bookworm from {host}"]
