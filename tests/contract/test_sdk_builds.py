"""A Dockerfile has the same steps, keys, copies and errors in Python and in TypeScript."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import tarfile
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import pytest

from forkd.errors import InvalidRequest
from forkd.sdk._dockerfile.context import Context
from forkd.sdk._dockerfile.copying import CopyAction
from forkd.sdk._dockerfile.ignore import parse_ignore
from forkd.sdk._dockerfile.packing import Look, Owner, Packer
from forkd.sdk._dockerfile.plan import Base, Wish, plan
from forkd.sdk._dockerfile.settings import Config
from forkd.sdk._dockerfile.stages import parse
from tests.support.npm_project import answer, package

if TYPE_CHECKING:
    from pathlib import Path

    from tools.typescript_package import Package

__all__ = ["package"]

pytestmark = [pytest.mark.needs("node"), pytest.mark.timeout(180)]

HOSTILE = 'é😀\u2028"\\\x7f'

BASE = Config(
    env={"PATH": "/bin", "b": HOSTILE, "B": "1", "😀": "2", "￿": "3"},
    cmd=("base", HOSTILE),
    labels={"from": "base"},
    healthcheck={"test": ("CMD", "x"), "retries": "3"},
)

GOOD = [
    "FROM a\nRUN true",
    'FROM a\n# comment\nRUN one \\\n  # between\n\n  two\\\n three\nRUN ["a", "b\\u00e9"]',
    "#escape=`\nFROM a\nRUN dir `\n  c:\\\nENV A=`$B C=$B\nRUN $A",
    "ARG V=1\nFROM a:$V\nARG V\nARG W=${V:-2}$V\nRUN echo\nARG TARGETARCH\nRUN echo",
    "FROM a\nENV A=1 B=\"two words\" C='x $A' D=three\\ more\nENV E  some  $A\nRUN env",
    "FROM a\nENV N= X=${N:-d} Y=${N-d} Z=${N:+d} W=${N+d} P=${PATH:?no} Q=${nope}\nRUN env",
    (
        "FROM a\nENV F=a/b.tar.gz\nENV A=${F#*/} B=${F##*.} C=${F%.*} D=${F%%.*} E=${F/a/x}"
        " G=${F//a/x} H=${F//[/y} I=${F/?/}\nRUN env"
    ),
    "FROM a\nWORKDIR /srv\nWORKDIR app/../x\nRUN true\nWORKDIR y\nUSER app:staff\nRUN true",
    (
        'FROM a\nSHELL ["/bin/bash", "-c"]\nRUN x\nENTRYPOINT run it\nCMD ["a"]\nEXPOSE 80 53/UDP'
        ' 8000-8010\nVOLUME /a /b\nSTOPSIGNAL sigterm\nLABEL a=b "c d"=e\nMAINTAINER me\n'
        "HEALTHCHECK --interval=1m30s --retries=2 CMD curl x"
    ),
    "FROM a\nHEALTHCHECK NONE\nENV API_KEY=x\nARG password=y\nRUN true",
    "FROM a\nRUN <<EOF\necho $A\n\techo b\nEOF\nRUN <<-'EOF' cat\n\tc\n\tEOF\nRUN <<E\n#!/x\nz\nE",
    'FROM a\nENV A=1\nCOPY <<one <<"two" /to/\n$A ${A}\none\n$A\ntwo\n',
    (
        "FROM a AS Build\nRUN x\nWORKDIR /w\nFROM build\nRUN x\nFROM a\nCOPY --from=Build /a /b\n"
        "COPY --from=1 /a b/\nCOPY --from=image:1 /x /y"
    ),
    "FROM a\nCOPY . /all\nCOPY src other\nCOPY *.py src/ many/\nCOPY src/main.py /one",
    'FROM a\nCOPY --chown=app:staff --chmod=750 --link src /x\nCOPY ["two words", "/to here"]',
    "FROM a\nADD data.tgz /data\nADD data.tar /data\nCOPY data.tgz /kept/\nADD notes.gz /kept/",
    "FROM a\nCOPY link.py /x\nCOPY odd* /odd/\nCOPY [^s]*.py s[a-m]*.py /some/",
    "FROM --platform=linux/amd64 a\nRUN true\nRUN  \t spaced   out  ",
]

BAD = [
    "",
    "RUN x",
    "ENV A=1\nFROM a",
    "FROM a\nRNU x",
    "FROM a\nSOMETHING x",
    "FROM a\nONBUILD RUN x",
    "FROM a\nRUN --mount=type=cache x",
    "FROM a\nRUN --nothing=1 x",
    "FROM a\nCOPY --chown=a --chown=b x y",
    "FROM a\nCOPY --chown x y",
    "FROM a\nCOPY --chmod=rwx src /",
    "FROM a\nCOPY --chown=a:b:c src /",
    "FROM a\nRUN",
    "FROM a\nRUN []",
    "FROM a AS",
    "FROM a AS 1st",
    "FROM a AS b\nFROM a AS b",
    "FROM $X",
    "FROM scratch",
    "FROM --platform=linux/arm64 a",
    "#escape=x\nFROM a",
    "#escape=`\n#escape=`\nFROM a",
    "FROM a\nRUN <<EOF\nx",
    "FROM a\nENV A",
    "FROM a\nENV A=1 b",
    "FROM a\nENV A='x",
    'FROM a\nENV A="x',
    "FROM a\nENV A=${B",
    "FROM a\nENV A=${B^}",
    "FROM a\nENV A=${}",
    "FROM a\nENV A=${nope:?is needed}",
    "FROM a\nARG 1=2",
    'FROM a\nWORKDIR ""',
    "FROM a\nUSER a b",
    "FROM a\nEXPOSE 99999",
    "FROM a\nEXPOSE http",
    "FROM a\nSTOPSIGNAL !",
    "FROM a\nSHELL bash",
    "FROM a\nHEALTHCHECK x",
    "FROM a\nHEALTHCHECK --retries=x CMD y",
    "FROM a\nHEALTHCHECK --timeout=x CMD y",
    'FROM a\nVOLUME ""',
    "FROM a\nCOPY x",
    "FROM a\nCOPY ../x /",
    "FROM a\nCOPY nothing /",
    "FROM a\nCOPY *.none /",
    "FROM a\nCOPY [a /",
    "FROM a\nCOPY left-out /",
    "FROM a\nCOPY away /",
    "FROM a\nCOPY pipe /",
    "FROM a\nCOPY src setup.py /x",
    "FROM a\nADD https://example.com/x /",
    "FROM a AS x\nCOPY --from=later /a /b\nFROM a AS later\nCOPY --from=x /a /b",
    "FROM a\nCOPY --from=$X /a /b",
    "FROM a\nCOPY --from=0 /../a /b",
    "FROM a AS b\nFROM b\nCOPY --from=b ../a /b",
    "FROM a\n" + "RUN x\n" * 64,
    "FROM a\n" + "LABEL a=b\n" * 512,
]  # fmt: skip

IGNORE = "pipe\nleft-out\n*.md\n!README.md\n**/*.pyc\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A build context."""
    root = tmp_path / "context"
    (root / "src" / "deep").mkdir(parents=True)
    for name in ("src/main.py", "src/deep/other.py", "src/main.pyc", "setup.py", "left-out", "a.md",
                 "README.md", "two words", "ä.py", "😀.py", "￿.py", "x.py"):  # fmt: skip
        (root / name).write_text(name * 300)
    (root / os.fsdecode(b"odd\xff")).write_text("not UTF-8")
    (root / "src" / ("deep" * 30)).write_text("a long name")
    (root / "setup.py").chmod(0o755)
    (root / "link.py").symlink_to("src/main.py")
    (root / "src" / "gone").symlink_to("nowhere")
    (root / "away").symlink_to("/etc")
    os.mkfifo(root / "pipe")
    (root / "notes.gz").write_bytes(b"\x1f\x8b only begins so")
    modes: tuple[tuple[str, Literal["w:gz", "w"]], ...] = (("data.tgz", "w:gz"), ("data.tar", "w"))
    for name, mode in modes:
        with tarfile.open(root / name, mode=mode, format=tarfile.GNU_FORMAT) as archive:
            for member in ("a/b", "long" * 40, "ü"):
                info = tarfile.TarInfo(member)
                info.size, info.uid, info.mode, info.mtime = 700, 7, 0o4755, 12345
                archive.addfile(info, io.BytesIO(b"x" * 700))
            info = tarfile.TarInfo("a/hard")
            info.type, info.linkname = tarfile.LNKTYPE, "a/b"
            archive.addfile(info)
    return root


def python_plans(case: dict[str, Any], root: Path) -> list[Any]:
    """Return what Python plans, as `plans.mjs` prints it."""
    try:
        ignore = None if case["ignore"] is None else parse_ignore(case["ignore"], ".dockerignore")
        wish = Wish(parse(case["text"], "D"), case["args"], case["target"], Context(root, ignore))
        plan(wish)
        made = plan(
            wish, dict.fromkeys(wish.images(), Base("image-1", "image-1 of today", BASE, 0))
        )
    except InvalidRequest as error:
        return [error.code, str(error)]
    steps: list[Any] = []
    for stage in made.stages:
        for step in stage.steps:
            is_ours = isinstance(step.action, CopyAction) and step.action.origin is None
            archive = packed(step.action, wish.context) if is_ours else None  # type: ignore[arg-type]
            steps.append([step.number, step.line, step.shown, step.key, [*step.folders], archive])
        steps.append([[*note] for note in stage.notes])
    config = json.loads(json.dumps(asdict(made.last.config)))
    return [steps, config, made.image_key(True, "é😀 ready"), [*made.warnings]]  # noqa: FBT003 - a key's


def packed(action: CopyAction, context: Context) -> list[tuple[Any, ...]]:
    """Return what the archive of a step's files has."""
    pieces: list[bytes] = []
    for part in action.parts:
        packer = Packer(Look(None if part.unpacked else Owner(5, 6), action.mode))
        pieces += packer.of_context(context, part, part.name)
    return members(b"".join(pieces) + Packer.end())


def members(data: bytes) -> list[tuple[Any, ...]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [
            (each.name, each.type, each.mode, each.uid, each.gid, each.mtime, each.linkname,
             file.read() if each.isreg() and (file := archive.extractfile(each)) else b"")
            for each in archive
        ]  # fmt: skip


def plain(answer: list[Any]) -> list[Any]:
    """Return an answer without what each language says in its own way."""
    if len(answer) == 2:
        said = answer[1].replace("--build-arg", "`buildArgs`").replace("\\\\", "\\")
        said = re.sub(r"is no pattern: .*", "is no pattern", said)
        return [answer[0], said]
    for step in answer[0]:
        if len(step) == 6 and isinstance(step[5], str):
            step[5] = members(base64.b64decode(step[5]))
    return answer


def test_the_same_dockerfile_is_planned_alike(package: Package, root: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"text": text, "context": str(root), "ignore": IGNORE, "args": {}, "target": None}
        for text in [*GOOD, *BAD]
    ]
    stages = "ARG V\nFROM a AS one\nRUN echo $V\nFROM a AS two\nARG V=2\nRUN echo"
    cases += [
        {**cases[0], "text": stages, "args": {"V": HOSTILE, "http_proxy": "p"}},
        {**cases[0], "text": stages, "target": "ONE"},
        {**cases[0], "text": stages, "target": "none"},
        {**cases[0], "text": stages, "args": {"none": "1"}},
        {**cases[0], "text": "FROM a\nCOPY . /", "ignore": "pipe\naway\n*\n!src/deep"},
        {**cases[0], "ignore": "a\n[b"},
        {**cases[0], "ignore": "!"},
        {**cases[0], "text": "FROM a\nCOPY pipe /", "ignore": None},
        {**cases[0], "text": "FROM a\nCOPY . /", "ignore": None},
    ]
    for case in cases:
        case["config"] = asdict(BASE)

    answers = answer(package, "plans.mjs", cases)

    for case, planned in zip(cases, answers, strict=True):
        assert plain(planned) == plain(python_plans(case, root)), case
    is_refused = [len(planned) == 2 for planned in answers]
    assert is_refused[: len(GOOD) + len(BAD)] == [False] * len(GOOD) + [True] * len(BAD)
