"""Other releases of Debian come from the servers that this host's apt uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError
from forkd.host.process import Finished
from forkd.images.apt import apart, parse_sources
from forkd.images.steps import Build

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAIN = "http://mirror.test/debian/ bookworm Debian Debian main"
UPDATES = "http://mirror.test/debian/ bookworm-updates Debian Debian main"
SECURITY = "http://mirror.test/security/ bookworm-security Debian Debian-Security main"


def test_each_server_of_debian_is_asked_for_every_release_once() -> None:
    other = "https://apt.test/ stable Vendor Vendor main"
    other_part = "http://elsewhere.test/debian/ bookworm Debian Debian non-free"

    listed = f"{MAIN}\n{UPDATES}\n{SECURITY}\n{other}\n{other_part}\nodd\n"

    assert parse_sources(listed) == [
        ("http://mirror.test/debian/", "bookworm"),
        ("http://mirror.test/debian/", "trixie"),
        ("http://mirror.test/debian/", "trixie-backports"),
        ("http://mirror.test/security/", "bookworm-security"),
        ("http://mirror.test/security/", "trixie-security"),
    ]


class Programs(Build):
    """A build whose programs write what a test says."""

    ran: list[list[str]]
    said: dict[str, str]

    def run(self, args: Sequence[str | Path], **_: object) -> Finished:
        self.ran.append([str(word) for word in args])
        return Finished(self.said.get(str(args[1]), "").encode(), "")


def programs(**said: str) -> Programs:
    build = Programs()
    object.__setattr__(build, "ran", [])
    object.__setattr__(build, "said", said)
    return build


def test_the_host_s_proxies_are_used_and_its_leave_to_skip_signatures_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring = tmp_path / "keys.gpg"
    keyring.touch()
    monkeypatch.setattr("forkd.images.apt.KEYRINGS", (keyring,))
    build = programs(
        indextargets=f"{MAIN}\n",
        dump=(
            'Acquire::http "";\nAcquire::http::Proxy "http://proxy.test:3128";\n'
            'Acquire::AllowInsecureRepositories "1";\nAcquire::Retries "3";\n'
        ),
    )

    asked = apart(tmp_path, build)

    assert asked.config is not None
    configuration = asked.config.read_text()
    assert 'Acquire::http::Proxy "http://proxy.test:3128";' in configuration
    assert 'Acquire::Retries "3";' in configuration
    assert "Insecure" not in configuration
    assert (tmp_path / "sources.list").read_text().splitlines() == [
        f"deb [arch=amd64 signed-by={keyring}] http://mirror.test/debian/ {suite} main"
        for suite in ("bookworm", "trixie", "trixie-backports")
    ]
    assert build.ran[-1][-1] == "update"


@pytest.mark.parametrize(
    ("listed", "keys", "words"),
    [
        ("", True, "no source of Debian: run `apt-get update`"),
        ("https://apt.test/ noble Ubuntu Ubuntu main\n", True, "no source of Debian"),
        (f"{MAIN}\n", False, "no keys of Debian's"),
    ],
)
def test_a_host_that_is_not_debian_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, words: str, *, keys: bool
) -> None:
    keyring = tmp_path / "keys.gpg"
    if keys:
        keyring.touch()
    monkeypatch.setattr("forkd.images.apt.KEYRINGS", (keyring,))

    with pytest.raises(BuildError, match=words):
        apart(tmp_path, programs(indextargets=listed))
