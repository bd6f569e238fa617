"""Build the documentation as a web site, from the same pages that the repository shows.

    python -m tools.build_site         into build/site, strictly: a broken link is an error

Pages and what they link to are copied to build/site-pages, each under its own path, so that their
links hold.  `mkdocs.yml` says how the site looks and what its navigation has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.docs import ROOT, links, pages

if TYPE_CHECKING:
    from pathlib import Path

PAGES = ROOT / "build/site-pages"
TEXT = (".md", ".svg", ".json", ".toml", ".py", ".service", ".txt", ".yml", ".ipynb")
"""What is copied where a page links to it."""


FENCE = re.compile(r"^```(\w+) \w+$", re.MULTILINE)
"""The beginning of a block with a second word, which our tests read and mkdocs does not know."""


def main() -> int:
    """Copy the pages and build the site; return the exit status."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for path in sources():
        target = PAGES / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(
                FENCE.sub(r"```\1", path.read_text(encoding="utf-8")), encoding="utf-8"
            )
        else:
            shutil.copyfile(path, target)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603 - ours


def sources() -> list[Path]:
    """Return every page, and every file of the repository to which a page links."""
    found = {path.resolve() for path in pages()}
    for page in pages():
        linked = ((page.parent / each.partition("#")[0]).resolve() for each in links(page))
        found |= {path for path in linked if path.is_file() and path.suffix in TEXT}
    found |= {ROOT / "LICENSE"}
    return sorted(path for path in found if path.is_relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
