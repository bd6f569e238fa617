"""What a Dockerfile copies, what it leaves out, and which steps follow from a change."""

from __future__ import annotations

import io
import os
import tarfile
from typing import TYPE_CHECKING

import pytest

from forkd.errors import InvalidRequest
from forkd.limits import CHAIN_DEPTH_MAX
from forkd.sdk._dockerfile import limits
from forkd.sdk._dockerfile.context import Context
from forkd.sdk._dockerfile.copying import CopyAction
from forkd.sdk._dockerfile.ignore import parse_ignore
from forkd.sdk._dockerfile.plan import Base, Plan, RunAction, Wish, plan
from forkd.sdk._dockerfile.settings import Config
from forkd.sdk._dockerfile.stages import parse

if TYPE_CHECKING:
    from pathlib import Path

BASE = Base("image-1", "image-1 of today", Config(env={"PATH": "/bin"}, cmd=("base",)), 0)


def wish(text: str, root: Path, target: str | None = None, **args: str) -> Wish:
    ignored = root / ".dockerignore"
    ignore = parse_ignore(ignored.read_text(), ".dockerignore") if ignored.exists() else None
    return Wish(parse(text, "D"), args, target, Context(root, ignore))


def planned(text: str, root: Path, target: str | None = None, **args: str) -> Plan:
    wanted = wish(text, root, target, **args)
    plan(wanted)
    return plan(wanted, dict.fromkeys(wanted.images(), BASE))


def keys(text: str, root: Path, **args: str) -> list[str]:
    return [step.key for step in planned(text, root, **args).last.steps]


def changed(before: list[str], after: list[str]) -> list[int]:
    pairs = zip(before, after, strict=True)
    return [number for number, (old, new) in enumerate(pairs, start=1) if old != new]


# .dockerignore


@pytest.mark.parametrize(
    ("text", "left_out", "kept"),
    [
        ("# comment\n*/temp*", ["somedir/temporary.txt", "somedir/temp", "a/temp/b"], ["temp"]),
        ("*/*/temp*", ["a/b/temporary.txt"], ["a/temp"]),
        ("temp?", ["tempa", "tempb"], ["temp", "tempab"]),
        ("**/*.go", ["a.go", "a/b.go", "a/b/c.go"], ["a.gox"]),
        ("*.md\n!README.md", ["a.md"], ["README.md", "a/b.md"]),
        ("*.md\n!README*.md\nREADME-secret.md", ["README-secret.md"], ["README.md"]),
        ("*.md\nREADME-secret.md\n!README*.md", ["a.md"], ["README-secret.md"]),
        ("/foo/bar", ["foo/bar", "foo/bar/baz"], ["a/foo/bar"]),
        ("foo/../bar/./", ["bar", "bar/a"], ["foo"]),
        ("*\n!a/b", ["x", "a/c"], ["a/b", "a/b/c"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "b"]),
        ("**", ["a", "a/b"], []),
        ("a/**/b", ["a/b", "a/x/y/b"], ["b", "ab"]),
        ("[ab].txt\nc[^d]", ["a.txt", "ce"], ["c.txt", "cd"]),
        ("\\#a\n  b  \n\n.", ["#a", "b"], ["a"]),
    ],
)
def test_a_dockerignore_leaves_out_what_docker_does(
    text: str, left_out: list[str], kept: list[str]
) -> None:
    ignore = parse_ignore(text, ".dockerignore")
    assert [path for path in [*left_out, *kept] if ignore.rule(path)] == left_out


def test_a_malformed_line_of_a_dockerignore_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^\.dockerignore:2: '\[a' is no pattern"):
        parse_ignore("a\n[a", ".dockerignore")
    with pytest.raises(InvalidRequest, match=r"^\.dockerignore:1: '!' alone"):
        parse_ignore("!", ".dockerignore")
    most = limits.DOCKERFILE_BYTES_MAX
    with pytest.raises(InvalidRequest, match=rf"longer than {most} bytes"):
        parse_ignore("a" * (most + 1), ".dockerignore")


# The context


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "src" / "main.py").write_text("main")
    (root / "src" / "deep" / "other.py").write_text("other")
    (root / "requirements.txt").write_text("numpy")
    (root / "setup.py").write_text("setup")
    return root


def copied(text: str, root: Path) -> CopyAction:
    action = planned(f"FROM a\nWORKDIR /srv\n{text}", root).last.steps[0].action
    assert isinstance(action, CopyAction)
    return action


def test_sources_are_files_folders_and_patterns(root: Path) -> None:
    paths = [part.entry and part.entry.path for part in copied("COPY *.py src /to/", root).parts]
    assert paths == ["setup.py", "src"]
    action = copied("COPY --chown=app:1 --chmod=0750 ./requirements.txt to/here", root)
    assert (action.target, action.is_folder) == ("/srv/to/here", False)
    assert (action.owner, action.mode) == ("app:1", 0o750)
    whole = copied("COPY . .", root)
    assert (whole.target, whole.is_folder, whole.parts[0].entry) == (
        "/srv", True, Context(root).entries[""]
    )  # fmt: skip


def test_links_are_followed_as_long_as_they_stay_in_the_context(root: Path) -> None:
    (root / "in").symlink_to("src/main.py")
    (root / "out").symlink_to("/etc/passwd")
    (entry,) = Context(root).sources("in")
    assert entry.path == "src/main.py"
    with pytest.raises(InvalidRequest, match=r"^D:3: COPY: 'out' is a link that leads out of"):
        copied("COPY out /x", root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("COPY ../x /x", "D:3: COPY: '../x' leads out of the context"),
        ("COPY a/../../x /x", "D:3: COPY: 'a/../../x' leads out of the context"),
        ("COPY missing /x", "D:3: COPY: no 'missing' in the context"),
        ("COPY *.go /x", "D:3: COPY: nothing in the context .* matches '\\*.go'"),
        ("COPY [a /x", "D:3: COPY: '\\[a' is no pattern"),
        ("COPY a", "D:3: COPY: needs a source and a target"),
        ("COPY src setup.py /x", "D:3: COPY: copies several files, so that '/x' must end with /"),
        ("COPY --chmod=u+x src /x", "D:3: COPY: --chmod is an octal number"),
        ("COPY --chown=a:b:c src /x", "D:3: COPY: --chown is USER"),
        ("ADD https://example.com/a /x", "D:3: ADD: https://example.com/a is a remote file"),
        ("ADD git@example.com:a/b /x", "D:3: ADD: git@example.com:a/b is a remote file"),
        ("COPY --from=missing /a /b", "D:3: --from=missing: there is no such stage"),
        ("COPY --from=7 /a /b", "D:3: --from=7: there is no such stage"),
        ("COPY --from=$x /a /b", "D:3: --from cannot have variables"),
        ("RUN []", "D:3: RUN: there is no program to run"),
    ],
)
def test_what_cannot_be_copied_is_named_with_its_line(text: str, message: str, root: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        planned(f"FROM a\nARG x\n{text}", root)


def test_a_file_that_is_left_out_says_by_which_line(root: Path) -> None:
    (root / ".dockerignore").write_text("# none\nsrc\n!src/deep\n")
    with pytest.raises(InvalidRequest, match=r"'setup' in the context"):
        copied("COPY setup /x", root)
    with pytest.raises(InvalidRequest, match=r"left out by \.dockerignore:2 \(src\)"):
        copied("COPY src/main.py /x", root)
    (part,) = copied("COPY src /x", root).parts
    context = Context(root)
    inside = ["deep", "deep/other.py"]
    digests = [context.digest(context.entries[f"src/{path}"]) for path in inside]
    assert part.key == ["folder", list(zip(inside, digests, strict=True))]


def test_a_context_has_limits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUILD_CONTEXT_ENTRIES_MAX", 6)
    copied("COPY setup.py /x", root)
    monkeypatch.setattr(limits, "BUILD_CONTEXT_ENTRIES_MAX", 5)
    with pytest.raises(InvalidRequest, match=r"^D:3: COPY: the context .* more than 5 files"):
        copied("COPY setup.py /x", root)
    monkeypatch.undo()
    monkeypatch.setattr(limits, "BUILD_CONTEXT_BYTES_MAX", 18)
    with pytest.raises(InvalidRequest, match=r"more than 18 bytes.*much is in src"):
        copied("COPY setup.py /x", root)
    (root / ".dockerignore").write_text("src")
    copied("COPY setup.py /x", root)


def test_what_is_no_file_cannot_be_copied(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(InvalidRequest, match="'pipe' is neither a file, a folder nor a link"):
        copied("COPY pipe /x", root)


def test_add_unpacks_archives_and_copy_does_not(root: Path) -> None:
    with tarfile.open(root / "a.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("x"), io.BytesIO())
    assert copied("ADD a.tar.gz /x/", root).parts[0].unpacked
    assert not copied("COPY a.tar.gz /x/", root).parts[0].unpacked
    assert not copied("ADD setup.py /x/", root).parts[0].unpacked


def test_a_heredoc_is_a_file(root: Path) -> None:
    text = "ARG who=me\nCOPY <<one <<'two' /to/\nhi $who\none\nhi $who\ntwo"
    parts = planned(f"FROM a\n{text}", root).last.steps[0].action.parts  # type: ignore[union-attr]
    assert [(part.said, part.content) for part in parts] == [
        ("one", "hi me\n"),
        ("two", "hi $who\n"),
    ]


# Keys


TWELVE = """FROM a
ENV A=1
WORKDIR /srv
COPY requirements.txt .
RUN pip install -r requirements.txt
LABEL x=y
COPY src src
RUN two
RUN three
RUN four
COPY setup.py .
RUN six
"""


def test_a_changed_instruction_changes_its_key_and_those_behind_it(root: Path) -> None:
    before = keys(TWELVE, root)
    assert len(before) == 8
    assert keys(TWELVE, root) == before
    assert changed(before, keys(TWELVE.replace("RUN four", "RUN 4"), root)) == [6, 7, 8]
    (root / "setup.py").write_text("other")
    assert changed(before, keys(TWELVE, root)) == [7, 8]
    (root / "src" / "deep" / "other.py").chmod(0o600)
    assert changed(before, keys(TWELVE, root)) == [3, 4, 5, 6, 7, 8]


def test_a_label_changes_the_image_and_no_step(root: Path) -> None:
    one, two = planned(TWELVE, root), planned(TWELVE.replace("x=y", "x=z"), root)
    assert [step.key for step in one.last.steps] == [step.key for step in two.last.steps]
    assert one.image_key() != two.image_key()
    assert one.image_key() != one.image_key("warm")


def test_variables_folder_and_user_are_part_of_a_key(root: Path) -> None:
    before = keys("FROM a\nRUN one\nRUN two", root)
    for line in ("ENV A=1", "WORKDIR /x", "USER app", 'SHELL ["/bin/bash", "-c"]'):
        assert changed(before, keys(f"FROM a\nRUN one\n{line}\nRUN two", root)) == [2], line


def test_a_build_argument_is_part_of_the_steps_behind_it(root: Path) -> None:
    text = "FROM a\nRUN one\nARG V=1\nCOPY setup.py $V\nRUN two"
    before = keys(text, root)
    assert keys(text, root, V="1") == before
    assert changed(before, keys(text, root, V="2")) == [2, 3]
    proxied = "FROM a\nRUN one"
    assert keys(proxied, root, HTTP_PROXY="x") == keys(proxied, root)
    (step,) = planned(proxied, root, HTTP_PROXY="x").last.steps
    assert isinstance(step.action, RunAction)
    assert step.action.hidden == {"HTTP_PROXY": "x"}


def test_a_build_argument_that_nothing_declares_is_refused(root: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"^D:1: no ARG declares the build argument 'W'; .*V"):
        planned("FROM a\nARG V=1", root, W="1")


# Variables


def run_env(text: str, root: Path, **args: str) -> dict[str, str]:
    action = planned(text, root, **args).last.steps[-1].action
    assert isinstance(action, RunAction)
    return {name: value for name, value in action.env.items() if name != "PATH"}


def test_arguments_have_the_scope_that_docker_gives_them(root: Path) -> None:
    assert run_env("ARG V=1\nFROM a\nRUN x", root) == {}
    assert run_env("ARG V=1\nFROM a\nARG V\nRUN x", root) == {"V": "1"}
    assert run_env("ARG V=1\nFROM a\nARG V=2\nRUN x", root) == {"V": "2"}
    assert run_env("ARG V=1\nFROM a\nARG V=2\nRUN x", root, V="3") == {"V": "3"}
    assert run_env("FROM a\nARG V=2\nENV V=4\nRUN x", root, V="3") == {"V": "4"}
    assert run_env("FROM a\nARG A=1 B=${A:-0}${C:-2}\nRUN x", root) == {"A": "1", "B": "02"}
    assert run_env("FROM a AS x\nARG V=2\nFROM x\nRUN x", root) == {}
    assert run_env("FROM a AS x\nENV V=2\nFROM x\nRUN x", root) == {"V": "2"}
    assert run_env("FROM a\nARG TARGETARCH\nRUN x", root) == {"TARGETARCH": "amd64"}


def test_from_uses_the_arguments_before_it(root: Path) -> None:
    text = "ARG V=3.12\nARG N=python:${V}-slim\nFROM $N\nRUN x"
    assert list(wish(text, root).images()) == ["python:3.12-slim"]
    assert list(wish(text, root, V="3.13").images()) == ["python:3.13-slim"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM $none", "D:1: FROM \\$none needs none, which is not set"),
        ("ARG V\nFROM a:$V", "D:2: FROM a:\\$V needs V, which is not set"),
        ("FROM scratch", "D:1: FROM scratch is not supported: "),
        ("FROM --platform=linux/arm64 a", "D:1: --platform=linux/arm64 is not supported"),
        ("FROM a\nRUN x\nENV A=${B:?needed}", "D:3: ENV: B: needed"),
    ],
)
def test_variables_that_are_missing_are_named(text: str, message: str, root: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        planned(text, root)


def test_what_a_base_image_may_set_is_looked_at_later(root: Path) -> None:
    wanted = wish("FROM a\nCOPY $WHERE /x\nRUN ${B:?x}", root)
    plan(wanted)
    with pytest.raises(InvalidRequest, match=r"^D:2: COPY: a source is empty"):
        plan(wanted, {"a": BASE})


# Stages


STAGES = """FROM a AS build
RUN make
FROM b AS test
RUN check
FROM c
COPY --from=build /out /usr/bin/
COPY --from=busybox:1 /bin/sh /bin/
CMD ["run"]
"""


def test_only_stages_that_are_needed_are_planned(root: Path) -> None:
    assert list(wish(STAGES, root).images()) == ["a", "c", "busybox:1"]
    made = planned(STAGES, root)
    assert [stage.stage.index for stage in made.stages] == [0, 2]
    assert made.total == 6
    assert [[note[0] for note in stage.notes] for stage in made.stages] == [[1], [3, 6]]
    assert [[step.number for step in stage.steps] for stage in made.stages] == [[2], [4, 5]]
    assert list(wish(STAGES, root, "test").images()) == ["b"]


def test_a_copy_from_a_stage_depends_on_that_stage(root: Path) -> None:
    before = keys(STAGES, root)
    assert changed(before, keys(STAGES.replace("RUN make", "RUN make all"), root)) == [1, 2]


def test_a_stage_goes_on_where_another_has_ended(root: Path) -> None:
    made = planned("FROM a AS x\nENV A=1\nWORKDIR /w\nRUN one\nWORKDIR v\nFROM x\nRUN two", root)
    last = made.last
    assert last.base == 0
    assert (last.steps[0].config.cwd, last.steps[0].folders) == ("/w/v", ("/w/v",))
    assert last.depth == 2


def test_an_entrypoint_has_no_arguments_of_the_base_image(root: Path) -> None:
    assert planned("FROM a", root).last.config.program == ("base",)
    assert planned('FROM a\nENTRYPOINT ["x"]', root).last.config.program == ("x",)
    own = planned('FROM a\nCMD ["y"]\nENTRYPOINT ["x"]', root)
    assert own.last.config.program == ("x", "y")


def test_a_chain_has_as_many_links_as_chains_may_have(root: Path) -> None:
    most = CHAIN_DEPTH_MAX - 1
    planned("FROM a\n" + "RUN x\n" * most, root)
    with pytest.raises(InvalidRequest, match=rf"^D:{most + 2}: RUN: this is step {most + 1}"):
        planned("FROM a\n" + "RUN x\n" * (most + 1), root)


def test_scripts_of_heredocs_are_run_by_whom_they_name(root: Path) -> None:
    def ran(text: str) -> tuple[tuple[str, ...], str | None]:
        action = planned(f"FROM a\n{text}", root).last.steps[0].action
        assert isinstance(action, RunAction)
        return action.args, action.script

    assert ran("RUN <<EOF\na\nb\nEOF") == (("/bin/sh", "-c", "a\nb\n"), None)
    assert ran("RUN <<EOF\n#!/bin/python\nb\nEOF") == ((), "#!/bin/python\nb\n")
    assert ran("RUN cat <<EOF\na\nEOF") == (("/bin/sh", "-c", "cat <<EOF\na\nEOF\n"), None)
    assert ran('RUN ["a", "$b"]') == (("a", "$b"), None)


def test_what_has_no_effect_or_a_risk_is_told(root: Path) -> None:
    text = "FROM a\nVOLUME /data\nARG API_TOKEN\nENV MY_PASSWORD=1 KEYS=2\nMAINTAINER me"
    assert [said.split(": ", 1)[0] for said in planned(text, root).warnings] == [
        "D:2", "D:3", "D:4", "D:5"
    ]  # fmt: skip
