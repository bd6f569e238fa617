"""Run `forkd` in this process, against a daemon that a test started."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from forkd.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.daemon import RunningDaemon


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it wrote to each stream."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self.out)


@pytest.fixture
def forkd(
    daemon: RunningDaemon, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Ended]]:
    """A function that runs one command; `stdin` is its input, unless the test's is kept."""
    monkeypatch.setenv("FORKD_URL", daemon.url)
    opened: list[Any] = []

    def run(*args: str, stdin: bytes = b"", keep_stdin: bool = False) -> Ended:
        if not keep_stdin:
            reader, writer = os.pipe()
            os.write(writer, stdin)
            os.close(writer)
            opened.append(os.fdopen(reader))
            monkeypatch.setattr(sys, "stdin", opened[-1])
        with pytest.raises(SystemExit) as ended:
            app(list(args), prog_name="forkd")
        captured = capfd.readouterr()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else 0, captured.out, captured.err)

    yield run
    for each in opened:
        each.close()
