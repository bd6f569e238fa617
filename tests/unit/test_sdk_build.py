"""What a build sends into a machine: archives, owners, and the script that warms a program."""

from __future__ import annotations

import io
import subprocess
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import InvalidRequest
from forkd.sdk._build import Options, Seen, image_path, is_folder, owner_of, ready_script
from forkd.sdk._dockerfile import limits
from forkd.sdk._dockerfile.context import Context
from forkd.sdk._dockerfile.copying import Part
from forkd.sdk._dockerfile.packing import Look, Owner, Packer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ACCOUNTS = "root:x:0:0::/:/bin/sh\napp:x:1000:1001::/srv:/bin/sh\nshort:x\n"
GROUP = "root:x:0:\nstaff:x:50:app\n"


def members(pieces: Iterable[bytes]) -> dict[str, tuple[Any, ...]]:
    data = b"".join(pieces) + Packer.end()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {
            each.name: (each.type, each.mode, each.uid, each.gid, each.linkname,
                        file.read() if (file := archive.extractfile(each)) else b"")
            for each in archive
        }  # fmt: skip


def part(context: Context, path: str, *, unpacked: bool = False) -> Part:
    entry = context.sources(path)[0]
    context.digest(entry)
    return Part(path, entry, None, None, path.rpartition("/")[2], unpacked)


def packed_tar(*entries: tuple[str, bytes, int]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content, uid in entries:
            info = tarfile.TarInfo(name)
            info.size, info.uid, info.mode = len(content), uid, 0o4755
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("hard")
        link.type, link.linkname = tarfile.LNKTYPE, entries[0][0]
        archive.addfile(link)
    return data.getvalue()


def test_a_folder_is_packed_with_its_owner_and_permissions(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "run").write_text("x" * 700)
    (tmp_path / "a" / "b" / "run").chmod(0o711)
    (tmp_path / "a" / "link").symlink_to("b/run")
    context = Context(tmp_path)
    found = members(Packer(Look(Owner(5, 6), None)).of_context(context, part(context, "a"), "a"))
    assert found == {
        "b": (tarfile.DIRTYPE, 0o755, 5, 6, "", b""),
        "b/run": (tarfile.REGTYPE, 0o711, 5, 6, "", b"x" * 700),
        "link": (tarfile.SYMTYPE, 0o777, 5, 6, "b/run", b"x" * 700),
    }
    changed = members(Packer(Look(Owner(0, 0), 0o700)).of_context(context, part(context, "a"), ""))
    assert [found[1] for found in changed.values()][:2] == [0o700, 0o700]


def test_a_file_that_changes_while_it_is_sent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    context = Context(tmp_path)
    known = part(context, "a")
    for text, message in (("two", "changed while"), ("t", "became shorter")):
        (tmp_path / "a").write_text(text)
        with pytest.raises(ValueError, match=message):
            members(Packer(Look(None, None)).of_context(context, known, "a"))


def test_an_archive_is_unpacked_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(packed_tar(("x/y", b"1", 7)))
    context = Context(tmp_path)
    known = part(context, "a.tgz", unpacked=True)
    found = members(Packer(Look(None, None)).of_context(context, known, ""))
    assert found["x/y"] == (tarfile.REGTYPE, 0o4755, 7, 0, "", b"1")
    assert found["hard"][5] == b"1"
    assert found["x"][0] == tarfile.DIRTYPE
    owned = members(Packer(Look(Owner(1, 2), None)).of_context(context, known, ""))
    assert owned["x/y"][2:4] == (1, 2)


def test_an_archive_that_leads_out_or_holds_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tgz").write_bytes(packed_tar(("../x", b"1", 0)))
    context = Context(tmp_path)
    known = part(context, "a.tgz", unpacked=True)
    with pytest.raises(ValueError, match="leads out of it"):
        members(Packer(Look(None, None)).of_context(context, known, ""))
    (tmp_path / "b.tgz").write_bytes(packed_tar(("x", bytes(10), 0)))
    known = part(Context(tmp_path), "b.tgz", unpacked=True)
    monkeypatch.setattr(limits, "BUILD_CONTEXT_BYTES_MAX", 10)
    members(Packer(Look(None, None)).of_context(context, known, ""))
    monkeypatch.setattr(limits, "BUILD_CONTEXT_BYTES_MAX", 9)
    with pytest.raises(ValueError, match="more than a context may hold"):
        members(Packer(Look(None, None)).of_context(context, known, ""))


def test_what_another_machine_sends_gets_the_owner_and_the_name_of_the_step() -> None:
    sent = io.BytesIO()
    with tarfile.open(fileobj=sent, mode="w") as archive:
        info = tarfile.TarInfo("tool")
        info.size, info.uid, info.mode = 2, 9, 0o6755
        archive.addfile(info, io.BytesIO(b"ab"))
    assert not is_folder(sent)
    found = members(Packer(Look(Owner(0, 0), None)).of_archive(sent, "bin", []))
    assert found == {"bin": (tarfile.REGTYPE, 0o6755, 0, 0, "", b"ab")}

    sent, skipped = io.BytesIO(), list[str]()
    record = '{"skipped":[{"path":"s","reason":"a socket"}],"more_skipped":2}'
    with tarfile.open(fileobj=sent, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, said in (("./", {}), ("./x/", {}), ("./", {"FORKD.skipped": record})):
            info = tarfile.TarInfo(name)
            info.type, info.pax_headers = tarfile.DIRTYPE, said
            archive.addfile(info)
    assert is_folder(sent)
    found = members(Packer(Look(Owner(0, 0), None)).of_archive(sent, None, skipped))
    assert (list(found), skipped) == (["x"], ["s: a socket", "2 more"])


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("0:0", (0, 0)),
        ("7", (7, 7)),
        ("7:8", (7, 8)),
        ("app", (1000, 1001)),
        ("app:staff", (1000, 50)),
        ("app:9", (1000, 9)),
        ("7:staff", (7, 50)),
    ],
)
def test_owners_are_names_of_the_machine_or_numbers(text: str, owner: tuple[int, int]) -> None:
    assert owner_of(text, ACCOUNTS, GROUP) == Owner(*owner)


@pytest.mark.parametrize(("text", "message"), [("x", "no user 'x'"), ("app:x", "no group 'x'")])
def test_owners_that_the_machine_does_not_have_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        owner_of(text, ACCOUNTS, GROUP)


def test_images_of_this_host_are_below_the_context(tmp_path: Path) -> None:
    assert image_path("./a", tmp_path) == str(tmp_path / "a")
    assert image_path("a.tar.gz", tmp_path) == str(tmp_path / "a.tar.gz")
    assert image_path("oci:a:1", tmp_path) == f"oci:{tmp_path}/a:1"
    assert image_path("python:3.12", tmp_path) == "python:3.12"


def warmed(log: Path, ready: str | None, *program: str) -> subprocess.CompletedProcess[str]:
    args = ["/bin/sh", "-c", ready_script(ready, str(log)), "sh", *program]
    return subprocess.run(args, capture_output=True, text=True, check=False, timeout=30)  # noqa: S603 - a test's own


def test_a_program_is_warm_once_it_is_ready_and_its_end_is_told(tmp_path: Path) -> None:
    made, log = tmp_path / "it's ready", tmp_path / "log"
    ready = f'test -e "{made}"'
    assert warmed(log, ready, "sh", "-c", f'touch "{made}"; exec sleep 0').returncode == 0
    assert warmed(log, None, "sh", "-c", "exit 0").returncode == 0
    failed = warmed(log, "false", "sh", "-c", "echo no port; exit 7")
    assert failed.returncode == 1
    assert failed.stdout == "no port\nthe program has ended with 7\n"


def test_the_end_of_what_a_step_prints_is_kept_with_a_way_out() -> None:
    seen = Seen(None, None)
    seen.output("".join(f"{number}\n\n" for number in range(30)))
    assert seen.said().splitlines() == [str(number) for number in range(10, 30)]
    seen.output("curl: (6) Could not resolve host\n")
    assert seen.said().endswith("--network internet")


def test_options_that_do_not_go_together_are_refused() -> None:
    machine: dict[str, int | None] = {}
    with pytest.raises(InvalidRequest, match="ready goes with warm"):
        Options(None, True, None, machine, "missing", False, "true", 1.0).check()  # noqa: FBT003 - one after the other
    with pytest.raises(InvalidRequest, match="is kept for snapshots of the daemon"):
        Options(f"image-{'0' * 12}", True, None, machine, "missing", False, None, 1.0).check()  # noqa: FBT003 - as above
