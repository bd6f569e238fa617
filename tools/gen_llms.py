"""Make llms.txt: what forkd is, and every page with its first sentence, for programs that read.

    python -m tools.gen         writes it, with everything else that is generated

Pages and their order are those of the navigation in `mkdocs.yml`.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "mkdocs.yml"
FILE = ROOT / "llms.txt"

SECTION = re.compile(r"^  - ([^:]+):$")
PAGE = re.compile(r"^ +- ([^:]+): (\S+\.md)$")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r"^# .*$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")

SUMMARY = """\
# forkd

> forkd runs untrusted code in virtual machines (KVM) that are forked from a warm, stored one: a
> daemon, a Python SDK (`from forkd import Sandbox`) and a command line (`forkd`). Running
> sandboxes can be branched, reset and promoted. Linux on x86_64.
"""


def outputs() -> dict[Path, str]:
    """Return the file with its contents."""
    return {FILE: text()}


def text() -> str:
    """Return the list of pages, by section."""
    lines = [SUMMARY, "## Start\n"]
    inside = False
    for line in SITE.read_text(encoding="utf-8").partition("\nnav:\n")[2].splitlines():
        if (section := SECTION.match(line)) is not None:
            lines += ["", f"## {section[1]}\n"]
            inside = True
        elif (page := PAGE.match(line)) is not None:
            if inside and line.startswith("  - "):
                lines += ["", "## More\n"]
                inside = False
            lines.append(f"- [{page[1]}]({page[2]}): {first_sentence(page[2])}")
    return "\n".join([*lines, ""])


def pages() -> list[str]:
    """Return the paths of the navigation's pages."""
    return [
        match[2]
        for line in SITE.read_text(encoding="utf-8").splitlines()
        if (match := PAGE.match(line))
    ]


def first_sentence(name: str) -> str:
    """Return the first sentence of a page, without its links and emphasis."""
    page = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    body = TITLE.split(page, maxsplit=1)[1]
    paragraphs = (each.strip() for each in body.split("\n\n"))
    first = next(each for each in paragraphs if each and not each.startswith(("#", "|", "<", "!")))
    plain = " ".join(LINK.sub(r"\1", first).replace("*", "").split())
    return re.split(r"(?<=[.:?])\s+(?=[A-Z])", plain)[0]
