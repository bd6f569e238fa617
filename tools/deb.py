"""Build a Debian package from the wheel: forkd and the Python packages that it needs, as locked.

    python -m tools.deb                     into build/deb; what `make deb` runs
    python -m tools.deb FOLDER              into another folder
    python -m tools.deb --version 0.0.9     under another version, for tests of upgrades
    python -m tools.deb --python 3.13       for Debian 13, whose Python that is

The package installs without a package index.  It has, in /usr/lib/forkd, what `python -m venv` and
pip would make there: the wheel with its extra `daemon` and all that this needs, at the versions and
digests of requirements.lock.  Compiled packages are for one version of Python, and so is the
Debian package, which depends on it, whichever Python builds it.  Bytecode is compiled when the
package is installed, as Debian does with its own.

Times in it are that of the commit, or `SOURCE_DATE_EPOCH`.  debhelper would bring nothing that is
not here: there is nothing to compile, and the maintainer scripts are in packaging/debian.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import textwrap
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from forkd.service import unit_files
from tools import release_lock, release_notes
from tools.outputs import Failed, output

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "build/dist"
DEBS = ROOT / "build/deb"
SCRIPTS = ROOT / "packaging/debian"

PROJECT, EXTRA = "forkd-vm", "daemon"
PACKAGE, ARCHITECTURE = "forkd", "amd64"
HOME = Path("usr/lib/forkd")
"""Where the package has its Python packages and programs."""

RELEASES = {"3.11": "deb12", "3.13": "deb13"}
"""Of Debian, by their versions of Python; each is the end of a package's version."""

DEBIAN_12 = "3.11"

PLATFORMS = (
    "manylinux_2_17",
    "manylinux2014",
    "manylinux_2_28",
    "manylinux_2_34",
    "manylinux_2_36",
)
"""What wheels may ask of the C library: Debian 12 has 2.36."""

MAINTAINER = "The forkd maintainers <maintainers@forkd.invalid>"
"""RFC 2606 keeps this domain free: the project has no address of its own yet."""

CONTROL = """\
Package: {package}
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {size_kib}
Pre-Depends: init-system-helpers (>= 1.54~)
Depends: python3, python{python}, libc6 (>= 2.36), passwd, nftables, e2fsprogs
Recommends: mmdebstrap
Suggests: qemu-system-x86
Section: admin
Priority: optional
Description: fork(2) for virtual machines
 forkd runs untrusted code in virtual machines that start in milliseconds:
 each is a fork of a warm one, and shares its memory. This package has the
 daemon as a service of systemd, the command line, the virtual machine
 monitor and recipes.
"""

SCRIPT = """\
#!/{home}/bin/python3
import sys

from {module} import main

sys.exit(main())
"""

PYVENV = "home = /usr/bin\ninclude-system-site-packages = false\nversion = {python}\n"

SHARED = {
    "packaging/completions/forkd": "usr/share/bash-completion/completions/forkd",
    "packaging/completions/_forkd": "usr/share/zsh/vendor-completions/_forkd",
    "packaging/completions/forkd.fish": "usr/share/fish/vendor_completions.d/forkd.fish",
    "packaging/forkd.toml": "etc/forkd/forkd.toml",
    "packaging/debian/copyright": f"usr/share/doc/{PACKAGE}/copyright",
    "packaging/debian/lintian-overrides": f"usr/share/lintian/overrides/{PACKAGE}",
}
"""Files of a checkout, and where the package has them."""

CONFFILES = ("/etc/forkd/forkd.toml",)

UNITS = {
    "forkd.service": "usr/lib/systemd/system/forkd.service",
    "forkd.socket": "usr/lib/systemd/system/forkd.socket",
    "forkd-user.service": "usr/lib/systemd/user/forkd.service",
    "forkd-user.socket": "usr/lib/systemd/user/forkd.socket",
}


class CannotBuild(Exception):
    """There can be no package; the message says what to do."""


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="make deb", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", nargs="?", type=Path, default=DEBS)
    parser.add_argument("--version", help="of the package, if it is not the wheel's")
    parser.add_argument("--python", default=DEBIAN_12, help="the version of Python it is for")
    asked = parser.parse_args()
    try:
        wheels = sorted(DIST.glob("*x86_64.whl"))
        asked.folder.mkdir(parents=True, exist_ok=True)
        path = build(wheels, asked.folder, python=asked.python, version=asked.version)
    except (CannotBuild, Failed, release_lock.NotLocked) as error:
        sys.stderr.write(f"deb: {error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


def build(
    wheels: list[Path], folder: Path, *, python: str = DEBIAN_12, version: str | None = None
) -> Path:
    """Build the package of the last wheel into a folder, and return its path.

    Raises:
        CannotBuild: There is no wheel, no dpkg-deb, or the version is not one of Debian's.
        Failed: pip or dpkg-deb refused; has what it said.
    """
    if shutil.which("dpkg-deb") is None:
        raise CannotBuild("dpkg-deb is not installed: it is in Debian's package dpkg")
    if not wheels:
        raise CannotBuild(f"there is no wheel in {DIST}: run `make wheel`")
    wheel = wheels[-1]
    number = version or wheel.name.split("-")[1]
    if not re.fullmatch(r"[0-9][A-Za-z0-9.+~]*", number):
        raise CannotBuild(f"{number!r} is no version of a Debian package")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or output("git", "log", "-1", "--format=%ct"))
    number += f"+{RELEASES.get(python, f'py{python}')}"
    target = folder.resolve() / f"{PACKAGE}_{number}_{ARCHITECTURE}.deb"
    with tempfile.TemporaryDirectory(prefix="forkd-deb-") as scratch:
        top = Path(scratch) / "root"
        top.mkdir(mode=0o755)
        _install(wheel, top, python)
        _add_programs(top, python)
        _add_files(top, number, epoch)
        _add_control(top, number, python)
        _settle(top, epoch)
        words = ("dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(top), str(target))
        output(*words, environment={"SOURCE_DATE_EPOCH": str(epoch)})
    return target


def _install(wheel: Path, top: Path, python: str) -> None:
    """Put the wheel and all that it needs where a virtual environment has them."""
    packages = top / HOME / f"lib/python{python}/site-packages"
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    asked = f"{wheel}[{EXTRA}] --hash=sha256:{digest}\n"
    requirements = top / "requirements.txt"
    requirements.write_text(asked + release_lock.requirements(lock, PROJECT, [EXTRA]), "utf-8")
    tag = python.replace(".", "")
    platforms = [word for each in PLATFORMS for word in ("--platform", f"{each}_x86_64")]
    output(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--require-hashes", "--only-binary=:all:", "--no-compile", "--no-deps"),
        *("--python-version", python, "--implementation", "cp"),
        *("--abi", f"cp{tag}", "--abi", "abi3", "--abi", "none"),
        *platforms,
        *("--target", str(packages), "--requirement", str(requirements)),
    )
    requirements.unlink()
    shutil.rmtree(packages / "bin", ignore_errors=True)  # scripts for the Python that runs pip
    for path in packages.glob("*.dist-info/direct_url.json"):  # where the wheel was built
        record = path.with_name("RECORD")
        lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
        record.write_text("".join(each for each in lines if path.name not in each), "utf-8")
        path.unlink()


def _add_programs(top: Path, python: str) -> None:
    """Add the interpreter's link, the programs, and their names in /usr/bin."""
    home = top / HOME
    (home / "pyvenv.cfg").write_text(PYVENV.format(python=python), encoding="utf-8")
    folder, names = home / "bin", top / "usr/bin"
    for each in (folder, names):
        each.mkdir(parents=True, mode=0o755)
    (folder / "python3").symlink_to(f"../../../bin/python{python}")
    modules = {"forkd": "forkd.cli.__main__", "forkd-daemon": "forkd.daemon.__main__"}
    for name, module in modules.items():
        (folder / name).write_text(SCRIPT.format(home=HOME, module=module), encoding="utf-8")
        (folder / name).chmod(0o755)
        (names / name).symlink_to(f"../lib/forkd/bin/{name}")


def _add_files(top: Path, number: str, epoch: int) -> None:
    """Add units, completions, configuration and documentation."""
    files = {place: (ROOT / source).read_bytes() for source, place in SHARED.items()}
    for name, place in UNITS.items():
        template = (ROOT / "packaging" / name).read_text(encoding="utf-8")
        files[place] = unit_files.rendered(
            template, f"/{HOME}/bin/forkd-daemon", group=True
        ).encode()
    for page in sorted((ROOT / "packaging/man").iterdir()):
        place = f"usr/share/man/man{page.suffix[1:]}/{page.name}.gz"
        files[place] = gzip.compress(page.read_bytes(), mtime=0)
    packed = gzip.compress(_changelog(number, epoch).encode(), mtime=0)
    files[f"usr/share/doc/{PACKAGE}/changelog.gz"] = packed
    for place, data in files.items():
        path = top / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _changelog(number: str, epoch: int) -> str:
    """Return the release notes as dpkg has changelogs."""
    at = datetime.fromtimestamp(epoch, UTC)
    lines = [f"{PACKAGE} ({number}) unstable; urgency=medium", ""]
    for line in release_notes.notes(ROOT / "changes", number, at.date()).splitlines():
        if line.startswith("- "):
            lines += textwrap.wrap(line[2:], 76, initial_indent="  * ", subsequent_indent="    ")
    return "\n".join([*lines, "", f" -- {MAINTAINER}  {format_datetime(at)}", ""])


def _add_control(top: Path, number: str, python: str) -> None:
    """Add what dpkg reads: the description, the scripts, and sums of all files."""
    control = top / "DEBIAN"
    files = sorted(path for path in top.rglob("*") if path.is_file() and not path.is_symlink())
    size_kib = sum(-(-path.stat().st_size // 1024) for path in files)
    sums = [
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  "
        f"{path.relative_to(top)}\n"
        for path in files
    ]
    control.mkdir(mode=0o755)
    (control / "md5sums").write_text("".join(sums), encoding="utf-8")
    (control / "conffiles").write_text("".join(f"{each}\n" for each in CONFFILES), "utf-8")
    text = CONTROL.format(
        package=PACKAGE,
        version=number,
        architecture=ARCHITECTURE,
        size_kib=size_kib,
        python=python,
        maintainer=MAINTAINER,
    )
    (control / "control").write_text(text, encoding="utf-8")
    for name in ("postinst", "prerm", "postrm"):
        shutil.copyfile(SCRIPTS / name, control / name)
        (control / name).chmod(0o755)


def _settle(top: Path, epoch: int) -> None:
    """Give all files the modes and times that they have in every build."""
    for path in (top, *top.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            is_open = stat.S_ISDIR(mode) or mode & stat.S_IXUSR
            path.chmod(0o755 if is_open else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main())
