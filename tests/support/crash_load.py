"""A load of operations on a daemon, and what its machines may know when some of them failed.

Each machine keeps a *story* in its warm runtime's memory and in a file, with a ballast beside each
that says whether it is torn.  An operation that was answered has happened; one that was not may
have happened, in part or not at all, so what is known of a machine is a set of states.

Operations at the same time never share a sandbox as their source, nor remove a snapshot that
another uses, so each knows what it began with.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from forkd.errors import ForkdError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from forkd import Client
    from forkd.sdk import Sandbox
    from forkd.wire import v2

EVAL_TIMEOUT_S = 120.0
"""For an evaluation on a host that is busy, emulated, and has just lost a process."""

BALLAST_MIB = 4

LEARN = """
import os
story, ballast = [*globals().get("story", []), {n}], bytes([{n} % 251 + 1]) * ({mib} << 20)
with open("/root/next", "wb") as file:
    file.write(",".join(map(str, story)).encode() + b"\\n" + ballast[:1 << 20])
os.rename("/root/next", "/root/story")
"""

TELL = """
import glob, os

def told():
    told, data = globals().get("story", []), globals().get("ballast", b"")
    line, body = b"", b""
    if os.path.exists("/root/story"):
        line, _, body = open("/root/story", "rb").read().partition(b"\\n")
    wrote = [int(word) for word in line.split(b",") if word]
    linked = sorted(int(path.rpartition("-")[2]) for path in glob.glob("/root/linked-*"))
    def whole(story, data, size):
        return data == (bytes([story[-1] % 251 + 1]) * size if story else b"")
    return [told, wrote, linked, whole(told, data, {mib} << 20), whole(wrote, body, 1 << 20)]

told()
"""


class State(NamedTuple):
    """What a machine knows: in memory, on its disk, and by commands that links were made with."""

    memory: tuple[int, ...] = ()
    file: tuple[int, ...] = ()
    linked: tuple[int, ...] = ()


States = frozenset[State]


@dataclass
class Known:
    """What may be known of a sandbox or a snapshot.

    Attributes:
        states: One of these it has.
        home: One of these it has after a reset; None if that is not known.
        sure: Whether it must be there.
        seen: Whether it has been looked at since it was made.
    """

    states: States
    home: States | None = None
    sure: bool = True
    seen: bool = False


@dataclass
class World:
    """All that a daemon should have, by id and by tag, and what was done to get there.

    What failed is counted by operation and error; `reasons` keeps the last message of each.
    """

    client: Client
    base: str
    sandboxes: dict[str, Known] = field(default_factory=dict)
    snapshots: dict[str, Known] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    last: int = 0

    def __post_init__(self) -> None:
        self.snapshots[self.base] = Known(frozenset({State()}), seen=True)

    def next(self) -> int:
        """Return a number that nobody had before."""
        self.last += 1
        return self.last


Step = tuple[str, "Callable[[], None]"]


def run(world: World, steps: Iterable[Step]) -> None:
    """Do steps until one fails."""
    for name, step in steps:
        try:
            step()
        except ForkdError as error:
            kind = f"{name}: {type(error).__name__}"
            world.failed[kind] += 1
            world.reasons[kind] = str(error)
            return
        world.done[name] += 1


class Script:
    """What can be done with one sandbox, and what is known of it afterwards."""

    def __init__(self, world: World, sandbox: Sandbox) -> None:
        self._world, self._sandbox = world, sandbox
        self._known = world.sandboxes[sandbox.id]

    def steps(self, chance: random.Random, count: int) -> list[Step]:
        """Return a random sequence of operations; the sandbox may be gone after the last."""
        steps = chance.choices(
            [self.learn, self.branch, self.snapshot, self.snapshot_later, self.branch_and_snapshot,
             self.reset],
            weights=[4, 3, 3, 2, 2, 2], k=count,
        )  # fmt: skip
        if chance.random() < 1 / 8:
            steps[-1] = self.delete
        return [(step.__name__, step) for step in steps]

    def learn(self) -> None:
        known, n = self._known, self._world.next()
        before = known.states
        memory = {state._replace(memory=(*state.memory, n)) for state in before}
        # A state whose file lags behind has its whole story written down by the next attempt.
        after = frozenset(state._replace(file=state.memory) for state in memory)
        known.states = before | memory | after
        self._sandbox.eval(LEARN.format(n=n, mib=BALLAST_MIB), timeout_s=EVAL_TIMEOUT_S).check()
        known.states = after

    def branch(self) -> None:
        for sibling in self._sandbox.branch(2):
            self._world.sandboxes[sibling.id] = Known(self._known.states, home=self._known.states)

    def snapshot(self) -> None:
        tag = self._claim()
        self._sandbox.snapshot(tag)
        self._world.snapshots[tag].sure = True

    def snapshot_later(self) -> None:
        self._sandbox.snapshot(self._claim(), wait=False)

    def branch_and_snapshot(self) -> None:
        tag = self._claim()
        made = self._sandbox.try_branch(1, tag=tag)
        self._world.snapshots[tag].sure = True
        for sibling in made.sandboxes:
            self._world.sandboxes[sibling.id] = Known(self._known.states, home=self._known.states)

    def reset(self) -> None:
        known = self._known
        if known.home is None:
            return
        known.states |= known.home
        self._sandbox.reset()
        known.states = known.home

    def delete(self) -> None:
        self._known.sure = False
        self._sandbox.kill()
        del self._world.sandboxes[self._sandbox.id]

    def _claim(self) -> str:
        tag = f"s{self._world.next()}"
        self._world.snapshots[tag] = Known(self._known.states, sure=False)
        return tag


def fork(world: World, tag: str, chance: random.Random) -> list[Step]:
    """Return the step that forks a snapshot, with a cgroup or a tap or neither."""
    known, count = world.snapshots[tag], chance.randint(1, 3)
    limit = chance.choice([None, None, 512])
    network = chance.random() < 1 / 4

    def step() -> None:
        for sandbox in world.client.fork(tag, count, memory_limit_mib=limit, network=network):
            world.sandboxes[sandbox.id] = Known(known.states, home=known.states)

    return [("fork", step)]


def link(world: World, tag: str) -> list[Step]:
    """Return the step that makes a link over a snapshot by a command."""
    n = world.next()
    above = world.snapshots[tag].states
    states = frozenset(state._replace(linked=(*state.linked, n)) for state in above)
    world.snapshots[f"l{n}"] = Known(states, sure=False)

    def step() -> None:
        world.client.snapshots.link(f"l{n}", tag, exec=f"touch /root/linked-{n}")
        world.snapshots[f"l{n}"].sure = True

    return [("link", step)]


def remove(world: World, tag: str) -> list[Step]:
    """Return the step that removes a snapshot."""

    def step() -> None:
        world.snapshots[tag].sure = False
        world.client.snapshots.delete(tag)
        del world.snapshots[tag]

    return [("rm", step)]


def look(sandbox: Sandbox, known: Known) -> None:
    """Check that a sandbox knows what it may know, whole; there is one state from now on."""
    code = TELL.format(mib=BALLAST_MIB)
    told: Any = sandbox.eval(code, timeout_s=EVAL_TIMEOUT_S).check().value
    memory, file, linked, *whole = told
    state = State(tuple(memory), tuple(file), tuple(linked))
    assert whole == [True, True], f"{sandbox} is torn: {state}"
    assert state in known.states, f"{sandbox} knows {state}, not one of {known.states}"
    known.states, known.seen = frozenset({state}), True


def ready(snapshots: Iterable[v2.SnapshotInfo]) -> set[str]:
    """Return the tags of those that can be forked."""
    return {each.tag for each in snapshots if each.status == "ready"}
