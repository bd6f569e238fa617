"""The TypeScript SDK has what the Python SDK has: names, options, defaults, requests, errors."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import re
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

import forkd
from forkd import types
from forkd.errors import ForkdError
from tests.support.docs import ROOT
from tests.support.npm_project import PARITY, answer, package
from tools import node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.typescript_package import Package

__all__ = ["package"]

pytestmark = [pytest.mark.needs("node"), pytest.mark.timeout(180)]

RUN_TIMEOUT_S = 120

CLASSES: dict[str, type] = {
    "Branch": types.Branch,
    "BuildResult": types.BuildResult,
    "BuildStep": types.BuildStep,
    "Builds": types.AsyncBuilds,
    "Client": forkd.AsyncClient,
    "Commands": types.AsyncCommands,
    "Endpoint": types.Endpoint,
    "EvalError": types.EvalError,
    "EvalResult": types.EvalResult,
    "ExecResult": types.ExecResult,
    "Files": types.AsyncFiles,
    "Forward": types.AsyncForward,
    "Image": forkd.Image,
    "Images": types.AsyncImages,
    "Network": types.AsyncNetwork,
    "Output": types.Output,
    "OutputMessage": types.OutputMessage,
    "Port": types.AsyncPort,
    "Process": forkd.AsyncProcess,
    "Recipes": types.AsyncRecipes,
    "Result": types.Result,
    "Sandbox": forkd.AsyncSandbox,
    "SandboxCollection": types.AsyncSandboxCollection,
    "Sandboxes": forkd.AsyncSandboxes,
    "Secrets": types.AsyncSecrets,
    "Snapshots": types.AsyncSnapshots,
    "Tenants": types.AsyncTenants,
    "Tokens": types.AsyncTokens,
}
"""Classes of TypeScript, and those of Python that they have the members of."""

OTHER_NAMES = {
    "Client.aclose": "close",
    "Forward.aclose": "close",
    "Port.aclose": "close",
    "Process.aclose": "close",
}
"""Members that have another name in TypeScript."""

OTHER_ARGUMENTS = {
    "Commands.run": {"timeout": "timeoutMs"},
    "Sandbox.create": {"timeout": "timeoutMs"},
    "Sandbox.run_code": {"timeout": "timeoutMs"},
    "Sandbox.set_timeout": {"timeout": "timeoutMs"},
    "Sandboxes.map": {"function": "ask"},
}
"""Arguments that have another name: E2B's TypeScript package takes milliseconds."""

LEFT_OUT = {
    "Endpoint.token": "it is a private member, so that no log shows it",
    "Endpoint.websocket_url": "the transport makes it",
    "Image.env(more)": "variables are an object",
    "Image.recipe": "JavaScript has no reader of TOML; `String(image)` is the recipe",
    "Recipes.image_reference": "files of this host are not uploaded",
    "Recipes.reference": "files of this host are not uploaded",
    "Recipes.upload(on_progress)": "the caller reads the archive, and can count",
    "Recipes.upload(recipe)": "it takes a tar archive",
    "Sandbox.exec(more)": "arguments are an array, as in every API of Node.js",
    "Sandbox.exec_stream(more)": "arguments are an array, as in every API of Node.js",
    "Sandbox.forward(listener)": "a server of Node.js that listens cannot be made half-open",
    "Sandbox.target": "the reference's, in `@forkd/sdk/compat`",
    "Sandbox.timeout": "the reference's, in `@forkd/sdk/compat`",
    "Sandboxes.count": "of Python's sequences",
    "Sandboxes.exec(more)": "arguments are an array, as in every API of Node.js",
    "Sandboxes.index": "of Python's sequences",
    "Snapshots.pull": "registries, and the keys that sign, are of the Python package",
    "Snapshots.push": "registries, and the keys that sign, are of the Python package",
}
"""What Python has and TypeScript has not, and why."""

NOT_COMPARED = (types.AsyncConnection,)
"""The part of a client that `Client` has, too."""

WITHOUT_SIGNAL = {
    "Port": "the signal of `connectPort` ends all of it",
    "Forward": "the signal of `forward` ends all of it",
    "Process": "the signal of `execStream` ends all of it",
    "Sandboxes.map": "the function that it calls has its own",
}
"""What waits and takes no signal, and why."""


def camel(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), name)


@pytest.fixture(scope="module")
def surface() -> dict[str, dict[str, list[str] | None]]:
    """What the TypeScript package exports: the members of each class, and their arguments."""
    done = subprocess.run(  # noqa: S603 - ours
        ["node", str(PARITY / "surface.mjs")],  # noqa: S607 - of the environment
        env=node.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, list[str] | None]] = json.loads(done.stdout)
    return found


def members(kind: type) -> dict[str, list[str]]:
    """Return the public members of a class of Python, and the arguments of those that take some."""
    found: dict[str, list[str]] = {}
    if dataclasses.is_dataclass(kind):
        fields = [each.name for each in dataclasses.fields(kind)]
        found |= {each: [] for each in fields if not each.startswith("_")}
    for each in kind.__mro__:
        said = (
            inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        )
        found |= {key: [] for key in re.findall(r"^    (\w+):", said, re.MULTILINE)}
    for name in dir(kind):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(kind, name)
        function = inspect.unwrap(getattr(member, "__func__", member))
        taken = inspect.signature(function).parameters if inspect.isfunction(function) else ()
        found[name] = [each for each in taken if each not in {"self", "cls"}]
    return found


def absent(surface: dict[str, dict[str, list[str] | None]], name: str) -> Iterator[str]:
    """Yield what a class of TypeScript does not have of Python's."""
    for member, taken in members(CLASSES[name]).items():
        ours = OTHER_NAMES.get(f"{name}.{member}", camel(member))
        if ours not in surface[name]:
            yield f"{name}.{member}"
            continue
        other = OTHER_ARGUMENTS.get(f"{name}.{member}", {})
        there = surface[name][ours] or []
        for each in taken:
            if other.get(each, camel(each)) not in there:
                yield f"{name}.{member}({each})"


def test_what_python_has_typescript_has_or_there_is_a_reason(
    surface: dict[str, dict[str, list[str] | None]],
) -> None:
    assert sorted(each for name in CLASSES for each in absent(surface, name)) == sorted(LEFT_OUT)


def test_every_class_of_the_python_sdk_is_compared() -> None:
    public = {each: getattr(types, each) for each in types.__all__}
    public |= {each: getattr(forkd, each) for each in forkd.__all__}
    asynchronous = {kind for name, kind in public.items() if name.startswith("Async")}

    assert asynchronous - {*NOT_COMPARED} <= {*CLASSES.values()}


def test_whatever_waits_takes_a_signal(
    surface: dict[str, dict[str, list[str] | None]],
) -> None:
    without = [
        f"{name}.{member}"
        for name, kind in CLASSES.items()
        for member in members(kind)
        if (taken := surface[name].get(OTHER_NAMES.get(f"{name}.{member}", camel(member))))
        is not None
        and asks(kind, member)
        and "signal" not in taken
    ]

    assert [
        each for each in without if {each, each.partition(".")[0]}.isdisjoint(WITHOUT_SIGNAL)
    ] == []


def asks(kind: type, member: str) -> bool:
    """Whether a member of Python is a call that waits for the daemon."""
    function = inspect.unwrap(
        getattr(inspect.getattr_static(kind, member), "__func__", None) or getattr(kind, member)
    )
    return member != "aclose" and (
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    )


SANDBOX = {
    "id": "sb-1",
    "snapshot_tag": "python",
    "status": "running",
    "hostname": "sb-1",
    "pid": 1,
    "guest_addr": None,
    "created_at_unix": 0,
    "memory_limit_mib": None,
    "disk_limit_mib": None,
    "fork_ms": None,
    "labels": {},
}

LIMITS = {
    "memory_limit_mib": 64,
    "cpu_limit": 0.5,
    "cpu_weight": 50,
    "pids_limit": 99,
    "io_limit_mib_s": 7,
    "io_limit_ops": 800,
    "bandwidth_limit_mbit": 9,
}
BRANCH = {
    "labels": {"a_b": "c"},
    "network": ["example.com:443"],
    "hold_egress": True,
    "deadline_s": 5,
}
FORK = {
    **LIMITS,
    **BRANCH,
    "disk_limit_mib": 6,
    "secrets": ["s"],
    "env": {"A_B": "c"},
    "wait": False,
}
BAKE = {"memory_mib": 128, "vcpus": 2, "disk_mib": 99}
PROGRAM = {"timeout_s": 5, "env": {"A": "b"}, "cwd": "/", "user": "u", "stdin": "in"}

Call = tuple[str, list[Any], dict[str, Any]]

CALLS: list[Call] = [
    ("fork", ["a"], {}),
    ("fork", ["a", 3], {**FORK, "ttl_s": 60}),
    ("fork", ["a"], {"ttl_s": "default", "network": True}),
    ("try_fork", ["a"], {}),
    ("sandbox", [], {}),
    ("sandbox", ["a"], {**FORK, "name": "n", "ttl_s": None}),
    ("sandbox", [], {"image": "python:3.12-slim"}),
    ("version", [], {}),
    ("host", [], {}),
    ("events", [], {}),
    ("events", [], {"after": 0, "follow": False}),
    ("usage", [], {}),
    ("tree", [], {}),
    ("tree", ["sb-1"], {}),
    ("diff", ["a", "b"], {}),
    ("snapshots.create", ["a"], {"recipe": "r"}),
    ("snapshots.create", ["a"], {**BAKE, "image": "i:1", "run": ["x"], "ready": "y"}),
    ("snapshots.for_image", ["i:1"], {}),
    ("snapshots.for_image", ["i:1"], {**BAKE, "pull": "always"}),
    ("snapshots.link", ["a", "b"], {}),
    (
        "snapshots.link",
        ["a", "b"],
        {"exec": "x", "exec_timeout_s": 9, "network": "internet", "wait": False},
    ),
    ("snapshots.list", [], {}),
    ("snapshots.info", ["a b/ü"], {}),
    ("snapshots.delete", ["a"], {}),
    ("snapshots.delete", ["a"], {"cascade": True, "force": True}),
    ("snapshots.share", ["a"], {"shared": True}),
    ("snapshots.compact", ["a"], {}),
    ("snapshots.compact", ["a"], {"to": "b"}),
    ("snapshots.gc", [], {}),
    ("snapshots.gc", [], {"dry_run": True}),
    ("images.build", ["r"], {}),
    ("images.list", [], {}),
    ("images.remove", ["k"], {}),
    ("recipes.list", [], {}),
    ("sandboxes.list", [], {}),
    (
        "sandboxes.list",
        [],
        {"tag": "a", "name": "n", "status": "paused", "labels": {"x": None, "y": "z"}},
    ),
    ("sandboxes.iterate", [], {}),
    ("sandboxes.iterate", [], {"tag": "a", "page_size": 7}),
    ("sandboxes.get", ["a b"], {}),
    ("secrets.set", ["a", "a-long-value", ["example.com"]], {}),
    (
        "secrets.set",
        ["a", "a-long-value", ["example.com"]],
        {"header": "X", "env": "E", "tenant": "t"},
    ),
    ("secrets.list", [], {}),
    ("secrets.delete", ["a"], {"tenant": "t"}),
    ("tokens.create", ["a", ["run"]], {}),
    ("tokens.create", ["a", ["run"]], {"tenant": "t", "expires_in_s": 60}),
    ("tokens.list", [], {}),
    ("tokens.delete", ["a"], {}),
    ("tenants.list", [], {}),
    ("tenants.set_quotas", ["a"], {"sandboxes": 1, "forks_per_minute": 2}),
    ("tenants.change_quotas", ["a"], {"vcpus": "unlimited", "disk_mib": 3}),
    ("tenants.remove_quotas", ["a"], {}),
    ("sandbox.refresh", [], {}),
    ("sandbox.kill", [], {}),
    ("sandbox.set_ttl", [60], {}),
    ("sandbox.set_ttl", [None], {}),
    ("sandbox.set_ttl", ["default"], {}),
    ("sandbox.rename", ["n"], {}),
    ("sandbox.rename", [None], {}),
    ("sandbox.set_labels", [{"a_b": "c"}], {}),
    ("sandbox.change_labels", [{"a_b": None, "c": "d"}], {}),
    ("sandbox.pause", [], {}),
    ("sandbox.resume", [], {}),
    ("sandbox.ping", [], {}),
    ("sandbox.usage", [], {}),
    ("sandbox.set_limits", [], LIMITS),
    ("sandbox.logs", [], {}),
    ("sandbox.follow_logs", [], {}),
    ("sandbox.wait", [], {}),
    ("sandbox.run", ["ls | wc"], {}),
    ("sandbox.run", ["ls | wc"], PROGRAM),
    ("sandbox.exec", [["ls", "-l"]], {}),
    ("sandbox.exec", [["ls", "-l"]], PROGRAM),
    ("sandbox.exec", ["ls"], {}),
    ("sandbox.eval", ["1"], {}),
    ("sandbox.eval", ["1"], {"runtime": "node", "timeout_s": 5, "env": {"A_B": "c"}}),
    ("sandbox.eval", ["1"], {"context": "a_b"}),
    ("sandbox.run_code", ["1"], {}),
    ("sandbox.run_code", ["1"], {"language": "python", "context": "a", "envs": {"A_B": "c"}}),
    ("sandbox.branch", [], {}),
    ("sandbox.branch", [2], {**BRANCH, "ttl_s": 60}),
    ("sandbox.try_branch", [], {}),
    ("sandbox.try_branch", [2], {**BRANCH, "tag": "a", "wait": False}),
    ("sandbox.snapshot", ["a"], {}),
    ("sandbox.snapshot", ["a"], {"wait": False}),
    ("sandbox.reset", [], {}),
    ("sandbox.reset", [], {"deadline_s": 5}),
    ("sandbox.promote", [], {}),
    ("sandbox.network.status", [], {}),
    ("sandbox.network.change", [], {"network": "none", "allow": ["a:1"], "hold_egress": False}),
    ("sandbox.files.read", ["/a"], {}),
    ("sandbox.files.read_text", ["/\udcff"], {}),
    ("sandbox.files.write", ["/a", "ü"], {}),
    ("sandbox.files.write", ["/a", "ü"], {"mode": 448, "make_parents": True, "user": "u"}),
    ("sandbox.files.stat", ["/a b"], {}),
    ("sandbox.files.exists", ["/a"], {}),
    ("sandbox.files.list", ["/a"], {}),
    ("sandbox.files.make_dir", ["/a"], {}),
    ("sandbox.files.make_dir", ["/a"], {"parents": True, "mode": 448, "user": "u"}),
    ("sandbox.files.move", ["/a", "/b"], {}),
    ("sandbox.files.rename", ["/a", "/b"], {}),
    ("sandbox.files.remove", ["/a"], {}),
    ("sandbox.files.remove", ["/a"], {"recursive": True}),
    # what is refused before it travels, or by a name that no option has
    ("fork", ["a"], {"ttl": 5}),
    ("sandbox", ["a"], {"image": "b"}),
]
"""Calls with the arguments of Python."""


@dataclass(frozen=True)
class Asked:
    """A request: all of it but what must differ."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: object
    has_key: bool


@contextmanager
def refusing() -> Iterator[tuple[str, list[Asked]]]:
    """Serve a daemon that knows one sandbox and refuses everything else; gives the requests."""
    seen: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            where = urlsplit(self.path)
            length = int(self.headers.get("Content-Length", 0))
            data = self.rfile.read(length)
            body: object = data.decode()
            if self.headers.get("Content-Type") == "application/json":
                body = with_defaults(self.command, where.path, json.loads(data))
            has_key = "idempotency-key" in self.headers
            seen.append(Asked(self.command, where.path, parse_qs(where.query), body, has_key))
            found = len(seen) == 1
            said = SANDBOX if found else {"error": "as asked", "code": "conflict", "context": {}}
            answer = json.dumps(said).encode()
            self.send_response(200 if found else 409)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815 - the server's

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            serving.join()


DOCUMENT: dict[str, Any] = json.loads((ROOT / "protocol/rest/openapi-v2.json").read_text("utf-8"))


def with_defaults(method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the members that were left to their defaults."""
    for pattern, operations in DOCUMENT["paths"].items():
        found = re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path)
        if found is None or method.lower() not in operations:
            continue
        said = operations[method.lower()]["requestBody"]["content"]["application/json"]["schema"]
        named = next(each for each in said.get("anyOf", [said]) if "$ref" in each)
        schema = DOCUMENT["components"]["schemas"][named["$ref"].rpartition("/")[2]]
        defaults = {name: each.get("default") for name, each in schema["properties"].items()}
        return defaults | body if method != "PATCH" else body
    raise AssertionError(f"no operation {method} {path}")


async def python_asks(url: str) -> list[tuple[str, str] | None]:
    """Make all calls; return the error of each."""
    errors: list[tuple[str, str] | None] = []
    async with forkd.AsyncClient(url, retries_max=0) as client:
        sandbox = await client.sandboxes.get("sb-1")
        for call, args, options in CALLS:
            *path, name = call.split(".")
            owner: Any = sandbox if path[:1] == ["sandbox"] else client
            for each in path[path[:1] == ["sandbox"] :]:
                owner = getattr(owner, each)
            try:
                made = getattr(owner, name)(*args, **options)
                if inspect.isasyncgen(made):
                    async for _ in made:
                        pass
                else:
                    await made
                errors.append(None)
            except ForkdError as error:
                errors.append((error.code, str(error)))
    return errors


def typescript_asks(package: Package, url: str) -> list[tuple[str, str] | None]:
    """Make all calls; return the error of each."""
    calls = [{"call": call, "args": args, "options": options} for call, args, options in CALLS]
    answers = answer(package, "requests.mjs", calls, url)
    return [None if each is None else (each[0], each[1]) for each in answers]


async def test_the_same_call_makes_the_same_request(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORKD_TAG", raising=False)
    with refusing() as (url, by_python):
        python_errors = await python_asks(url)
    with refusing() as (url, by_typescript):
        typescript_errors = await asyncio.to_thread(typescript_asks, package, url)

    codes = [None if each is None else each[0] for each in python_errors]
    assert [None if each is None else each[0] for each in typescript_errors] == codes
    assert set(codes) == {"conflict", "invalid_request"}
    assert by_typescript == by_python
    assert typescript_errors[-2:] == [
        ("invalid_request", "fork() has no option 'ttl'; did you mean ttlS?"),
        ("invalid_request", "give a tag or an image, not both"),
    ]
