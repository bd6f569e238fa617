"""User namespaces for siblings, as the kernel has them: who may enter one, and be whom in it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from forkd import programs
from forkd.errors import HostError
from forkd.host import files, userns
from forkd.limits import UIDS_DEFAULT
from forkd.service.jail import UidRange
from forkd.service.siblings import without

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.host.userns import Extent

pytestmark = pytest.mark.needs("root", "binaries")

UIDS = UidRange.parse(UIDS_DEFAULT)
SOURCE = UIDS.first + UIDS.count // 4
BLOCK: Extent = (UIDS.siblings_first, 64)
SIBLING, OTHER = BLOCK[0], BLOCK[0] + 1
LEVELS = 33
"""How many namespaces the kernel makes, one below the other."""

TIMEOUT_S = 60.0

ACTOR = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
told = socket.socket(fileno=0)


def become(uid):
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def enter():
    (namespace,) = socket.recv_fds(told, 1, 1)[1]
    if libc.setns(namespace, 0x10000000) < 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)


def give_up():
    if libc.syscall(126, (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) < 0:
        raise OSError(ctypes.get_errno(), "capset")


def forbid():
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


told.send(b"ok")
while line := told.recv(200):
    try:
        exec(line.decode())
        said = "ok"
    except OSError as error:
        said = os.strerror(error.errno)
    told.send(said.encode())
"""


class Actor:
    """A process that does what it is told, and says what the kernel said."""

    def __init__(self, process: subprocess.Popen[bytes], told: socket.socket) -> None:
        self.pid = process.pid
        self._told = told
        assert self._heard() == "ok"

    def do(self, what: str, namespace: int | None = None) -> str:
        self._told.send(what.encode())
        if namespace is not None:
            socket.send_fds(self._told, [b"x"], [namespace])
        return self._heard()

    def _heard(self) -> str:
        return self._told.recv(200).decode()


@contextlib.contextmanager
def actor(uid: int) -> Iterator[Actor]:
    """Have a process that is that user, without any right."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(TIMEOUT_S)
    with ours:
        command = [sys.executable, "-c", ACTOR]
        with theirs:
            process = subprocess.Popen(command, stdin=theirs.fileno())  # noqa: S603 - our own
        with process:
            try:
                made = Actor(process, ours)
                assert made.do(f"os.setgroups([]); become({uid})") == "ok"
                yield made
            finally:
                process.kill()


def make(source: Actor, uid: int, users: tuple[Extent, ...]) -> int | None:
    return userns.make(programs.find(programs.VMM), source.pid, uid, users)


@contextlib.contextmanager
def namespace(source: Actor, uid: int = SOURCE, *users: Extent) -> Iterator[int]:
    made = make(source, uid, users or (BLOCK,))
    assert made is not None
    try:
        yield made
    finally:
        files.close(made)


def test_its_user_alone_enters_one_and_becomes_nobody_but_who_is_in_it() -> None:
    refused, nobody = os.strerror(1), os.strerror(22)
    with (
        actor(SOURCE) as source,
        actor(SOURCE) as seed,
        actor(SOURCE + 1) as stranger,
        namespace(source) as there,
    ):
        assert stranger.do("enter()", there) == refused
        assert seed.do(f"become({SIBLING})") == refused
        assert seed.do("enter()", there) == "ok"
        for uid in (0, SOURCE, SOURCE + 1, BLOCK[0] - 1, sum(BLOCK)):
            assert seed.do(f"become({uid})") == nobody, uid
        assert seed.do(f"become({SIBLING})") == "ok"
        assert userns.extents(seed.pid) == (BLOCK,)
        assert userns.extents(source.pid) is None


def test_siblings_do_not_signal_each_other_their_seed_or_their_source() -> None:
    with (
        actor(SOURCE) as source,
        actor(SOURCE) as seed,
        actor(SOURCE) as one,
        actor(SOURCE) as two,
        namespace(source) as there,
    ):
        for each in (seed, one, two):
            assert each.do("enter()", there) == "ok"
        for each, uid in ((one, SIBLING), (two, OTHER)):
            assert each.do(f"become({uid}); give_up()") == "ok"

        for each in (source, seed, two):
            assert one.do(f"os.kill({each.pid}, 0)") == os.strerror(1)
        assert seed.do(f"os.kill({one.pid}, 0)") == "ok"
        assert one.do(f"become({OTHER})") == os.strerror(1)
        # As the guide says: the namespace is its user's, whose signals arrive.
        assert source.do(f"os.kill({one.pid}, 0)") == "ok"
        assert source.do(f"open('/proc/{one.pid}/mem', 'rb')") == os.strerror(13)
        assert source.do(f"os.readlink('/proc/{one.pid}/ns/user')") == os.strerror(13)


def test_a_siblings_siblings_are_others_of_its_tree_and_not_itself() -> None:
    with actor(SOURCE) as source, actor(SOURCE) as sibling, namespace(source) as there:
        assert sibling.do("enter()", there) == "ok"
        assert sibling.do(f"become({SIBLING}); give_up()") == "ok"
        above = userns.extents(sibling.pid)
        assert above is not None
        left = without(SIBLING, above)
        with namespace(sibling, SIBLING, *left) as below:
            assert sibling.do("enter()", below) == "ok"
            assert sibling.do(f"become({SIBLING})") == os.strerror(22)
            assert sibling.do(f"become({OTHER})") == "ok"
            assert userns.extents(sibling.pid) == left


def test_there_is_none_below_as_many_as_the_kernel_allows() -> None:
    uid = SOURCE
    users: tuple[Extent, ...] = (BLOCK,)
    with actor(SOURCE) as machine:
        for level in range(LEVELS):
            with namespace(machine, uid, *users) as there:
                assert machine.do("enter()", there) == "ok", level
                uid = users[0][0]
                assert machine.do(f"become({uid}); give_up()") == "ok"
                users = without(uid, users)

        assert make(machine, uid, users) is None


def test_what_forbids_one_is_named() -> None:
    with actor(SOURCE) as source, actor(SOURCE) as sibling, namespace(source) as there:
        assert sibling.do("enter(); forbid()", there) == "ok"
        assert sibling.do(f"become({SIBLING}); give_up()") == "ok"

        with pytest.raises(HostError, match=r"users of their own: .*user\.max_user_namespaces"):
            make(sibling, SIBLING, without(SIBLING, (BLOCK,)))


def test_of_a_process_that_has_ended_there_is_none() -> None:
    with actor(SOURCE) as source:
        pass

    with pytest.raises(HostError):
        userns.extents(source.pid)
    with pytest.raises(HostError, match="users of their own"):
        make(source, SOURCE, (BLOCK,))
