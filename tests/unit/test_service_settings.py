"""A run folder whose sockets could not be named is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forkd.errors import InvalidRequest
from forkd.host.sockets import PATH_BYTES_MAX
from forkd.model.ids import new_sandbox_id
from forkd.service.settings import (
    LONGEST_SOCKET_NAME,
    TOPS_PATH_BYTES_MAX,
    DiskPolicy,
    HostSettings,
)


def settings(run_dir: Path) -> HostSettings:
    return HostSettings(vmm=Path("/v"), agent=Path("/a"), cache_dir=Path("/c"), run_dir=run_dir)


def test_the_longest_run_folder_fits_and_one_byte_more_does_not() -> None:
    room = PATH_BYTES_MAX - len(LONGEST_SOCKET_NAME) - 1
    longest = Path("/" + "r" * (room - 1))

    socket = settings(longest).sandboxes_dir / new_sandbox_id() / "vsock.sock_1025"
    assert len(bytes(socket)) == PATH_BYTES_MAX

    with pytest.raises(InvalidRequest) as refusal:
        settings(Path(f"{longest}r"))

    assert refusal.value.context["field"] == "run_dir"


def test_the_longest_folder_of_private_disks_fits_and_one_byte_more_does_not() -> None:
    longest = Path("/" + "t" * (TOPS_PATH_BYTES_MAX - 1))
    fits = replace(settings(Path("/r")), disks=DiskPolicy(longest))
    assert fits.tops_dir == longest

    with pytest.raises(InvalidRequest) as refusal:
        replace(fits, disks=DiskPolicy(Path(f"{longest}t")))

    assert refusal.value.context["field"] == "disk_dir"
