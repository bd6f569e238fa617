"""Settings of a host on folders of its own; apart, for daemons that have no use for pytest."""

from __future__ import annotations

from pathlib import Path

from forkd import programs
from forkd.images.layout import default_cache_folder
from forkd.limits import (
    BUILD_UIDS_DEFAULT,
    IMAGE_CACHE_MIB_MAX,
    MEMORY_OVERCOMMIT_MAX,
    UIDS_DEFAULT,
)
from forkd.service.jail import UidRange
from forkd.service.settings import AdmissionPolicy, HostSettings, PackPolicy


def settings_in(state: Path, run_dir: Path) -> HostSettings:
    """Return settings under which a host shares images with the user's, and nothing else."""
    cache, shared = state / "cache", default_cache_folder()
    for name in ("locks", "initramfs"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    for name in ("kernels", "images"):
        if not (cache / name).exists():
            (cache / name).symlink_to(shared / name)
    return HostSettings(
        vmm=programs.find(programs.VMM),
        agent=programs.find(programs.AGENT),
        cache_dir=cache,
        state_dir=state,
        run_dir=run_dir,
        recipe_dirs=(Path("/"), programs.RECIPES),
        cgroups=True,
        packs=PackPolicy(allow_unsigned=True),
        admission=AdmissionPolicy(
            memory_pressure_max=100.0,  # what ran before may still be felt
            memory_overcommit=MEMORY_OVERCOMMIT_MAX,  # guests may be larger than the host
        ),
        uids=UidRange.parse(UIDS_DEFAULT),
        build_uids=UidRange.parse(BUILD_UIDS_DEFAULT),
        image_cache_mib=IMAGE_CACHE_MIB_MAX,  # the images are those of all tests
    )
