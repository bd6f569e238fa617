"""A mirror of a small archive of Debian's kind, whose keys are the test's own."""

from __future__ import annotations

import datetime as dt
import email.utils
import io
import lzma
import tarfile
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

import pysequoia

from forkd.images.mirrors import Mirrors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.web import Web

NOW = dt.datetime(2026, 11, 28, 12, tzinfo=dt.UTC)

RELEASE = "6.1.0-9-amd64"
VERSION = "6.1.9-1"

KERNEL = {
    f"boot/vmlinuz-{RELEASE}": b"kernel",
    f"lib/modules/{RELEASE}/kernel/a.ko": b"\x7fELF",
    "usr/share/doc/x": b"not wanted",
}
"""What is in the package of the one kernel that there is."""


def deb(contents: Mapping[str, bytes], compression: str = "xz") -> bytes:
    """Return a Debian package with these files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as tar:  # type: ignore[call-overload]
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    suffix = f".{compression}" if compression else ""
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": b"x",
        f"data.tar{suffix}": data.getvalue(),
    }
    return b"!<arch>\n" + b"".join(_member(name, held) for name, held in members.items())


def _member(name: str, data: bytes) -> bytes:
    head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n"
    return head.encode() + data + b"\n" * (len(data) % 2)


def record(name: str, version: str, archive: bytes, path: str, depends: str = "") -> str:
    """Return what a list of packages says of one."""
    fields = {
        "Package": name,
        "Version": version,
        **({"Depends": depends} if depends else {}),
        "Filename": path,
        "Size": str(len(archive)),
        "SHA256": sha256(archive).hexdigest(),
    }
    return "".join(f"{key}: {value}\n" for key, value in fields.items())


def new_key() -> pysequoia.Tsk:
    """Return a key that signs."""
    return pysequoia.Tsk.generate("Test <test@example.test>")


@dataclass
class DebianMirror:
    """A mirror with one kernel, in `bookworm-security`, beside an empty `bookworm`.

    Attributes:
        web: What serves it.
        key: What its releases are signed with.
        date: When they were made.
        valid_until: When they expire.
    """

    web: Web
    key: pysequoia.Tsk = field(default_factory=new_key)
    date: dt.datetime = NOW - dt.timedelta(days=1)
    valid_until: dt.datetime | None = NOW + dt.timedelta(days=6)

    @property
    def mirrors(self) -> Mirrors:
        return Mirrors(self.web.url("/debian"), self.web.url("/debian-security"))

    def publish(self, kernel: bytes | None = None) -> None:
        """Put all of it on the server."""
        archive = deb(KERNEL) if kernel is None else kernel
        image, meta = f"linux-image-{RELEASE}", "linux-image-amd64"
        path = f"pool/{image}_{VERSION}_amd64.deb"
        self.web.files[f"/debian-security/{path}"] = archive
        listed = "\n".join(
            (
                record(image, VERSION, archive, path),
                record(meta, VERSION, b"", "pool/meta.deb", f"{image} (= {VERSION})"),
            )
        )
        self.put_suite("/debian", "bookworm", "")
        self.put_suite("/debian-security", "bookworm-security", listed)

    def put_suite(self, root: str, suite: str, listed: str, *, codename: str | None = None) -> None:
        """Put a suite and its list of packages on the server."""
        packed = lzma.compress(listed.encode())
        digest = sha256(packed).hexdigest()
        folder = f"{root}/dists/{suite}"
        self.web.files[f"{folder}/main/binary-amd64/by-hash/SHA256/{digest}"] = packed
        fields = {
            "Codename": codename or suite,
            "Date": email.utils.format_datetime(self.date, usegmt=True),
            **(
                {"Valid-Until": email.utils.format_datetime(self.valid_until, usegmt=True)}
                if self.valid_until
                else {}
            ),
            "Acquire-By-Hash": "yes",
        }
        text = "".join(f"{key}: {value}\n" for key, value in fields.items())
        text += f"SHA256:\n {digest} {len(packed):>8} main/binary-amd64/Packages.xz\n"
        self.web.files[f"{folder}/InRelease"] = self.signed(text.encode())

    def signed(self, data: bytes) -> bytes:
        """Return data signed as `InRelease` is."""
        return pysequoia.sign(self.key.signer(), data, mode=pysequoia.SignatureMode.CLEAR)
