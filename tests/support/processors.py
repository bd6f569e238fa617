"""Ask the virtual CPUs of a guest whether each of them runs a thread."""

from __future__ import annotations

ON_EVERY_CPU = """
import os, threading
seen, barrier = {}, threading.Barrier(os.cpu_count())


def work(cpu):
    os.sched_setaffinity(0, {cpu})
    barrier.wait(30)
    with open(f"/proc/self/task/{threading.get_native_id()}/stat") as file:
        seen[cpu] = int(file.read().rpartition(")")[2].split()[36])


threads = [threading.Thread(target=work, args=[cpu]) for cpu in range(os.cpu_count())]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sorted(seen.items())
"""
"""Python that runs one thread on each CPU, all at one time, and tells where each has run."""


def on_every_cpu(count: int) -> list[list[int]]:
    """Return the value of `ON_EVERY_CPU` in a guest of which `count` CPUs work."""
    return [[cpu, cpu] for cpu in range(count)]
