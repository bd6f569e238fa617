"""Whatever is killed, and whenever, what is left is whole, known to the daemon, and answers."""

from __future__ import annotations

import signal
import time
from collections import Counter
from concurrent.futures import ALL_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3

from forkd import Client
from forkd.host.spawn import Process
from forkd.model.ids import parse_tag
from forkd.store.headers import HEADER_BYTES
from forkd.store.snapshots import SnapshotStore
from tests.support import census
from tests.support.crash_load import Known, Script, World, fork, link, look, ready, remove, run
from tests.support.real_daemon import running_daemon
from tests.support.real_host import REAL, RECIPE, TAG

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from forkd.sdk import Sandbox
    from forkd.wire import v2
    from tests.support.bakes import Bakes
    from tests.support.crash_load import Step
    from tests.support.real_daemon import Daemon
    from tests.support.soak import Soak

pytestmark = [
    REAL,
    pytest.mark.soak(only=True),
    pytest.mark.timeout(900),
    # httpcore leaves a socket that could not connect to a killed daemon to be collected.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

ROLES = ("daemon", "zygote", "source", "seed", "writer")

MOMENT_S = 1.5
"""Within this time of the load's begin, which takes about as long, somebody is killed."""

LIFE_S = 0.2
"""As long a seed or a writer lives here, which is killed within that time of being seen."""

END_S = 180.0
"""Deadline of a load that has lost somebody, and of the daemon's tidying up after that."""

POLL_S = 0.005

TOLD_EVERY = 20
"""After so many rounds it is said how far it has come."""

ATTEMPTS = 20
SANDBOXES_KEPT = 4
SNAPSHOTS_KEPT = 6


@pytest.fixture
def daemon(bakes: Bakes) -> Iterator[Daemon]:
    """A daemon with a base."""
    with running_daemon(bakes.of(RECIPE)) as made:
        yield made
        left = made.vmm_processes()
        for pid in left:
            _kill(pid)
        assert left == set()


def test_whoever_is_killed_no_snapshot_is_torn_nobody_is_an_orphan_and_the_list_is_true(
    daemon: Daemon, soak: Soak, tell: Callable[[str], None]
) -> None:
    chance, killed, rounds = soak.dice(), Counter[str](), soak.count(len(ROLES), 200)
    with Client(daemon.url) as client:
        arena = Arena(daemon, client, chance)
        for number in range(rounds):
            if number % len(ROLES) == 0:
                order = chance.sample(ROLES, len(ROLES))
            role = order[number % len(ROLES)]
            started_s = time.monotonic()
            arena.strike(role)
            arena.check()
            killed[role] += 1
            print(f"{number}: {role}, {time.monotonic() - started_s:.1f} s")  # noqa: T201 - if it fails
            if (number + 1) % TOLD_EVERY == 0:
                tell(f"{number + 1} killed: {dict(killed)}; in vain {dict(arena.vain)}")
        arena.end()
    tell(f"killed {dict(killed)}; looked at {dict(arena.looked)}")
    tell(f"done {dict(arena.world.done)}, failed {dict(arena.world.failed)}")
    assert sum(arena.world.done.values()) > sum(arena.world.failed.values())


class Arena:
    """A daemon under load, of which somebody is killed again and again."""

    def __init__(self, daemon: Daemon, client: Client, chance: random.Random) -> None:
        self._daemon, self._client, self._chance = daemon, client, chance
        self._killed: set[str] = set()
        self.world = World(client, TAG)
        self.looked = Counter[str]()
        self.vain = Counter[str]()

    # Killing

    def strike(self, role: str) -> None:
        """Put the daemon under load and kill a process of that role; the load has ended then."""
        done, failed = self.world.done.copy(), self.world.failed.copy()
        for _ in range(ATTEMPTS):
            with ThreadPoolExecutor() as pool:
                tasks = [pool.submit(run, self.world, steps) for steps in self._plan(role)]
                struck = self._strike_during(role, tasks)
                for task in tasks:
                    task.result(END_S)
            if role == "daemon":
                self._daemon.start()
            if struck:
                return
            self.vain[role] += 1
            self._settle()
            self._trim()
        done, failed = self.world.done - done, self.world.failed - failed
        reasons = {kind: self.world.reasons[kind] for kind in failed}
        raise AssertionError(
            f"there was never a {role}; done {done}, failed {failed}, lastly {reasons};"
            f" {census.take(self._daemon)}; {self._client.snapshots.list()}"
        )

    def _plan(self, role: str) -> list[list[Step]]:
        """Return what is to be done at the same time."""
        running = self._running()
        while len(running) < 2:
            run(self.world, fork(self.world, TAG, self._chance))
            running = self._running()
        chosen = self._chance.sample(running, 2)
        self._sources = {each.id for each in chosen}
        scripts = [Script(self.world, each) for each in chosen]
        plan = [script.steps(self._chance, 2) for script in scripts]
        if role in {"seed", "writer"}:
            first = scripts[0]
            plan[0] = [("learn", first.learn), ("snapshot", first.snapshot), *plan[0]]
        snapshots = self._client.snapshots.list()
        tag = self._chance.choice(sorted(ready(snapshots)))
        plan.append(
            self._chance.choice([fork(self.world, tag, self._chance), link(self.world, tag)])
        )
        leaves = self._leaves(snapshots, besides={tag})
        if leaves and self._chance.random() < 1 / 3:
            plan.append(remove(self.world, self._chance.choice(leaves)))
        return plan

    def _strike_during(self, role: str, tasks: list[Future[None]]) -> bool:
        """Kill a process of that role at a random moment; returns whether there was one."""
        if role in {"seed", "writer"}:
            while not (found := self._victims(role)) and not _over(tasks, POLL_S):
                pass
            _over(tasks, self._chance.uniform(0, LIFE_S))
        else:
            _over(tasks, self._chance.uniform(0, MOMENT_S))
            if role == "daemon":
                self._daemon.end(signal.SIGKILL)
                return True
            found = self._victims(role)
        if not found:
            return False
        pid = self._chance.choice(sorted(found))
        self._killed.add(found[pid])
        if found[pid] in self.world.sandboxes:
            self.world.sandboxes[found[pid]].sure = False
        return _kill(pid)

    def _victims(self, role: str) -> dict[int, str]:
        now = census.take(self._daemon)
        sources = {pid: name for pid, name in now.machines.items() if name in self._sources}
        return {
            "zygote": now.zygotes,
            "source": sources or now.machines,
            "seed": now.seeds,
            "writer": dict.fromkeys(now.writers, ""),
        }[role]

    # Checking

    def check(self) -> None:
        """Check everything that must hold once somebody was killed."""
        self._settle()
        self._until_true()
        self._check_sandboxes()
        self._check_snapshots()
        self._trim()
        self._until_true()

    def _settle(self) -> None:
        """Return when nothing is being written any more."""
        until(lambda: [s.tag for s in self._client.snapshots.list() if s.status == "writing"])

    def _until_true(self) -> None:
        """Return when what the daemon says is what there is."""
        until(lambda: census.untrue(self._daemon, [s.info for s in self._client.sandboxes.list()]))

    def _running(self) -> list[Sandbox]:
        return [each for each in self._client.sandboxes.list() if each.info.status == "running"]

    def _check_sandboxes(self) -> None:
        known = self.world.sandboxes
        for each in self._client.sandboxes.list():
            if each.info.status == "exited":
                assert each.id in self._killed, f"{each.id} ended: {each.info.exit_reason}"
                each.kill()
        running = {each.id: each for each in self._running()}
        for id_ in running.keys() - known.keys():
            known[id_] = self._origin(running[id_])
        for id_ in known.keys() - running.keys():
            assert not known.pop(id_).sure, f"{id_} is gone"
        for id_, each in running.items():
            known[id_].sure = True
            look(each, known[id_])
            self.looked["sandboxes"] += 1

    def _origin(self, sandbox: Sandbox) -> Known:
        """Return what a sandbox may know whose fork was never answered."""
        parent = sandbox.info.parent_id
        if parent is not None:
            states = self.world.sandboxes[parent].states
        else:
            states = self.world.snapshots[sandbox.tag].states
        return Known(states, home=states)

    def _check_snapshots(self) -> None:
        known, listed = self.world.snapshots, {s.tag: s for s in self._client.snapshots.list()}
        for tag in [tag for tag in known if tag not in listed]:
            assert not known.pop(tag).sure, f"snapshot {tag} is gone"
        for tag, snapshot in listed.items():
            if snapshot.status == "failed":
                assert not known.pop(tag).sure, f"snapshot {tag} failed: {snapshot.error}"
                self._client.snapshots.delete(tag)
                self.looked["failed snapshots"] += 1
                continue
            known[tag].sure = True
            if not known[tag].seen:
                self._check_snapshot(tag, known[tag])
        one = self._chance.choice(sorted(known))
        self._check_snapshot(one, known[one])

    def _check_snapshot(self, tag: str, known: Known) -> None:
        """Check that a snapshot's files are whole, and that a fork of it knows what it should."""
        store = SnapshotStore(self._daemon.state)
        manifest = store.load_chain(parse_tag(tag))[-1]
        for file in manifest.files if tag != TAG else ():
            body = (store.folder(parse_tag(tag)) / file.name).read_bytes()[HEADER_BYTES:]
            assert blake3(body).hexdigest() == file.digest, f"{file.name} of {tag} is torn"
        with self._client.fork(tag)[0] as child:
            look(child, known)
        self.looked["snapshots"] += 1

    # Keeping it small

    def _leaves(self, snapshots: list[v2.SnapshotInfo], besides: set[str]) -> list[str]:
        """Return the snapshots that can be removed, as far as nobody begins to use them."""
        parents = {each.parent_tag for each in snapshots} | besides | {TAG}
        return [s.tag for s in snapshots if s.tag not in parents and s.sandboxes == 0]

    def _trim(self) -> None:
        """Remove what is too much."""
        running = self._running()
        self._chance.shuffle(running)
        for each in running[SANDBOXES_KEPT:]:
            each.kill()
            del self.world.sandboxes[each.id]
        snapshots = self._client.snapshots.list()
        leaves = self._leaves(snapshots, besides=set())
        self._chance.shuffle(leaves)
        for tag in leaves[: max(0, len(snapshots) - SNAPSHOTS_KEPT)]:
            self._client.snapshots.delete(tag)
            del self.world.snapshots[tag]

    def end(self) -> None:
        """End and remove everything; nothing of it is left."""
        for each in self._client.sandboxes.list():
            each.kill()
        self._client.snapshots.delete(TAG, cascade=True)
        assert self._client.snapshots.list() == []
        until(lambda: [*self._daemon.left(), *self._daemon.vmm_processes()])


def until(still: Callable[[], object]) -> None:
    """Return when `still` has nothing more to say; what it says too long fails the test."""
    until_s = time.monotonic() + END_S
    never: Future[None] = Future()
    while said := still():
        assert time.monotonic() < until_s, said
        _over([never], POLL_S)


def _over(tasks: list[Future[None]], timeout_s: float) -> bool:
    """Wait until all tasks have ended, or for that time; returns whether they have."""
    return not wait(tasks, timeout_s, ALL_COMPLETED).not_done


def _kill(pid: int) -> bool:
    """Kill a process; returns whether there was one."""
    process = Process.open(pid)
    if process is None:
        return False
    with process:
        process.kill()
    return True
