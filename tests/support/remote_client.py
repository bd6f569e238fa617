"""A program of a client's: drives a daemon of another host where Python lacks Unix's modules.

It runs alone, in an environment with the client's packages only, and is told by the environment
where the daemon is, as docs/install.md says.  `remote_client.py sdk` prints what it saw as JSON;
`remote_client.py cli WORDS…` is the command `forkd WORDS…`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from typing import Any

UNIX = (
    *("crypt", "curses", "fcntl", "grp", "nis", "pty", "pwd"),
    *("readline", "resource", "spwd", "syslog", "termios", "tty"),
)
"""What Python has on Unix alone, but for what its own modules cannot do without there."""

DAEMON = ("blake3", "fastapi", "pydantic_settings", "pyroute2", "uvicorn", "zstandard")
"""What a client has no use for."""

TAG = "python"


class Without:
    """Finds no module of Unix's."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - the protocol's
        if name.partition(".")[0] in UNIX:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide() -> None:
    """Have this process import no module of Unix's from now on."""
    for name in UNIX:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Without())


def names() -> dict[str, Any]:
    """Load all public names; return how many there are, and what is installed needlessly."""
    import forkd  # noqa: PLC0415 - after `hide`

    loaded = [getattr(forkd, name) for name in forkd.__all__]
    needless = [name for name in DAEMON if importlib.util.find_spec(name) is not None]
    return {
        "names": len(loaded) == len(forkd.__all__),
        "needless": needless,
        "where": forkd.__file__,
    }


def sync() -> dict[str, Any]:
    """Have a conversation in the synchronous flavour."""
    from forkd import Client  # noqa: PLC0415 - after `hide`
    from forkd.errors import CommandError, NotFound  # noqa: PLC0415 - as above

    seen: dict[str, Any] = {}
    with Client() as client:
        seen["url"] = client.endpoint.url
        with client.fork(TAG, 2) as many:
            one = many[0]
            seen["run"] = [done.stdout for done in many.run("echo hello")]
            seen["exit"] = one.run("exit 3", check=False).exit_code
            try:
                one.run("exit 3", check=True)
            except CommandError as error:
                seen["raised"] = error.result.exit_code
            with one.exec_stream(["cat"], stdin=True) as process:
                process.write(b"typed")
                process.close_stdin()
                seen["streamed"] = b"".join(each.data for each in process).decode()
            one.eval("x = 41", check=True)
            with one.branch(1) as (sibling,):
                seen["eval"] = sibling.eval("x + 1").value
            one.files.write("/note", "text")
            seen["read"] = one.files.read("/note", format="text")
            seen["listed"] = "note" in [entry.name for entry in one.files.list("/")]
            one.files.remove("/note")
            seen["exists"] = one.files.exists("/note")
            seen["killed"] = one.kill()
            try:
                client.sandboxes.get(one.id)
            except NotFound:
                seen["gone"] = True
        seen["left"] = len(client.sandboxes.list())
    return seen


async def twin() -> dict[str, Any]:
    """Have the same conversation in the asynchronous flavour."""
    from forkd import AsyncClient  # noqa: PLC0415 - after `hide`
    from forkd.errors import CommandError, NotFound  # noqa: PLC0415 - as above

    seen: dict[str, Any] = {}
    async with AsyncClient() as client:
        seen["url"] = client.endpoint.url
        async with await client.fork(TAG, 2) as many:
            one = many[0]
            seen["run"] = [done.stdout for done in await many.run("echo hello")]
            seen["exit"] = (await one.run("exit 3", check=False)).exit_code
            try:
                await one.run("exit 3", check=True)
            except CommandError as error:
                seen["raised"] = error.result.exit_code
            async with one.exec_stream(["cat"], stdin=True) as process:
                await process.write(b"typed")
                await process.close_stdin()
                seen["streamed"] = b"".join([each.data async for each in process]).decode()
            await one.eval("x = 41", check=True)
            async with await one.branch(1) as (sibling,):
                seen["eval"] = (await sibling.eval("x + 1")).value
            await one.files.write("/note", "text")
            seen["read"] = await one.files.read("/note", format="text")
            seen["listed"] = "note" in [entry.name for entry in await one.files.list("/")]
            await one.files.remove("/note")
            seen["exists"] = await one.files.exists("/note")
            seen["killed"] = await one.kill()
            try:
                await client.sandboxes.get(one.id)
            except NotFound:
                seen["gone"] = True
        seen["left"] = len(await client.sandboxes.list())
    return seen


def main() -> None:
    """Do what the first argument says."""
    hide()
    kind, *words = sys.argv[1:]
    if kind == "cli":
        from forkd.cli.__main__ import main as forkd  # noqa: PLC0415 - after `hide`

        sys.argv = ["forkd", *words]
        forkd()
        return
    seen = {
        "python": "{}.{}".format(*sys.version_info),
        **names(),
        "sync": sync(),
        "async": asyncio.run(twin()),
        "unix": sorted({*UNIX} & {*sys.modules}),
    }
    print(json.dumps(seen))  # noqa: T201 - for the test


if __name__ == "__main__":
    main()
