"""Make every generated file: the contracts, the synchronous SDK, parts of the TypeScript one.

    python -m tools.gen            write the files
    python -m tools.gen --check    fail if a file differs from what would be written

Files are compared whole.  `tests/contract/test_generated.py` does so on every run.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import TYPE_CHECKING, cast

from starlette.datastructures import State

from forkd import errors
from forkd.daemon.app import create_app
from forkd.daemon.errors import status_of
from forkd.daemon.reference.app import create_reference
from tools import (
    async_to_sync,
    gen_completions,
    gen_config,
    gen_docs,
    gen_executor_times,
    gen_host_times,
    gen_limits,
    gen_llms,
    gen_man,
    gen_plots,
    gen_python,
    gen_recipe_times,
    gen_typescript,
)
from tools.async_to_sync import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from forkd.service.api import Host

OPENAPI = ROOT / "protocol/rest/openapi-v2.json"
OPENAPI_V1 = ROOT / "protocol/rest/openapi-v1.json"
ERRORS = ROOT / "protocol/rest/errors.json"

CLIENT_ONLY = {
    errors.ClientClosed,
    errors.CommandError,
    errors.ExecTimeout,
    errors.SandboxLost,
    errors.TaskError,
    errors.TransportError,
}
"""What only the SDK raises, so that no answer has a status for it."""


def outputs() -> dict[Path, str]:
    """Return every generated file with its contents."""
    contract, codes = openapi(), error_codes()
    return {
        OPENAPI: contract,
        OPENAPI_V1: openapi_v1(),
        ERRORS: codes,
        **async_to_sync.outputs(),
        **gen_completions.outputs(),
        **gen_config.outputs(),
        **gen_docs.outputs(),
        **gen_limits.outputs(),
        **gen_llms.outputs(),
        **gen_man.outputs(),
        **gen_plots.outputs(),
        **gen_python.outputs(),
        **gen_typescript.outputs(contract, codes),
        **gen_recipe_times.outputs(),
        **gen_executor_times.outputs(),
        **gen_host_times.outputs(),
    }


def openapi() -> str:
    """Return the OpenAPI document.  No host is needed: no route is called."""
    app = create_app(cast("Host", None))
    return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


def openapi_v1() -> str:
    """Return the document of the reference's protocol."""
    app = create_reference(State())
    return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


def error_codes() -> str:
    """Return every code of the error tree: its class, its status, and what it means."""
    said = {
        each.code: {
            "class": each.__name__,
            "parent": None if each is errors.ForkdError else each.__mro__[1].__name__,
            "status": None if each in CLIENT_ONLY else status_of(each),
            "retryable": each.retryable,
            "meaning": (inspect.getdoc(each) or "").partition("\n")[0],
        }
        for each in walk(errors.ForkdError)
    }
    return json.dumps(said, indent=1) + "\n"


def walk(kind: type[errors.ForkdError]) -> Iterator[type[errors.ForkdError]]:
    """Yield an error class and everything below it."""
    yield kind
    for each in kind.__subclasses__():
        yield from walk(each)


def stale() -> list[str]:
    """Return the files that are not what would be written."""
    return [
        str(path.relative_to(ROOT))
        for path, text in outputs().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the files, or compare them; return the exit status."""
    if "--check" in sys.argv[1:]:
        for each in (differing := stale()):
            sys.stderr.write(f"{each} is not what its source makes: run `python -m tools.gen`\n")
        return 1 if differing else 0
    if write(async_to_sync.outputs()):  # pages repeat its docstrings: have it loaded again
        return subprocess.call([sys.executable, "-m", "tools.gen"], cwd=ROOT)
    write(outputs())
    return 0


def write(files: Mapping[Path, str]) -> bool:
    """Write files; return whether one was not so already."""
    changed = False
    for path, text in files.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        changed = True
    return changed


if __name__ == "__main__":
    sys.exit(main())
