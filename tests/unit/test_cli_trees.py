"""`forkd branch`, `reset`, `promote` and `tree` do what the SDK does, and draw it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.model.ids import SandboxId
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


@pytest.fixture(autouse=True)
def snapshots(daemon: RunningDaemon) -> None:
    daemon.service.stored = some_snapshots("warm", "is-flaky")


@pytest.fixture
def sandbox(forkd: Forkd) -> str:
    return forkd("fork", "warm").out.strip()


def test_a_branch_prints_ids_alone_on_standard_output(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("branch", sandbox, "-n", "3", "--ttl", "60")

    ids = ended.out.splitlines()
    assert (ended.code, len(ids)) == (0, 3)
    assert (
        "3 ready, 0 failed; the source was paused for 1.2 ms, and saw a stall of 2.5 ms at most"
        in ended.err
    )
    assert set(forkd("ls", "--quiet").out.splitlines()) == {sandbox, *ids}


def test_a_branch_is_one_json_document(forkd: Forkd, sandbox: str) -> None:
    document = forkd("branch", sandbox, "--tag", "kept", "-n", "1", "--json").document

    assert (document["pause_ms"], document["stall_ms"]) == (1.25, 2.5)
    assert document["snapshot"]["tag"] == "kept"
    assert [each["parent_id"] for each in document["sandboxes"]] == [sandbox]


def test_a_branch_with_a_tag_makes_no_sibling_unless_told(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("branch", sandbox, "--tag", "kept", "--no-wait")

    assert ended.out == ""
    assert "snapshot kept is writing" in ended.err


def test_a_branch_that_fails_in_part_ends_with_1(forkd: Forkd) -> None:
    source = forkd("fork", "is-flaky").out.strip()

    ended = forkd("branch", source, "-n", "2")

    assert (ended.code, len(ended.out.splitlines())) == (1, 1)
    assert "failed in agent: no answer (guest)" in ended.err


def test_a_tree_at_its_budget_says_so_and_ends_with_4(forkd: Forkd, sandbox: str) -> None:
    child = forkd("branch", sandbox).out.strip()
    leaf = forkd("branch", child).out.strip()

    ended = forkd("branch", leaf)

    assert ended.code == 4
    assert "too deep (budget)" in ended.err


def test_a_reset_says_how_long_it_took(forkd: Forkd, sandbox: str) -> None:
    assert "is as it was when it was forked (2.5 ms)" in forkd("reset", sandbox).err
    assert forkd("reset", sandbox, "--json").document == {"id": sandbox, "reset_ms": 2.5}


def test_a_promotion_prints_the_id_that_the_winner_has(forkd: Forkd, sandbox: str) -> None:
    winner = forkd("branch", sandbox, "-n", "2").out.splitlines()[0]

    ended = forkd("promote", winner)

    assert ended.out.strip() == sandbox
    assert "2 ended" in ended.err
    assert forkd("ls", "--quiet").out.strip() == sandbox
    assert forkd("promote", sandbox).code == 4


def test_the_tree_is_drawn_with_who_when_and_how_much(forkd: Forkd, sandbox: str) -> None:
    child = forkd("branch", sandbox).out.strip()
    leaf = forkd("branch", child).out.strip()

    lines = forkd("tree").out.splitlines()

    assert [line.lstrip("└─ ").split()[0] for line in lines] == [sandbox, child, leaf]
    assert "running" in lines[0]
    assert "of warm" in lines[0]
    assert "branched at 03:04:05.000 UTC" in lines[1]
    assert all("3 MiB" in line for line in lines)
    assert lines[2].startswith("    └── ")


def test_the_tree_is_one_json_document(forkd: Forkd, sandbox: str) -> None:
    other = forkd("fork", "warm").out.strip()
    child = forkd("branch", sandbox).out.strip()

    document = forkd("tree", "--json").document
    assert [root["id"] for root in document["roots"]] == [sandbox, other]
    assert document["roots"][0]["children"][0]["id"] == child
    assert document["limits"]["depth"] == 2
    assert [root["id"] for root in forkd("tree", child, "--json").document["roots"]] == [sandbox]
    assert forkd("tree", "sb-" + "a" * 26).code == 3


def test_the_list_says_why_a_sandbox_ended(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str
) -> None:
    assert "ENDED BY" not in forkd("ls").out

    guest = daemon.service.running[SandboxId(sandbox)]
    guest.sandbox = replace(guest.sandbox, exit_reason="oom")

    head, line = forkd("ls").out.splitlines()
    assert "ENDED BY" in head
    assert line.endswith("oom")


def test_a_difference_is_a_line_for_each_file(forkd: Forkd, sandbox: str, tmp_path: Path) -> None:
    child = forkd("branch", sandbox).out.strip()
    (tmp_path / "added").write_text("new")
    assert forkd("cp", str(tmp_path / "added"), f"{child}:/root/added").code == 0

    ended = forkd("diff", sandbox, child)

    assert ended.out == "+ /root/added\n"
    assert "1 files differ, 5 pages apart" in ended.err
    assert forkd("diff", child, sandbox, "--json").document["changes"][0]["change"] == "removed"
