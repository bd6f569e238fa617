"""What a release is made of, and what keeps one from being made."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

import pytest

from tools import release, release_lock, sbom
from tools.outputs import Failed
from tools.release_notes import BadFragment, notes

if TYPE_CHECKING:
    from pathlib import Path

DAY = date(2026, 11, 28)


def write(folder: Path, **fragments: str) -> Path:
    for name, text in fragments.items():
        (folder / f"{name.replace('__', '.')}.md").write_text(text)
    return folder


def test_notes_have_a_section_for_each_kind_with_fragments_by_name(tmp_path: Path) -> None:
    write(
        tmp_path,
        README="how",
        b__added="B is there.\n",
        a__added="A is\nthere.",
        c__fixed="C works.",
    )

    assert notes(tmp_path, "0.1.0", DAY) == (
        "# forkd 0.1.0 (2026-11-28)\n"
        "\n## Added\n\n- A is there.\n- B is there.\n"
        "\n## Fixed\n\n- C works.\n"
    )


@pytest.mark.parametrize("name", ["a__improved", "added", "A__added"])
def test_a_file_that_is_no_fragment_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, **{name: "A sentence."})

    with pytest.raises(BadFragment, match=rf"^{name.replace('__', '.')}\.md in changes is not"):
        notes(tmp_path, "0.1.0", DAY)


def test_an_empty_fragment_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFragment, match=r"a\.added\.md in changes is empty"):
        notes(write(tmp_path, a__added=" \n"), "0.1.0", DAY)


def test_without_the_fixture_for_upgrades_there_is_no_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def output(*words: str) -> str:
        if words[-2:] == ("tools.release_fixture", "--check"):
            raise Failed("the fixture is missing")
        return ""  # nothing is uncommitted

    monkeypatch.setattr(release, "output", output)

    with pytest.raises(Failed, match="the fixture is missing"):
        release.release(tmp_path / "release", dirty=False)

    assert not (tmp_path / "release").exists()


def test_every_fragment_of_this_checkout_is_in_the_notes() -> None:
    folder = release.ROOT / "changes"

    lines = [line for line in notes(folder, "0", DAY).splitlines() if line.startswith("- ")]

    assert len(lines) == len(list(folder.iterdir())) - 1  # README.md


def test_versions_that_differ_are_named_with_their_files() -> None:
    assert release.agreed({"a": "1", "b": "1"}) == "1"
    with pytest.raises(release.CannotRelease, match="versions differ: a has 1, b has 2"):
        release.agreed({"a": "1", "b": "2"})


def test_the_manifests_of_this_checkout_agree() -> None:
    assert release.version()


def test_requirements_are_what_is_needed_with_the_digests_of_the_lock() -> None:
    digest = f" \\\n    --hash=sha256:{'0' * 64}"
    lock = f"# a lock\nMdurl==0.1.2{digest}\nmarkdown-it-py==4.3.0{digest}\nunasked==1{digest}\n"

    needed = release_lock.requirements(lock, "markdown-it-py", [])

    assert needed == f"Mdurl==0.1.2{digest}\n"


def test_a_package_that_is_not_locked_is_named() -> None:
    with pytest.raises(
        release_lock.NotLocked, match=r"make lock`: annotated-types.*, pydantic-core"
    ):
        release_lock.requirements("", "pydantic", [])


def test_a_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        release.CannotRelease, match=r"FORKD_RELEASE_KEY names .*/none, which is no file"
    ):
        release.sign(tmp_path / "sums", tmp_path / "none", "x")


def test_a_program_that_is_not_installed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("key")
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(release.CannotRelease, match="minisign is not installed"):
        release.sign(tmp_path / "sums", tmp_path / "key", "x")


def test_what_only_builds_a_crate_is_not_linked_into_it() -> None:
    kinds = {"a": None, "b": "build", "c": "dev"}
    node = {"deps": [{"pkg": key, "dep_kinds": [{"kind": kind}]} for key, kind in kinds.items()]}

    assert sbom.linked(node) == ["a"]
