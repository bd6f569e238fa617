"""A program that is missing has the package of this distribution, or is said to have none."""

from __future__ import annotations

import pytest

from forkd.service.packages import MANAGERS, PACKAGES, advice, manager


@pytest.mark.parametrize(
    ("on", "says"),
    [
        ("apt", "apt install mmdebstrap e2fsprogs"),
        ("dnf", "dnf install mmdebstrap e2fsprogs"),
        ("pacman", "pacman -S e2fsprogs; no package for pacman is known that has mmdebstrap"),
        ("zypper", "zypper install e2fsprogs; no package for zypper is known that has mmdebstrap"),
        ("apk", "apk add e2fsprogs; no package for apk is known that has mmdebstrap"),
        (None, "no package manager that forkd knows is here; in Debian: mmdebstrap e2fsprogs"),
    ],
)
def test_each_distribution_has_its_words(on: str | None, says: str) -> None:
    assert advice(["mmdebstrap", "mke2fs"], on) == says


@pytest.mark.parametrize("name", MANAGERS)
def test_the_manager_is_the_one_that_is_installed(name: str) -> None:
    assert manager(lambda program: program == name) == name
    assert manager(lambda _: False) is None


def test_every_program_of_the_table_has_advice_everywhere() -> None:
    for each in PACKAGES:
        for name in (*MANAGERS, None):
            assert advice([each], name)
