"""What we start has limits of its own, whatever those of the process that starts it are."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from forkd.errors import CapacityError, HostError
from forkd.host import process, rlimits, spawn
from forkd.host.pipes import piped
from forkd.limits import DISK_LIMIT_MIB_MAX
from forkd.model.sandbox import ForkOptions
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from forkd.host.rlimits import Limits
    from tests.support.service_host import FakeHost

TOLD = "umask; cat /proc/self/limits"

NAMES = {
    "Max core file size": resource.RLIMIT_CORE,
    "Max file size": resource.RLIMIT_FSIZE,
    "Max locked memory": resource.RLIMIT_MEMLOCK,
    "Max open files": resource.RLIMIT_NOFILE,
    "Max processes": resource.RLIMIT_NPROC,
}


@pytest.fixture(autouse=True)
def careless() -> Iterator[None]:
    """Have this process let everybody read what it writes, and all cores that it may dump."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    mask = os.umask(0)
    yield
    os.umask(mask)
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def given(limits: Limits) -> dict[str, str]:
    """Return what a process is to say of itself: as much as that, and no more than this one may."""
    wanted = {
        "Max core file size": 1,
        "Max file size": DISK_LIMIT_MIB_MAX << 20,
        "Max locked memory": limits.locked_bytes_max,
        "Max open files": limits.open_files_max,
        "Max processes": 262_144,
    }
    most = {name: resource.getrlimit(number)[1] for name, number in NAMES.items()}
    return {
        "umask": f"{limits.umask:04o}",
        **{
            name: str(value if most[name] == resource.RLIM_INFINITY else min(value, most[name]))
            for name, value in wanted.items()
        },
    }


def said(text: str) -> dict[str, str]:
    """Return what a process said of itself; a soft and a hard limit that differ are both there."""
    umask, *lines = text.splitlines()
    found = {"umask": umask}
    for line in lines:
        for name in NAMES:
            if line.startswith(name):
                soft, hard, *_ = line.removeprefix(name).split()
                found[name] = soft if soft == hard else f"{soft}:{hard}"
    return found


def of_process(pid: int) -> str:
    """Return what a process would say of itself, from the kernel."""
    folder = Path("/proc", str(pid))
    status = (folder / "status").read_text().splitlines()
    (umask,) = [line.split()[1] for line in status if line.startswith("Umask:")]
    return f"{umask}\n{(folder / 'limits').read_text()}"


@pytest.mark.parametrize("limits", [rlimits.VMM, rlimits.COMPARER], ids=["vmm", "comparer"])
async def test_a_program_that_outlives_us_has_its_own_limits(
    limits: Limits, tmp_path: Path
) -> None:
    script = f"({TOLD}) > {tmp_path}/told; echo"

    started, output = spawn.start(["/bin/sh", "-c", script], log=tmp_path / "log", limits=limits)
    with started:
        assert await output.line(100) == b"\n"
        assert await started.wait(10)

    assert said((tmp_path / "told").read_text()) == given(limits)
    assert (tmp_path / "told").stat().st_mode & 0o777 == 0o600


async def test_a_program_of_a_pack_has_its_own_limits() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    async with piped(["/bin/sh", "-c", TOLD], limits=rlimits.PACKER) as started:
        await started.feed(nothing())
        text = b"".join([piece async for piece in started.output()])
        await started.ended()

    assert said(text.decode()) == given(rlimits.PACKER)


def test_a_program_of_a_build_has_its_own_limits() -> None:
    done = process.run(["sh", "-c", TOLD], timeout_s=10)

    assert said(done.stdout.decode()) == given(rlimits.BUILDER)


def test_limits_of_ours_that_are_lower_stay() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200));"
        "from forkd.host import process;"
        "print(process.run(['sh', '-c', 'ulimit -Sn; ulimit -Hn'], timeout_s=10).stdout.decode())"
    )

    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["200", "200"]


def test_without_prlimit_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(os, "defpath", "/nonexistent")

    with pytest.raises(HostError, match=r"prlimit is not installed \(Debian package util-linux\)"):
        process.run(["/bin/sh", "-c", "exit"], timeout_s=10)


@pytest.mark.needs("root")
def test_a_folder_of_the_search_path_that_is_others_is_passed_over(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    code = f"""
import os, sys
os.environ["PATH"] = {f"{closed}/bin:/usr/bin"!r}
sys.path[:0] = {sys.path!r}
from forkd.host import rlimits
os.setresuid(65534, 65534, 65534)
print(rlimits.VMM.command(["/bin/sh"])[0])
"""
    done = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout == "/usr/bin/prlimit\n"


def test_a_kernel_that_has_no_memory_is_not_a_missing_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        with pytest.raises(CapacityError, match="look for /bin/sh"):
            rlimits.VMM.command(["/bin/sh"])


@pytest.mark.parametrize("mode", [0o644, None])
def test_what_cannot_be_executed_is_no_program(tmp_path: Path, mode: int | None) -> None:
    path = tmp_path / "program"
    if mode is None:
        path.mkdir()
    else:
        path.touch(mode)

    with pytest.raises(HostError, match="there is no such program"):
        rlimits.VMM.command([path])


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot start /nonexistent: there is no such program"):
        spawn.start(["/nonexistent"], log=tmp_path / "log", limits=rlimits.VMM)


async def test_zygotes_and_machines_do_not_have_the_daemons_limits(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        fork = await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())
        (sandbox,) = fork.sandboxes
        await until(lambda: len(fake_host.vmm_processes()) == 2)
        pids = fake_host.vmm_processes()
        wanted = given(rlimits.VMM)

        assert [said(of_process(pid)) for pid in pids] == [wanted, wanted]
        assert sandbox.pid in pids
        await service.sandboxes.delete(CALLER, sandbox.id)
