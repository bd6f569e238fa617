"""A chain is followed to its base, and a link that is not what it was is named."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from forkd.errors import ChainError, StoreError
from forkd.limits import CHAIN_DEPTH_MAX
from forkd.model.ids import Tag, parse_tag
from forkd.store.manifest import REPLACES_MAX, Cpu, Link, Manifest, StoredFile
from forkd.store.pending import RECORD_BYTES_MAX, PendingStore, Record
from forkd.store.snapshots import SnapshotStore
from tests.support.stored import write_stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOW = datetime(2026, 1, 2, tzinfo=UTC)
BASE, MIDDLE, HEAD = (parse_tag(name) for name in ("base", "middle", "head"))


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    made = SnapshotStore(tmp_path)
    made.prepare()
    rootfs = tmp_path / "cached.ext4"
    rootfs.write_bytes(b"root")
    made.keep_rootfs("key", rootfs)
    return made


def staged(
    store: SnapshotStore, tag: Tag, parent: Manifest | None, link: Link | None = None
) -> tuple[Path, Manifest]:
    folder = store.stage()
    written = [
        write_stored(folder / name, name, f"{tag} {name}".encode())
        for name in ("state", "memory", "disk.layer")
    ]
    if parent is not None:
        link = Link(parent_digest=parent.digest, source="sb-x", pause_ms=1.5)
    manifest = Manifest(
        tag=tag,
        created_at=NOW,
        recipe="python-numpy",
        image_key="key",
        kernel="6.1",
        vcpus=1,
        memory_bytes=1 << 27,
        disk_bytes=1 << 20,
        runtime="python",
        cpu=Cpu(model="a CPU", features=("sse",)),
        parent=None if parent is None else parent.tag,
        files=tuple(StoredFile.model_validate(file) for file in written),
        link=link,
    )
    return folder, manifest


def publish(store: SnapshotStore, tag: Tag, parent: Manifest | None = None) -> Manifest:
    folder, manifest = staged(store, tag, parent)
    store.publish(folder, manifest)
    return manifest


@pytest.fixture
def chain(store: SnapshotStore) -> tuple[Manifest, ...]:
    base = publish(store, BASE)
    middle = publish(store, MIDDLE, base)
    return base, middle, publish(store, HEAD, middle)


def change_manifest(folder: Path, **changed: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_a_chain_reads_from_its_base_to_its_head(
    store: SnapshotStore, chain: tuple[Manifest, ...]
) -> None:
    assert [link.tag for link in store.load_chain(HEAD)] == [BASE, MIDDLE, HEAD]
    assert [link.digest for link in store.load_chain(HEAD)] == [link.digest for link in chain]


def test_a_base_is_written_so_that_an_older_release_reads_it(
    store: SnapshotStore, chain: tuple[Manifest, ...]
) -> None:
    assert len(chain) == 3
    base = json.loads((store.folder(BASE) / "manifest.json").read_text())
    head = json.loads((store.folder(HEAD) / "manifest.json").read_text())

    assert (base["version"], "link" in base) == (1, False)
    assert head["version"] == 2


def remove(store: SnapshotStore) -> None:
    store.delete(MIDDLE)


def break_file(store: SnapshotStore) -> None:
    (store.folder(MIDDLE) / "memory").write_bytes(b"FKDMEMRY")


def write_anew(store: SnapshotStore) -> None:
    folder = store.folder(MIDDLE)
    written = write_stored(folder / "memory", "memory", b"other pages")
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [written if file["name"] == "memory" else file for file in manifest["files"]]
    change_manifest(folder, files=files)


def swap(store: SnapshotStore) -> None:
    shutil.rmtree(store.folder(MIDDLE))
    shutil.copytree(store.folder(HEAD), store.folder(MIDDLE))
    change_manifest(store.folder(MIDDLE), tag=MIDDLE, parent=BASE)


def resize(store: SnapshotStore) -> None:
    change_manifest(store.folder(MIDDLE), memory_bytes=1 << 28)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, "head depends on middle, which is missing"),
        (break_file, "head depends on middle, which cannot be used: memory is damaged"),
        (write_anew, "middle, which is not the snapshot that head was made from"),
        (swap, "middle, which is not the snapshot that head was made from"),
        (resize, "middle, which is not the snapshot that head was made from"),
    ],
)
def test_a_link_that_is_not_what_it_was_is_named(
    store: SnapshotStore,
    chain: tuple[Manifest, ...],
    damage: Callable[[SnapshotStore], None],
    words: str,
) -> None:
    assert len(chain) == 3
    damage(store)

    with pytest.raises(ChainError, match=words) as caught:
        store.load_chain(HEAD)

    assert caught.value.context["link"] == MIDDLE
    store.load_chain(BASE)


def test_a_damaged_head_is_its_own_error(store: SnapshotStore, chain: tuple[Manifest, ...]) -> None:
    assert len(chain) == 3
    (store.folder(HEAD) / "state").unlink()

    with pytest.raises(StoreError, match="state is missing"):
        store.load_chain(HEAD)


def test_a_chain_is_as_long_as_the_limit_and_no_longer(store: SnapshotStore) -> None:
    link = publish(store, parse_tag("t0"))
    for number in range(1, CHAIN_DEPTH_MAX + 2):
        link = publish(store, parse_tag(f"t{number}"), link)

    assert len(store.load_chain(parse_tag(f"t{CHAIN_DEPTH_MAX}"))) == CHAIN_DEPTH_MAX + 1
    with pytest.raises(ChainError, match=f"more than {CHAIN_DEPTH_MAX} ancestors"):
        store.load_chain(parse_tag(f"t{CHAIN_DEPTH_MAX + 1}"))


def test_children_stand_on_what_replaced_their_parent(
    store: SnapshotStore, chain: tuple[Manifest, ...]
) -> None:
    folder, flat = staged(store, MIDDLE, None, Link(replaces=(chain[1].digest,)))
    store.replace(folder, flat)

    assert [link.tag for link in store.load_chain(HEAD)] == [MIDDLE, HEAD]


def test_a_crash_between_the_two_renames_leaves_the_old_snapshot(
    store: SnapshotStore, chain: tuple[Manifest, ...], tmp_path: Path
) -> None:
    staged(store, MIDDLE, None, Link(replaces=(chain[1].digest,)))
    store.folder(MIDDLE).rename(tmp_path / "staging" / "replaced-middle")

    store.prepare()

    assert [link.tag for link in store.load_chain(HEAD)] == [BASE, MIDDLE, HEAD]
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_crash_after_the_second_rename_leaves_the_new_snapshot(
    store: SnapshotStore, chain: tuple[Manifest, ...], tmp_path: Path
) -> None:
    folder, flat = staged(store, MIDDLE, None, Link(replaces=(chain[1].digest,)))
    store.replace(folder, flat)
    shutil.copytree(store.folder(BASE), tmp_path / "staging" / "replaced-middle")

    store.prepare()

    assert [link.tag for link in store.load_chain(HEAD)] == [MIDDLE, HEAD]
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_replacement_that_lacks_a_file_leaves_the_old_snapshot(
    store: SnapshotStore, chain: tuple[Manifest, ...]
) -> None:
    folder, flat = staged(store, MIDDLE, None, Link(replaces=(chain[1].digest,)))
    (folder / "memory").unlink()

    with pytest.raises(StoreError, match="memory is missing"):
        store.replace(folder, flat)

    assert len(store.load_chain(HEAD)) == 3


def test_a_snapshot_stands_in_for_so_many_others_and_no_more() -> None:
    Link(replaces=("d",) * REPLACES_MAX)
    with pytest.raises(ValueError, match="at most"):
        Link(replaces=("d",) * (REPLACES_MAX + 1))


def test_what_lies_among_the_snapshots_and_is_none_is_told(
    store: SnapshotStore, chain: tuple[Manifest, ...], tmp_path: Path
) -> None:
    assert len(chain) == 3
    snapshots = tmp_path / "snapshots"
    (snapshots / ".hidden").mkdir()
    (snapshots / "empty").mkdir()
    (snapshots / "file").write_bytes(b"")

    assert [path.name for path in store.strangers()] == [".hidden", "empty", "file"]


@pytest.fixture
def pending(tmp_path: Path) -> PendingStore:
    made = PendingStore(tmp_path)
    made.prepare()
    return made


RECORD = Record(tag=HEAD, created_at=NOW, parent=BASE, source="sb-x")


def test_a_record_is_there_after_a_restart_until_it_is_removed(
    pending: PendingStore, tmp_path: Path
) -> None:
    pending.put(RECORD)
    again = PendingStore(tmp_path)
    assert again.records() == (RECORD,)

    again.remove(HEAD)
    again.remove(HEAD)
    assert pending.records() == ()


@pytest.mark.parametrize(
    "raw",
    [b"{", b"[]", RECORD.model_dump_json().encode(), b" " * (RECORD_BYTES_MAX + 1)],
    ids=["cut", "list", "of another tag", "too long"],
)
def test_what_is_no_record_is_removed(pending: PendingStore, tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "writing" / "other.json"
    path.write_bytes(raw)

    assert pending.records() == ()
    assert not path.exists()
