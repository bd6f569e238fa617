"""Requests and answers about builds of Dockerfiles; the rules are those of `v2`."""

from __future__ import annotations

from pydantic import BaseModel, Field

from forkd import limits
from forkd.wire.parts import Answer, Request, Tag


class _Config(BaseModel):
    env: dict[str, str] = Field(default_factory=dict, description="Variables of programs.")
    cwd: str = Field(default="/", description="Where programs start.")
    user: str = Field(default="root", description="Who they run as: a name, or `uid[:gid]`.")
    entrypoint: list[str] | None = Field(
        default=None, description="The program that the image is for; null if it names none."
    )
    cmd: list[str] | None = Field(
        default=None, description="Its arguments, or the program if there is no entrypoint."
    )
    ports: list[str] = Field(
        default_factory=list, description="Ports that programs listen on, as `80/tcp`."
    )
    labels: dict[str, str] = Field(default_factory=dict, description="Text by key.")
    healthcheck: dict[str, str | list[str]] = Field(
        default_factory=dict, description="`test` with its arguments, `interval`, `retries`, …"
    )
    stop_signal: str = Field(default="", description="What ends the program; empty: SIGTERM.")
    volumes: list[str] = Field(default_factory=list, description="Folders that are data.")
    shell: list[str] = Field(
        default=["/bin/sh", "-c"], description="What reads lines in Dockerfiles."
    )


class ImageConfig(_Config, Request):
    """What an image says of programs in it."""


class ImageConfigInfo(_Config, Answer):
    """What an image says of programs in it."""


class BuildLink(Request):
    """The result of a step of a build: look for it, or have it written."""

    key: str = Field(
        pattern=limits.BUILD_KEY_PATTERN,
        description="Names the step and all before it, among those of one tenant.",
    )
    config: ImageConfig = Field(
        default_factory=ImageConfig,
        description="What the image says of programs: what those in forks begin with.",
    )
    sandbox: str | None = Field(
        default=None,
        max_length=limits.ID_CHARS_MAX,
        description="The sandbox that it is written from, unless it is there; null: look only.",
    )
    tag: Tag | None = Field(
        default=None,
        description="Its name; null: one of the daemon's, and it may be removed for want of room.",
    )
