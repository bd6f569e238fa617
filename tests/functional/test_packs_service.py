"""Packs between two stores, read and written by processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from forkd import programs
from forkd.errors import CapacityError, Conflict, ForkdError, NotFound, PackError, StoreError
from forkd.host import files, proc
from forkd.limits import BUILD_UIDS, BUILD_UIDS_DEFAULT, BUILDS_MAX, PACKS_MAX
from forkd.model.caller import Caller, Scope, Tenant
from forkd.model.ids import Tag, parse_tag
from forkd.model.pack import UnpackRequest
from forkd.model.snapshot import SnapshotStatus
from forkd.packs import keys
from forkd.service.cells import Cells
from forkd.service.jail import UidRange
from forkd.service.journal import Journal
from forkd.service.ledger import Ledger
from forkd.service.packs import Packs
from forkd.service.records import Records
from forkd.service.settings import PackPolicy
from forkd.service.snapshots import stored
from forkd.service.snapshots.catalog import Catalog
from forkd.service.workers import Workers
from forkd.store.database import Database
from forkd.store.manifest import Cpu, Link, Manifest, StoredFile
from forkd.store.pending import PendingStore
from forkd.store.snapshots import SnapshotStore
from forkd.telemetry.telemetry import Telemetry
from tests.support import processes
from tests.support.callers import CALLER
from tests.support.no_records import no_records
from tests.support.packs import (
    DISK_BYTES,
    MEMORY_BYTES,
    PUBLIC,
    OneCell,
    a_link,
    block,
    chunk,
    open_below,
    signed,
)
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

POLICY = PackPolicy(allow_unsigned=True)

CELLS: list[Cells | None] = [None]
"""Where packs are read and written."""

FILES = ("state", "memory", "disk.layer")

BASE = parse_tag("base")

OPERATORS = bytes(range(1, 33))
"""A secret key that is not the tests' usual one."""


@dataclass
class Host:
    """One store with what serves packs over it."""

    state: Path
    store: SnapshotStore
    catalog: Catalog
    packs: Packs

    async def pack(self, tag: str) -> bytes:
        return b"".join([piece async for piece in self.packs.pack(CALLER, parse_tag(tag))])

    async def unpack(self, pack: bytes, tag: str, **terms: object) -> list[tuple[str, bool]]:
        """Unpack whoever signed it; returns name and whether it was here, for each link."""
        values = {"allow_unsigned": True, **terms}
        request = UnpackRequest(parse_tag(tag), **values)  # type: ignore[arg-type]
        unpacked = await self.packs.unpack(CALLER, request, pieces(pack))
        return [(each.tag, each.reused) for each in unpacked.links]

    def add(self, tags: list[str], rootfs: bytes = block("root") + bytes(8192)) -> None:
        """Store a chain of snapshots, each in its own content."""
        source = self.state / "image"
        source.write_bytes(rootfs)
        self.store.keep_rootfs("key", source)
        parent: Manifest | None = None
        for tag in tags:
            staged = self.store.stage()
            manifest = self._manifest(staged, tag, parent)
            self.store.publish(staged, manifest)
            self.catalog.add(stored.read(parse_tag(tag), self.store))
            parent = manifest

    @staticmethod
    def _manifest(staged: Path, tag: str, parent: Manifest | None) -> Manifest:
        link = a_link(staged / "made", tag, None)
        for name in FILES:
            (staged / "made" / name).rename(staged / name)
        (staged / "made").rmdir()
        return Manifest(
            tag=tag,
            created_at=link.created_at,
            recipe=link.recipe,
            image_key="key",
            kernel=link.kernel,
            vcpus=2,
            memory_bytes=MEMORY_BYTES,
            disk_bytes=DISK_BYTES,
            runtime="python",
            cpu=Cpu(model="a CPU", features=("sse", "not-there")),
            parent=None if parent is None else parent.tag,
            files=tuple(StoredFile(**file.model_dump()) for file in link.files),
            link=None if parent is None else Link(parent_digest=parent.digest),
        )

    def contents(self, tag: str) -> list[bytes]:
        return [(self.store.folder(parse_tag(tag)) / name).read_bytes() for name in FILES]

    def everything(self) -> set[str]:
        return {str(path.relative_to(self.state)) for path in self.state.rglob("*")}


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 10_000):
        yield data[start : start + 10_000]


def cells() -> Cells:
    return Cells(programs.find(programs.VMM), UidRange.parse(BUILD_UIDS_DEFAULT), None, None)


@pytest.fixture(
    autouse=True,
    params=["here", pytest.param("cell", marks=pytest.mark.needs("root", "binaries"))],
)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test read and write packs as an ordinary user's daemon, and as root's."""
    monkeypatch.setattr(
        sys.modules[__name__], "CELLS", [None if request.param == "here" else cells()]
    )


@contextlib.contextmanager
def a_host(state: Path, policy: PackPolicy = POLICY) -> Iterator[Host]:
    state.mkdir()
    store, pending = SnapshotStore(state), PendingStore(state)
    records = Records(Database(state / "forkd.db"))
    store.prepare()
    pending.prepare()
    telemetry, ledger = Telemetry(), Ledger()
    journal = Journal(telemetry, no_records())
    catalog = Catalog(store, pending, records, ledger, journal, lambda _: ())

    async def drop_images() -> None:
        if not catalog.shelf.writing:  # else one may need an image that no manifest names yet
            for path in store.unused_images(catalog.shelf.image_keys()):
                store.discard(store.put_aside(path))

    with Workers() as workers:
        packs = Packs(telemetry, policy, store, catalog, drop_images, CELLS[0], workers)
        yield Host(state, store, catalog, packs)
    records.close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path / "here") as host:
        host.add(["base", "middle", "head"])
        yield host


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path / "there") as host:
        yield host


async def test_a_chain_arrives_byte_for_byte_and_is_ready(here: Host, there: Host) -> None:
    links = await there.unpack(await here.pack("head"), "head")

    assert links == [("base", False), ("middle", False), ("head", False)]
    for tag in ("base", "middle", "head"):
        assert there.contents(tag) == here.contents(tag)
        assert there.catalog.get(parse_tag(tag)).status is SnapshotStatus.READY
    chain = there.store.load_chain(parse_tag("head"))
    assert [each.tag for each in chain] == ["base", "middle", "head"]
    image = there.store.rootfs(chain[0].image_key)
    assert image.read_bytes() == here.store.rootfs("key").read_bytes()
    assert list((there.state / "staging").iterdir()) == []


async def test_a_pack_of_a_base_has_nothing_of_what_stands_on_it(here: Host, there: Host) -> None:
    assert await there.unpack(await here.pack("base"), "base") == [("base", False)]


async def test_a_second_restart_reads_what_was_unpacked(here: Host, there: Host) -> None:
    await there.unpack(await here.pack("head"), "head")

    await there.catalog.load()

    assert [each.status for each in there.catalog.all()] == [SnapshotStatus.READY] * 3


async def test_unpacking_twice_changes_nothing(here: Host, there: Host) -> None:
    pack = await here.pack("head")
    await there.unpack(pack, "head")
    before = there.everything()

    links = await there.unpack(pack, "head")

    assert links == [("base", True), ("middle", True), ("head", True)]
    assert there.everything() == before


async def test_links_that_are_here_are_shared(here: Host, there: Host) -> None:
    await there.unpack(await here.pack("middle"), "middle")

    links = await there.unpack(await here.pack("head"), "head")

    assert links == [("base", True), ("middle", True), ("head", False)]


async def test_another_name_is_the_heads_alone(here: Host) -> None:
    links = await here.unpack(await here.pack("head"), "copy")

    assert links == [("base", True), ("middle", True), ("copy", False)]
    assert here.contents("copy") == here.contents("head")
    assert here.store.load(parse_tag("copy")).image_key == "key"


async def test_an_ancestor_whose_name_is_taken_gets_one_after_the_head(
    here: Host, there: Host
) -> None:
    there.add(["middle"])

    links = await there.unpack(await here.pack("head"), "head")

    assert links == [("base", False), ("head.1", False), ("head", False)]
    assert [each.tag for each in there.store.load_chain(parse_tag("head"))] == [
        "base",
        "head.1",
        "head",
    ]


async def test_an_ancestor_called_as_the_pack_is_now_gets_another_name(
    here: Host, there: Host
) -> None:
    links = await there.unpack(await here.pack("head"), "base")

    assert [tag for tag, _ in links] == ["base.0", "middle", "base"]


async def test_a_link_is_never_laid_over_another_tenants_private_snapshot(
    here: Host, there: Host
) -> None:
    """Its files are the same, its tag is taken: that is all that the caller learns."""
    await there.unpack(await here.pack("middle"), "middle")
    member = Caller("token:member", Tenant("team"), frozenset({Scope.SNAPSHOTS}), "test")

    async def unpack(head: str) -> list[tuple[str, bool]]:
        request = UnpackRequest(parse_tag(head), allow_unsigned=True)
        pack = pieces(await here.pack("head"))
        return [(e.tag, e.reused) for e in (await there.packs.unpack(member, request, pack)).links]

    assert await unpack("head") == [("head.0", False), ("head.1", False), ("head", False)]
    again = await there.unpack(await here.pack("middle"), "middle")
    assert again == [("base", True), ("middle", True)]
    for tag in ("base", "middle"):
        await there.catalog.share(parse_tag(tag), shared=True)
    assert await unpack("other") == [("base", True), ("middle", True), ("other", False)]


async def test_a_name_that_another_snapshot_has_is_refused(here: Host, there: Host) -> None:
    there.add(["other", "head"])
    before, pack = there.everything(), await here.pack("head")

    with pytest.raises(Conflict, match="another snapshot head"):
        await there.unpack(pack, "head")

    assert there.everything() == before


async def test_another_image_under_the_same_key_is_not_mistaken_for_it(
    here: Host, there: Host
) -> None:
    """A recipe's image here must not become what somebody else calls by its key."""
    there.add(["mine"], rootfs=block("mine"))

    await there.unpack(await here.pack("base"), "base")

    assert there.store.rootfs("key").read_bytes() == block("mine")
    key = there.store.load(parse_tag("base")).image_key
    assert key.startswith("pack-")
    assert there.store.rootfs(key).read_bytes() == here.store.rootfs("key").read_bytes()


async def test_a_key_that_no_image_here_has_is_not_taken_from_a_pack(
    here: Host, there: Host
) -> None:
    await there.unpack(await here.pack("base"), "base")

    assert not there.store.rootfs("key").exists()


async def test_what_the_guests_cpu_had_and_this_one_lacks_is_named(here: Host, there: Host) -> None:
    request = UnpackRequest(parse_tag("base"), allow_unsigned=True)

    unpacked = await there.packs.unpack(CALLER, request, pieces(await here.pack("base")))

    assert "avx" not in proc.cpu().features or "avx" not in unpacked.missing_features
    assert "not-there" in unpacked.missing_features


async def test_a_signature_that_is_trusted_is_told(here: Host, there: Host) -> None:
    request = UnpackRequest(parse_tag("base"), trusted=(PUBLIC,))

    unpacked = await there.packs.unpack(CALLER, request, pieces(signed(await here.pack("base"))))

    assert unpacked.signed_by == PUBLIC


async def test_a_host_takes_only_packs_that_its_operator_trusts_whatever_is_asked_for(
    here: Host, tmp_path: Path
) -> None:
    policy = PackPolicy(trusted_keys=frozenset({keys.public_of(OPERATORS)}))
    pack = await here.pack("base")
    with a_host(tmp_path / "strict", policy) as strict:
        for terms, sent, problem in (
            (UnpackRequest(BASE, trusted=(PUBLIC,)), signed(pack), "not trusted"),
            (UnpackRequest(BASE), signed(pack), "not trusted"),
            (UnpackRequest(BASE, allow_unsigned=True), pack, "FORKD_PACK_UNSIGNED"),
        ):
            with pytest.raises(ForkdError, match=problem):
                await strict.packs.unpack(CALLER, terms, pieces(sent))
        assert strict.catalog.all() == ()

        sent = signed(pack, OPERATORS)
        unpacked = await strict.packs.unpack(CALLER, UnpackRequest(BASE), pieces(sent))
        assert unpacked.signed_by == keys.public_of(OPERATORS)


@pytest.mark.parametrize("fault", ["unsigned", "untrusted", "damaged", "truncated", "trailing"])
async def test_nothing_is_left_of_a_pack_that_is_refused(
    fault: str, here: Host, there: Host
) -> None:
    before, pack = there.everything(), await here.pack("head")
    bad = {
        "unsigned": pack,
        "untrusted": signed(pack),
        "damaged": pack[:-20] + b"\xff" + pack[-19:],
        "truncated": pack[:-9],
        "trailing": pack + b"x",
    }[fault]

    with pytest.raises(PackError) as refused:
        await there.unpack(bad, "head", allow_unsigned=fault not in {"unsigned", "untrusted"})

    assert refused.value.context["reason"] == fault
    assert there.everything() == before
    assert there.catalog.all() == ()


async def test_a_pack_refused_at_its_head_does_not_break_off_who_sends_it(there: Host) -> None:
    """Megabytes still come when the reader has long ended."""
    with pytest.raises(PackError, match="no pack"):
        await there.unpack(bytes(8 << 20), "head")


async def test_a_well_packed_file_that_is_no_stored_file_is_refused(
    here: Host, there: Host
) -> None:
    more = (await here.pack("head"))[:-8] + chunk(bytes(17)) + bytes(8)

    with pytest.raises(PackError) as refused:
        await there.unpack(more, "head")

    assert refused.value.context["reason"] == "undeclared"


async def test_a_file_that_only_a_later_forkd_reads_is_refused(
    here: Host, there: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = await here.pack("head")
    monkeypatch.setattr("forkd.store.headers.Magic.version", 0)

    with pytest.raises(StoreError, match="too new"):
        await there.unpack(pack, "head")

    assert there.store.tags() == ()
    assert list((there.state / "staging").iterdir()) == []


async def test_a_full_disk_is_said_to_be_and_left_as_it_was(
    here: Host, there: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, pack = there.everything(), await here.pack("head")
    monkeypatch.setattr("forkd.service.packs.ROOM_BYTES_MIN", 1 << 60)

    with pytest.raises(CapacityError, match="needs"):
        await there.unpack(pack, "head")

    assert there.everything() == before


async def test_a_link_that_cannot_be_published_takes_those_before_it_along(
    here: Host, there: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = await here.pack("head")
    publish = SnapshotStore.publish

    def fails_at_the_head(store: SnapshotStore, staged: Path, manifest: Manifest) -> None:
        if manifest.tag == "head":
            raise CapacityError("No space left on device")
        publish(store, staged, manifest)

    monkeypatch.setattr(SnapshotStore, "publish", fails_at_the_head)

    with pytest.raises(CapacityError, match="No space left"):
        await there.unpack(pack, "head")

    assert there.store.tags() == ()
    assert list((there.state / "images").iterdir()) == []
    assert there.catalog.all() == ()
    assert list((there.state / "staging").iterdir()) == []


async def test_a_download_that_ends_as_its_files_are_opened_leaves_none_open(
    here: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on, opened = threading.Event(), threading.Event(), list[int]()
    open_to_read = files.open_to_read

    def open_slowly(path: Path) -> int:
        opening.set()
        assert go_on.wait(10)
        opened.append(open_to_read(path))
        return opened[-1]

    monkeypatch.setattr(files, "open_to_read", open_slowly)
    none = (here.store, here.catalog, lambda: asyncio.sleep(0), cast("Cells", OneCell()))
    with Workers() as workers:
        packs = Packs(Telemetry(), POLICY, *none, workers)
        download = asyncio.ensure_future(anext(packs.pack(CALLER, parse_tag("head"))))
        await asyncio.to_thread(opening.wait, 10)
        download.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([download])

    assert download.cancelled()
    assert len(opened) == 3 * len(FILES) + 1
    assert open_below(here.state / "snapshots") == []


async def test_two_packs_of_one_name_at_once_are_one_snapshot(here: Host, there: Host) -> None:
    pack = await here.pack("head")

    ended = await asyncio.gather(
        *(there.unpack(pack, "head") for _ in range(3)), return_exceptions=True
    )

    assert any(isinstance(each, list) for each in ended), ended
    assert all(isinstance(each, list | Conflict) for each in ended), ended
    assert there.store.tags() == ("base", "head", "middle")
    assert there.contents("head") == here.contents("head")


async def test_a_damaged_snapshot_is_not_packed(here: Host) -> None:
    path = here.store.folder(parse_tag("middle")) / "memory"
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    with pytest.raises(StoreError, match="memory of middle is damaged"):
        await here.pack("head")


async def test_what_does_not_exist_is_not_packed(here: Host) -> None:
    with pytest.raises(NotFound):
        await here.pack("nope")


async def test_a_reader_that_leaves_ends_the_packing(here: Host) -> None:
    source = here.packs.pack(CALLER, Tag("head"))
    async with contextlib.aclosing(source):
        await anext(source)
        packing = [
            pid
            for pid in processes.below(proc.own_pid())
            if b"forkd.packs" in processes.command(pid)
        ]

    assert packing
    assert [pid for pid in packing if b"forkd.packs" in processes.command(pid)] == []


@dataclass(frozen=True)
class Seen:
    """What the kernel shows of a process in a cell."""

    status: dict[str, str]
    namespaces: dict[str, str]
    root: frozenset[str]
    mounts: str
    command: str


KINDS = ("mnt", "net", "ipc", "uts", "pid", "cgroup")


def namespaces(pid: int | str) -> dict[str, str]:
    return {kind: str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in KINDS}


def inmates() -> list[Seen]:
    """Return what is seen of the processes in cells of packs."""
    uids = UidRange.parse(BUILD_UIDS_DEFAULT)
    first = uids.first + BUILDS_MAX * BUILD_UIDS
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and first <= folder.stat().st_uid < first + PACKS_MAX:
                lines = (folder / "status").read_text().splitlines()
                seen = Seen(
                    dict(line.split(":\t", 1) for line in lines),
                    namespaces(folder.name),
                    frozenset(each.name for each in (folder / "root").iterdir()),
                    (folder / "mounts").read_text(),
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(),
                )
                found.append(seen)
    return found


def is_program(seen: Seen) -> bool:
    """Whether it is what reads or writes a pack, which is started when all of the cell is made."""
    return "forkd.packs" in seen.command and " cell " not in seen.command


async def test_what_reads_a_pack_is_nobody_and_sees_one_folder(there: Host, here: Host) -> None:
    if CELLS[0] is None:
        return
    pack, seen = await here.pack("head"), list[Seen]()

    async def slowly() -> AsyncIterator[bytes]:
        yield pack[:10_000]
        await until(lambda: any(map(is_program, inmates())))
        seen.extend(inmates())
        yield pack[10_000:]

    request = UnpackRequest(parse_tag("head"), allow_unsigned=True)
    await there.packs.unpack(CALLER, request, slowly())

    check_confined(seen, there.state / "staging")
    assert inmates() == []
    owners = {path.stat().st_uid for path in there.state.rglob("*")}
    assert owners == {0}
    assert there.contents("head") == here.contents("head")


async def test_what_writes_a_pack_is_nobody_and_sees_no_folder(here: Host) -> None:
    if CELLS[0] is None:
        return
    async with contextlib.aclosing(here.packs.pack(CALLER, parse_tag("head"))) as written:
        await anext(written)
        seen = inmates()

    check_confined(seen, None)
    assert inmates() == []


def check_confined(seen: list[Seen], writable: Path | None) -> None:
    ours = namespaces("self")
    assert any(map(is_program, seen))
    for each in seen:
        status = each.status
        assert len(set(status["Uid"].split())) == len(set(status["Gid"].split())) == 1
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[kind], 16) == 0, kind
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert all(each.namespaces[kind] != ours[kind] for kind in KINDS)
        assert not {"home", "sys", "boot", "mnt"} & each.root
        on_disk = [
            line.split()[1]
            for line in each.mounts.splitlines()
            if line.split()[2] not in {"tmpfs", "proc", "devpts"}
            and line.split()[3].startswith("rw")
        ]
        assert len(on_disk) == (writable is not None)
        assert all(Path(path).parent == writable for path in on_disk)
