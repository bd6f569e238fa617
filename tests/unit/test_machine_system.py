"""The helper machine sees the host's programs and what every user may read of `/etc`."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.machine import system


@pytest.fixture
def host(tmp_path: Path) -> Path:
    root = tmp_path / "host"
    for folder in ("usr/bin", "usr/lib", "lib64", "etc/ssl/certs", "etc/ssl/private", "root/.ssh"):
        (root / folder).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/shadow").write_text("root:secret\n")
    (root / "etc/localtime").symlink_to("/nowhere/UTC")
    (root / "etc/ssl/certs/ca.pem").write_text("certificate")
    (root / "etc/ssl/certs/closed.pem").write_text("key")
    (root / "etc/ssl/certs/closed.pem").chmod(0o600)
    (root / "etc/ssl/private/key.pem").write_text("key")
    (root / "root/.ssh/id").write_text("key")
    return root


def test_its_root_has_the_files_of_programs_and_none_of_users(host: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"

    folders = system.stage(made, host)

    assert folders == (host / "usr", host / "lib64")
    assert (made / "bin").readlink() == Path("usr/bin")
    assert (made / "etc/passwd").read_text().startswith("root:")
    assert (made / "etc/localtime").readlink() == Path("/nowhere/UTC")
    assert (made / "etc/ssl/certs/ca.pem").read_text() == "certificate"
    found = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert found == {"etc/hosts", "etc/passwd", "etc/ssl/certs/ca.pem"}


def test_a_root_is_made_anew_for_each_start(host: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    system.stage(made, host)
    (host / "etc/passwd").unlink()

    system.stage(made, host)

    assert not (made / "etc/passwd").exists()
