"""What of a project, and of installed distributions, is copied into a sandbox."""

from __future__ import annotations

import io
import tarfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import InvalidRequest
from forkd.testing import _archive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for path in (
        "pyproject.toml", "src/package/__init__.py", "tests/test_it.py", ".git/HEAD",
        "src/package/__pycache__/x.pyc", "node_modules/x.js", "env/pyvenv.cfg", "env/lib/x.py",
    ):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "link").symlink_to("src")
    return tmp_path


def test_a_project_is_copied_without_environments_and_caches(project: Path) -> None:
    assert [name for _, name in _archive.named(_archive.project_files(project), project)] == [
        "link", "pyproject.toml", "src/package/__init__.py", "tests/test_it.py",
    ]  # fmt: skip


def test_pytest_is_sent_with_what_it_needs_and_without_programs() -> None:
    names = {name for _, name in _archive.distribution_files(["pytest"])}

    assert {"pytest/__init__.py", "_pytest/config/__init__.py", "pluggy/__init__.py"} <= names
    assert not [each for each in names if ".." in each or each.endswith(".pyc")]


def test_a_distribution_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="no-such-thing is not installed here"):
        list(_archive.distribution_files(["no_such_thing"]))


class Recorder:
    """A sandbox that keeps what is written into it."""

    def __init__(self, *skipped: Any) -> None:  # noqa: ANN401 - as the wire has them
        self.files = self
        self.written: dict[str, list[str]] = {}
        self._skipped = list(skipped)

    def write_archive(self, folder: str, pieces: Iterator[bytes]) -> Any:  # noqa: ANN401 - as the wire has it
        with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
            self.written[folder] = tar.getnames()
        return SimpleNamespace(skipped=self._skipped)


def test_files_are_sent_as_one_archive(project: Path) -> None:
    sandbox: Any = Recorder()

    _archive.send(sandbox, _archive.named(_archive.project_files(project), project), "/project")

    assert sandbox.written["/project"][-1] == "tests/test_it.py"


def test_a_file_that_cannot_be_made_is_an_error() -> None:
    sandbox: Any = Recorder(SimpleNamespace(path="link", reason="no space"))

    with pytest.raises(InvalidRequest, match="link cannot be made in /project: no space"):
        _archive.send(sandbox, [], "/project")


def test_a_project_beyond_the_limit_is_refused_with_the_way_out(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _archive.named(_archive.project_files(project), project)
    sandbox: Any = Recorder()
    _archive.send(sandbox, files, "/project")
    monkeypatch.setattr(_archive, "PROJECT_BYTES_MAX", 1024)

    with pytest.raises(InvalidRequest, match=r"more than the 1024 .* --forkd-path"):
        _archive.send(Recorder(), files, "/other")  # type: ignore[arg-type]
