"""`doctor --fix` writes only what it has shown, to whom may, and says how to take it back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from forkd.daemon.fixing import fix
from forkd.errors import InvalidRequest
from forkd.host.tuning import Seen

if TYPE_CHECKING:
    from pathlib import Path

SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
WRONG = Seen(values={"vm.overcommit_memory": "2", SHMEM: "never"})
GOOD = Seen(values={"vm.overcommit_memory": "0"})


def written(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_files_are_shown_written_and_can_be_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fix(tmp_path, fix=True, yes=True, as_json=False, host=WRONG) == 0

    said = capsys.readouterr().out
    assert list(written(tmp_path)) == ["etc/sysctl.d/90-forkd.conf", "etc/tmpfiles.d/forkd.conf"]
    for text in written(tmp_path).values():
        assert all(f"  {line}\n" in said for line in text.splitlines())
    assert f"written: {tmp_path}/etc/sysctl.d/90-forkd.conf" in said
    assert "delete these files and restart" in said


def test_doing_it_again_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fix(tmp_path, fix=True, yes=True, as_json=False, host=WRONG)
    before = written(tmp_path)
    capsys.readouterr()

    assert fix(tmp_path, fix=True, yes=True, as_json=False, host=WRONG) == 0

    assert written(tmp_path) == before
    assert "the files are as they should be" in capsys.readouterr().out


def test_a_host_with_nothing_wrong_gets_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fix(tmp_path, fix=True, yes=True, as_json=False, host=GOOD) == 0

    assert written(tmp_path) == {}
    assert capsys.readouterr().out == "nothing to set: every setting is good\n"


def test_what_was_done_is_said_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fix(tmp_path, fix=True, yes=True, as_json=True, host=WRONG)

    assert json.loads(capsys.readouterr().out) == {
        "files": [str(tmp_path / name) for name in written(tmp_path)],
        "settings": {"vm.overcommit_memory": "0", SHMEM: "advise"},
        "refused": {},
    }


@pytest.mark.parametrize("as_json", [True, False])
def test_nothing_is_written_where_nobody_can_be_asked(tmp_path: Path, *, as_json: bool) -> None:
    with pytest.raises(InvalidRequest, match="give --yes"):
        fix(tmp_path, fix=True, yes=False, as_json=as_json, host=WRONG)

    assert written(tmp_path) == {}


def test_options_of_fix_need_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--dir and --yes need --fix"):
        fix(tmp_path, fix=False, yes=False, as_json=False, host=WRONG)
