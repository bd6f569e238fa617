"""A snapshot is its folder: there whole, or not there."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import HostError, StoreError
from forkd.host import files
from forkd.host.files import hides_holes
from forkd.model.ids import parse_tag
from forkd.store.manifest import MANIFEST_BYTES_MAX, Cpu, Manifest, StoredFile
from forkd.store.snapshots import SnapshotStore
from tests.support.stored import write_stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TAG = parse_tag("python")


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    made = SnapshotStore(tmp_path)
    made.prepare()
    return made


def write_files(folder: Path) -> tuple[StoredFile, ...]:
    names = ("state", "memory", "disk.layer")
    written = [write_stored(folder / name, name, name.encode()) for name in names]
    return tuple(StoredFile.model_validate(file) for file in written)


def manifest(written: tuple[StoredFile, ...]) -> Manifest:
    values: dict[str, Any] = {
        "tag": TAG,
        "created_at": datetime(2026, 1, 2, tzinfo=UTC),
        "recipe": "python-numpy",
        "image_key": "key",
        "kernel": "6.1",
        "vcpus": 1,
        "memory_bytes": 1 << 27,
        "disk_bytes": 1 << 20,
        "runtime": "python",
        "cpu": Cpu(model="a CPU", features=("sse",)),
        "files": written,
    }
    return Manifest(**values)


@pytest.fixture
def published(store: SnapshotStore, tmp_path: Path) -> Path:
    rootfs = tmp_path / "cached.ext4"
    rootfs.write_bytes(b"root")
    store.keep_rootfs("key", rootfs)
    staged = store.stage()
    store.publish(staged, manifest(write_files(staged)))
    return store.folder(TAG)


def test_a_published_snapshot_is_found_and_reads_as_written(
    store: SnapshotStore, published: Path
) -> None:
    assert store.tags() == (TAG,)
    assert store.load(TAG).recipe == "python-numpy"
    assert {entry.name for entry in published.iterdir()} == {
        "manifest.json",
        "state",
        "memory",
        "disk.layer",
    }


def test_what_an_earlier_daemon_was_writing_is_gone_after_a_start(
    store: SnapshotStore, tmp_path: Path
) -> None:
    write_files(store.stage())

    store.prepare()

    assert list((tmp_path / "staging").iterdir()) == []
    assert store.tags() == ()


def test_a_folder_is_nobodys_neither_while_it_is_made_nor_while_it_is_put_aside(
    store: SnapshotStore, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever tidies looks from another thread, at any moment."""
    left = []
    made, renamed = files.make_folder, files.rename_for_good

    def make(path: Path) -> None:
        made(path)
        left.append(store.leftovers())

    def rename(old: Path, new: Path) -> None:
        renamed(old, new)
        left.append(store.leftovers())

    monkeypatch.setattr(files, "make_folder", make)
    monkeypatch.setattr(files, "rename_for_good", rename)

    staged, aside = store.stage(), store.put_aside(published)

    assert left == [(), ()]
    store.discard(staged)
    store.discard(aside)
    assert store.leftovers() == ()


def test_a_folder_that_cannot_be_made_or_moved_is_not_remembered(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = iter(("one", "two"))
    monkeypatch.setattr("forkd.store.snapshots.secrets.token_hex", lambda _: next(chosen))
    (tmp_path / "staging" / "one").mkdir()
    with pytest.raises(HostError):
        store.stage()
    with pytest.raises(HostError):
        store.put_aside(tmp_path / "none-such")
    (tmp_path / "staging" / "two").mkdir()

    assert [path.name for path in store.leftovers()] == ["one", "two"]


def test_a_snapshot_that_lacks_a_file_is_not_published(store: SnapshotStore) -> None:
    staged = store.stage()
    written = write_files(staged)
    (staged / "memory").unlink()

    with pytest.raises(StoreError, match="memory is missing"):
        store.publish(staged, manifest(written))

    assert store.tags() == ()


def damage_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("no manifest", lambda folder: (folder / "manifest.json").unlink()),
    ("damaged", lambda folder: (folder / "manifest.json").write_text("{")),
    ("damaged", lambda folder: (folder / "manifest.json").write_text("[]")),
    (
        "exceeds",
        lambda folder: (folder / "manifest.json").write_bytes(bytes(MANIFEST_BYTES_MAX + 1)),
    ),
    ("version 4", lambda folder: damage_manifest(folder, lambda m: m.update(version=4))),
    ("speaks of", lambda folder: damage_manifest(folder, lambda m: m.update(tag="other"))),
    ("damaged", lambda folder: damage_manifest(folder, lambda m: m.update(vcpus=0))),
    ("damaged", lambda folder: damage_manifest(folder, lambda m: m.update(parent="../x"))),
    (
        "parent without its digest",
        lambda folder: damage_manifest(folder, lambda m: m.update(parent="base")),
    ),
    ("names the files", lambda folder: damage_manifest(folder, lambda m: m.update(files=[]))),
    ("state is missing", lambda folder: (folder / "state").unlink()),
    ("memory is damaged", lambda folder: (folder / "memory").write_bytes(b"FKDMEMRY")),
    (
        "not the file that was saved",
        lambda folder: write_stored(folder / "memory", "memory", b"another"),
    ),
]


@pytest.mark.parametrize(("words", "damage"), DAMAGE)
def test_damage_of_any_kind_is_one_clear_error(
    store: SnapshotStore, published: Path, words: str, damage: Callable[[Path], object]
) -> None:
    damage(published)

    with pytest.raises(StoreError, match=words):
        store.load(TAG)


def test_a_deleted_snapshot_is_gone_and_deleting_it_again_is_fine(
    store: SnapshotStore, published: Path, tmp_path: Path
) -> None:
    store.delete(TAG)
    store.delete(TAG)

    assert not published.exists()
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.usefixtures("published")
def test_what_was_replaced_does_not_come_back_when_its_successor_is_deleted(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise HostError("cannot rename")

    staged = store.stage()
    with monkeypatch.context() as refused:
        refused.setattr(files, "rename_if_there", refuse)
        store.replace(staged, manifest(write_files(staged)))
    assert store.exists(TAG)

    store.delete(TAG)
    store.prepare()

    assert not store.exists(TAG)
    assert store.leftovers() == ()


def test_an_image_is_kept_once_and_survives_the_cache(store: SnapshotStore, tmp_path: Path) -> None:
    cached = tmp_path / "cached.ext4"
    cached.write_bytes(b"root")

    kept = store.keep_rootfs("key", cached)
    cached.unlink()

    assert kept.read_bytes() == b"root"
    assert store.keep_rootfs("key", cached) == kept


def test_an_image_that_nothing_stands_on_is_told(store: SnapshotStore, published: Path) -> None:
    assert store.unused_images({"key"}) == ()
    store.load(TAG)

    (unused,) = store.unused_images(set())
    shutil.rmtree(unused)

    assert published.exists()
    with pytest.raises(StoreError, match="image of python is missing"):
        store.load(TAG)


def test_what_is_no_tag_is_not_listed(store: SnapshotStore, tmp_path: Path) -> None:
    (tmp_path / "snapshots" / ".hidden").mkdir()

    assert store.tags() == ()


def test_a_file_whose_holes_show_is_copied_and_not_used_where_it_is(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 20)
        file.write(b"data")

    assert not hides_holes(sparse)


def test_an_image_that_several_bakes_want_at_once_is_kept_once(
    store: SnapshotStore, tmp_path: Path
) -> None:
    cached = tmp_path / "cached.ext4"
    cached.write_bytes(b"root")
    together, tries = threading.Barrier(8), 50

    def keep(_: int) -> list[tuple[Path, int]]:
        found = []
        for number in range(tries):
            together.wait(10)
            kept = store.keep_rootfs(f"key{number}", cached)
            found.append((kept, kept.stat().st_ino))
        return found

    with ThreadPoolExecutor(together.parties) as threads:
        kept = list(threads.map(keep, range(together.parties)))

    assert all(each == kept[0] for each in kept)
