"""Debian's docker-registry on a loopback address, with the images that a test puts into it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LISTENING = re.compile(r"listening on (127\.0\.0\.1:[0-9]+)")

USER, PASSWORD = "puller", "secret"
HTPASSWD = f"{USER}:$2b$04$4y5DYIFTMkWVavHlI/hOMu7uz81H4JisiSyMxHU8vSJyx5lJ.rBQm\n"
"""The password as bcrypt has it."""

CONFIG = """
version: 0.1
log: {{accesslog: {{disabled: true}}, level: info}}
storage: {{filesystem: {{rootdirectory: {folder}/stored}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:0"}}
"""


@dataclass(frozen=True, slots=True)
class Registry:
    """A registry that runs; `host` has its port."""

    host: str
    login: tuple[str, ...] = ()

    def push(self, layout: Path, name: str) -> str:
        """Put the image of a layout in under a name; return the reference of that."""
        reference = f"{self.host}/{name}"
        target = ["--dest-tls-verify=false", *self.login, f"docker://{reference}"]
        command = ["skopeo", "--insecure-policy", "copy", "-q", f"oci:{layout}", *target]
        subprocess.run(command, check=True, timeout=60)  # noqa: S603 - our own arguments
        return reference


@contextlib.contextmanager
def running(folder: Path, *, private: bool = False) -> Iterator[Registry]:
    """Run a registry for the block; a private one wants `USER` and `PASSWORD`."""
    config = CONFIG.format(folder=folder)
    if private:
        (folder / "htpasswd").write_text(HTPASSWD)
        config += f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}\n"
    (folder / "config.yml").write_text(config)
    command = ["docker-registry", "serve", str(folder / "config.yml")]
    with subprocess.Popen(  # noqa: S603 - our own arguments
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, map(LISTENING.search, process.stderr)))
            drain = threading.Thread(target=process.stderr.read, daemon=True)  # or its pipe fills
            drain.start()
            login = (f"--dest-creds={USER}:{PASSWORD}",) if private else ()
            yield Registry(found[1], login)
        finally:
            process.kill()
