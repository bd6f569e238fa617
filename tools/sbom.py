"""List the parts of a release in CycloneDX: Python packages, and what is linked into the programs.

The list of Python packages is made by cyclonedx-py of the release's requirements; licences are
added from the packages' own metadata.  The list of the programs is made of `cargo metadata` and
`Cargo.lock`.  The programs are static, so it also has the C library, the compiler's run-time
library and Rust's standard library.  Both lists are checked against CycloneDX's schema.
"""

from __future__ import annotations

import json
import platform
import sys
import tomllib
import uuid
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, metadata
from typing import TYPE_CHECKING, Any

from tools.outputs import ROOT, output

if TYPE_CHECKING:
    from pathlib import Path

TOOLS = ROOT / "build" / "release-tools"

PROGRAMS = ("forkd-vmm", "forkd-agent")
"""The crates whose programs are shipped."""

TARGET = "x86_64-unknown-linux-gnu"

SPEC_VERSION = "1.6"

VALIDATE = """
import pathlib, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(pathlib.Path(sys.argv[1]).read_text())
sys.exit(f"{sys.argv[1]}: {found}" if found else 0)
"""
"""A program that fails if a list does not fit the schema; with the tools' packages."""

Component = dict[str, Any]


def write_python(requirements: Path, target: Path, epoch: int) -> None:
    """Write the list of the packages in a requirements file with digests.

    Raises:
        Failed: cyclonedx-py refused the file.
    """
    words = ["cyclonedx_py", "requirements", "--pyproject", "pyproject.toml", "--short-PURLs"]
    words += ["--output-reproducible", "--spec-version", SPEC_VERSION, str(requirements)]
    listed = json.loads(_with_tools("-m", *words, epoch=epoch))
    for component in listed["components"]:
        del component["description"]  # the line of the file, which the release has beside it
        component.pop("externalReferences", None)  # the index that this host happens to use
        expression = _license(component["name"])
        if expression is not None:
            component["licenses"] = [{"expression": expression}]
    write(listed, target)


def _license(name: str) -> str | None:
    try:
        expression = metadata(name).json.get("license_expression")
    except PackageNotFoundError:
        return None
    return expression if isinstance(expression, str) else None


def write_rust(target: Path, version: str, epoch: int) -> None:
    """Write the list of what is linked into the programs.

    Raises:
        Failed: cargo refused, or the list does not fit CycloneDX's schema.
    """
    words = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET]
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text(encoding="utf-8"))
    listed = rust(json.loads(output(*words)), lock, run_time())
    listed["metadata"] = {
        "timestamp": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "component": {
            "type": "application",
            "bom-ref": "forkd",
            "name": "forkd",
            "version": version,
        },
    }
    identity = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(listed, sort_keys=True))
    write({**listed, "serialNumber": identity.urn}, target)


def write(listed: Component, target: Path) -> None:
    """Write a list as it is always written, and check it against CycloneDX's schema.

    Raises:
        Failed: It does not fit.
    """
    target.write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    _with_tools("-c", VALIDATE, str(target), epoch=0)


def rust(resolved: Component, lock: Component, base: list[Component]) -> Component:
    """Return the list of crates that are linked into the programs.

    Args:
        resolved: What `cargo metadata` says.
        lock: `Cargo.lock`, which has the digests.
        base: What every program has in it, beside crates.
    """
    packages = {each["id"]: each for each in resolved["packages"]}
    nodes = {each["id"]: each for each in resolved["resolve"]["nodes"]}
    roots = [key for key, each in packages.items() if each["name"] in PROGRAMS]
    needs: dict[str, list[str]] = {}
    wanted = list(roots)
    while wanted:
        key = wanted.pop()
        if key not in needs:
            needs[key] = [
                each for each in linked(nodes[key]) if not _at_compile_time(packages[each])
            ]
            wanted += needs[key]
    digests = {(each["name"], each["version"]): each.get("checksum") for each in lock["package"]}
    crates = [_crate(packages[key], digests, is_program=key in roots) for key in sorted(needs)]
    refs = {key: _crate(packages[key], digests, is_program=False)["bom-ref"] for key in needs}
    common = [each["bom-ref"] for each in base]
    graph = [
        {"ref": refs[key], "dependsOn": sorted({refs[each] for each in below})
         + (common if key in roots else [])}
        for key, below in sorted(needs.items())
    ]  # fmt: skip
    top = {"ref": "forkd", "dependsOn": sorted(refs[key] for key in roots)}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "components": crates + base,
        "dependencies": [top, *graph],
    }


def linked(node: Component) -> list[str]:
    """Return the ids of crates that one is linked with: not of what only builds or tests it."""
    return [
        each["pkg"]
        for each in node["deps"]
        if any(kind["kind"] is None for kind in each["dep_kinds"])
    ]


def _at_compile_time(package: Component) -> bool:
    return any("proc-macro" in target["kind"] for target in package["targets"])


def _crate(
    package: Component, digests: dict[tuple[str, str], str | None], *, is_program: bool
) -> Component:
    name, version = package["name"], package["version"]
    ours = package["source"] is None
    component: Component = {
        "type": "application" if is_program else "library",
        "bom-ref": f"{name}@{version}" if ours else f"pkg:cargo/{name}@{version}",
        "name": name,
        "version": version,
    }
    if package["license"]:
        component["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    if not ours:
        component["purl"] = component["bom-ref"]
    digest = digests.get((name, version))
    if digest is not None:
        component["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return component


def run_time() -> list[Component]:
    """Return what every static program has in it: the libraries of Rust, C and the compiler."""
    said = dict(line.split(": ", 1) for line in output("rustc", "-vV").splitlines() if ": " in line)
    parts = (
        ("rust-std", said["release"], "MIT OR Apache-2.0"),
        ("glibc", platform.libc_ver()[1], "LGPL-2.1-or-later"),
        (
            "libgcc",
            output("cc", "-dumpfullversion").strip(),
            "GPL-3.0-or-later WITH GCC-exception-3.1",
        ),
    )
    return [
        {
            "type": "library",
            "bom-ref": f"{name}@{version}",
            "name": name,
            "version": version,
            "licenses": [{"expression": expression}],
        }
        for name, version, expression in parts
    ]


def _with_tools(*words: str, epoch: int) -> str:
    extra = {"PYTHONPATH": str(TOOLS), "SOURCE_DATE_EPOCH": str(epoch)}
    return output(sys.executable, "-P", *words, environment=extra)
