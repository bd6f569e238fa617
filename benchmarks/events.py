"""Measure what open streams of events cost a fork: `python -m benchmarks.events [--streams N]`.

A daemon in a process of its own over the VMM of the tests, which is none: it costs a fork less than
a real one, so that what the streams cost shows more.  Rounds without and with the streams take
turns; in each, for some seconds, sandboxes are forked one after the other and deleted.  A process
of its own reads the streams, as clients do.  The ratio is that of the medians of single forks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import select
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.sdk import Client
from tests.support.fake_daemon import FakeDaemon
from tests.support.service_host import make_host

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

REQUEST = b"GET /v2/events HTTP/1.1\r\nHost: localhost\r\n\r\n"

ROUND_S = 5.0
"""Longer than events are gathered, so that followers are told in each round."""


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.events", description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as run_dir,
    ):
        host = make_host(Path(folder), Path(run_dir))
        with FakeDaemon(host) as daemon, Client(daemon.url) as client:
            client.snapshots.create("python", host.recipe())
            without, with_streams = _measured(client, daemon.url, options.streams, options.rounds)
    ratio = statistics.median(with_streams) / statistics.median(without)
    figures = {
        "streams": options.streams,
        "forks": len(without),
        "fork_ms": _summary(without),
        "fork_ms_with_streams": _summary(with_streams),
        "ratio": round(ratio, 3),
    }
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    return 0


def _measured(
    client: Client, url: str, streams: int, rounds: int
) -> tuple[list[float], list[float]]:
    without: list[float] = []
    with_streams: list[float] = []
    _round(client)  # cold
    for _ in range(rounds):
        without += _round(client)
        ours, theirs = multiprocessing.Pipe()
        path = url.removeprefix("unix://")
        reader = multiprocessing.Process(target=_read, args=(path, streams, theirs))
        reader.start()
        ours.recv()
        with_streams += _round(client)
        ours.send("end")
        told = ours.recv()
        reader.join()
        if told < streams:
            raise RuntimeError(f"only {told} of {streams} streams were told of anything")
    return without, with_streams


def _round(client: Client) -> list[float]:
    """Fork one sandbox after the other; return how long each took, in milliseconds."""
    took_ms = []
    until_s = time.perf_counter() + ROUND_S
    while (begun_s := time.perf_counter()) < until_s:
        (made,) = client.fork("python")
        took_ms.append((time.perf_counter() - begun_s) * 1_000)
        made.kill()
    return took_ms


def _read(path: str, streams: int, parent: Connection) -> None:
    """Open streams and read what comes; tell how many were told of an event."""
    poll, sockets = select.epoll(), {}
    told: set[int] = set()
    for _ in range(streams):
        made = socket.socket(socket.AF_UNIX)
        made.connect(path)
        made.sendall(REQUEST)
        sockets[made.fileno()] = made
    for made in sockets.values():
        said = b""
        while b"id: " not in said:
            said += made.recv(65536)
        poll.register(made, select.EPOLLIN)
    poll.register(parent, select.EPOLLIN)
    parent.send("open")
    while True:
        for number, _ in poll.poll():
            if number == parent.fileno():
                parent.send(len(told))
                return
            if b"data: " in sockets[number].recv(65536):
                told.add(number)


def _summary(took_ms: list[float]) -> dict[str, float]:
    ordered = sorted(took_ms)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p10": round(ordered[len(ordered) // 10], 2),
        "p90": round(ordered[len(ordered) * 9 // 10], 2),
        "mean": round(statistics.fmean(ordered), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
