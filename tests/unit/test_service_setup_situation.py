"""Who is to use forkd is who has called sudo, or calls us, if this host knows them."""

from __future__ import annotations

import pytest

from forkd.host import proc, users
from forkd.service.setup.situation import default_user


@pytest.mark.parametrize(
    ("calling", "expected"),
    [("daemon", "daemon"), ("root", None), ("nobody-at-all", None), (None, None)],
)
def test_the_user_of_root_is_who_has_called_sudo(
    monkeypatch: pytest.MonkeyPatch, calling: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(proc, "is_root", lambda: True)
    monkeypatch.delenv("SUDO_USER", raising=False)
    if calling is not None:
        monkeypatch.setenv("SUDO_USER", calling)

    assert default_user() == expected


@pytest.mark.parametrize(("name", "expected"), [("daemon", "daemon"), ("4242424242", None)])
def test_who_is_not_root_is_the_user(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: str | None
) -> None:
    monkeypatch.setattr(proc, "is_root", lambda: False)
    monkeypatch.setattr(users, "user_name", lambda _: name)

    assert default_user() == expected
