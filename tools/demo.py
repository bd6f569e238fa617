"""`make demo`: fork a hundred Linux machines from a warm one, and ask each a question.

    python -m tools.demo [-n 100] [--keep]

It starts forkd unless it runs, bakes `python-numpy` unless an earlier demo baked just that,
forks, and asks every child what it computes, who it is, and what is on its disk.  It ends with
status 0 only if every child answered and no two are the same.  Then it removes what it made,
except for the snapshot and the cache of images, which make the next run quick.

Everything here goes through what any user has: the `forkd` command, and the SDK.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from forkd import AsyncClient, ForkdError, programs
from forkd.errors import EngineError, NotFound
from forkd.machine import lifecycle
from forkd.sdk._endpoint import state_dir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from forkd import AsyncSandbox

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "python-numpy"
TAG = "python-numpy"
STAMP = "demo.json"
FORKD = str(Path(sys.executable).parent / "forkd")

AT_ONCE = 2
"""How many children are asked at the same time: the helper machine has no more processors."""

SHOWN = 5
"""How many children the table of answers shows."""

QUESTION = """
import os, random, socket, uuid
os.makedirs("/var/lib/demo", exist_ok=True)
with open("/var/lib/demo/{index}", "w") as file:
    file.write("child {index} was here")
    file.flush()
    os.fsync(file.fileno())
{{
    "index": {index},
    "zeros": numpy.zeros(5).tolist(),
    "hostname": socket.gethostname(),
    "machine_id": open("/etc/machine-id").read().strip(),
    "boot_id": open("/proc/sys/kernel/random/boot_id").read().strip(),
    "random": random.random(),
    "numpy_random": float(numpy.random.random()),
    "urandom": os.urandom(16).hex(),
    "uuid": str(uuid.uuid4()),
}}
"""

LOOK_AT_DISK = """
import mmap
def on_disk(path):
    page = mmap.mmap(-1, mmap.PAGESIZE)
    direct = lambda path, flags: os.open(path, flags | os.O_DIRECT)
    with open(path, "rb", buffering=0, opener=direct) as file:
        return page[:file.readinto(page)].decode()
{name: on_disk(f"/var/lib/demo/{name}") for name in os.listdir("/var/lib/demo")}
"""
"""Asked once every child has written: what is on the disk itself, past the guest's cache."""

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one child said; every member but `zeros` must be its own."""

    index: int
    zeros: list[float]
    hostname: str
    machine_id: str
    boot_id: str
    random: float
    numpy_random: float
    urandom: str
    uuid: str


OWN = tuple(each.name for each in fields(Answer) if each.name != "zeros")


def complaints(answers: Sequence[Answer], disks: Sequence[dict[str, str]]) -> list[str]:
    """Return what is wrong with the answers; nothing, if every child is a machine of its own.

    Args:
        answers: One for each child.
        disks: What each child, in the same order, found in the folder it had written to.
    """
    found = [
        f"child {answer.index} computed {answer.zeros}, not five zeros"
        for answer in answers
        if answer.zeros != [0.0] * 5
    ]
    for name in OWN:
        distinct = len({getattr(answer, name) for answer in answers})
        if distinct != len(answers):
            found.append(f"{len(answers)} children have only {distinct} different {name}")
    for answer, disk in zip(answers, disks, strict=True):
        index = str(answer.index)
        if disk != {index: f"child {index} was here"}:
            found.append(f"child {index} found on its disk: {disk}")
    return found


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(prog="make demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", type=int, default=100, help="how many children")
    parser.add_argument("--keep", action="store_true", help="leave children and daemon running")
    options = parser.parse_args()

    def run() -> int:
        with running_forkd(keep=options.keep) as started_s:
            return asyncio.run(demo(options.n, started_s, keep=options.keep))

    return status_of(run)


def status_of(run: Callable[[], int]) -> int:
    """Run a demo; return its exit status, or say in one line why it had none and return 1."""
    try:
        return run()
    except ForkdError as error:
        console.print(f"error: {error} ({error.code})", markup=False, style="bold red")
    except subprocess.CalledProcessError as error:
        console.print(f"error: that command failed with status {error.returncode}")
    except KeyboardInterrupt:
        console.print("interrupted")
    return 1


def forkd(*arguments: str) -> None:
    """Run the `forkd` command, and show how it was called."""
    console.print(f"$ forkd {' '.join(arguments)}", style="bold cyan", markup=False)
    subprocess.run([FORKD, *arguments], check=True)  # noqa: S603 - our own command


@contextlib.contextmanager
def running_forkd(*, keep: bool) -> Iterator[float]:
    """Have forkd run; give how long its start took.  One that ran before is left running."""
    try:
        lifecycle.find(state_dir())
    except NotFound:
        began = perf_counter()
        try:
            forkd("up")
            yield perf_counter() - began
        finally:
            if not keep:
                forkd("down")
    else:
        yield 0.0


async def demo(n: int, started_s: float, *, keep: bool) -> int:
    """Bake, fork, ask and show; return the exit status."""
    async with AsyncClient() as client:
        baked_s = await snapshot(client)
        # The first fork finds no zygote; what that costs is no part of a fork.
        async with forked(client, 1, "loading the parent") as (_, load_s):
            pass
        before = await client.host()
        async with forked(client, n, f"forking {n} machines", keep=keep) as (children, fork_s):
            began = perf_counter()
            answers = await ask_all(children, "asking each", ask)
            asked_s = perf_counter() - began
            after = await client.host()
            disks = await ask_all(children, "looking at each disk", look_at_disk)
            wrong = complaints(answers, disks)
            show_children(answers, disks)
            taken_mib = before.memory_available_mib - after.memory_available_mib
            console.print(
                summary(
                    {
                        "machines": f"{after.cpus} x {after.cpu_model}, Linux {after.kernel}",
                        "forkd up": f"{started_s:.1f} s" if started_s else "ran already",
                        "parent baked": f"{baked_s:.1f} s" if baked_s else "by an earlier run",
                        "parent loaded": f"{load_s:.1f} s, with a first child",
                        "forked": f"{len(children)} of {n}, in {fork_s:.2f} s",
                        "fork to answer, each": spawn_times(children),
                        "asked": f"{len(answers)} answered, in {asked_s:.2f} s",
                        "memory": f"{taken_mib / n:.1f} MiB per child, by the fall of MemAvailable",
                        "identities": ", ".join(OWN[1:]) + ": none twice"
                        if not wrong
                        else "see below",
                        "disks": "each child found its own file, and no other's"
                        if not wrong
                        else "see below",
                    }
                )
            )
    for complaint in wrong:
        console.print(complaint, style="bold red", markup=False)
    return 1 if wrong else 0


async def snapshot(client: AsyncClient) -> float:
    """Have the snapshot, and return how long its bake took; 0 if an earlier one serves.

    One that a demo baked serves while recipe and programs are as they were; one that somebody
    else baked under this tag is theirs, and serves as it is.
    """
    stamp = state_dir() / STAMP
    wanted = fingerprint()
    try:
        found = await client.snapshots.info(TAG)
    except NotFound:
        pass
    else:
        baked = json.loads(stamp.read_text()) if stamp.exists() else {}
        ours = baked.get("created_at_unix") == found.created_at_unix
        if found.bootable and (not ours or baked["fingerprint"] == wanted):
            whose = "an earlier demo baked it, and nothing has changed" if ours else "not a demo's"
            console.print(f"using snapshot {TAG}: {whose}")
            return 0.0
        forkd("snapshot", "rm", TAG)
    began = perf_counter()
    await asyncio.to_thread(forkd, "snapshot", "create", TAG, "--recipe", str(RECIPE))
    found = await client.snapshots.info(TAG)
    stamp.write_text(json.dumps({"created_at_unix": found.created_at_unix, "fingerprint": wanted}))
    return perf_counter() - began


def fingerprint() -> str:
    """Return what tells one bake from another: the recipe, and the programs that it ran."""
    digest = hashlib.sha256()
    for path in (
        *sorted(RECIPE.iterdir()),
        programs.find(programs.VMM),
        programs.find(programs.AGENT),
    ):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@contextlib.asynccontextmanager
async def forked(
    client: AsyncClient, n: int, title: str, *, keep: bool = False
) -> AsyncIterator[tuple[Sequence[AsyncSandbox], float]]:
    """Fork `n` children; give them, and how long that took.  They are gone afterwards."""
    with bar(title, None):
        began = perf_counter()
        children, failed = await client.try_fork(TAG, n)
        fork_s = perf_counter() - began
    try:
        if failed:
            raise EngineError(
                f"{len(failed)} of {n} did not become ready; the first at {failed[0].stage}: "
                f"{failed[0].error}"
            )
        yield children, fork_s
    finally:
        if not keep:
            await ask_all(children, "ending all", lambda child, _: child.kill())


async def ask(child: AsyncSandbox, index: int) -> Answer:
    """Have a child compute something, say who it is, and write a file."""
    return Answer(**await evaluate(child, QUESTION.format(index=index)))


async def look_at_disk(child: AsyncSandbox, _: int) -> dict[str, str]:
    """Return the files that a child finds where it wrote one, and what is in them."""
    return dict(await evaluate(child, LOOK_AT_DISK))


async def evaluate(child: AsyncSandbox, code: str) -> Any:  # noqa: ANN401 - JSON
    """Return the value of code in a child; what it raises there is raised here."""
    return (await child.eval(code)).check().value


async def ask_all(
    children: Sequence[AsyncSandbox],
    title: str,
    question: Callable[[AsyncSandbox, int], Awaitable[T]],
) -> list[T]:
    """Ask every child, some at a time; return the answers in the order of the children."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def one(child: AsyncSandbox, index: int, advance: Callable[[], object]) -> T:
        async with at_once:
            answer = await question(child, index)
        advance()
        return answer

    with bar(title, len(children)) as advance:
        waiting = [one(child, index, advance) for index, child in enumerate(children)]
        return await asyncio.gather(*waiting)


@contextlib.contextmanager
def bar(title: str, total: int | None) -> Iterator[Callable[[], object]]:
    """Show a progress bar; gives what moves it on by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    counted = () if total is None else (MofNCompleteColumn(),)
    with Progress(*columns, *counted, console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
        progress.update(task, total=total or 1, completed=total or 1)


def spawn_times(children: Sequence[AsyncSandbox]) -> str:
    """Return the quantiles of the children's own fork times, as text."""
    times = sorted(child.info.fork_ms.total for child in children if child.info.fork_ms)
    if not times:
        return "not known"
    p50, p99 = (times[max(0, -(-len(times) * percent // 100) - 1)] for percent in (50, 99))
    return f"p50 {p50:.0f} ms, p99 {p99:.0f} ms"


def show_children(answers: Sequence[Answer], disks: Sequence[dict[str, str]]) -> None:
    """Print some of the answers."""
    table = Table(
        title=f"{min(SHOWN, len(answers))} of {len(answers)} children", title_justify="left"
    )
    for name in ("child", "numpy.zeros(5)", "hostname", "machine-id", "random()", "its files"):
        table.add_column(name, no_wrap=True)
    for answer, disk in list(zip(answers, disks, strict=True))[:SHOWN]:
        table.add_row(
            str(answer.index),
            ", ".join(map(str, answer.zeros)),
            f"{answer.hostname[:9]}…",
            f"{answer.machine_id[:8]}…",
            f"{answer.random:.5f}",
            " ".join(disk),
        )
    console.print(table)


def summary(rows: dict[str, str]) -> Table:
    """Return the table of what was found out."""
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


if __name__ == "__main__":
    sys.exit(main())
