"""Tools for the life of sandboxes, from their fork to their end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.mcp import fields
from forkd.mcp.call import Arguments, Call, Result, Toolbox
from forkd.mcp.fields import NO_EFFECT, Failure, Network, Sandbox, SandboxName, Tag, Ttl

box = Toolbox()

Image = Annotated[str, Field(min_length=1, max_length=limits.PATH_BYTES_MAX)]
Labels = Annotated[dict[str, str], Field(max_length=limits.LABELS_MAX)]


class SpawnSandboxes(Arguments):
    """Sandboxes to fork."""

    snapshot_tag: Tag | None = Field(
        default=None, description="The snapshot to fork; list_snapshots has all. Or give an image."
    )
    image: Image | None = Field(
        default=None,
        description="Instead of a snapshot: an image of a registry, such as python:3.12-slim, or "
        "the name of a recipe. The first fork of an image takes minutes, the next ones "
        "milliseconds.",
    )
    n: int = Field(default=1, ge=1, le=limits.MCP_FORK_COUNT_MAX, description="How many.")
    name: str | None = Field(
        default=None,
        pattern=limits.SANDBOX_NAME_PATTERN,
        description="A name for the sandbox, beside its id; only for one.",
    )
    ttl_secs: Ttl = limits.MCP_TTL_S_DEFAULT
    network: Network | None = Field(
        default=None, description="What each may reach, as of network_policy; null for no network."
    )
    memory_limit_mib: int | None = Field(
        default=None,
        ge=limits.MEMORY_LIMIT_MIB_MIN,
        le=limits.MEMORY_LIMIT_MIB_MAX,
        description="Memory of each on the host; null for what the snapshot has.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        max_length=limits.EXEC_ENV_MAX,
        description="Environment variables of every program in each.",
    )
    labels: Labels = Field(
        default_factory=dict, description="Names and values by which they can be found."
    )
    per_child_netns: bool = Field(
        default=False, description='Same as network="host", if no network is given.'
    )
    prewarm: bool = Field(default=False, description=NO_EFFECT)
    live_fork: bool = Field(default=False, description=NO_EFFECT)
    hugepages: bool = Field(default=False, description=NO_EFFECT)


class Spawned(Result):
    """Sandboxes that were made."""

    sandboxes: list[Sandbox]
    failures: list[Failure] = Field(description="Why the others did not become ready.")


@box.tool(SpawnSandboxes, Spawned)
async def spawn_sandboxes(call: Call, args: SpawnSandboxes) -> Spawned:
    """Create (fork) one or more new sandboxes from a snapshot or an image.

    Each is a Linux virtual machine of its own, ready in milliseconds with everything that the
    snapshot has loaded. This is where work begins: other tools take the id that this returns.
    To copy a sandbox that runs already, with its state, use branch_sandbox.
    """
    if (args.snapshot_tag is None) == (args.image is None):
        raise InvalidRequest(
            "give a snapshot_tag or an image, and not both; list_snapshots has the snapshots",
            field="snapshot_tag",
        )
    if args.name is not None and args.n != 1:
        raise InvalidRequest(f"name: only one sandbox can have it, not {args.n}", field="name")
    tag = args.snapshot_tag
    if args.image is not None:
        async with call.steps() as told:
            tag = (await call.client.snapshots.for_image(args.image, on_progress=told)).tag
    network = "host" if args.per_child_netns and args.network is None else args.network
    if args.name is not None and tag is not None:
        one = await call.client.sandbox(
            tag,
            name=args.name,
            ttl_s=args.ttl_secs,
            network=network,
            memory_limit_mib=args.memory_limit_mib,
            env=args.env,
            labels=args.labels,
        )
        return Spawned(sandboxes=[fields.sandbox(one.info)], failures=[])
    ready, failed = await call.client.try_fork(
        tag or "",
        args.n,
        ttl_s=args.ttl_secs,
        network=network,
        memory_limit_mib=args.memory_limit_mib,
        env=args.env,
        labels=args.labels,
    )
    return Spawned(
        sandboxes=[fields.sandbox(each.info) for each in ready],
        failures=[fields.failure(each) for each in failed],
    )


class ListSandboxes(Arguments):
    """Which sandboxes."""

    snapshot_tag: Tag | None = Field(default=None, description="Only those forked from this one.")
    status: Literal["starting", "running", "paused", "stopping", "exited"] | None = Field(
        default=None, description="Only those in this state."
    )


class SandboxList(Result):
    """Sandboxes."""

    sandboxes: list[Sandbox] = Field(description="The oldest first.")
    more: int = Field(description="How many others there are.")


@box.tool(ListSandboxes, SandboxList, reads=True)
async def list_sandboxes(call: Call, args: ListSandboxes) -> SandboxList:
    """List the sandboxes that exist, with their state and when they end."""
    found = await call.client.sandboxes.list(args.snapshot_tag, status=args.status)
    return SandboxList(
        sandboxes=[fields.sandbox(each.info) for each in found[: limits.MCP_LISTED_MAX]],
        more=max(0, len(found) - limits.MCP_LISTED_MAX),
    )


class OneSandbox(Arguments):
    """A sandbox."""

    sandbox_id: SandboxName


@box.tool(OneSandbox, Sandbox, reads=True)
async def get_sandbox(call: Call, args: OneSandbox) -> Sandbox:
    """Show one sandbox: its state, limits, network, labels, parent, and when it ends."""
    return fields.sandbox((await call.sandbox(args.sandbox_id)).info)


class UpdateSandbox(Arguments):
    """What to change of a sandbox; what is left out stays as it is."""

    sandbox_id: SandboxName
    ttl_secs: Ttl = None
    name: str | None = Field(
        default=None,
        pattern=limits.SANDBOX_NAME_PATTERN,
        description="Another name; null: none any more.",
    )
    labels: Labels | None = Field(default=None, description="In the place of those that it has.")
    paused: bool | None = Field(
        default=None,
        description="True stops its processors and keeps its memory; false lets it go on.",
    )


@box.tool(UpdateSandbox, Sandbox, repeatable=True)
async def update_sandbox(call: Call, args: UpdateSandbox) -> Sandbox:
    """Extend or shorten a sandbox's life, pause or resume it, rename or label it."""
    found = await call.sandbox(args.sandbox_id)
    if "ttl_secs" in args.model_fields_set:
        await found.set_ttl(args.ttl_secs)
    if "name" in args.model_fields_set:
        await found.rename(args.name)
    if args.labels is not None:
        await found.set_labels(args.labels)
    if args.paused is not None:
        await (found.pause() if args.paused else found.resume())
    return fields.sandbox(found.info)


class Killed(Result):
    """A sandbox that is gone."""

    id: str
    killed: bool = Field(description="Whether it was there.")


@box.tool(OneSandbox, Killed, destroys=True, repeatable=True)
async def kill_sandbox(call: Call, args: OneSandbox) -> Killed:
    """Delete a sandbox with its memory and its disk; nothing of it can be had back."""
    found = await call.sandbox(args.sandbox_id)
    return Killed(id=found.id, killed=await found.kill())


class NetworkPolicy(Arguments):
    """What to change of a sandbox's network; what is left out stays as it is."""

    sandbox_id: SandboxName
    network: Network | None = Field(
        default=None,
        description="What it may reach from now on: a word or rules, as of spawn_sandboxes; "
        '"deny-all" for nothing.',
    )
    allow: list[Annotated[str, Field(max_length=limits.PATH_BYTES_MAX)]] = Field(
        default_factory=list,
        max_length=limits.NETWORK_RULES_MAX,
        description='Rules that are added, such as ["example.com:443"].',
    )
    hold: bool | None = Field(
        default=None, description="True blocks everything; false lifts the block."
    )


class Refused(Result):
    """What a sandbox was refused."""

    destination: str
    times: int


class NetworkState(Result):
    """What a sandbox may reach, and what it was refused."""

    network: list[str] = Field(description="Its rules; none if it may reach nothing.")
    held: bool = Field(description="It may reach nothing at the moment, whatever its rules.")
    guest_addr: str
    refused: list[Refused] = Field(description="Within the last hour, the most asked for first.")


@box.tool(NetworkPolicy, NetworkState, repeatable=True)
async def network_policy(call: Call, args: NetworkPolicy) -> NetworkState:
    """Show or change what a sandbox may reach on the network (firewall, allow-list).

    With sandbox_id alone it only shows the rules, and which destinations were refused. Only a
    sandbox that was spawned with a network has a policy.
    """
    network = (await call.sandbox(args.sandbox_id)).network
    if args.network is not None or args.allow or args.hold is not None:
        found = await network.change(args.network, allow=args.allow, hold_egress=args.hold)
    else:
        found = await network.status()
    names = [Refused(destination=each.name, times=each.questions) for each in found.refused_names]
    addresses = [
        Refused(
            destination=f"{each.address}:{each.port}/{each.protocol}"
            if each.port is not None
            else f"{each.address}/{each.protocol}",
            times=each.packets,
        )
        for each in found.refused_destinations
    ]
    return NetworkState(
        network=found.network,
        held=found.egress_held,
        guest_addr=found.guest_addr,
        refused=[*names, *addresses][: limits.MCP_LISTED_MAX],
    )
