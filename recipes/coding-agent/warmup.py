"""Use each tool once on the project in /srv/project, and offer `sh` and `run_tests` to agents.

What a tool reads from the disk for this is in memory in every child.  pytest is imported here, and
`run_tests` forks this process, so that no child imports it again.
"""

import os
import subprocess
import sys
import tempfile

import pytest

PROJECT = "/srv/project"


def sh(command, folder=PROJECT, timeout_s=600.0):
    """Run a line of the shell in a folder; return its exit status, and what it printed.

    After `timeout_s` its processes are killed, and `subprocess.TimeoutExpired` is raised.
    """
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            ["timeout", "--kill-after=1", str(timeout_s), "bash", "-c", command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        status = process.wait()
        if status in {124, 137}:
            raise subprocess.TimeoutExpired(command, timeout_s)
        return {"exit": status, "output": _text(printed)}


def run_tests(folder=PROJECT, *options):
    """Run the tests of a folder with pytest; return its exit status, and what it printed.

    They run in a copy of this process, so nothing that they do stays here.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            _in_child(printed.fileno(), folder, options)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {"exit": status, "output": _text(printed)}


def _in_child(printed, folder, options):
    status = 3  # pytest's own for an internal error
    try:
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.chdir(folder)
        sys.path.insert(0, folder)
        status = int(pytest.main(["-q", "-p", "no:cacheprovider", *options]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _text(file):
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _use_everything():
    for line in (
        "git init -q && git add -A && git commit -q -m 'Add slug' && git log --stat && git status",
        "echo '# changed' >>slug.py && git diff && git checkout -q slug.py",
        "rg -n slug && rg --files",
        "ruff check . && ruff format --check .",
        "make -s all && build/c && build/cc && make -s clean",
        "node -e 'console.log(JSON.stringify({warm: [1, 2].map((n) => n * 2)}))' | jq .warm",
        "python3 -m venv --without-pip /tmp/warm && /tmp/warm/bin/python -c 'import json, re'",
        "rm -r /tmp/warm && python3 -m pip --version && python3 -m pytest -q -p no:cacheprovider",
    ):
        done = sh(line)
        if done["exit"] != 0:
            raise RuntimeError(f"{line}: status {done['exit']}: {done['output']}")
    done = run_tests()
    if done["exit"] != 0:
        raise RuntimeError(done["output"])


_use_everything()
