"""A daemon of an ordinary user over the real VMM, for tests that are root."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.cgroups.limits import CONTROLLERS, IO
from forkd.host import cgroupfs
from forkd.images.layout import default_cache_folder
from tests.support.real_daemon import END_TIMEOUT_S, Daemon
from tests.support.real_host import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

USER = 2_142_900_007
"""Nobody's on this host: above all that forkd gives out by default."""

HOME_FILE = "letter"
"""A file of the user's home, which every user may read."""

KVM = Path("/dev/kvm")

SERVE = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = [{root!r}]
from forkd.loading import without_collecting
with without_collecting():
    from forkd.daemon import commands
    from forkd.daemon.settings import Settings
    from tests.support.host_settings import settings_in

state, run_dir = Path({state!r}), Path({run_dir!r})
settings = Settings(socket=run_dir / "forkd.sock", state_dir=state)
cgroups = commands.host_settings(settings).cgroups
commands.host_settings = lambda _: replace(
    settings_in(state, run_dir), uids=None, build_uids=None, cgroups=cgroups, rootless_jail=True
)
sys.exit(commands.serve(settings, log_file=run_dir / "log", detach=False))
"""
"""The daemon as it is for an ordinary user, except that images are root's."""


CAPTURED = """
import asyncio, json, sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from forkd.engine.configs import BranchConfig, ChildConfig, Identity, ZygoteConfig
from forkd.engine.control import Control
from forkd.engine.process import end, end_listener, start_zygote
from forkd.service.chain_files import load_chain
from forkd.service.jail import Jail
from forkd.store.snapshots import SnapshotStore
from tests.support.host_settings import settings_in

settings = settings_in(Path({state!r}), Path({run_dir!r}))
places = settings.jail_dirs, settings.tops_dir
jail = Jail(None, *places, rootless=True, cgroups=Path({cgroups!r}))
(base,) = load_chain(SnapshotStore(settings.state_dir), {tag!r})
names = "captive", "captive-source"
(zygote_folder, seed_folder) = (settings.zygotes_dir / name for name in names)
(folder, source_folder) = (settings.sandboxes_dir / name for name in names)
for each in (zygote_folder, seed_folder, folder, source_folder):
    each.mkdir(mode=0o700)
told = jail.zygote_config(None)
config = ZygoteConfig(zygote_folder, base.state, (base.memory,), base.disk, told)

def child(folder, hostname):
    identity = Identity(hostname, "0" * 32, "00000000-0000-4000-8000-000000000000")
    return ChildConfig(folder.name, folder, identity)

async def fork(control, child):
    said = []
    await control.fork([child], deadline_s=300.0, on_outcome=said.append)
    return said[0]

async def captured():
    captive = child(folder, {others!r})
    with await start_zygote(Path({captive!r}), config, filtered=False) as process:
        async with await Control.connect(zygote_folder / "zygote.sock") as control:
            if {seed!r}:
                await fork(control, child(source_folder, "honest"))
                async with await Control.connect(source_folder / "control.sock") as machine:
                    await machine.branch(BranchConfig(seed_folder))
                async with await Control.connect(seed_folder / "zygote.sock") as seed:
                    outcome = await fork(seed, captive)
                await end_listener(seed_folder / "zygote.sock")
                await end_listener(source_folder / "control.sock")
            else:
                outcome = await fork(control, captive)
        await end(process)
    assert "a captive ran" in outcome.message, outcome

asyncio.run(captured())
print((folder / "captive.json").read_text())
"""
"""Has a machine that was taken over try what it can, in the jail of the user who runs this; or the
zygote or seed that forks it."""


def as_user(words: Sequence[str | Path]) -> list[str]:
    """Return the words that run a program as the user, who may use KVM."""
    user = ("--reuid", str(USER), "--regid", str(USER))
    groups = f"--groups={KVM.stat().st_gid}" if KVM.exists() else "--clear-groups"
    return ["/usr/bin/setpriv", *user, groups, "--", *map(str, words)]


def without_user_namespaces(words: Sequence[str | Path], spare: Path) -> list[str]:
    """Return the words that run a program as the user where the kernel gives none a namespace.

    That is in a chroot, which is here all of the host's files, on an empty folder.
    """
    refuse = 'mount --rbind / "$0" && exec chroot "$0" "$@"'
    return ["/usr/bin/unshare", "--mount", "/bin/sh", "-ec", refuse, str(spare), *as_user(words)]


@contextlib.contextmanager
def delegated_group(name: str = "forkd-test-unit") -> Iterator[Path]:
    """A cgroup of the user's, as a service manager makes for a unit; all in it ends and goes."""
    group = cgroupfs.CGROUP_ROOT / name
    wanted = cgroupfs.controllers(cgroupfs.CGROUP_ROOT) & {*CONTROLLERS, IO}
    cgroupfs.write(
        cgroupfs.CGROUP_ROOT, "cgroup.subtree_control", " ".join(f"+{each}" for each in wanted)
    )
    cgroupfs.make(group)
    for file in (".", cgroupfs.PROCESSES, "cgroup.subtree_control", "cgroup.threads"):
        os.chown(group / file, USER, USER)
    try:
        yield group
    finally:
        cgroupfs.write(group, "cgroup.kill", "1")
        for below in sorted(group.glob("**/"), reverse=True):
            cgroupfs.end(below, END_TIMEOUT_S)


def in_group(group: Path, words: Sequence[str | Path]) -> list[str]:
    """Return the words that run a program in a cgroup."""
    enter = 'echo 0 >"$0"; exec "$@"'
    return ["/bin/sh", "-ec", enter, str(group / cgroupfs.PROCESSES), *map(str, words)]


class RootlessDaemon(Daemon):
    """As `Daemon`; its folders are the user's, and so is a home with a file in it."""

    def __init__(self, group: Path) -> None:
        super().__init__()
        self.group = group
        """The cgroup that it is started in."""

    @property
    def home(self) -> Path:
        """The user's home folder."""
        return self.state / "home"

    def start(self) -> None:
        """Start it; it listens when this returns."""
        script = SERVE.format(root=str(ROOT), state=str(self.state), run_dir=str(self.run_dir))
        process = self._process = subprocess.Popen(  # noqa: S603 - our own
            in_group(self.group, as_user([sys.executable, "-c", script])),
            stdout=subprocess.PIPE,
            env={**os.environ, "HOME": str(self.home)},
        )
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["event"] == "listening", said

    def captured(self, captive: Path, tag: str, others: str, *, seed: bool) -> list[dict[str, str]]:
        """Have a captive try what it can beside others; return what came of each try.

        Args:
            captive: Its program.
            tag: Of what it is a fork.
            others: The hostname that says what it tries.
            seed: Whether a seed forks it, and not a zygote.
        """
        script = CAPTURED.format(
            root=str(ROOT), state=str(self.state), run_dir=str(self.run_dir), tag=tag,
            cgroups=str(self.group / self.names.cgroup_root.name),
            captive=str(captive), others=others, seed=seed,
        )  # fmt: skip
        try:
            done = subprocess.run(  # noqa: S603 - our own
                as_user([sys.executable, "-c", script]),
                check=True, stdout=subprocess.PIPE, env={**os.environ, "HOME": str(self.home)},
            )  # fmt: skip
            found: list[dict[str, str]] = json.loads(done.stdout)
            return found
        finally:
            made = self.settings.sandboxes_dir / "made"
            made.unlink(missing_ok=True)
            for each in (self.settings.zygotes_dir, self.settings.sandboxes_dir):
                for left in each.glob("captive*"):
                    shutil.rmtree(left)

    def give_away(self) -> None:
        """Make everything in its folders the user's."""
        self.home.mkdir()
        (self.home / HOME_FILE).write_text("dear")
        for folder in (self.state, self.run_dir):
            for path in (folder, *folder.rglob("*")):
                os.chown(path, USER, USER, follow_symlinks=False)


@contextlib.contextmanager
def running_rootless_daemon() -> Iterator[RootlessDaemon]:
    """A daemon of an ordinary user in a cgroup that is the user's; all is gone afterwards."""
    with contextlib.ExitStack() as mounts:
        made = RootlessDaemon(mounts.enter_context(delegated_group()))
        shared, cache = default_cache_folder(), made.state / "cache"
        bound = [cache / name for name in ("images", "kernels")]
        mounts.callback(made.remove)
        for path in bound:
            path.unlink()  # a link into root's home
            path.mkdir()
        made.give_away()
        # Of the user's processes, the one that a captive may reach first.
        victim = mounts.enter_context(subprocess.Popen(as_user(["/usr/bin/sleep", "infinity"])))  # noqa: S603 - constant
        mounts.callback(victim.kill)
        for path in bound:
            # By a mount, as the user may not pass through root's home.
            subprocess.run(["/usr/bin/mount", "--bind", shared / path.name, path], check=True)  # noqa: S603 - constant
            mounts.callback(unmount, path)
        made.start()
        mounts.callback(made.end, signal.SIGTERM)
        yield made


def unmount(path: Path) -> None:
    """Unmount what is mounted somewhere."""
    subprocess.run(["/usr/bin/umount", path], check=True)  # noqa: S603 - a constant command
