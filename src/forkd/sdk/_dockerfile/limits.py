"""Limits of what a build reads on this host."""

from __future__ import annotations

DOCKERFILE_BYTES_MAX = 1024 * 1024
"""Longest Dockerfile, and longest `.dockerignore`, that is read."""

DOCKERFILE_INSTRUCTIONS_MAX = 512
"""Most instructions of a Dockerfile: several stages of as many steps as a chain has links."""

BUILD_CONTEXT_ENTRIES_MAX = 100_000
"""Most files, folders and links of a build context, without those that are left out."""

BUILD_CONTEXT_BYTES_MAX = 4 * 1024 * 1024 * 1024
"""Most bytes of the files of a build context, without those that are left out."""
