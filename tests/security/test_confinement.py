"""What looks at a guest's disk has nothing to lose, and says clearly what it does not read."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from forkd import programs
from forkd.engine.configs import CompareConfig, members
from forkd.engine.process import compare
from forkd.errors import GuestError, StoreError
from forkd.limits import UIDS_DEFAULT
from tests.support.service_host import until
from tests.support.stored import write_layer

pytestmark = pytest.mark.needs("binaries")

SIZE = 8 << 20
NAMES = 1_000
PIPE_BYTES = 64 * 1024


def image(folder: Path, names: int) -> bytes:
    """Make a file system with so many files of long names."""
    tree = folder / "tree"
    tree.mkdir(exist_ok=True)
    for number in range(names):
        (tree / f"{number:04}{'n' * 200}").touch()
    path = folder / "made.ext4"
    args = ["/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-O", "^has_journal"]
    subprocess.run(  # noqa: S603 - our own arguments
        [*args, "-N", "2048", "-d", str(tree), str(path), str(SIZE // 1024) + "k"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    data = path.read_bytes()
    path.unlink()
    return data


def config(folder: Path, one: bytes, other: bytes) -> CompareConfig:
    base = folder / "base"
    base.write_bytes(one)
    for name, data in (("before", one), ("after", other)):
        write_layer(folder / name, one, data)
    return CompareConfig((base,), SIZE, folder / "before", folder / "after", 10_000, 10_000)


KINDS = ("mnt", "net", "ipc", "uts")
USER = int(UIDS_DEFAULT.partition(":")[0]) + 7


def namespaces(proc: Path) -> list[str]:
    return [str((proc / "ns" / kind).readlink()) for kind in KINDS]


@pytest.mark.needs("root")
@pytest.mark.parametrize("uid", [None, USER], ids=["without a jail", "jailed"])
def test_what_compares_disks_is_nobody_and_can_open_nothing(
    tmp_path: Path, uid: int | None
) -> None:
    wanted = replace(config(tmp_path, image(tmp_path, 0), image(tmp_path, NAMES)), uid=uid)
    (tmp_path / "config").write_text(json.dumps(members(wanted)))
    args = [str(programs.find(programs.VMM)), "compare", "--config", str(tmp_path / "config")]
    with subprocess.Popen(args, stdout=subprocess.PIPE, bufsize=0) as process:  # noqa: S603 - ours
        try:
            assert process.stdout is not None
            begun = process.stdout.read(1)  # it waits for room in the pipe now
            proc = Path(f"/proc/{process.pid}")
            status = dict(
                line.split(":\t", 1) for line in (proc / "status").read_text().splitlines()
            )
            limits = (proc / "limits").read_text()
            theirs, ours = namespaces(proc), namespaces(Path("/proc/self"))
            seen = {each.name for each in (proc / "root").iterdir()}
            said = begun + process.stdout.read()
        finally:
            process.kill()
    assert len(said) > PIPE_BYTES
    assert (status["Uid"], status["Gid"]) == ("\t".join([str(uid or 65534)] * 4),) * 2
    if uid is not None:
        assert all(one != other for one, other in zip(theirs, ours, strict=True))
        assert seen == {"proc"}
        assert int(status["CapBnd"], 16) == 0
    assert status["Groups"].strip() == ""
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    for name, most in (("open files", "0"), ("processes", "0"), ("address space", str(2 << 30))):
        (line,) = (each for each in limits.splitlines() if each.startswith(f"Max {name} "))
        assert line.removeprefix(f"Max {name} ").split()[:2] == [most, most]
    assert len(json.loads(said)["changes"]) == NAMES


async def test_a_disk_of_garbage_is_the_guests_fault_and_a_damaged_layer_the_stores(
    tmp_path: Path,
) -> None:
    good = image(tmp_path, 3)
    garbage = os.urandom(64 * 1024) + good[64 * 1024 :]
    work = tmp_path / "work"
    work.mkdir()
    vmm = programs.find(programs.VMM)

    with pytest.raises(GuestError, match="the second: it is not ext4"):
        await compare(vmm, config(tmp_path, good, garbage), work)

    wanted = config(tmp_path, good, garbage)
    stored = bytearray(wanted.after.read_bytes())
    stored[-1] ^= 1
    wanted.after.write_bytes(stored)
    with pytest.raises(StoreError, match="after"):
        await compare(vmm, wanted, work)


async def test_a_comparison_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    wanted = config(tmp_path, image(tmp_path, 0), image(tmp_path, 3))
    work = tmp_path / "work"
    work.mkdir()
    task = asyncio.ensure_future(compare(programs.find(programs.VMM), wanted, work))
    await until((work / "config.json").exists)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
