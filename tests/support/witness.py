"""`forkd-witness` in a sandbox: a program that notices when a branch of its machine is unsound."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine.process import LOG_FILE, log_tail
from forkd.errors import EngineExited, ForkdError
from forkd.model.exec import ExecRequest, Exited, Stdout
from tests.support import processes
from tests.support.callers import CALLER
from tests.support.real_host import ROOT, shell, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from tests.support.real_host import RealHost

PROGRAM = ROOT / "build" / "bin" / "forkd-witness"

GUEST_PATH = "/opt/forkd-witness"

START = """
import subprocess
witness = subprocess.Popen([{path!r}, "run", {load!r}], stdout=subprocess.PIPE, text=True,
                           start_new_session=True)
witness.stdout.readline()
"""

ASK_TIMEOUT_S = 300.0
"""How long an answer may take, on a host where several busy machines share a processor."""


DOINGS = r"""
for task in /proc/[0-9]*/task/[0-9]*; do
    [ -e $task/exe ] || continue
    echo "$task $(cut -d' ' -f2,3,14,15,39 $task/stat)"; cat $task/stack
done
cat /proc/interrupts
echo l > /proc/sysrq-trigger
dmesg | tail -n 300
"""
"""Each thread's number, name, state, ticks in user and system mode, processor, and where it waits;
kernel threads have no `exe`.  At the end what each processor executes, which the kernel's log has
(`Documentation/admin-guide/sysrq.rst`): a thread that runs waits nowhere."""

DOINGS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a witness says of itself; `crates/witness/src/report.rs` has the words."""

    asked: int
    load: str
    steps: tuple[int, ...]
    transfers: int
    pages: int
    blocks: int
    violations: tuple[str, ...]
    kernel: tuple[str, ...]

    def is_later_than(self, other: Report) -> bool:
        """Whether each worker has done a step since."""
        pairs = zip(self.steps, other.steps, strict=True)
        return all(mine > theirs for mine, theirs in pairs)


async def start(host: RealHost, sandbox: SandboxId, load: str) -> None:
    """Put the witness into a sandbox, and have it keep the invariant of a load."""
    data = PROGRAM.read_bytes()

    async def pieces() -> AsyncIterator[bytes]:
        yield data

    service = host.service
    await service.guests.write_file(
        CALLER, sandbox, GUEST_PATH, pieces(), mode=0o755, make_parents=True
    )
    assert await value(host, sandbox, START.format(path=GUEST_PATH, load=load)) == "ready\n"


async def story(host: RealHost, sandbox: SandboxId) -> str:
    """Say what is left of a machine that has ended, or that only ended a connection."""
    folder = host.settings.sandboxes_dir / sandbox
    now = await host.service.sandboxes.get(CALLER, sandbox)
    vmm = "runs" if now.pid in processes.of(host.settings.run_dir) else "has ended"
    console = (await host.service.sandboxes.console_log(CALLER, sandbox)).decode(errors="replace")
    return f"{now}; its VMM {vmm}: {log_tail(folder / LOG_FILE)}; its console: {console}"


async def doings(host: RealHost, sandbox: SandboxId) -> str:
    """Say what each thread of a machine does whose agent answers, and its interrupts."""
    try:
        return await asyncio.wait_for(shell(host, sandbox, DOINGS), DOINGS_TIMEOUT_S)
    except TimeoutError:
        return "it does not say what its threads do"
    except ForkdError as error:
        return f"it cannot be asked what its threads do: {error}"


async def ask(host: RealHost, sandbox: SandboxId, question: str) -> Report:
    """Ask the witness in a sandbox to `look` or to `check`."""
    request = ExecRequest((GUEST_PATH, "ask", question), timeout_s=ASK_TIMEOUT_S)
    try:
        async with await host.service.guests.exec(CALLER, sandbox, request) as session:
            events = [event async for event in session]
    except EngineExited as error:
        error.add_note(await story(host, sandbox))
        raise
    ended = [each.exit_code for each in events if isinstance(each, Exited)]
    assert ended == [0], f"{events}; {await doings(host, sandbox)}; {await story(host, sandbox)}"
    said = json.loads(b"".join(each.data for each in events if isinstance(each, Stdout)))
    lists = {name: tuple(said[name]) for name in ("steps", "violations", "kernel")}
    return Report(**said | lists)
