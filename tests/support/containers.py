"""Real containers, started by runc as Docker and Kubernetes' runtimes have it start them.

`Confinement()` is what `docker run` gives a container that asks for nothing; `privileged` what
`docker run --privileged` gives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import mounts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.support.container_image import ContainerImage

COMMAND_TIMEOUT_S = START_TIMEOUT_S = 300.0
"""Both are long enough for an emulated processor."""

LOOK_S = 0.2
"""How often a log is looked at, for which there is no event."""


def words(text: str) -> frozenset[str]:
    """Return what is listed."""
    return frozenset(text.split())


DOCKER = words(
    "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP"
    " SETGID SETPCAP SETUID SYS_CHROOT"
)
"""The capabilities that Docker and containerd leave to root.  Source: Docker's documentation,
"Runtime privilege and Linux capabilities"."""

ALL = frozenset(
    line.split()[1].removeprefix("CAP_")
    for line in Path("/usr/include/linux/capability.h").read_text(encoding="utf-8").splitlines()
    if line.startswith("#define CAP_") and line.split()[2].isdecimal()
)
"""Every capability that this host's headers know."""

ALWAYS_REFUSED = words(
    "add_key create_module get_kernel_syms io_uring_enter io_uring_register io_uring_setup"
    " kexec_file_load kexec_load keyctl move_pages nfsservctl pivot_root query_module request_key"
    " swapoff swapon sysfs _sysctl uselib userfaultfd ustat"
)
"""What Docker's default profile refuses to every container that is not privileged.  Source:
Docker's documentation, "Seccomp security profiles for Docker"."""

REFUSED_WITHOUT = {
    "SYS_ADMIN": words(
        "bpf fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr"
        " move_mount open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname setns"
        " syslog umount2 unshare"
    ),
    "DAC_READ_SEARCH": words("open_by_handle_at"),
    "SYS_BOOT": words("reboot"),
    "SYS_CHROOT": words("chroot"),
    "SYS_MODULE": words("delete_module finit_module init_module"),
    "SYS_NICE": words("get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
    "SYS_PACCT": words("acct"),
    "SYS_PTRACE": words("kcmp pidfd_getfd process_madvise"),
    "SYS_RAWIO": words("ioperm iopl"),
    "SYS_TIME": words("clock_settime settimeofday"),
    "SYS_TTY_CONFIG": words("vhangup"),
}
"""What it refuses to a container without a capability."""

DEVICE_GROUP = 108
"""The group that may open devices, as on most distributions; a container without root has it."""

ENOSYS = 38
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW… of clone(2), without CLONE_NEWTIME, which it does not have."""

MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/sys/firmware"),
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""What Docker hides of these file systems, and what it lets containers only read."""

NAMESPACES = ("ipc", "mount", "network", "pid", "uts")


@dataclass(frozen=True, slots=True)
class Confinement:
    """How a container is confined.

    Attributes:
        privileged: Whether it has all capabilities and devices, and nothing is hidden from it.
        capabilities: Those of its programs, if they are root's.
        seccomp: Whether it has a profile like Docker's default one.
        devices: Those that it has besides the usual ones, if it is not privileged.
        writes_cgroups: Whether it may make groups, if it is not privileged.
        writes_settings: Whether nothing of /proc is hidden from it or only to be read, if it is not
            privileged.
        sees_groups_above: Whether it sees the host's groups, as privileged pods of containerd do.
        user: Whose its program is.
        gains_rights: Whether programs in it may have more rights than who starts them.
        memory_mib: Its limit; None for none.
    """

    privileged: bool = False
    capabilities: frozenset[str] = DOCKER
    seccomp: bool = True
    devices: tuple[str, ...] = ()
    writes_cgroups: bool = False
    writes_settings: bool = False
    sees_groups_above: bool = False
    user: int = 0
    gains_rights: bool = True
    memory_mib: int | None = None


@dataclass(slots=True)
class Container:
    """A container that was started.

    Attributes:
        name: What runc calls it.
        state: Where runc keeps what it knows of it.
        log: What its program said.
        group: Its cgroup, as this host sees it.
    """

    name: str
    state: Path
    log: Path
    group: Path

    def run(self, *words: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program in it, as `docker exec` does."""
        who = [] if user is None else ["--user", f"{user}:{user}"]
        return self._runc("exec", *who, self.name, *words)

    def check(self, *words: str) -> str:
        """Run a program; return what it printed.

        Raises:
            AssertionError: It failed; has what it and the daemon said.
        """
        done = self.run(*words)
        said = f"{words}: {done.stdout}{done.stderr}\n{self.log.read_text()}"
        assert done.returncode == 0, said
        return done.stdout

    @contextlib.contextmanager
    def background(self, *words: str, environment: Mapping[str, str]) -> Iterator[Path]:
        """Run a program in it for the block; gives what it says, a file.

        Args:
            words: The program.
            environment: Variables besides those of the container's own program.
        """
        settings = [word for each in environment.items() for word in ("--env", "=".join(each))]
        said = self.log.with_name("said")
        with said.open("wb") as output:
            command = ["runc", "--root", str(self.state), "exec", *settings, self.name, *words]
            with subprocess.Popen(command, stdout=output, stderr=output) as running:  # noqa: S603 - runc, by root
                try:
                    yield said
                finally:
                    running.terminate()  # which runc passes on

    def is_running(self) -> bool:
        """Whether its program has not ended."""
        return str(self._state()["status"]) == "running"

    def pid(self) -> int:
        """Return the number of its program on this host."""
        return int(self._state()["pid"])

    def _state(self) -> dict[str, Any]:
        return dict(json.loads(self._runc("state", self.name).stdout))

    def end(self) -> None:
        """Kill all that runs in it, and remove it."""
        done = self._runc("delete", "--force", self.name)
        assert done.returncode == 0, done.stderr

    def _runc(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603 - runc, by root
            ["runc", "--root", self.state, *words],  # noqa: S607 - Debian's
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=COMMAND_TIMEOUT_S,
        )  # fmt: skip


@contextlib.contextmanager
def container(  # noqa: PLR0913 - what a container is given
    image: ContainerImage,
    confinement: Confinement,
    *,
    environment: Mapping[str, str] | None = None,
    volumes: Mapping[str, Path] | None = None,
    readable: Mapping[str, Path] | None = None,
    program: Sequence[str] | None = None,
) -> Iterator[Container]:
    """Start a container, and remove it after the block.

    Args:
        image: Its files, which stay as they are.
        confinement: How it is confined.
        environment: Variables besides those of the image.
        volumes: Folders and files of this host, by where they are in it.
        readable: Likewise those that it may only read.
        program: What it runs instead of the image's own program.
    """
    # Not by forkd's name in /tmp, and short: sockets are below it.
    with tempfile.TemporaryDirectory(prefix="ctr-", dir="/tmp") as name:
        folder = Path(name)
        bundle = folder / "bundle"
        for part in ("layer", "bundle", "bundle/root", "runc"):
            (folder / part).mkdir()
        group = f"ctr-{os.getpid()}-{folder.name.removeprefix('ctr-')}"
        words = tuple(program or image.config.program)
        home = "/var/lib/forkd" if confinement.user else "/root"
        variables = {**image.config.env, "HOME": home, **(environment or {})}
        mounted = _mounts(confinement, volumes or {}, readable or {})
        spec = _spec(words, variables, confinement, mounted, group)
        (bundle / "config.json").write_text(json.dumps(spec))
        with _layered(image.root, folder / "layer", bundle / "root"):
            log = folder / "log"
            made = Container(folder.name, folder / "runc", log, Path("/sys/fs/cgroup", group))
            with log.open("wb") as output:
                done = subprocess.run(  # noqa: S603 - runc, by root
                    ["runc", "--root", made.state, "run", "--detach", "--bundle", bundle,  # noqa: S607 - Debian's
                     made.name],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False,
                    timeout=COMMAND_TIMEOUT_S,
                )  # fmt: skip
            try:
                assert done.returncode == 0, log.read_text()
                yield made
            finally:
                made.end()


async def listening(made: Container) -> None:
    """Wait until a container's program, a daemon, listens.

    Raises:
        AssertionError: It ended; has what it said.
        TimeoutError: It does not listen in time.
    """
    async with asyncio.timeout(START_TIMEOUT_S):
        while '"listening"' not in made.log.read_text():
            assert made.is_running(), made.log.read_text()
            await asyncio.sleep(LOOK_S)


async def ended(made: Container) -> None:
    """Wait until a container's program, a daemon that cannot run, has ended.

    Raises:
        AssertionError: It listened.
        TimeoutError: It does not end in time.
    """
    async with asyncio.timeout(START_TIMEOUT_S):
        while made.is_running():
            assert '"listening"' not in made.log.read_text()
            await asyncio.sleep(LOOK_S)


@contextlib.contextmanager
def _layered(lower: Path, layer: Path, where: Path) -> Iterator[None]:
    """Have files at a place where what is written goes to memory."""
    with mounts.mounted("tmpfs", layer, "mode=755"):
        for part in ("upper", "work"):
            (layer / part).mkdir()
        layers = f"lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work"
        with mounts.mounted("overlay", where, layers):
            yield


def _spec(
    program: tuple[str, ...],
    variables: Mapping[str, str],
    confinement: Confinement,
    mounted: Sequence[dict[str, Any]],
    group: str,
) -> dict[str, Any]:
    """Return the configuration of the OCI's runtime specification."""
    privileged = confinement.privileged
    rights = sorted(f"CAP_{each}" for each in (ALL if privileged else confinement.capabilities))
    sets = ("bounding",) if confinement.user else ("bounding", "effective", "permitted")
    resources: dict[str, Any] = {"devices": _device_rules(confinement)}
    if confinement.memory_mib is not None:
        limit = confinement.memory_mib << 20
        resources["memory"] = {"limit": limit, "swap": limit}
    namespaces = [*NAMESPACES, *([] if confinement.sees_groups_above else ["cgroup"])]
    linux: dict[str, Any] = {
        "cgroupsPath": f"/{group}",
        "namespaces": [{"type": each} for each in namespaces],
        "resources": resources,
        "devices": [_device(path) for path in _devices(confinement)],
    }
    if not privileged and not confinement.writes_settings:
        linux |= {"maskedPaths": MASKED, "readonlyPaths": READ_ONLY}
    if not privileged and confinement.seccomp:
        linux["seccomp"] = _seccomp(confinement.capabilities)
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {
                "uid": confinement.user,
                "gid": confinement.user,
                "additionalGids": [DEVICE_GROUP] if confinement.user else [],
            },
            "args": program,
            "env": [f"{name}={value}" for name, value in variables.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(sets, rights),
            "noNewPrivileges": not confinement.gains_rights,
        },
        "root": {"path": "root"},
        "hostname": "container",
        "mounts": mounted,
        "linux": linux,
    }


def _mounts(
    confinement: Confinement, volumes: Mapping[str, Path], readable: Mapping[str, Path]
) -> list[dict[str, Any]]:
    kept = ["nosuid", "noexec", "nodev"]
    sys = kept if confinement.privileged else [*kept, "ro"]
    cgroups = kept if confinement.privileged or confinement.writes_cgroups else [*kept, "ro"]
    found = [
        ("/proc", "proc", "proc", kept),
        ("/dev", "tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
        ("/dev/pts", "devpts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666"]),
        ("/dev/shm", "tmpfs", "shm", [*kept, "mode=1777", "size=65536k"]),
        ("/sys", "sysfs", "sysfs", sys),
        ("/sys/fs/cgroup", "cgroup", "cgroup", cgroups),
    ]
    mounts = [
        {"destination": where, "type": kind, "source": source, "options": options}
        for where, kind, source, options in found
    ]
    bound = [(where, path, ["rbind"]) for where, path in volumes.items()]
    bound += [(where, path, ["rbind", "ro"]) for where, path in readable.items()]
    mounts += [
        {"destination": where, "type": "bind", "source": str(path), "options": options}
        for where, path, options in bound
    ]
    return mounts


def _devices(confinement: Confinement) -> tuple[str, ...]:
    """Return the devices besides those of every container."""
    if not confinement.privileged:
        return confinement.devices
    return tuple(each for each in ("/dev/kvm", "/dev/net/tun") if Path(each).exists())


def _device(path: str) -> dict[str, Any]:
    found = Path(path).stat()
    numbers = {"major": os.major(found.st_rdev), "minor": os.minor(found.st_rdev)}
    access = {"fileMode": 0o660, "uid": 0, "gid": DEVICE_GROUP}
    return {"path": path, "type": "c", **numbers, **access}


def _device_rules(confinement: Confinement) -> list[dict[str, Any]]:
    if confinement.privileged:
        return [{"allow": True, "access": "rwm"}]
    allowed = [_device(path) for path in confinement.devices]
    return [
        {"allow": False, "access": "rwm"},
        *(
            {"allow": True, "access": "rwm"} | {name: each[name] for name in RULE}
            for each in allowed
        ),
    ]


RULE = ("type", "major", "minor")


def _seccomp(capabilities: frozenset[str]) -> dict[str, Any]:
    """Return a profile that refuses what Docker's default one does.

    Docker's lists what is allowed; what it refuses of all else is listed here.
    """
    refused = set(ALWAYS_REFUSED)
    for capability, calls in REFUSED_WITHOUT.items():
        refused |= set() if capability in capabilities else calls
    rules: list[dict[str, Any]] = [
        {"names": sorted(refused), "action": "SCMP_ACT_ERRNO", "errnoRet": 1}
    ]
    if "SYS_ADMIN" not in capabilities:
        rules.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS})
        rules += [
            {
                "names": ["clone"],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": 1,
                "args": [{"index": 0, "value": bit, "valueTwo": bit, "op": "SCMP_CMP_MASKED_EQ"}],
            }
            for bit in (1 << shift for shift in range(32))
            if bit & NEW_NAMESPACES
        ]
    rules.append(
        {
            "names": ["socket"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": 1,
            "args": [{"index": 0, "value": 40, "op": "SCMP_CMP_EQ"}],  # AF_VSOCK
        }
    )
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": rules,
    }
