"""Mirrors are those of the variables, then of this host's apt, then Debian's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.errors import InvalidRequest
from forkd.images.mirrors import (
    MIRROR_VARIABLE,
    SECURITY_VARIABLE,
    Mirrors,
    apt_proxies,
    find_mirrors,
    parse_sources,
    release_of_host,
    suites_of,
)

if TYPE_CHECKING:
    from pathlib import Path

OURS = Mirrors()

PARAGRAPHS = """# http://snapshot.test/debian
Types: deb deb-src
URIs: https://mirror.test/debian/
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By:
 /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://security.test/sec
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MIRROR_VARIABLE, SECURITY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_a_host_without_apt_asks_debian_itself(tmp_path: Path) -> None:
    assert find_mirrors(tmp_path / "none") == OURS


def test_mirrors_and_proxy_of_this_host_s_apt_are_used(tmp_path: Path) -> None:
    for name, text in (
        ("sources.list.d/debian.sources", PARAGRAPHS),
        ("apt.conf.d/proxy", 'Acquire::http::Proxy "http://proxy.test:3128";\n'),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert find_mirrors(tmp_path) == Mirrors(
        "https://mirror.test/debian", "http://security.test/sec", {"http": "http://proxy.test:3128"}
    )


@pytest.mark.parametrize(
    "line",
    [
        "deb https://apt.vendor.test bookworm main",
        "deb [signed-by=/k.gpg] https://vendor.test/linux/debian bookworm stable",
        "deb http://mirror.test/ubuntu noble main",
        "deb http://mirror.test/debian bookworm-pgdg main",
        "deb cdrom:[Debian]/ bookworm main",
        "deb-src http://mirror.test/debian bookworm main",
        "# deb http://mirror.test/debian bookworm main",
    ],
)
def test_sources_of_others_are_not_used(line: str) -> None:
    assert parse_sources([f"{line}\n"], []) == OURS


def test_one_line_sources_are_read_and_the_first_counts() -> None:
    lines = (
        "deb [arch=amd64] http://one.test/debian/ trixie main # ours\n"
        "deb http://two.test/debian trixie main\n"
        "deb http://one.test/debian-security bullseye/updates main\n"
    )

    assert parse_sources([lines], []) == Mirrors(
        "http://one.test/debian", "http://one.test/debian-security"
    )


def test_a_source_that_is_switched_off_is_not_used() -> None:
    off = PARAGRAPHS.replace("Types: deb deb-src", "Enabled: no\nTypes: deb")

    assert parse_sources([], [off]) == Mirrors(OURS.releases, "http://security.test/sec")


def test_the_variable_names_a_mirror_and_security_updates_are_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MIRROR_VARIABLE, "http://mine.test/debian/")
    assert find_mirrors(tmp_path) == Mirrors(
        "http://mine.test/debian", "http://mine.test/debian-security"
    )
    monkeypatch.setenv(SECURITY_VARIABLE, "https://other.test/s")
    assert find_mirrors(tmp_path).security == "https://other.test/s"


@pytest.mark.parametrize("said", ["mirror.test/debian", "file:///srv", "http://", "http://a b"])
def test_a_variable_that_is_no_url_is_refused(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MIRROR_VARIABLE, said)

    with pytest.raises(InvalidRequest, match=r"FORKD_DEBIAN_MIRROR is '.*': must be the URL"):
        find_mirrors(tmp_path)


@pytest.mark.parametrize(
    ("text", "proxies"),
    [
        ('Acquire::HTTP::Proxy "http://p.test:1";', {"http": "http://p.test:1"}),
        (
            '// a\nAcquire { http { Proxy "http://p.test:1"; }; https::Proxy "http://q.test"; };',
            {"http": "http://p.test:1", "https": "http://q.test"},
        ),
        ('#Acquire::http::Proxy "http://p.test";\nAcquire::http::Proxy "DIRECT";', {}),
        ('Acquire::http::Proxy::host.test "http://p.test";', {}),
        ("} } { ; odd", {}),
    ],
)
def test_proxies_are_read_in_both_forms(text: str, proxies: dict[str, str]) -> None:
    assert apt_proxies([text]) == proxies


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("ID=debian\nVERSION_CODENAME=trixie\n", "trixie"),
        ('ID="debian"\nVERSION_CODENAME="bookworm"\n', "bookworm"),
        ("ID=debian\nVERSION_CODENAME=forky\n", "bookworm"),
        ("ID=ubuntu\nVERSION_CODENAME=noble\n", "bookworm"),
        ("", "bookworm"),
    ],
)
def test_hosts_of_other_releases_have_kernels_of_debian_12(
    text: str, release: str, tmp_path: Path
) -> None:
    (tmp_path / "os-release").write_text(text)

    assert release_of_host(tmp_path / "os-release") == release


def test_security_updates_belong_to_releases_but_not_to_backports() -> None:
    assert suites_of(("bookworm", "trixie-backports")) == [
        "bookworm",
        "bookworm-security",
        "trixie-backports",
    ]
