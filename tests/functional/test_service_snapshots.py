"""Baking ends in a whole snapshot or in one clear error and nothing else."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError, Conflict, ForkdError, NotFound, StoreError, WarmUpError
from forkd.model.ids import parse_tag
from forkd.model.progress import Progress
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import SnapshotCpu, SnapshotRequest, SnapshotStatus
from forkd.service.snapshots import bake, bake_warm
from tests.support.callers import CALLER
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

ONE = ForkOptions()
NOW = ForkOptions(wait=False)


async def test_a_bake_tells_each_stage_and_ends_in_the_snapshot(fake_host: FakeHost) -> None:
    stages = []
    async with fake_host.service() as service:
        events = service.snapshots.bake(CALLER, SnapshotRequest(TAG, fake_host.recipe()))
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Progress):
                    stages.append(event.stage)
                else:
                    assert event == await service.snapshots.get(CALLER, TAG)

        *image, boot, warm, quiesce, save = list(dict.fromkeys(stages))
        assert image
        assert (boot, warm, quiesce, save) == ("boot", "warm", "quiesce", "save")
        snapshot = await service.snapshots.get(CALLER, TAG)
        assert snapshot.status is SnapshotStatus.READY
        assert snapshot.cpu == SnapshotCpu("A CPU", ("avx2", "fma"))
        assert fake_host.left_over() == []
        assert fake_host.vmm_processes() == []


async def test_a_snapshot_is_still_there_after_a_restart(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        before = await fake_host.bake(service, fake_host.recipe())

    async with fake_host.service() as service:
        assert await service.snapshots.list(CALLER) == (before,)


@pytest.mark.parametrize(
    ("knobs", "code", "kind", "words"),
    [
        ("boot=exit", "", BuildError, "killed by the filter; .* hello from the console"),
        ("save=fail", "", BuildError, "refused to be baked"),
        ("", "raise ValueError()", WarmUpError, "ValueError: as asked"),
    ],
)
async def test_a_failed_bake_is_one_error_and_leaves_nothing(
    fake_host: FakeHost, knobs: str, code: str, kind: type[ForkdError], words: str
) -> None:
    async with fake_host.service() as service:
        with pytest.raises(kind, match=words):
            await fake_host.bake(service, fake_host.recipe(knobs=knobs, code=code))

        assert await service.snapshots.list(CALLER) == ()
        assert fake_host.left_over() == []
        assert fake_host.vmm_processes() == []
        # the tag is free again
        await fake_host.bake(service, fake_host.recipe())


def with_more(recipe: Path, text: str) -> Path:
    """Add to the warm-up of a recipe."""
    file = recipe / "recipe.toml"
    file.write_text(f"{file.read_text()}{text}\n")
    return recipe


async def messages_of(service: Host, recipe: Path) -> list[str]:
    """Bake a recipe; return what was told of its lines."""
    events = service.snapshots.bake(CALLER, SnapshotRequest(TAG, recipe))
    async with contextlib.aclosing(events):
        told = [event async for event in events if isinstance(event, Progress)]
    return [each.message for each in told if each.stage == "run"]


async def test_lines_are_run_in_order_before_the_warm_up(fake_host: FakeHost) -> None:
    recipe = with_more(fake_host.recipe(), 'run = ["exit 0", "first", "second"]')
    async with fake_host.service() as service:
        # what the fake shell runs only says "sh"
        assert await messages_of(service, recipe) == ["exit 0", "first", "sh", "second", "sh"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("exit 3", r"^'exit 3' exited with 3: it printed nothing"),
        ("fail 2 no such package", r"exited with 2: sh\nno such package$"),
        ("fail 6 Could not resolve host", r"resolve host\na machine has no network while it is"),
    ],
)
async def test_a_line_that_fails_shows_its_output_and_leaves_nothing(
    fake_host: FakeHost, line: str, words: str
) -> None:
    recipe = with_more(fake_host.recipe(), f'run = ["exit 0", "{line}", "never"]')
    async with fake_host.service() as service:
        with pytest.raises(BuildError, match=words) as raised:
            await fake_host.bake(service, recipe)

        assert raised.value.context["field"] == "run"
        assert await service.snapshots.list(CALLER) == ()
        assert fake_host.left_over() == []


async def test_a_line_for_an_image_without_a_shell_is_one_clear_error(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bake_warm, "SHELL", ("missing", "-c"))
    recipe = with_more(fake_host.recipe(), 'run = ["true"]')
    async with fake_host.service() as service:
        with pytest.raises(BuildError, match=r"cannot run 'true': the image has no shell \(`sh`\)"):
            await fake_host.bake(service, recipe)

        assert await service.snapshots.list(CALLER) == ()


@pytest.mark.parametrize(("program", "runtime"), [("cat", "python"), ("missing", "none")])
async def test_a_runtime_is_started_if_the_image_has_one(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch, program: str, runtime: str
) -> None:
    monkeypatch.setattr(bake_warm, "_PYTHON", (program,))
    recipe = fake_host.recipe(code="")
    text = (recipe / "recipe.toml").read_text()
    (recipe / "recipe.toml").write_text(text.replace('runtime = "python"', 'runtime = "auto"'))
    async with fake_host.service() as service:
        assert (await fake_host.bake(service, recipe)).runtime == runtime


async def test_a_guest_that_never_boots_ends_the_bake_at_its_deadline(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bake, "BOOT_TIMEOUT_S", 0.2)
    async with fake_host.service() as service:
        with pytest.raises(BuildError, match=r"did not boot to its agent within 0\.2 s"):
            await fake_host.bake(service, fake_host.recipe(knobs="boot=never"))

        assert fake_host.vmm_processes() == []


async def test_a_kernel_that_is_no_kernel_is_one_clear_error(fake_host: FakeHost) -> None:
    recipe = fake_host.recipe()
    (recipe / "kernel").write_bytes(b"not a kernel")
    async with fake_host.service() as service:
        with pytest.raises(BuildError, match="neither a bzImage nor an ELF"):
            await fake_host.bake(service, recipe)

        assert await service.snapshots.list(CALLER) == ()


async def test_a_missing_recipe_is_not_found(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        with pytest.raises(NotFound):
            await fake_host.bake(service, fake_host.folder / "recipes" / "nowhere")


async def test_closing_the_events_ends_the_bake(fake_host: FakeHost) -> None:
    request = SnapshotRequest(TAG, fake_host.recipe(code="hang"))
    async with fake_host.service() as service:
        events = service.snapshots.bake(CALLER, request)
        async for event in events:
            if isinstance(event, Progress) and event.message == "warming":
                break
        assert [s.status for s in await service.snapshots.list(CALLER)] == [SnapshotStatus.WRITING]
        assert len(fake_host.vmm_processes()) == 1

        await events.aclose()

        assert await service.snapshots.list(CALLER) == ()
        assert fake_host.vmm_processes() == []
        assert fake_host.left_over() == []


async def test_stopping_the_service_undoes_a_bake(fake_host: FakeHost) -> None:
    request = SnapshotRequest(TAG, fake_host.recipe(code="hang"))
    async with fake_host.service() as service:
        events = service.snapshots.bake(CALLER, request)
        async for event in events:
            if isinstance(event, Progress) and event.message == "warming":
                break

    assert fake_host.vmm_processes() == []
    assert fake_host.left_over() == []
    with pytest.raises(Conflict, match="stopping"):
        await anext(events)


async def test_a_tag_is_baked_once_at_a_time_and_taken_afterwards(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        first = service.snapshots.bake(CALLER, SnapshotRequest(TAG, fake_host.recipe(code="hang")))
        await anext(first)
        with pytest.raises(Conflict, match="being written already"):
            await fake_host.bake(service, fake_host.recipe(name="other"))
        with pytest.raises(Conflict, match="still being written"):
            await service.sandboxes.fork(CALLER, TAG, 1, NOW)
        with pytest.raises(Conflict, match="being written"):
            await service.snapshots.delete(CALLER, TAG)
        await first.aclose()

        await fake_host.bake(service, fake_host.recipe())
        with pytest.raises(Conflict, match="exists"):
            await fake_host.bake(service, fake_host.recipe())


async def test_a_snapshot_in_use_is_not_deleted_and_the_refusal_names_who_uses_it(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ONE)).sandboxes
        assert (await service.snapshots.get(CALLER, TAG)).sandboxes == 1

        with pytest.raises(Conflict, match=sandbox.id):
            await service.snapshots.delete(CALLER, TAG)

        await service.sandboxes.delete(CALLER, sandbox.id)
        await service.snapshots.delete(CALLER, TAG)
        assert await service.snapshots.list(CALLER) == ()
        assert fake_host.vmm_processes() == []
        with pytest.raises(NotFound):
            await service.snapshots.delete(CALLER, TAG)


@pytest.mark.parametrize("file", ["state", "memory", "disk.layer"])
async def test_a_truncated_file_is_found_at_the_start_and_said_at_the_fork(
    fake_host: FakeHost, file: str
) -> None:
    async with fake_host.service() as service:
        snapshot = await fake_host.bake(service, fake_host.recipe())
    path = snapshot.directory / file
    path.write_bytes(path.read_bytes()[:-1])

    async with fake_host.service() as service:
        (found,) = await service.snapshots.list(CALLER)
        assert found.status is SnapshotStatus.FAILED
        with pytest.raises(StoreError, match=f"{file} is damaged"):
            await service.sandboxes.fork(CALLER, TAG, 1, ONE)
        await service.snapshots.delete(CALLER, TAG)
        assert await service.snapshots.list(CALLER) == ()


@pytest.mark.parametrize("file", ["state", "memory", "disk.layer"])
async def test_a_flipped_bit_is_found_before_anything_runs(fake_host: FakeHost, file: str) -> None:
    async with fake_host.service() as service:
        snapshot = await fake_host.bake(service, fake_host.recipe())
        raw = bytearray((snapshot.directory / file).read_bytes())
        raw[-1] ^= 1
        (snapshot.directory / file).write_bytes(raw)

        with pytest.raises(StoreError, match=f"{file}: its body does not match"):
            await service.sandboxes.fork(CALLER, TAG, 1, ONE)

        assert await service.sandboxes.list(CALLER) == ()
        assert fake_host.vmm_processes() == []
        assert list(fake_host.settings.zygotes_dir.iterdir()) == []


async def test_an_image_is_built_with_progress_and_named_by_its_key(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        events = [event async for event in service.images.build(CALLER, fake_host.recipe())]

    image = events[-1]
    assert not isinstance(image, Progress)
    assert image.rootfs.parent.name == image.key


async def test_a_snapshot_survives_the_image_cache(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(), tag="other")
        other = parse_tag("other")
        for file in (fake_host.settings.cache_dir / "images").glob("*/*"):
            file.unlink()

        assert len((await service.sandboxes.fork(CALLER, other, 1, ONE)).sandboxes) == 1
        for sandbox in await service.sandboxes.list(CALLER):
            await service.sandboxes.delete(CALLER, sandbox.id)
