"""Every command: its panel in the help, the file that has it, and what it does in a sentence.

The file of a command is loaded when that command is used: `forkd --help` loads none.  A contract
test compares each sentence with the command's own help.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer

from forkd.cli.help_text import Commands

PACKAGE = "forkd.cli"


@dataclass(frozen=True, slots=True)
class Listed:
    """A command in the list.

    Attributes:
        name: What is typed.
        file: The module that has it.
        summary: The first sentence of its help; empty for an alias, which the list leaves out.
    """

    name: str
    file: str
    summary: str


PANELS: dict[str, tuple[Listed, ...]] = {
    "Daemon": (
        Listed(
            "quickstart",
            "quickstart",
            "Start forkd on this host, and have ten forks of a small Python answer.",
        ),
        Listed(
            "up",
            "host",
            "Start the forkd daemon: on this host, or in a helper VM where KVM is not usable.",
        ),
        Listed("down", "host", "Stop all sandboxes, the daemon and the helper VM."),
        Listed(
            "doctor", "doctor", "Check what this host supports, and how to fix what it does not."
        ),
        Listed("ping", "about", "Ask the daemon, or the agent in a sandbox, whether it answers."),
        Listed("version", "about", "Show the versions of this command and of the daemon."),
        Listed("help", "about", "Show the help of a command."),
        Listed("context", "contexts", "Choose among several daemons by name."),
        Listed("host", "host_setup", "Check and set up this host, and show the daemon's host."),
    ),
    "Sandboxes": (
        Listed(
            "run",
            "run",
            "Run a command in a new sandbox and remove the sandbox when the command ends.",
        ),
        Listed("fork", "sandboxes", "Start sandboxes from a snapshot and print their ids."),
        Listed("ls", "sandboxes", "List sandboxes."),
        Listed("ps", "sandboxes", ""),
        Listed("inspect", "sandboxes", "Describe one sandbox."),
        Listed("kill", "sandboxes", "Delete sandboxes, with their memory and disks."),
        Listed("rm", "sandboxes", ""),
        Listed("ttl", "life", "Show or change when a sandbox ends by itself."),
        Listed("rename", "life", "Give a sandbox another name."),
        Listed("label", "life", "Show, set or remove labels of a sandbox."),
        Listed("pause", "life", "Stop the virtual CPUs of sandboxes and keep their memory."),
        Listed("resume", "life", "Let paused sandboxes go on."),
        Listed("unpause", "life", ""),
        Listed("wait", "life", "Wait until sandboxes have ended, and print why each did."),
        Listed("branch", "trees", "Copy a running sandbox into siblings and print their ids."),
        Listed("reset", "trees", "Roll a sandbox back to the moment it was forked."),
        Listed(
            "promote",
            "trees",
            "Keep this branch: it takes over its parent's id; parent and siblings are deleted.",
        ),
        Listed("tree", "trees", "Draw the tree of branches, with times and private memory."),
        Listed(
            "diff", "trees", "List the files added (+), changed (~) and removed (-) from A to B."
        ),
        Listed("limits", "sandboxes", "Show or change the limits of a running sandbox."),
        Listed("network", "network", "Show or change what a sandbox may reach."),
    ),
    "Inside": (
        Listed("shell", "guests", "Open a login shell in a sandbox."),
        Listed("exec", "guests", "Run a command in a sandbox and exit with its exit code."),
        Listed(
            "eval",
            "guests",
            "Run code in the sandbox's warm interpreter and print the result.",
        ),
        Listed("port", "ports", "Forward ports of this host to ports in a sandbox until Ctrl-C."),
        Listed("cp", "copy", "Copy files and folders between this host and a sandbox."),
        Listed("logs", "sandboxes", "Print a sandbox's console log."),
        Listed(
            "mcp",
            "mcp",
            "Serve sandboxes as tools for AI agents (Model Context Protocol).",
        ),
    ),
    "Snapshots and packs": (
        Listed("snapshot", "snapshots", "Create, list and remove snapshots."),
        Listed("image", "images", "List and remove built images."),
        Listed("recipe", "recipes", "List, show and begin recipes."),
        Listed("build", "build", "Build a snapshot from a Dockerfile, or the image of a recipe."),
        Listed("pack", "packs", "Export a snapshot and its ancestors to one signed file."),
        Listed("unpack", "packs", "Import a pack: all of its snapshots, or none."),
        Listed("push", "packs", "Pack a snapshot and upload it to a registry or a server."),
        Listed("pull", "packs", "Download a pack from a registry or a server, and import it."),
        Listed("key", "keys", "Manage the keys that sign and verify packs."),
    ),
    "Watch": (
        Listed("top", "top", "Show live resource use of running sandboxes (q quits)."),
        Listed("events", "events", "List events of sandboxes and snapshots."),
        Listed("audit", "audit", "Search the audit log of the daemon on this host."),
    ),
    "Team": (
        Listed("token", "rights", "Manage the bearer tokens that may use a daemon."),
        Listed("tenant", "rights", "Show tenants and set their quotas."),
        Listed(
            "secret",
            "secrets",
            "Manage secrets that forkd injects into sandboxes' HTTPS requests.",
        ),
    ),
}
"""Commands by the heading that the help shows them under."""

LISTED = {each.name: each for panel in PANELS.values() for each in panel}
"""Commands by their names."""


class Lazy(MutableMapping[str, Any]):
    """Commands by their names; each is loaded when it is looked up."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - typer's own type
        if name not in self._loaded:
            self._loaded.update(_commands_of(LISTED[name].file))
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:  # noqa: ANN401 - as above
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(LISTED)

    def __len__(self) -> int:
        return len(LISTED)


def _commands_of(file: str) -> dict[str, Any]:
    """Return the commands that a file registers."""
    app = Commands()
    app.callback()(_nothing)  # a group, even of one command
    import_module(f"{PACKAGE}.{file}").register(app)
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def _nothing() -> None:
    """Stand in front of commands that need nothing in front of them."""
