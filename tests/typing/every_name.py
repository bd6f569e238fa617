"""Every public name, used as a program would: checked by mypy and pyright, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import forkd
from forkd import (
    AsyncClient,
    AsyncProcess,
    AsyncSandbox,
    AsyncSandboxes,
    Branch,
    BranchMode,
    Client,
    CommandError,
    CommandResult,
    Controller,
    ControllerError,
    EvalError,
    EvalResult,
    ExecResult,
    ExecTimeout,
    ForkdError,
    Image,
    Output,
    Process,
    Sandbox,
    Sandboxes,
    compat,
    errors,
    types,
)
from forkd.types import (
    Amounts,
    ArchiveWritten,
    AsyncBuilds,
    AsyncCommands,
    AsyncConnection,
    AsyncFiles,
    AsyncForward,
    AsyncImages,
    AsyncNetwork,
    AsyncPort,
    AsyncRecipes,
    AsyncSandboxCollection,
    AsyncSecrets,
    AsyncSnapshots,
    AsyncTenants,
    AsyncTokens,
    BuildResult,
    Builds,
    BuildStep,
    CachedImageInfo,
    CodeContext,
    Commands,
    Connection,
    Copied,
    DiffInfo,
    Endpoint,
    EventInfo,
    ExecExit,
    FileChange,
    FileEntry,
    Files,
    ForkTimes,
    Forward,
    HostInfo,
    HostRecipe,
    ImageConfigInfo,
    ImageInfo,
    Images,
    Logs,
    Network,
    NetworkInfo,
    OutputMessage,
    Pong,
    Port,
    ProgressEvent,
    Pushed,
    Quotas,
    RecipeInfo,
    Recipes,
    RefusedDestination,
    RefusedName,
    RemovedInfo,
    Result,
    SandboxCollection,
    SandboxFailure,
    SandboxInfo,
    SecretInfo,
    Secrets,
    SkippedEntry,
    SnapshotCpuInfo,
    SnapshotGcInfo,
    SnapshotInfo,
    SnapshotInfoDetail,
    Snapshots,
    TenantInfo,
    Tenants,
    TokenCreated,
    TokenInfo,
    Tokens,
    TreeInfo,
    TreeLimits,
    TreeNode,
    Unpacked,
    UnpackedLink,
    UsageInfo,
    Version,
)

if TYPE_CHECKING:
    from pathlib import Path


def first_lines() -> None:
    assert_type(forkd.__version__, str)
    with Sandbox("numpy", ttl_s=60, idle_ttl_s=30, network="internet", env={"A": "b"}) as sandbox:
        assert_type(sandbox, Sandbox)
        assert_type(sandbox.run("ls | wc -l"), ExecResult[str])
        assert_type(sandbox.run("ls", text=False).stdout, bytes)
        assert_type(sandbox.exec("ls", "-l", check=True).stdout, str)
        assert_type(sandbox.exec(["ls"], on_stdout=print, timeout_s=5, check=False).ok, bool)
        assert_type(sandbox.eval("1").error, EvalError | None)
        assert_type(sandbox.run_code("1", timeout=3).logs, Logs)
        assert_type(sandbox.run_code("1").results, list[Result])
        image = Image.debian().apt_install("git").pip_install(["six"]).env(A="b").env({"C": "d"})
        image = image.run_commands("true").workdir("/").user("root").warm_up("import six")
        image = image.add_local_file("a", "/a", mode=0o644).add_local_dir("b", "/b")
        assert_type(image, Image)
        assert_type(Image.from_registry("alpine").recipe(), dict[str, Any])
        context = sandbox.create_code_context(cwd="/tmp", language="python")
        assert_type(context, CodeContext)
        assert_type(sandbox.run_code("1", language="python", context=context).text, str | None)
        said: list[OutputMessage] = []
        assert_type(sandbox.run_code("1", envs={"A": "b"}, on_stdout=said.append).ok, bool)
        assert_type(said[0].line, str)
        assert_type(sandbox.list_code_contexts(), list[CodeContext])
        assert_type(sandbox.restart_code_context(context), CodeContext)
        assert_type(sandbox.remove_code_context(context), bool)
        with sandbox.branch(2) as (left, right):
            assert_type(left, Sandbox)
            right.eval("x = 1", check=True)
    assert_type(Sandbox.create("numpy", timeout=60, metadata={"a": "b"}), Sandbox)
    assert_type(Sandbox.connect("sb-x"), Sandbox)
    Sandbox(None, None, 30, spawn=False)


def many(client: Client) -> None:
    sandboxes = client.fork("numpy", 3, ttl_s="default", labels={"a": "b"})
    assert_type(sandboxes, Sandboxes)
    assert_type(sandboxes[0], Sandbox)
    assert_type(sandboxes[1:], Sandboxes)
    assert_type([each.id for each in sandboxes], list[str])
    (one,) = client.fork("numpy")
    assert_type(one, Sandbox)
    assert_type(sandboxes.map(lambda each: each.id, parallel_max=2), list[str])
    assert_type(sandboxes.run("ls"), list[ExecResult[str]])
    assert_type(sandboxes.exec("ls"), list[ExecResult[str]])
    assert_type(sandboxes.eval("1"), list[EvalResult])
    assert_type(sandboxes.kill(), list[bool])
    ready, failed = client.try_fork("numpy", 3)
    assert_type(ready, Sandboxes)
    assert_type(failed, list[SandboxFailure])
    with client.sandbox("numpy", ttl_s=None) as sandbox:
        assert_type(sandbox, Sandbox)


def one_sandbox(sandbox: Sandbox) -> None:
    assert_type(sandbox.info, SandboxInfo)
    assert_type(sandbox.info.fork_ms, ForkTimes | None)
    assert_type(sandbox.files, Files)
    assert_type(sandbox.network, Network)
    assert_type(sandbox.commands, Commands)
    assert_type(sandbox.commands.run("ls", timeout=3, envs={}), ExecResult[str])
    assert_type(sandbox.files.read("/a"), bytes)
    assert_type(sandbox.files.read("/a", format="text"), str)
    assert_type(sandbox.files.list("/"), list[FileEntry])
    assert_type(sandbox.files.list("/")[0].path, str)
    assert_type(sandbox.files.upload("folder", "/"), Copied)
    assert_type(sandbox.files.download("/", "folder").skipped, list[str])
    assert_type(sandbox.files.write_archive("/", b""), ArchiveWritten)
    assert_type(sandbox.files.write_archive("/", b"").skipped, list[SkippedEntry])
    assert_type(sandbox.network.status(), NetworkInfo)
    assert_type(sandbox.network.status().refused_destinations, list[RefusedDestination])
    assert_type(sandbox.network.status().refused_names, list[RefusedName])
    assert_type(sandbox.refresh(), SandboxInfo)
    assert_type(sandbox.set_limits(memory_limit_mib=64), SandboxInfo)
    assert_type(sandbox.ping(), Pong)
    assert_type(sandbox.usage(), UsageInfo)
    assert_type(sandbox.pause(), SandboxInfo)
    assert_type(sandbox.resume(), SandboxInfo)
    assert_type(sandbox.set_ttl("default"), SandboxInfo)
    assert_type(sandbox.set_idle_ttl(60), SandboxInfo)
    assert_type(sandbox.rename(None), SandboxInfo)
    assert_type(sandbox.set_labels({"a": "b"}), SandboxInfo)
    assert_type(sandbox.change_labels({"a": "b", "c": None}), SandboxInfo)
    assert_type((sandbox.name, sandbox.labels), tuple[str | None, dict[str, str]])
    assert_type(sandbox.kill(), bool)
    assert_type(sandbox.is_running(), bool)
    assert_type(sandbox.wait(timeout_s=1.0), str | None)
    assert_type(sandbox.snapshot("tag"), SnapshotInfo)
    assert_type(sandbox.reset(), float)
    assert_type(sandbox.promote(), list[str])
    made = sandbox.try_branch(2, tag="kept")
    assert_type(made, Branch[Sandbox])
    with sandbox.exec_stream("sh", stdin=True, tty=(24, 80)) as process:
        assert_type(process, Process)
        for output in process:
            assert_type(output, Output)
        assert_type(process.exit, ExecExit | None)
    for output in sandbox.exec_stream("ls"):
        assert_type(output, Output)
    assert_type(sandbox.console(), str)


def ports_of(sandbox: Sandbox) -> None:
    with sandbox.connect_port(80) as port:
        assert_type(port, Port)
        port.send(b"")
        port.send_end()
        for data in port:
            assert_type(data, bytes)
    with sandbox.forward(80, host="::1", host_port=8080, on_error=print) as forward:
        assert_type(forward, Forward)
        assert_type((forward.address, forward.host), tuple[str, str])
        assert_type((forward.port, forward.guest_port), tuple[int, int])


def whole_daemon(client: Client, pack: bytes, path: Path) -> None:
    connection: Connection = client
    assert_type(connection.endpoint, Endpoint)
    assert_type(client.version(), Version)
    assert_type(client.host(), HostInfo)
    assert_type(client.tree(), TreeInfo)
    assert_type(client.tree().limits, TreeLimits)
    assert_type(client.tree().roots, list[TreeNode])
    assert_type(client.diff("a", "b"), DiffInfo)
    assert_type(client.diff("a", "b").changes, list[FileChange])
    for event in client.events():
        assert_type(event, EventInfo)
    assert_type(client.sandboxes, SandboxCollection)
    assert_type(client.sandboxes.list(labels={"a": None}, status="paused"), list[Sandbox])
    assert_type([each.id for each in client.sandboxes.iterate(page_size=3)], list[str])
    assert_type(client.snapshots, Snapshots)
    assert_type(client.snapshots.create("a", path, on_progress=progress), SnapshotInfo)
    assert_type(client.snapshots.info("a"), SnapshotInfoDetail)
    assert_type(client.snapshots.gc(dry_run=True), SnapshotGcInfo)
    assert_type(client.snapshots.gc().removed, list[RemovedInfo])
    assert_type(client.snapshots.unpack("a", pack), Unpacked)
    assert_type(client.snapshots.unpack("a", pack).links, list[UnpackedLink])
    assert_type(client.snapshots.push("a", "registry.example.com/a:1"), Pushed)
    assert_type(client.snapshots.pull("registry.example.com/a:1", "b"), Unpacked)
    assert_type(client.builds, Builds)
    built = client.builds.build(path, tag="app", build_args={"V": "1"}, network="internet")
    assert_type(built, BuildResult)
    assert_type(list(built.steps), list[BuildStep])
    assert_type(client.snapshots.info("app").config, ImageConfigInfo | None)
    assert_type(client.snapshots.info("app").cpu, SnapshotCpuInfo | None)
    assert_type(client.images, Images)
    assert_type(client.images.build(path), ImageInfo)
    assert_type(client.images.list(), list[CachedImageInfo])
    client.images.remove("0" * 32)
    assert_type(client.snapshots.create("py", image="python", run=["true"]), SnapshotInfo)
    assert_type(client.snapshots.for_image("python", pull="always"), SnapshotInfo)
    assert_type(client.recipes.list(), list[HostRecipe])
    assert_type(client.recipes, Recipes)
    assert_type(client.recipes.upload(path), RecipeInfo)
    assert_type(client.secrets, Secrets)
    assert_type(client.secrets.list(), list[SecretInfo])
    assert_type(client.tokens, Tokens)
    assert_type(client.tokens.create("a", ["run"]), TokenCreated)
    assert_type(client.tokens.list(), list[TokenInfo])
    assert_type(client.tenants, Tenants)
    assert_type(client.tenants.set_quotas("a", sandboxes=3), TenantInfo)
    assert_type(client.tenants.change_quotas("a", vcpus=3, disk_mib="unlimited"), TenantInfo)
    assert_type(client.tenants.list()[0].quotas, Quotas)
    assert_type(client.tenants.list()[0].used, Amounts)


def progress(event: ProgressEvent) -> None:
    assert_type(event.fraction, float | None)


def failures(sandbox: Sandbox) -> None:
    try:
        sandbox.run("make", check=True, timeout_s=1)
    except ExecTimeout as error:
        assert_type(error.result, Any)
    except CommandError as error:
        assert_type(error.code, str)
    except (errors.NotFound, ForkdError, ControllerError):
        raise


async def asynchronous(client: AsyncClient) -> None:
    async with AsyncSandbox("numpy") as sandbox:
        assert_type(await sandbox.run("ls"), ExecResult[str])
        assert_type(await sandbox.exec("ls", text=False), ExecResult[bytes])
        async with await sandbox.branch(2) as (left, _):
            assert_type(left, AsyncSandbox)
        async with sandbox.exec_stream("sh") as process:
            assert_type(process, AsyncProcess)
        async with sandbox.connect_port(80) as port:
            assert_type(port, AsyncPort)
            assert_type(await port.receive(), bytes)
        async with sandbox.forward(80) as forward:
            assert_type(forward, AsyncForward)
    assert_type(await AsyncSandbox("numpy"), AsyncSandbox)
    assert_type(await AsyncSandbox.create("numpy"), AsyncSandbox)
    made = await client.fork("numpy", 2)
    assert_type(made, AsyncSandboxes)
    assert_type(await made.map(name_of), list[str])
    assert_type(await made.eval("1"), list[EvalResult])
    connection: AsyncConnection = client
    assert_type(connection.endpoint, Endpoint)
    assert_type(client.sandboxes, AsyncSandboxCollection)
    assert_type(client.snapshots, AsyncSnapshots)
    assert_type(client.builds, AsyncBuilds)
    assert_type(client.images, AsyncImages)
    assert_type(client.recipes, AsyncRecipes)
    assert_type(client.secrets, AsyncSecrets)
    assert_type(client.tokens, AsyncTokens)
    assert_type(client.tenants, AsyncTenants)
    assert_type(sandbox.files, AsyncFiles)
    assert_type(sandbox.network, AsyncNetwork)
    assert_type(sandbox.commands, AsyncCommands)


async def name_of(sandbox: AsyncSandbox) -> str:
    return sandbox.id


def reference() -> None:
    mode: BranchMode = "live"
    controller = Controller()
    assert_type(controller.branch_sandbox("sb-x", mode=mode), dict[str, Any])
    with compat.Sandbox("numpy") as sandbox:
        assert_type(sandbox.commands.run("ls"), CommandResult)


def modules() -> None:
    assert_type(types.SandboxInfo, type[SandboxInfo])
    assert errors is not None
